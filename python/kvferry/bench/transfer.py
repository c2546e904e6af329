"""`kvferry bench transfer` without its options: buffers, all cells, the latencies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import kvferry as kf
from kvferry.bench import latency
from kvferry.bench.buffers import SLACK, Arena
from kvferry.bench.cells import UNIT, Cell, Selection, select, size
from kvferry.bench.contenders import Copiers
from kvferry.bench.measure import EFFORTS, CellResult, run_cell

if TYPE_CHECKING:
    from collections.abc import Callable

_SHARE_OF_MEMORY = 0.6
_COPIES = 3
"""Source, destination, and what NumPy gathers in between."""
_LATENCY_CALLS = {"quick": 300, "default": 2000, "full": 5000}


@dataclass(frozen=True)
class Options:
    """What was asked for, and what the machine has."""

    selection: Selection
    payload_bytes: int
    threads: int | None
    seed: int
    only: frozenset[str]
    available_bytes: int | None
    cache_bytes: int | None
    """Of the last caches together."""


@dataclass
class Results:
    """What came out."""

    threads: int = 0
    buffer_bytes: int = 0
    notes: list[str] = field(default_factory=list)
    cells: list[CellResult] = field(default_factory=list)
    latencies: list[latency.Latency] = field(default_factory=list)
    source_unchanged: bool = True

    @property
    def good(self) -> bool:
        """Whether every byte was right everywhere."""
        return self.source_unchanged and all(cell.good for cell in self.cells)


def affordable(options: Options) -> tuple[int, list[str]]:
    """The largest payload that memory has room for, at most the one asked for, and notes on it."""
    payload, notes = options.payload_bytes, []
    if options.available_bytes is not None:
        room = int(options.available_bytes * _SHARE_OF_MEMORY / _COPIES) - 2 * SLACK
        if room < payload:
            payload = max(room // UNIT, 1) * UNIT
            notes.append(
                f"--bytes reduced from {size(options.payload_bytes)} to {size(payload)}: "
                f"{size(options.available_bytes)} of memory available"
            )
    if options.cache_bytes is not None and payload <= options.cache_bytes:
        notes.append(
            f"buffers of {size(payload)} fit in the last cache ({size(options.cache_bytes)}): "
            "speeds are those of the cache in part"
        )
    return payload, notes


def run(options: Options, progress: Callable[[int, int, str], None]) -> Results:
    """Measures; calls `progress` with the number of the cell that begins, of how many, and its name."""
    results = Results()
    payload, results.notes = affordable(options)
    cells = select(options.selection, max_payload=payload, only=options.only)
    progress(0, len(cells), "first touch")
    arenas = (Arena(payload + payload // 16 + SLACK), Arena(payload + payload // 16 + SLACK))
    results.buffer_bytes = len(arenas[0].bytes)
    arenas[0].randomise(options.seed)
    arenas[1].poison()
    before = arenas[0].digest()
    with kf.TransferContext("cpu", threads=options.threads) as context, Copiers(context.threads) as copiers:
        results.threads = context.threads
        for number, cell in enumerate(cells):
            progress(number + 1, len(cells), cell.name)
            results.cells.append(_cell(options, cell, arenas, context, copiers))
        progress(len(cells), len(cells), "latencies")
        results.latencies = latency.measure(context, arenas, calls=_LATENCY_CALLS[options.selection])
    results.source_unchanged = arenas[0].digest() == before
    return results


def _cell(
    options: Options,
    cell: Cell,
    arenas: tuple[Arena, Arena],
    context: kf.TransferContext,
    copiers: Copiers,
) -> CellResult:
    return run_cell(
        cell,
        arenas,
        context,
        copiers,
        effort=EFFORTS[options.selection],
        seed=options.seed,
        check_before=options.selection == "full",
    )
