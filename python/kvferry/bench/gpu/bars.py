"""The bars of the transfer work: each is measured, compared and said, whether met or missed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import kvferry as kf
from kvferry.bench.gpu import bars_cost, bars_load, bars_speed, core
from kvferry.bench.gpu.bar import Bar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvferry.bench.gpu.bar import Scene

REGRET = 0.95
_FAILURES = (kf.Error, RuntimeError, ValueError, TypeError, AttributeError, OSError, MemoryError)

GROUPS: dict[str, Callable[[Scene], Iterator[Bar]]] = {
    "across PCIe": bars_speed.pcie,
    "one block": bars_speed.one_block,
    "submission": bars_cost.submission,
    "tokens": bars_speed.tokens,
    "both ways": bars_speed.both_ways,
    "on one GPU": bars_speed.device,
    "between GPUs": bars_speed.peer,
    "pageable": bars_speed.pageable,
    "beside a model": bars_load.gemm,
    "waiting": bars_cost.waiting,
    "memory": bars_cost.memory,
    "small jobs": bars_cost.soak,
}


def run(scene: Scene, progress: Callable[[str, list[Bar], float], None]) -> list[Bar]:
    """All groups; a failing one becomes a row that says so. `progress` gets each, its rows, its seconds."""
    rows: list[Bar] = []
    for name, group in [*GROUPS.items(), ("core table", of_table)]:
        start = time.monotonic()
        found: list[Bar] = []
        try:
            found.extend(group(scene))
        except _FAILURES as error:
            why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            found.append(Bar(f"{name}: failed", 1.0, at_least=True, why_not=why))
            scene.wrong.append(f"{name}: {why}")
        rows += found
        progress(name, found, time.monotonic() - start)
    return rows


def of_table(scene: Scene) -> Iterator[Bar]:
    """What the core table says of the choice of engine and of the contenders."""
    regret = "auto against the best forced engine, worst core cell"
    others = "cells lost to a contender beyond the tie band, all core cells"
    if scene.table is None or not scene.table.cells:
        for case in (regret, others):
            yield Bar(case, REGRET, at_least=True, why_not="needs the core table in the same run")
        return
    found = core.regrets(scene.table)
    if found:
        worst = min(found, key=lambda duel: duel.speedup)
        below = sum(duel.speedup < REGRET for duel in found)
        detail = f"{worst.cell.name}, {worst.other}; below in {below} of {len(found)} cells"
        yield Bar(regret, REGRET, at_least=True, value=worst.speedup, detail=detail)
    fought = core.duels(scene.table)
    lost = [duel for duel in fought if duel.verdict == "lose"]
    cells = len({duel.cell for duel in lost})
    detail = f"{len(lost)} of {len(fought)} duels, in {cells} cells"
    yield Bar(others, 0, at_least=False, value=float(len(lost)), detail=detail)
