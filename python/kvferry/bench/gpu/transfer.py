"""`kvferry bench transfer` on GPUs without its options: memory, core table, bars, extras, and their times."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import kvferry as kf
from kvferry.bench.gpu import arrays, bars, cells, core, driver, extra
from kvferry.bench.gpu.bar import Bar, Scene
from kvferry.bench.gpu.core import Table
from kvferry.bench.gpu.measure import Effort
from kvferry.bench.gpu.place import Place
from kvferry.bench.sections import timed

if TYPE_CHECKING:
    from kvferry.bench.gpu.ceilings import Ceiling
    from kvferry.bench.gpu.cells import Direction
    from kvferry.bench.gpu.measure import CellResult

SECTIONS = ("core", "bars", "extra")
SIMULATED = bool(os.environ.get("KVFERRY_FAKE_DEVICES"))
_BARS_EFFORT = Effort(seconds=0.1, least=7, most=40)


@dataclass(frozen=True)
class Options:
    """What was asked for."""

    device: int
    peer: int | None
    sections: tuple[str, ...]
    payload_bytes: int
    seed: int
    budget: float | None = None
    """Seconds for the core table."""
    quick: bool = False
    directions: tuple[Direction, ...] = ()
    """Only these; none: all that the GPUs allow."""
    soak_jobs: int = 200_000


@dataclass
class Results:
    """What came out."""

    facts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    table: Table = field(default_factory=Table)
    bars: list[Bar] = field(default_factory=list)
    extra: list[extra.Row] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    """Of each section."""
    wrong: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Whether every byte was right everywhere and nothing of ours failed."""
        return not self.wrong and self.table.good and all(row.good for row in self.extra)


class Listener(Protocol):
    """Told what happens."""

    def section(self, name: str, /) -> None:
        """A section begins."""

    def cell(self, number: int, count: int, result: CellResult, ceiling: Ceiling, /) -> None:
        """A core cell has ended."""

    def group(self, name: str, rows: list[Bar], seconds: float, /) -> None:
        """A group of bars has ended."""

    def row(self, row: extra.Row, /) -> None:
        """An extra row has ended."""


def run(options: Options, listener: Listener) -> Results:
    """Measures everything asked for."""
    results = Results(facts=describe(options))
    with timed(results, listener, "memory"):
        peer = options.peer
        if peer is not None and not driver.join_peers(options.device, peer):
            results.notes.append(f"GPU {options.device} cannot reach GPU {peer}: no p2p")
            peer = None
        math, notes = arrays.choose()
        results.notes += notes
        results.facts["checked_by"] = math.name
        place = Place(math, options.device, peer, options.payload_bytes, options.seed)
    contexts = core.Contexts()
    try:
        if "core" in options.sections:
            with timed(results, listener, "core"):
                _core(options, results, place, contexts, listener)
        scene = Scene(
            place=place,
            contexts=contexts,
            effort=core.QUICK if options.quick else _BARS_EFFORT,
            payload=options.payload_bytes,
            seed=options.seed,
            quick=options.quick,
            table=results.table if results.table.cells else None,
            soak_jobs=options.soak_jobs,
            wrong=results.wrong,
        )
        if "bars" in options.sections:
            with timed(results, listener, "bars"):
                results.bars = bars.run(scene, listener.group)
        if "extra" in options.sections:
            with timed(results, listener, "extra"):
                results.extra = extra.run(scene, listener.row)
    finally:
        contexts.close()
    return results


def _core(
    options: Options, results: Results, place: Place, contexts: core.Contexts, listener: Listener
) -> None:
    directions = tuple(
        direction
        for direction in options.directions or cells.DIRECTIONS
        if direction != "p2p" or place.peer is not None
    )
    results.table = core.run(
        place,
        contexts,
        cells.core(directions, max_payload=options.payload_bytes, quick=options.quick),
        core.QUICK if options.quick else core.DEFAULT,
        seed=options.seed,
        budget=options.budget,
        ceiling_bytes=options.payload_bytes,
        progress=listener.cell,
    )


def describe(options: Options) -> dict[str, Any]:
    """The machine and the build."""
    devices = kf.devices()
    info = kf.build_info()
    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "gpus": [f"{each['name']} ({each['uuid']}), {each['sm_count']} SMs" for each in devices],
        "device": options.device,
        "peer": options.peer,
        "driver_cuda": driver.version(),
        "cpu": _cpu(),
        "cpus": len(os.sched_getaffinity(0)),
        "kvferry": info["version"],
        "profile": info["profile"],
        "python": platform.python_version(),
        "payload_bytes": options.payload_bytes,
        "simulated": SIMULATED,
    }


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(
                (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), ""
            )
    except OSError:
        return ""
