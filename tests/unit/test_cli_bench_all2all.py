"""`kvferry bench all2all` without GPUs: numbers, bars, reports, runs on CPUs."""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import fake_all2all_kernels
import pytest

import kvferry as kf
from kvferry.cli import build_parser, main

np = pytest.importorskip("numpy")

from kvferry.bench.all2all import (  # noqa: E402 - they need NumPy
    bars,
    ceiling,
    cells,
    clock,
    data,
    kernels,
    launch,
    markdown,
    plan,
    recovery,
    report,
    results,
    run,
)
from kvferry.bench.all2all.cells import Cell  # noqa: E402
from kvferry.bench.all2all.results import Measured, Record, Results  # noqa: E402
from kvferry.cli import _bench_all2all  # noqa: E402

TESTS = Path(__file__).resolve().parents[1]
FAKE = (sys.executable, str(TESTS / "fake_all2all.py"))
FAKE_GPU = (sys.executable, str(TESTS / "fake_all2all_gpu.py"))
GPU = plan.Options(device="gpu", world=2)

CELL = cells.one(2, 1, 5, 32, 16)


def records(way: str, *ranks: tuple[float, ...], task: str = "t", **fields: Any) -> list[list[Record]]:
    return [[Record(task, way, device=[us * 1e-6 for us in rank], **fields)] for rank in ranks]


def test_the_slowest_rank_of_each_iteration_counts() -> None:
    task = plan.exchange("core", CELL, "owned")
    found = results.gather(task, records("owned", (1, 9, 3), (2, 1, 5)))
    row = found.rows["owned"]
    assert row.device == pytest.approx([2e-6, 9e-6, 5e-6]) and row.device_s == pytest.approx(5e-6)
    assert found.seconds("owned", "out") == pytest.approx(5e-6) and found.seconds("out") is None
    assert found.gb_per_s("owned") == pytest.approx(task.cell.wire / 5e3)
    best = found.best("out", "owned")
    assert best and best[0] == "owned" and not found.faults
    lines = records("owned", (1, 2), (3, 4))
    lines[1][0].wrong = "7 wrong words"
    assert results.gather(task, lines).faults == [f"{task.name}, owned: rank 1: 7 wrong words"]
    missing = results.gather(task, [lines[0], []])
    assert missing.rows["owned"].why == "a rank did not report" and missing.seconds("owned") is None
    assert missing.faults
    theirs = results.gather(task, records("nccl", (), (), why="no NCCL"))
    assert not theirs.faults and results.ours("copy") and not results.ours("memcpy both")
    refused = results.gather(task, records("copy", (), (), why="Unsupported: no"))
    assert not refused.faults
    line = Record("t", "w", device=[1e-6], values={"a": 1}).dump()
    assert Record(**json.loads(line)).values == {"a": 1}


def exchanged(task: plan.Task, times: dict[str, float]) -> Measured:
    rows = [
        records(way, (us,) * 3, (us,) * 3, task=task.name) for way, us in times.items() if way in task.ways
    ]
    return results.gather(task, [[record for row in rows for record in row[rank]] for rank in (0, 1)])


def everything(**changes: float) -> Results:
    """A run in which every way took as long as a good bandwidth says."""
    found = Results(facts={"device": "gpu", "ranks": 2})
    for task in plan.tasks(GPU):
        if task.kind == "exchange":
            base = 8.0 + task.cell.wire / 340e3
            times = dict.fromkeys(task.ways, base)
            times |= {way: base * 0.91 for way in ("memcpy both", "memcpy") if way in times}
            times |= {way: 2.2 * base + 12 for way in times if way.startswith(("nccl", "reference"))}
            times |= {way: base * 0.95 for way in times if way == "copy"}
            times |= {way: times[way] - 6 for way in times if "graph" in way}
            times |= {way: 10.0 for way in times if way.startswith("only")}
            times |= {way: us for way, us in changes.items() if way in times}
            found.measured[task.name] = exchanged(task, times)
    setup = [
        [Record("setup", "communicator", device=[0.3, 0.1], values={"first_s": first})]
        for first in (0.2, 0.3)
    ]
    found.measured["setup"] = results.gather(plan.tasks(GPU)[0], setup)
    values = {"cpu_us": 12.5, "wall_us": 14.0, "drop_us": 1.0}
    cost = next(task for task in plan.tasks(GPU) if task.kind == "cost")
    found.measured["cost"] = results.gather(cost, [[Record("cost", "owned", values=values)]] * 2)
    found.recovery = {
        "timeout_s": 2.0,
        "stop": {"error": "PeerTimeout", "waited_s": 2.06, "text": "", "at": 0},
        "kill": {"error": "PeerDied", "delay_s": 0.02, "text": "", "at": 0},
        "reset": ["", ""],
        "usable": "",
        "anew": ["", ""],
        "resident_bytes": 600 << 20,
    }
    on_cpu = plan.exchange("bandwidth", cells.one(2, 1, 8192, 32, 128), "owned", "out", "memcpy")
    found.cpu[on_cpu.name] = exchanged(on_cpu, {"owned": 9000, "out": 8000, "memcpy": 6000})
    found.bars = bars.of(found, GPU)
    return found


def state(found: Results, words: str) -> str:
    (bar,) = [bar for bar in found.bars if f" {words}" in f" {bar.case}"]
    return bar.state


def test_bars_of_a_good_run() -> None:
    found = everything()
    assert {bar.state for bar in found.bars} == {"met"}, [b for b in found.bars if b.state != "met"]
    fused = next(bar for bar in found.bars if "in one call" in bar.case)
    assert fused.value is not None and fused.value < 0.5 and "10.0 us + 10.0 us + 10.0 us" in fused.detail
    # One row for each line of the table, and one for every compared shape.
    assert len(found.bars) == 3 + 5 + 19 + 1 + 4 + 1 + 1 + 3 + 1
    assert found.good and report.summary(found)[-2].startswith(f"bars: {len(found.bars)} met, 0 missed")


@pytest.mark.parametrize(
    ("way", "us", "missed"),
    [
        ("push 16", 9000.0, ["34 MB per rank, 16 CTAs", "134 MB per rank, 16 CTAs"]),
        ("copy", 9000.0, ["537 MB"]),
        ("reference", 5.0, ["of the reference"]),
        ("nccl", 5.0, ["every shape, eager", "34 MB up, eager"]),
        ("nccl graph", 5.0, ["every shape, graph", "34 MB up, graph", "in a graph, of permute"]),
    ],
)
def test_bars_that_are_missed(way: str, us: float, missed: list[str]) -> None:
    found = everything(**{way: us})
    for words in missed:
        assert state(found, words) == "missed", words


def test_bars_without_a_number_say_why() -> None:
    nothing = Results(facts={"device": "gpu"})
    assert {bar.state for bar in bars.of(nothing, GPU)} == {"not measured"}
    assert all(bar.why_not for bar in bars.of(nothing, GPU))
    found = everything()
    name = "core 1,4096,32,128 bf16"
    found.measured[name] = Measured(found.measured[name].task, skipped="no time left")
    few = next(bar for bar in bars.of(found, GPU) if "at most 64" in bar.case)
    assert (few.state, few.why_not) == ("not measured", "no time left")
    wrong = everything()
    for record in wrong.measured["core 1,65536,32,128 bf16"].rows["copy"].ranks:
        record.wrong = "3 wrong words in tensor 0"
    huge = next(bar for bar in bars.of(wrong, GPU) if "537 MB" in bar.case)
    assert huge.state == "not measured" and "wrong bytes" in huge.why_not and not wrong.good
    four = plan.Options(device="gpu", world=4)
    assert all("for 2 ranks" in bar.detail for bar in bars.of(nothing, four))


def test_few_ctas_of_their_own_choice_count() -> None:
    found = everything(owned=10.0)
    rows = found.measured["core 1,4096,32,128 bf16"].rows
    for ctas, ways in ((None, ()), (128, ()), (64, ("owned",))):
        for record in rows["owned"].ranks:
            record.values = {} if ctas is None else {"ctas": ctas}
        few = next(bar for bar in bars.of(found, GPU) if "at most 64" in bar.case)
        assert ("owned" in few.detail) == bool(ways)
    for record in rows["memcpy both"].ranks:
        record.note = "copies through IPC"
    few = next(bar for bar in bars.of(found, GPU) if "at most 64" in bar.case)
    assert few.detail.endswith("; memcpy both: copies through IPC")
    for record in rows["memcpy both"].ranks:
        record.wrong = "2 wrong words"
    few = next(bar for bar in bars.of(found, GPU) if "at most 64" in bar.case)
    assert few.state == "not measured" and "wrong bytes of memcpy both" in few.why_not


def test_recovery_s_faults() -> None:
    found = everything()
    assert recovery.faults(found.recovery) == [] and recovery.faults({}) == []
    bad = found.recovery | {
        "stop": {"error": "PeerDied", "waited_s": 0.1, "text": "PeerDied: x"},
        "anew": ["", "no"],
    }
    assert recovery.faults(bad) == ["stop: PeerDied: x instead of PeerTimeout", "anew: no"]
    found.recovery = bad
    found.bars = bars.of(found, GPU)
    assert state(found, "SIGSTOP") == "not measured" and state(found, "after both") == "missed"
    assert recovery.faults({"why": "late"}) == ["ended early: late"]
    assert recovery.resident(os.getpid()) > 1 << 20 and recovery.resident(-1) == 0


def test_reports_hold_everything(tmp_path: Path) -> None:
    found = everything()
    text = report.as_text(report.as_json(found))
    loaded = json.loads(text)
    assert loaded["schema"] == 1 and loaded["verified"] and len(loaded["bars"]) == len(found.bars)
    assert {task["name"] for task in loaded["tasks"]} == set(found.measured)
    ways = next(task for task in loaded["tasks"] if task["name"] == "core 1,4096,32,128 bf16")["ways"]
    assert len(ways["push 16"]["ranks"]) == 2 and len(ways["push 16"]["ranks"][0]["device_us"]) == 3
    rows = list(csv.DictReader(io.StringIO(report.as_csv(found))))
    assert len(rows) == sum(len(each.rows) for each in found.every)
    copied = next(row for row in rows if row["shape"] == "1,65536,32,128 bf16" and row["way"] == "copy")
    assert copied["verified"] == "True" and float(copied["of_memcpy"]) > 0.9
    page = markdown.render(found)
    assert page.count("| met |") == len(found.bars) and "### latency" in page and "## CTAs" in page
    for task in found.measured.values():
        assert report.line(task)
    table = report.line(found.measured["core 1,4096,32,128 bf16"])
    assert table.endswith("  same") and table.startswith("1,4096,32,128 bf16 ")
    if importlib.util.find_spec("matplotlib"):
        markdown.plot(found, str(tmp_path / "x.png"))
        assert (tmp_path / "x.png").stat().st_size > 10_000


def test_lines_of_other_tasks() -> None:
    by_kind = {task.kind: task for task in plan.tasks(GPU)}
    gemm = Record(
        "overlap", "push 16", device=[0.05], values={"slowdown": 0.031, "exchange_us": 70, "covered": False}
    )
    line = report.line(results.gather(by_kind["gemm"], [[gemm], [gemm]]))
    assert "push 16 +3.1 % (exchange 70 us), ended before the products" in line
    early, late = ({"usual_us": 20.0, name: us} for name, us in (("early_us", 1020.0), ("late_us", 21.0)))
    lines = [[Record("skew", "owned 1", device=[2e-5], values=values)] for values in (early, late)]
    assert "owned 1 ms: early 1020, late 21.0, usual 20.0 us" in report.line(
        results.gather(by_kind["skew"], lines)
    )
    assert (
        report.line(Measured(by_kind["gemm"], skipped="no time left")) == "gemm: not measured: no time left"
    )
    shape = Measured(by_kind["exchange"], skipped="no time left")
    assert report.line(shape).endswith("not measured: no time left")


def test_effort() -> None:
    effort = clock.Effort(0.02, 10, 40)
    assert (effort.count(1e-6), effort.count(1e-3), effort.count(1.0)) == (40, 20, 10)


class Line:
    """A device whose queue takes so many calls; each takes the host some time."""

    ordinal: int | None = 0

    def __init__(self, room: int = 1 << 30, host_s: float = 0.0) -> None:
        self.room, self.host_s = room, host_s
        self.bursts: list[int] = []
        self._until, self._queued = 0.0, 0

    def call(self) -> None:
        self._queued += 1
        time.sleep(self.host_s)
        if self._queued > self.room and (left := self._until - time.perf_counter()) > 0:
            time.sleep(left)

    def on(self, stream: Any = None, /) -> Any:
        return contextlib.nullcontext()

    def settle(self) -> None:
        self.bursts.append(self._queued)
        self._queued = 0

    def marks(self, count: int, /) -> list[Any]:
        return [None] * count

    def mark(self, mark: Any, /) -> None:
        pass

    def between(self, first: Any, last: Any, /) -> float:
        return 10e-6

    def passed(self, mark: Any, /) -> bool:
        return time.perf_counter() >= self._until

    def hold(self, seconds: float, /) -> None:
        self._until = time.perf_counter() + seconds

    def meet(self) -> None:
        pass


@pytest.mark.parametrize(
    ("line", "noted"),
    [(Line(), False), (Line(room=9), False), (Line(host_s=0.5e-3), False), (Line(host_s=5e-3), True)],
    ids=["quick", "few in flight", "slow", "too slow"],
)
def test_what_is_timed_was_submitted_in_time(line: Line, noted: bool) -> None:
    effort = clock.Effort(0.02, 10, 40)
    times = clock.Clock(line, ceiling.Solo(), effort).eager(line.call)
    assert len(times.device) == len(times.submit) == 40
    assert times.note == (clock.NOTE if noted else "")
    # The first is the warm-up; the next may have been done over.
    assert max(line.bursts) <= clock.MOST_DEPTH
    assert line.room > 100 or max(line.bursts[-3:]) <= line.room


class Told:
    """A listener that remembers."""

    def __init__(self) -> None:
        self.tasks: list[Measured] = []
        self.notes: list[str] = []

    def section(self, name: str) -> None:
        pass

    def task(self, number: int, count: int, found: Measured) -> None:
        assert number == len(self.tasks) + 1 <= count
        self.tasks.append(found)

    def note(self, text: str) -> None:
        self.notes.append(text)


def fake_run(monkeypatch: pytest.MonkeyPatch, fault: str = "", **options: Any) -> tuple[Results, Told]:
    monkeypatch.setenv("FAKE_FAULT", fault)
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    told = Told()
    chosen: dict[str, Any] = {"device": "cpu", "world": 2, "selection": "quick", "timeout": 5.0} | options
    return run.run(plan.Options(**chosen), told, FAKE), told


def test_a_run_over_files(monkeypatch: pytest.MonkeyPatch) -> None:
    found, told = fake_run(monkeypatch)
    assert found.good and not told.notes, (found.wrong, told.notes)
    assert [each.task.name for each in told.tasks] == list(found.measured)
    exchange = found.measured["bandwidth 1,1024,8,64 bf16"]
    assert all(exchange.seconds(way) for way in ("owned", "out", "memcpy"))
    assert {bar.case: bar.state for bar in found.bars if bar.state != "not measured"} == {
        "CPU backend, set-up of a communicator, the first of the process": "met",
        "SIGKILL of a rank, a forked child alive: PeerDied after": "met",
        "SIGSTOP of a rank: PeerTimeout off the set time by": "met",
        "after both: context usable, reset() and set-up anew work": "met",
    }
    assert found.recovery["child_alive"] and found.facts["transport"] == "files"


def test_wrong_bytes_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = fake_run(monkeypatch, "bytes", only=("bandwidth",))
    faults = found.measured["bandwidth 1,1024,8,64 bf16"].faults
    assert not found.good and any("owned: rank 1: 1 wrong words in tensor 0" in fault for fault in faults)
    assert not any("memcpy" in fault for fault in faults)


def test_a_failing_rank_is_named_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = fake_run(monkeypatch, "raise", only=("bandwidth",), timeout=1.0)
    rows = found.measured["bandwidth 1,1024,8,64 bf16"].rows
    assert rows["owned"].why == "rank 0: Error: made to fail" and rows["out"].why and not found.good
    assert rows["memcpy"].device_s


def test_a_budget_that_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    found, told = fake_run(monkeypatch, only=("setup", "bandwidth"), budget=1e-3)
    assert found.good and {each.skipped for each in told.tasks} == {"no time left"}
    assert "not measured (2)" in "\n".join(report.summary(found))


needs_cpu = pytest.mark.skipif(not hasattr(kf, "All2All"), reason="this build has no All2All")


@needs_cpu
def test_a_run_of_the_cpu_backend(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {kind: tmp_path / f"x.{kind}" for kind in ("json", "csv", "md")}
    words = [word for kind, path in files.items() for word in (f"--{kind}", str(path))]
    code = main(["bench", "all2all", "--device", "cpu", "--quick", *words])
    said = capsys.readouterr().out
    assert code == 0, said
    loaded = json.loads(files["json"].read_text())
    assert loaded["verified"] and loaded["facts"]["transport"] == "shared memory" and loaded["machine"]
    assert not any(bar["state"] == "missed" for bar in loaded["bars"]), loaded["bars"]
    assert "## Bars" in files["md"].read_text() and len(files["csv"].read_text().splitlines()) == 5


needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


@needs_torch
@pytest.mark.parametrize(
    ("device", "command"), [("host", FAKE), ("gpu", FAKE_GPU)], ids=["torch on CPUs", "stand-in GPU"]
)
def test_the_gpu_s_worker_without_one(device: str, command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    told = Told()
    options = plan.Options(device=device, world=2, selection="quick", only=("setup", "core", "cost"))  # type: ignore[arg-type]
    found = run.run(options, told, command)
    assert found.good and not told.notes, (found.wrong, told.notes)
    core = found.measured["core 1,128,32,128 bf16"]
    there = {way for way, row in core.rows.items() if row.device_s is not None}
    others = {"reference", "reference 16", "memcpy both"} if device == "gpu" else set()
    assert there == {"owned", "out", "graph", "graph out", "nccl", "nccl graph", "nccl bare"} | others


@needs_torch
def test_copies_through_ipc_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    for seen, note in (("1", "copies through IPC: rank 0 sees 1 of 2 GPUs"), ("2", "")):
        monkeypatch.setenv("FAKE_GPUS", seen)
        options = plan.Options(device="gpu", world=2, selection="quick", only=("core",))
        found = run.run(options, Told(), FAKE_GPU).measured["core 1,128,32,128 bf16"]
        row = found.rows["memcpy both"]
        assert row.device_s and ("IPC" in row.note) == bool(note) and note in row.note


@needs_torch
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("both", [True, False])
def test_the_ceiling_s_copies(world: int, both: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch, stand_in = importlib.import_module("torch"), importlib.import_module("fake_all2all_gpu")
    monkeypatch.setattr(torch, "cuda", stand_in.cuda())
    monkeypatch.setattr(importlib.import_module("kvferry.bench.all2all.device"), "NAME", "cpu")
    cell = cells.one(world, 1, 5, 6, 16)
    copies = ceiling.Copies(torch, cell, range(world) if both else (0,))
    assert "wrong words" in copies.check()
    copies.call()
    assert copies.check() == ""
    sent = sum(part.target.nbytes for part in copies._parts)
    assert sent == sum(
        cell.sent(source, peer) for source in copies.lanes.ordinals for peer in range(world) if peer != source
    )
    copies._parts[-1].target[-1] ^= 1
    last = copies._parts[-1]
    assert copies.check() == f"1 wrong words from GPU {last.source} to GPU {last.peer}"
    copies.poison()
    assert f"{len(last.target)} wrong words" in copies.check()
    first, then = copies.lanes.marks(2)
    copies.lanes.mark(first)
    copies.lanes.hold(1e-3)
    copies.lanes.meet()
    copies.lanes.mark(then)
    assert len(first) == len(copies.lanes.ordinals) and copies.lanes.passed(then)
    assert copies.lanes.between(first, then) >= 1e-3


@pytest.fixture(scope="module")
def host_kernels(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The bench's kernels as host code."""
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    return fake_all2all_kernels.compiled(tmp_path_factory.mktemp("kernels"))


@pytest.mark.parametrize("grid", [2, 5, 16])
@pytest.mark.parametrize(
    "cell",
    [
        cells.one(2, 1, 70, 4, 32),
        cells.one(2, 2, 9, 40, 128),
        Cell(1, (5, 12), (6,), 64, "e4m3"),
        Cell(2, (0, 3), (2,), 8),
        cells.one(1, 1, 3, 2, 16),
    ],
    ids=lambda cell: cell.name,
)
def test_the_reference_s_method(cell: Cell, grid: int, host_kernels: Any) -> None:
    """Every rank's launch in turn, in memory of this process: bit by bit, and nothing beside the result."""
    grounds = [data.Ground(data.Numpy(), cell, rank, 1) for rank in range(cell.world)]
    size = kernels.POOL_AT + cell.largest_result + 256
    memory = np.full((cell.world, size), 0x6B, np.uint8)
    memory[:, : kernels.POOL_AT] = 0
    bases = np.array([each.ctypes.data for each in memory], np.uint64)
    row = cell.heads[0] // cell.world * cell.dim * cell.item
    starts = cells.spans(cell.tokens)

    def launch_of(rank: int) -> None:
        where = (grounds[rank].inputs[0].ctypes.data, bases.ctypes.data)
        tokens = (cell.tokens[rank], starts[rank].start, sum(cell.tokens))
        host_kernels.run_exchange(
            grid, kernels.THREADS, *where, cell.world, rank, cell.batch, *tokens, row, 5_000_000_000
        )

    # Launches of one process share the thread's indices, so only one rank can run at a time: its peers'
    # arrivals are there beforehand and taken off by it.
    for rank in range(cell.world):
        signals = memory[rank, kernels.SIGNAL_AT :].view(np.uint32)
        expected = (grid - rank + cell.world - 1) // cell.world
        for other in range(cell.world):
            signals[other] += expected if other != rank else 0
        launch_of(rank)
        assert signals[rank] == 0
    for rank, ground in enumerate(grounds):
        shape = cell.result_shape(rank, 0)
        nbytes = int(np.prod(shape)) * cell.item
        result = memory[rank, kernels.POOL_AT : kernels.POOL_AT + nbytes]
        assert ground.check([result.view(np.int32).reshape(*shape[:3], -1)]).replace("tensor 0 is", "") == ""
        assert (memory[rank, kernels.POOL_AT + nbytes :] == 0x6B).all() and ground.intact() == ""
        assert memory[rank, kernels.FAULT_AT] == 0


def test_rows_that_the_reference_cannot_move() -> None:
    assert [kernels.rows_at_once(row) for row in (16, 4096, 8192, 8208, 24, 0)] == [512, 2, 1, 0, 0, 0]


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    parser = build_parser()
    arguments = parser.parse_args(
        ["bench", "all2all", "--only", "core,cpu", "--world", "4", "--budget", "60"]
    )
    assert arguments.only == ("core", "cpu") and arguments.world == 4 and arguments.selection == "default"
    for wrong in (["--only", "speed"], ["--world", "0"], ["--budget", "0"], ["--quick", "--full"]):
        with pytest.raises(SystemExit):
            parser.parse_args(["bench", "all2all", *wrong])
    assert "setup, core, fused" in capsys.readouterr().err
    assert _bench_all2all._refusal("gpu", 2, 1).startswith("2 ranks need as many GPUs")
    assert main(["bench", "all2all", "--json", "/nowhere/x.json"]) == 2


def test_a_worker_says_what_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "options.json").write_text(plan.Options(device="gpu", world=1).dump())
    command = [sys.executable, "-m", "kvferry.bench.all2all.worker", str(tmp_path), "0"]
    ended = subprocess.run(
        command, env=launch.environment(), capture_output=True, text=True, timeout=60, check=False
    )
    if importlib.util.find_spec("torch") is None:
        assert ended.returncode == 3 and "No module named 'torch'" in ended.stderr
