"""`kvferry bench transfer`: measures, says and writes what it measured, and fails on wrong bytes."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import kvferry as kf
from kvferry.cli import main

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("numpy")

from kvferry.bench import cells, latency, measure, report, transfer

TINY = measure.Effort(seconds=0.0, least=2, most=2)


def small(pair: str, run: int = 4096) -> cells.Cell:
    by_name = {known.name: known for known in cells.PAIRS}
    return cells.Cell(by_name[pair], run, 1)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cells, few calls."""

    def select(*_: object, **__: object) -> list[cells.Cell]:
        return [small("FC-LW"), small("FC-universal", 256)]

    monkeypatch.setattr(transfer, "select", select)
    monkeypatch.setitem(measure.EFFORTS, "quick", TINY)
    monkeypatch.setitem(transfer._LATENCY_CALLS, "quick", 10)
    monkeypatch.setattr(latency, "MANY_IDS", 1000)


@pytest.mark.usefixtures("tiny")
def test_the_command_and_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, lines = tmp_path / "out.json", tmp_path / "out.csv"
    command = ["bench", "transfer", "--device", "cpu", "--quick", "--bytes", "2M", "--threads", "1"]
    assert main([*command, "--json", str(out), "--csv", str(lines)]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert printed.out.isascii() and "\033" not in printed.out
    assert max(map(len, printed.out.splitlines())) <= 100
    assert "every byte same, guards intact, source unchanged: 2 cells" in printed.out
    facts = json.loads(out.read_text())
    assert (facts["verified"], facts["threads"], facts["machine"]["profile"]) == (
        True,
        1,
        kf.build_info()["profile"],
    )
    assert [cell["pair"] for cell in facts["cells"]] == ["FC-LW", "FC-universal"]
    for cell in facts["cells"]:
        assert cell["checks"][0]["checked_bytes"] == cell["payload_bytes"]
        timing = cell["contenders"]["kvferry"]
        assert len(timing["seconds"]) == timing["samples"] == 2
        assert timing["gb_per_s_p5"] <= timing["gb_per_s_p50"] <= timing["gb_per_s_p95"]
    rows = list(csv.DictReader(io.StringIO(lines.read_text())))
    assert [row["contender"].split()[0] for row in rows] == ["memcpy", "kvferry", "numpy"] * 2


@pytest.mark.usefixtures("tiny")
def test_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "out.png"
    assert main(["bench", "transfer", "--device", "cpu", "--quick", "--bytes", "2M", "--png", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("tiny")
def test_wrong_bytes_fail_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = measure.Check(checked_bytes=8, wrong_words=1, stray_words=0)
    monkeypatch.setattr(measure, "check", lambda *_: wrong)
    assert main(["bench", "transfer", "--device", "cpu", "--quick", "--bytes", "2M"]) == 1
    printed = capsys.readouterr().out
    assert printed.count("  WRONG\n") == 2
    assert "WRONG BYTES: FC-LW, 4 KiB runs, 2 MiB; FC-universal" in printed


@pytest.mark.usefixtures("tiny")
def test_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["bench", "transfer", "--device", "cpu", "--quick", "--bytes", "2M"]) == 0
    err = capsys.readouterr().err
    assert "[1/2] FC-LW, 4 KiB runs, 2 MiB" in err
    assert err.endswith("\r\033[K")


@pytest.mark.parametrize("missing", ["numpy", "matplotlib"])
def test_what_is_missing_is_said_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, missing: str
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else find(name))
    assert main(["bench", "transfer", "--png", str(tmp_path / "out.png")]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"pip install {missing}" in printed.err and printed.err.count("\n") == 1


def test_a_file_that_cannot_be_written_is_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "transfer", "--json", "/nowhere/out.json"]) == 2
    assert "/nowhere/out.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        ["all"],
        ["transfer", "--bytes", "1M"],
        ["transfer", "--bytes", "much"],
        ["transfer", "--threads", "0"],
        ["transfer", "--pair", "FC-disk"],
        ["transfer", "--quick", "--full"],
    ],
)
def test_wrong_usage_is_refused(capsys: pytest.CaptureFixture[str], wrong: list[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["bench", *wrong])
    assert refused.value.code == 2
    assert "usage: kvferry bench" in capsys.readouterr().err


def test_the_command_line_needs_no_numpy() -> None:
    lean = "import sys, kvferry.cli; sys.exit('numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", lean], timeout=60, check=True)


def test_the_table_is_narrow() -> None:
    timing = measure.Timing("kvferry", [0.5], [1e-3])
    cell = cells.select("full", max_payload=512 << 20)[-1]
    result = measure.CellResult(cell, 1, timing, timing, timing, [measure.Check(1, 0, 0)])
    assert max(map(len, report.table(transfer.Results(cells=[result])).splitlines())) <= 100
