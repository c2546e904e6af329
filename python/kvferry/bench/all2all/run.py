"""`kvferry bench all2all` without its options: the sessions one after the other, then the bars."""

from __future__ import annotations

import contextlib
import json
import platform
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import kvferry as kf
from kvferry.bench.all2all import bars, plan, recovery
from kvferry.bench.all2all.launch import Collector, Session
from kvferry.bench.all2all.results import Measured, Results
from kvferry.bench.sections import timed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvferry.bench.all2all.plan import Options

RECOVERY_S, CPU_S = 14.0, 8.0
"""What the last two sections need of a budget."""
_CPU_MOST_S, _LEAVE_S = 90.0, 10.0
_LATE_S = 60.0
"""How long after the deadline a cell that was begun may still take."""


class Listener(Protocol):
    """Told what happens."""

    def section(self, name: str, /) -> None:
        """A session begins."""

    def task(self, number: int, count: int, found: Measured, /) -> None:
        """A task has ended."""

    def note(self, text: str, /) -> None:
        """Something to know."""


def run(options: Options, listener: Listener, command: Sequence[str] = ()) -> Results:
    """Measures everything asked for. `command`: what a worker runs, if not this kvferry's."""
    results, start = Results(facts=describe(options)), time.monotonic()
    root = Path(tempfile.mkdtemp(prefix="kvferry-bench-"))
    sick: Session | None = None
    how = (listener, command)
    try:
        if "recovery" in options.only and options.world >= 2:
            # Started early, as its libraries take a while to load; it waits for its turn.
            sick = Session(root / "recovery", options, recovery.MEMBERS, "recovery", command)
        with timed(results, listener, "exchanges"):
            timely = _with_deadline(options, start)
            _measure(root / "ranks", timely, results, results.measured, how)
        if sick is not None:
            with timed(results, listener, "recovery"):
                _recover(sick, results, listener)
        if options.device == "gpu" and "cpu" in options.only and options.selection != "quick":
            with timed(results, listener, "CPU backend"):
                only = ("bandwidth",) if options.selection == "default" else plan.GROUPS
                on_cpu = replace(options, device="cpu", world=2, only=only, deadline=time.monotonic() + CPU_S)
                _measure(root / "cpu", on_cpu, results, results.cpu, how)
    finally:
        if sick is not None:
            sick.kill()
        shutil.rmtree(root, ignore_errors=True)
    made = results.measured.get("setup")
    for row in made.rows.values() if made else ():
        stats = row.ranks[0].values.get("stats", {})
        results.facts |= {key: stats[key] for key in ("transport", "why") if key in stats}
    results.wrong += [f"recovery: {fault}" for fault in recovery.faults(results.recovery)]
    results.bars = bars.of(results, options)
    return results


_How = tuple[Listener, "Sequence[str]"]
"""Whom to tell, and what a worker runs."""


def _with_deadline(options: Options, start: float) -> Options:
    if options.budget is None:
        return options
    later = RECOVERY_S * ("recovery" in options.only) + CPU_S * (
        "cpu" in options.only and options.device == "gpu"
    )
    return replace(options, deadline=start + max(options.budget - later, options.budget / 2))


def _measure(folder: Path, options: Options, results: Results, into: dict[str, Measured], how: _How) -> None:
    listener, command = how
    tasks = plan.tasks(options)
    if not tasks:
        return
    session = Session(folder, options, options.world, command=command)
    ended: list[Measured] = []

    def told(found: Measured) -> None:
        ended.append(found)
        listener.task(len(ended), len(tasks), found)

    collector = Collector(session, tasks, told)
    most = 1500.0 if options.deadline is None else options.deadline - time.monotonic() + _LATE_S
    if options.device == "cpu":
        most = max(most, _CPU_MOST_S)
    amiss = session.wait(time.monotonic() + most, collector.look)
    collector.close(amiss)
    into.update({task.name: collector.measured[task.name] for task in tasks})
    if amiss or collector.crashes:
        said = "; ".join([amiss, *collector.crashes])
        results.wrong.append(f"the run ended early: {said}")
        listener.note(f"{said}\n{session.log()}")
    facts = folder / "facts.json"
    if facts.exists():
        results.facts |= json.loads(facts.read_text())


def _recover(session: Session, results: Results, listener: Listener) -> None:
    results.recovery = recovery.drive(session)
    end = time.monotonic() + _LEAVE_S
    while time.monotonic() < end and any(session.processes[number].poll() is None for number in (0, 2)):
        time.sleep(0.05)
    if results.recovery.get("why"):
        listener.note(f"{results.recovery['why']}\n{session.log()}")
    session.kill()


def describe(options: Options) -> dict[str, Any]:
    """The machine and the build."""
    info = kf.build_info()
    facts: dict[str, Any] = {"date": time.strftime("%Y-%m-%d %H:%M"), "ranks": options.world}
    if options.device == "gpu":
        with contextlib.suppress(kf.CudaError):
            facts["gpus"] = [
                f"{each['name']} ({each['uuid']}), {each['sm_count']} SMs" for each in kf.devices()
            ]
    facts |= {
        "device": options.device,
        "kvferry": info["version"],
        "profile": info["profile"],
        "python": platform.python_version(),
        "budget_s": options.budget,
        "selection": options.selection,
    }
    return facts
