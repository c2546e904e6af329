"""How it is measured: contenders take turns on blocks not touched lately; correctness is checked untimed."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvferry.bench.buffers import POISON, Ground
from kvferry.bench.contenders import Kvferry, Numpy, ceilings

if TYPE_CHECKING:
    import kvferry as kf
    from kvferry.bench.buffers import Arena
    from kvferry.bench.cells import Cell
    from kvferry.bench.contenders import Contender, Copiers

_NEAR = 1.15
"""A plain copy slower than the best by more than this in the warm-up is not the ceiling."""
_CHECKED_BYTES = 16 << 20


@dataclass(frozen=True)
class Effort:
    """How long a contender may take in a cell."""

    seconds: float
    least: int
    most: int


EFFORTS = {
    "quick": Effort(seconds=0.15, least=3, most=30),
    "default": Effort(seconds=0.5, least=5, most=60),
    "full": Effort(seconds=2.0, least=10, most=100),
}


@dataclass(frozen=True)
class Timing:
    """Seconds of one contender's calls."""

    name: str
    seconds: list[float]
    submit_seconds: list[float]

    def at(self, percent: float) -> float:
        """A percentile of the seconds."""
        return float(np.percentile(self.seconds, percent))

    def submit_at(self, percent: float) -> float | None:
        """A percentile of the seconds until the call returned; None where it returns when all is done."""
        return float(np.percentile(self.submit_seconds, percent)) if self.submit_seconds else None

    def gb_per_s(self, payload: int, percent: float = 50) -> float:
        """Payload, counted once, over a percentile of the seconds, in 10^9 bytes/s."""
        return payload / self.at(percent) / 1e9


@dataclass(frozen=True)
class Check:
    """What was wrong, in 8-byte words, after a transfer into poisoned memory."""

    checked_bytes: int
    wrong_words: int
    stray_words: int
    """Written though no block of theirs was named."""

    @property
    def good(self) -> bool:
        """Whether nothing was."""
        return self.wrong_words == self.stray_words == 0


@dataclass(frozen=True)
class CellResult:
    """One cell, measured and checked."""

    cell: Cell
    runs: int
    ceiling: Timing
    """The fastest plain copy."""
    kvferry: Timing
    numpy: Timing
    checks: list[Check]

    @property
    def good(self) -> bool:
        """Whether every check was."""
        return all(check.good for check in self.checks)

    @property
    def ratio(self) -> float:
        """Speed of kvferry in terms of the ceiling."""
        return self.ceiling.at(50) / self.kvferry.at(50)

    @property
    def numpy_ratio(self) -> float:
        """Speed of kvferry in terms of NumPy's."""
        return self.numpy.at(50) / self.kvferry.at(50)


def run_cell(
    cell: Cell,
    arenas: tuple[Arena, Arena],
    context: kf.TransferContext,
    copiers: Copiers,
    *,
    effort: Effort,
    seed: int,
    check_before: bool,
) -> CellResult:
    """Measures a cell and checks what kvferry moved, after the measurements and, if asked, before too."""
    ground = Ground.lay(cell, *arenas, seed)
    plan = context.plan(ground.src.layout, ground.dst.layout, ground.src_slices[0], ground.dst_slices[0])
    checks = [check(context, ground, arenas[1], 0)] if check_before else []
    plain = _likely(ceilings(copiers, arenas, cell.payload_bytes))
    timings = race([Kvferry(context, ground), Numpy(ground), *plain], effort)
    checks.append(check(context, ground, arenas[1], ground.calls - 1))
    return CellResult(
        cell=cell,
        runs=plan.num_runs,
        ceiling=min(timings[2:], key=lambda timing: timing.at(50)),
        kvferry=timings[0],
        numpy=timings[1],
        checks=checks,
    )


def race(contenders: list[Contender], effort: Effort) -> list[Timing]:
    """Lets contenders take turns, another one first in each round, until each has had its time."""
    timings = [Timing(contender.name, [], []) for contender in contenders]
    call = 0
    for contender in contenders:
        call += 1
        contender.move(call)
    active = list(range(len(contenders)))
    while active:
        for number in list(active):
            call += 1
            start = time.perf_counter()
            submitted = contenders[number].move(call)
            timings[number].seconds.append(time.perf_counter() - start)
            if submitted is not None:
                timings[number].submit_seconds.append(submitted)
            had = timings[number].seconds
            if len(had) >= effort.most or (len(had) >= effort.least and sum(had) >= effort.seconds):
                active.remove(number)
        active = active[1:] + active[:1]
    return timings


def check(context: kf.TransferContext, ground: Ground, target: Arena, call: int) -> Check:
    """Transfers into poisoned memory; compares with NumPy's view of the source, and all else with poison."""
    target.poison()
    src_ids, dst_ids = ground.src_slices[call], ground.dst_slices[call]
    context.transfer(ground.src.layout, ground.dst.layout, src_ids, dst_ids).wait()
    wrong = checked = 0
    step = max(_CHECKED_BYTES // ground.src.shape.chunk_bytes, 1)
    for src, dst in zip(ground.src.planes, ground.dst.planes, strict=True):
        src_words, dst_words = src.view(np.uint64), dst.view(np.uint64)
        for start in range(0, len(src_ids), step):
            part = slice(start, start + step)
            expected, found = src_words[src_ids[part]], dst_words[dst_ids[part]]
            checked += expected.nbytes
            if not np.array_equal(expected, found):
                wrong += int(np.count_nonzero(expected != found))
            dst[dst_ids[part]] = POISON << 8 | POISON
    return Check(checked_bytes=checked, wrong_words=wrong, stray_words=target.unpoisoned())


def _likely(plain: list[Contender]) -> list[Contender]:
    """The plain copies that may be the fastest."""
    best = []
    for contender in plain:
        seconds = []
        for call in range(3):
            start = time.perf_counter()
            contender.move(call)
            seconds.append(time.perf_counter() - start)
        best.append(min(seconds))
    return [contender for contender, taken in zip(plain, best, strict=True) if taken <= _NEAR * min(best)]
