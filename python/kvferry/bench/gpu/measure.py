"""How it is measured: contenders take turns on blocks not touched lately, each checked once before."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import kvferry as kf
from kvferry.bench.gpu import driver
from kvferry.bench.gpu.stats import Series

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvferry.bench.gpu.cells import Cell
    from kvferry.bench.gpu.memory import Ground
    from kvferry.bench.gpu.place import Check, Place

_FAILURES = (kf.Error, driver.DriverError, RuntimeError, ValueError, TypeError, AttributeError, MemoryError)
_DELAY_PER_S = 3.0e12
"""A GPU fills at most about this many bytes a second."""


@dataclass(frozen=True)
class Effort:
    """How long a contender may take in a cell."""

    seconds: float
    least: int
    most: int

    def enough(self, taken: list[float]) -> bool:
        """Whether these samples will do; a slow contender stops before it has the least."""
        spent = sum(taken)
        slow = bool(taken) and spent >= 6 * self.seconds
        return slow or len(taken) >= self.most or (len(taken) >= self.least and spent >= self.seconds)

    def scaled(self, share: float) -> Effort:
        """Less of it, never nothing."""
        if share >= 1:
            return self
        return Effort(self.seconds * share, max(int(self.least * share), 1), max(int(self.most * share), 1))


@dataclass
class CellResult:
    """One cell, measured and checked."""

    cell: Cell
    series: dict[str, Series] = field(default_factory=dict)
    checks: dict[str, Check] = field(default_factory=dict)
    engine: str = ""
    """What `auto` chose."""
    errors: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Whether every contender moved the right bytes and nothing of ours failed."""
        return not self.errors and all(check.good for check in self.checks.values())


class Timer:
    """Times a contender's calls: end to end, and between events behind work that hides the submission."""

    def __init__(self, place: Place, stream: driver.Stream) -> None:
        self._stream = stream
        self._delay = place.delay_on(stream)
        driver.use(stream.ordinal)
        self._events = (driver.Event(), driver.Event())

    def enter(self) -> None:
        """Makes the stream's GPU the current one, as checks of other GPUs' memory may have left another."""
        driver.use(self._stream.ordinal)

    def end_to_end(self, contender: Any, call: int) -> tuple[float, float]:
        """Seconds until the caller knows that all has arrived, and until it had control again."""
        prepare(contender, call)
        start = time.perf_counter()
        wait = contender.start(call)
        middle = time.perf_counter()
        wait()
        return time.perf_counter() - start, middle - start

    def between_events(self, contender: Any, call: int, submit: float) -> float | None:
        """Seconds of the work itself; None where the contender cannot use the stream."""
        prepare(contender, call)
        first, last = self._events
        self._hold(min(submit, 2e-3) * 1.5 + 30e-6)
        first.record(self._stream)
        wait = contender.enqueue(call)
        if wait is None:
            self._stream.synchronize()
            return None
        last.record(self._stream)
        wait()
        last.synchronize()
        return last.seconds_since(first)

    def _hold(self, seconds: float) -> None:
        """Keeps the stream busy for about so long."""
        left = int(seconds * _DELAY_PER_S)
        while left > 0:
            part = min(left, self._delay.nbytes)
            self._stream.fill(self._delay.addr, left & 0xFF, part)
            left -= part


def prepare(contender: Any, call: int) -> None:
    """What a contender works out beforehand."""
    ready: Callable[[int], None] | None = getattr(contender, "prepare", None)
    if ready is not None:
        ready(call)


def run_cell(
    place: Place, ground: Ground, entered: list[tuple[str, Any]], effort: Effort, *, first_call: int = 0
) -> CellResult:
    """Checks every contender once, then lets those that were right take turns until each has had its time."""
    result = CellResult(ground.cell)
    stream = place.stream_of(ground.cell)
    timer = Timer(place, stream)
    racing: list[tuple[Series, Any]] = []
    call = first_call
    for name, contender in entered:
        series = result.series[name] = Series(name)
        if isinstance(contender, str):
            series.not_run = contender
            continue
        call += 1
        try:
            result.checks[name] = check(place, ground, contender, call)
        except _FAILURES as error:
            series.not_run = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            if name.startswith("kvferry") and not isinstance(error, kf.Unsupported):
                result.errors.append(f"{name}: {series.not_run}")
            continue
        result.engine = contender.engine if name == "kvferry auto" else result.engine
        racing.append((series, contender))
    race(timer, racing, effort, call)
    driver.use(place.ordinal)
    return result


def check(place: Place, ground: Ground, contender: Any, call: int) -> Check:
    """One call into poisoned memory, which also warms up."""
    place.poison(ground.dst.arena)
    prepare(contender, call)
    driver.use(place.stream_of(ground.cell).ordinal)
    contender.start(call)()
    driver.use(place.ordinal)
    reread = getattr(contender, "reread", None)
    return place.check(ground, contender.ids(call), reread)


def race(timer: Timer, racing: list[tuple[Series, Any]], effort: Effort, call: int) -> None:
    """Turns, in a new order each round: who comes after a contender of many calls finds cold caches."""
    timer.enter()
    order = random.Random(call)
    active = list(racing)
    while active:
        for entry in order.sample(active, len(active)):
            series, contender = entry
            call += 1
            end, submit = timer.end_to_end(contender, call)
            series.end.append(end)
            series.submit.append(submit)
            call += 1
            event = timer.between_events(contender, call, submit)
            if event is not None:
                series.event.append(event)
            if effort.enough(series.end):
                active.remove(entry)
