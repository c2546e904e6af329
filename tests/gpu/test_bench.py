"""`kvferry bench transfer` on a GPU: every path runs, all bytes are checked; no number is judged."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from kvferry.bench.gpu import bars, cells, driver, extra
from kvferry.bench.gpu.measure import check
from kvferry.cli import main

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.gpu

QUICK = ["bench", "transfer", "--device", "0", "--quick", "--bytes", "4M"]
ALONE = [*QUICK, "--peer", "none"]


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every path once: the kinds of run, not all their lengths."""
    monkeypatch.setattr(cells, "RUNS", (4 << 10, 32 << 10, 512 << 10))
    monkeypatch.setattr(extra, "ROWS", (16, 512))


def run(words: list[str], tmp_path: Path) -> Any:
    out = tmp_path / "out.json"
    assert (
        main(
            [*words, "--json", str(out), "--csv", str(tmp_path / "out.csv"), "--md", str(tmp_path / "out.md")]
        )
        == 0
    )
    return json.loads(out.read_text())


@pytest.mark.parametrize("direction", ["h2d", "d2h", "d2d"])
def test_the_core_table(direction: str, tmp_path: Path) -> None:
    facts = run([*ALONE, "--direction", direction], tmp_path)
    assert facts["verified"] is True
    pairs = {cell["pair"] for cell in facts["cells"]}
    assert pairs == {"FC-FC", "LW-FC" if direction == "d2h" else "FC-LW"}
    for cell in facts["cells"]:
        timed = {name for name, found in cell["contenders"].items() if "end_us" in found}
        assert {"kvferry auto", "kvferry kernel", "copy loop"} <= timed
        assert {name for name, found in cell["checks"].items() if found["checked_bytes"]} >= timed


@pytest.mark.multigpu
def test_between_two_gpus(tmp_path: Path) -> None:
    facts = run([*QUICK, "--peer", "1", "--direction", "p2p"], tmp_path)
    assert facts["verified"] is True and {cell["direction"] for cell in facts["cells"]} == {"p2p"}


def test_all_bars_are_said(tmp_path: Path) -> None:
    facts = run([*ALONE, "--bars"], tmp_path)
    said = " ".join(bar["case"] for bar in facts["bars"])
    for word in (
        "FC-LW",
        "2 MiB runs",
        "page_size 1",
        "at once",
        "submit",
        "pageable",
        "products",
        "wait()",
        "memory",
    ):
        assert word in said
    assert not [bar for bar in facts["bars"] if bar["case"].endswith("failed")]
    assert len(facts["bars"]) > len(bars.GROUPS)


def test_short_rows_and_slices(tmp_path: Path) -> None:
    facts = run([*ALONE, "--sections", "extra"], tmp_path)
    assert facts["verified"] is True
    assert {row["row_bytes"] for row in facts["extra"]} == {16, 512}


def test_wrong_bytes_are_found() -> None:
    """The check itself: a contender that moves one block too few, and one that writes where it must not."""
    from kvferry.bench.gpu import arrays, core  # noqa: PLC0415 - with a GPU only
    from kvferry.bench.gpu.contenders import CopyLoop  # noqa: PLC0415
    from kvferry.bench.gpu.memory import Ground  # noqa: PLC0415
    from kvferry.bench.gpu.place import Place  # noqa: PLC0415

    place = Place(arrays.choose()[0], 0, None, 2 << 20, 1)
    contexts = core.Contexts()
    cell = cells.fc_fc("h2d", 64 << 10, 1)
    ground = Ground.lay(cell, *place.pair(cell), 2)
    right = CopyLoop(ground, place.stream)
    assert check(place, ground, right, 0).good

    class Short(CopyLoop):
        def submit(self, call: int) -> None:
            table = self.table(call)
            self._tables = {call % ground.calls: table[1:]}
            super().submit(call)

    found = check(place, ground, Short(ground, place.stream), 0)
    assert (found.wrong_words, found.stray_words) == (cell.run_bytes // 8, 0)

    class Stray(CopyLoop):
        def submit(self, call: int) -> None:
            super().submit(call)
            unnamed = next(
                slot for slot in range(ground.dst.slots) if slot not in set(ground.ids(call)[1].tolist())
            )
            driver.use(0)
            self._stream.fill(ground.dst.addr + unnamed * cell.run_bytes, 0, 8)

    found = check(place, ground, Stray(ground, place.stream), 0)
    assert (found.wrong_words, found.stray_words) == (0, 1)
    contexts.close()
