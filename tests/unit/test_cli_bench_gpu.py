"""What `kvferry bench transfer` measures on GPUs, its numbers and its reports: all that needs no GPU."""

from __future__ import annotations

import csv
import io
import json
from typing import TYPE_CHECKING, Any

import pytest

from kvferry.cli import build_parser, main

if TYPE_CHECKING:
    from pathlib import Path

np = pytest.importorskip("numpy")

from kvferry.bench.cells import UNIT  # noqa: E402 - they need NumPy
from kvferry.bench.gpu import bars, cells, core, extra, markdown, report, stats, transfer  # noqa: E402
from kvferry.bench.gpu.bar import Bar  # noqa: E402
from kvferry.bench.gpu.ceilings import Ceiling  # noqa: E402
from kvferry.bench.gpu.measure import CellResult, Effort  # noqa: E402
from kvferry.bench.gpu.place import Check  # noqa: E402
from kvferry.bench.gpu.stats import Series  # noqa: E402
from kvferry.cli import _bench_gpu  # noqa: E402

GOOD = Check(checked_bytes=4096, wrong_words=0, stray_words=0, digest=1)
BAD = Check(checked_bytes=4096, wrong_words=3, stray_words=0, digest=1)


def series(name: str, *micros: float, event: float | None = None) -> Series:
    end = [micro * 1e-6 for micro in micros]
    return Series(name, end=end, event=[] if event is None else [event * 1e-6], submit=[5e-6] * len(end))


def table(**changes: float) -> core.Table:
    """A table of one cell in which every contender took 200 us but those named."""
    cell = cells.fc_lw("h2d", 32 << 10, 8)
    names = ["kvferry auto", "kvferry kernel", "kvferry staged", *report.OTHERS]
    took = {name: changes.get(name.replace(" ", "_"), 200.0) for name in names}
    result = CellResult(cell, {name: series(name, micros, event=150) for name, micros in took.items()})
    result.series["kvferry batch"] = Series("kvferry batch", not_run="its runs are too short")
    result.checks = dict.fromkeys(names, GOOD)
    result.engine = "staged"
    ceiling = Ceiling("h2d", 512 << 20, 55e9, 55e9)
    return core.Table({"h2d": ceiling}, {"h2d": ceiling}, [result])


@pytest.mark.parametrize("direction", cells.DIRECTIONS)
@pytest.mark.parametrize("run", cells.RUNS)
def test_cells_move_what_they_say(direction: cells.Direction, run: int) -> None:
    for units in cells.UNITS:
        whole, layered = cells.fc_fc(direction, run, units), cells.fc_lw(direction, run, units)
        assert whole.payload_bytes == units * UNIT
        assert whole.shape.block_bytes == run
        assert layered.payload_bytes == max(units * UNIT, layered.shape.block_bytes)
        assert layered.shape.block_bytes == layered.shape.layers * layered.shape.outer * run
        assert layered.runs == layered.payload_bytes // run
        assert (layered.src, layered.dst) == (
            (cells.LW, cells.FC) if direction == "d2h" else (cells.FC, cells.LW)
        )


def test_the_core_table_is_the_issue_s() -> None:
    one_gpu = cells.core(("h2d", "d2h", "d2d"), max_payload=512 << 20)
    assert {cell.run_bytes for cell in one_gpu} == set(cells.RUNS)
    # 6 runs x 4 sizes x 2 pairs x 3 directions, less the sizes that blocks of 8 MiB make equal.
    assert len(one_gpu) == 6 * 4 * 2 * 3 and len(set(one_gpu)) == len(one_gpu)
    assert {cell.payload_bytes // UNIT for cell in one_gpu} == {1, 4, 8, 64, 256}
    assert len(cells.core(cells.DIRECTIONS, max_payload=512 << 20)) == len(one_gpu) * 4 // 3
    small = cells.core(("h2d",), max_payload=4 << 20, quick=True)
    assert small and all(cell.payload_bytes <= 4 << 20 for cell in small)


def test_reordered_rows() -> None:
    for row in extra.ROWS:
        cell = cells.reorder("d2d", row, 64)
        assert cell.shape.dim * 2 == row and cell.payload_bytes == 64 * UNIT
        assert cell.gb_per_s(1.0) == pytest.approx(2 * cell.payload_bytes / 1e9)


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        (1.0, 1.0, "tie"),
        (1.029, 1.0, "tie"),
        (1.031, 1.0, "lose"),
        (0.969, 1.0, "win"),
        (0.971, 1.0, "tie"),
        (54e-6, 50e-6, "tie"),
        (56e-6, 50e-6, "lose"),
        (44e-6, 50e-6, "win"),
        (104e-6, 100e-6, "lose"),
    ],
)
def test_ties(ours: float, theirs: float, expected: str) -> None:
    assert stats.verdict(ours, theirs) == expected


def test_numbers() -> None:
    assert stats.slope((64, 10.0), (164, 11.0)) == pytest.approx(0.01)
    assert stats.spread([5.0, 1.0, 3.0]) == (1.0, 3.0, 5.0)
    timed = series("x", 3, 1, 2, event=1.5)
    assert timed.end_s == pytest.approx(2e-6) and timed.event_s == pytest.approx(1.5e-6)
    assert not Series("y").ran and Series("y").event_s is None and Series("y").submit_s is None


def test_effort_drops_calls_never_all() -> None:
    effort = Effort(seconds=0.1, least=5, most=20)
    assert not effort.enough([]) and not effort.enough([0.03] * 4) and effort.enough([0.03] * 5)
    assert effort.enough([0.001] * 20) and effort.enough([0.7])
    assert effort.scaled(2.0) is effort
    assert effort.scaled(0.5) == Effort(0.05, 2, 10)
    assert effort.scaled(0.0) == Effort(0.0, 1, 1)
    assert effort.scaled(0.0).enough([1e-6])


def test_shares_of_the_ceiling() -> None:
    ceiling = Ceiling("h2d", 512 << 20, 50e9, 55e9)
    assert ceiling.share(50_000_000, 1e-3) == pytest.approx(1.0)
    assert ceiling.event_share(50_000_000, 1e-3) == pytest.approx(50 / 55)


def test_duels_and_regrets() -> None:
    found = table(kvferry_auto=100.0, driver_batch=98.0, LMCache=102.0, reference=300.0, kvferry_kernel=90.0)
    verdicts = {duel.other: duel.verdict for duel in core.duels(found)}
    assert verdicts == {
        "copy loop": "win",
        "driver batch": "tie",
        "reference": "win",
        "torch index": "win",
        "LMCache": "tie",
    }
    (regret,) = core.regrets(found)
    assert regret.other == "kvferry kernel" and regret.speedup == pytest.approx(0.9)
    losing = table(kvferry_auto=120.0, driver_batch=110.0)
    assert [duel.other for duel in core.duels(losing) if duel.verdict == "lose"] == ["driver batch"]


def test_bars_say_whether_they_are_met() -> None:
    assert Bar("x", 0.9, at_least=True, value=0.9).state == "met"
    assert Bar("x", 0.9, at_least=True, value=0.899).state == "missed"
    assert Bar("x", 20.0, at_least=False, value=20.1, unit="us").state == "missed"
    assert Bar("x", 20.0, at_least=False, value=20.0, unit="us").measured == "20 us"
    missing = Bar("x", 0.35, at_least=False, why_not="needs two GPUs")
    assert (missing.state, missing.measured, missing.asked) == ("not measured", "-", "<= 0.35")
    assert "needs two GPUs" in report.bar_line(missing)


def test_bars_of_the_table() -> None:
    scene: Any = type("Scene", (), {"table": table(kvferry_auto=100.0, kvferry_kernel=90.0, LMCache=80.0)})()
    regret, lost = bars.of_table(scene)
    assert regret.value == pytest.approx(0.9) and regret.state == "missed"
    assert lost.value == 1.0 and lost.state == "missed"
    scene.table = None
    assert [bar.state for bar in bars.of_table(scene)] == ["not measured"] * 2


def results(found: core.Table | None = None) -> transfer.Results:
    made = transfer.Results(
        facts={"gpus": ["none"], "simulated": True}, table=found or table(kvferry_auto=100.0)
    )
    made.bars = [Bar("submit", 12.0, at_least=False, value=13.0, unit="us", detail="a | b")]
    made.extra = [extra.Row("NHD-HND", "d2d", 64, "kernel", 0.8, 3000.0, good=True)]
    made.seconds = {"core": 12.0}
    return made


def test_reports() -> None:
    made = results()
    lines = [report.heading(), *(report.line(cell, made.table.ceilings["h2d"]) for cell in made.table.cells)]
    assert all(line.isascii() and len(line) <= 130 for line in [*lines, *report.LEGEND])
    assert "staged" in lines[1] and lines[1].endswith("same")
    facts = report.as_json(made)
    assert json.loads(report.as_text(facts)) == json.loads(json.dumps(facts))
    assert facts["bars"][0]["state"] == "missed"
    assert facts["cells"][0]["contenders"]["kvferry auto"]["end_us"] == [100.0]
    rows = list(csv.DictReader(io.StringIO(report.as_csv(made))))
    assert {row["contender"] for row in rows} == set(made.table.cells[0].series) - {"kvferry batch"}
    assert rows[0]["verified"] == "True" and float(rows[0]["end_us_p50"]) == 100.0
    text = markdown.render(made)
    assert "**missed**" in text and "A simulated driver" in text and "a / b" in text
    assert "every byte same, guards intact: 1 cells" in report.summary(made)[-1]
    assert "against LMCache: 1 win, 0 tie, 0 lose" in report.summary(made)


def test_wrong_bytes_are_said() -> None:
    found = table()
    found.cells[0].checks["reference"] = BAD
    made = results(found)
    assert not made.good
    assert report.line(found.cells[0], found.ceilings["h2d"]).endswith("WRONG")
    assert any(
        line.startswith("WRONG: h2d FC-LW") and "wrong_words=3" in line for line in report.summary(made)
    )
    assert "WRONG BYTES" in markdown.render(made)


def test_a_failed_engine_is_said() -> None:
    found = table()
    found.cells[0].series["kvferry auto"] = Series("kvferry auto", not_run="CudaError: 700")
    found.cells[0].errors = ["kvferry auto: CudaError: 700"]
    made = results(found)
    assert not made.good and core.duels(found) == []
    assert "700" in report.line(found.cells[0], found.ceilings["h2d"])
    assert markdown.render(made)


def test_who_did_not_take_part_is_said() -> None:
    found = table()
    found.cells[0].series["LMCache"] = Series("LMCache", not_run="ImportError: no lmcache")
    assert "LMCache did not take part: ImportError: no lmcache" in report.summary(results(found))


def test_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    markdown.plot(results(), str(tmp_path / "out.png"))
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def parsed(*words: str) -> Any:
    return build_parser().parse_args(["bench", "transfer", *words])


def test_options() -> None:
    assert _bench_gpu.ordinal(parsed("--device", "cpu")) is None
    assert _bench_gpu.ordinal(parsed("--device", "3")) == 3
    assert parsed("--bars").sections == ("bars",)
    assert parsed("--sections", "core,bars").sections == ("core", "bars")
    assert parsed("--direction", "h2d", "--direction", "d2d").direction == ["h2d", "d2d"]
    assert set(_bench_gpu.SECTIONS) == set(transfer.SECTIONS)
    assert set(_bench_gpu.DIRECTIONS) == set(cells.DIRECTIONS)


@pytest.mark.parametrize(
    "wrong",
    [
        ["--device", "gpu"],
        ["--peer", "x"],
        ["--sections", "core,all"],
        ["--budget", "0"],
        ["--direction", "up"],
    ],
)
def test_wrong_options_are_refused(capsys: pytest.CaptureFixture[str], wrong: list[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["bench", "transfer", *wrong])
    assert refused.value.code == 2
    assert "usage: kvferry bench" in capsys.readouterr().err


def test_two_tensors_of_a_store_do_not_meet() -> None:
    """Addresses of runs, worked out once more from the axes."""
    from kvferry.bench.gpu.memory import Store  # noqa: PLC0415 - a store without memory

    cell = cells.fc_lw("h2d", 4 << 10, 8)
    shape, slots = cell.shape, 5
    for axes in (cells.FC, cells.LW):
        store = Store.__new__(Store)
        store.axes, store.shape, store.slots, store.pitch = axes, shape, slots, 1 << 30
        store.arena = type("At", (), {"addr": 1 << 40})()
        ids = np.array([3, 0, 4])
        found = store.run_pointers(ids, cell.run_bytes).reshape(3, shape.layers, shape.outer).tolist()
        for number, block in enumerate(ids.tolist()):
            for layer in range(shape.layers):
                for outer in range(shape.outer):
                    if axes == cells.FC:
                        index = (block * shape.layers + layer) * shape.outer + outer
                        at = index * cell.run_bytes
                    else:
                        at = layer * store.pitch + (outer * slots + block) * cell.run_bytes
                    assert found[number][layer][outer] == (1 << 40) + at
        with pytest.raises(ValueError, match="no table of runs"):
            store.run_pointers(ids, 1000)
