"""What a call costs beside the copying: one small block, and a plan of very many ids."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvferry.bench.buffers import Store
from kvferry.bench.cells import PAIRS, Shape

if TYPE_CHECKING:
    from collections.abc import Callable

    import kvferry as kf
    from kvferry.bench.buffers import Arena

MANY_IDS = 131_072
_SMALL = Shape(2, 2, 4, 2, 64)
_TINY = Shape(2, 2, 1, 1, 32)


@dataclass(frozen=True)
class Latency:
    """One row: microseconds at the 50th and the 99th percentile."""

    what: str
    calls: int
    submit_us: tuple[float, float]
    wait_us: tuple[float, float] | None
    ids: int

    @property
    def ns_per_id(self) -> float:
        """Nanoseconds of the median submission for each id pair."""
        return self.submit_us[0] * 1e3 / self.ids


def measure(
    context: kf.TransferContext, arenas: tuple[Arena, Arena], *, calls: int, ids: int = MANY_IDS
) -> list[Latency]:
    """All rows."""
    contiguous = PAIRS[0]
    source, target = (
        Store.cut(arena, axes, _SMALL, 64).layout
        for arena, axes in zip(arenas, (contiguous.src, contiguous.dst), strict=True)
    )
    from_id, to_id = np.array([3]), np.array([5])
    route = context.route(source, target)
    small = f"of one block of {_SMALL.block_bytes // 1024} KiB"
    rows = [
        _jobs(f"transfer() {small}", lambda: context.transfer(source, target, from_id, to_id), calls),
        _jobs(f"route() {small}", lambda: route(from_id, to_id), calls),
    ]
    ids = min(ids, min(len(arena.bytes) for arena in arenas) // _TINY.block_bytes - 1)
    many_source, many_target = (Store.cut(arena, contiguous.src, _TINY, ids + 1).layout for arena in arenas)
    rng = np.random.default_rng(0)
    src_ids, dst_ids = rng.permutation(ids + 1)[:ids], rng.permutation(ids + 1)[:ids]
    few = max(calls // 100, 3)
    planned = _seconds(lambda: context.plan(many_source, many_target, src_ids, dst_ids), few)
    rows.append(Latency(f"plan() of {ids} ids", few, _percentiles(planned), None, ids))
    move = f"transfer() of {ids} blocks of {_TINY.block_bytes} B"
    rows.append(_jobs(move, lambda: context.transfer(many_source, many_target, src_ids, dst_ids), few, ids))
    return rows


def _jobs(what: str, submit: Callable[[], kf.Transfer], calls: int, ids: int = 1) -> Latency:
    submitted, waited = [], []
    for call in range(-max(calls // 10, 1), calls):
        start = time.perf_counter()
        job = submit()
        middle = time.perf_counter()
        job.wait()
        end = time.perf_counter()
        if call >= 0:
            submitted.append(middle - start)
            waited.append(end - middle)
    return Latency(what, calls, _percentiles(submitted), _percentiles(waited), ids)


def _seconds(call: Callable[[], object], calls: int) -> list[float]:
    taken = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return taken


def _percentiles(seconds: list[float]) -> tuple[float, float]:
    median, high = np.percentile(seconds, [50, 99])
    return float(median) * 1e6, float(high) * 1e6
