"""How exchanges are timed: behind work that hides the submission, all ranks' streams starting together."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

from kvferry.bench.all2all.plan import GRAPH_CALLS

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvferry.bench.all2all.device import Watched

MOST_HOLD_S = 40e-3
MOST_DEPTH = 24
"""Calls of a burst. Beyond some number in flight a submission waits for the device, however long it is held:
from the 29th on with kvferry's owned results and its copy engine on two H200s."""
NOTE = "host time in it: the delay was too short"
_WARM = 3
_DROPPED = 2
"""First iterations of a burst, which start a little apart."""
_LEAST_DEPTH = _DROPPED + 2
_TRIES = 5
"""Bursts that may be done over because their submission was late."""


@dataclass
class Times:
    """Seconds, call by call."""

    device: list[float] = field(default_factory=list)
    submit: list[float] = field(default_factory=list)
    note: str = ""


@dataclass(frozen=True)
class Effort:
    """How many calls: as many as fit in the time, within bounds."""

    seconds: float
    least: int
    most: int

    def count(self, each: float) -> int:
        """Of calls that take so long."""
        return max(min(int(self.seconds / max(each, 1e-7)), self.most), self.least)


EFFORTS = {"quick": Effort(0.0, 3, 3), "default": Effort(0.02, 10, 40), "full": Effort(0.06, 15, 100)}


class Gathering(Protocol):
    """What a clock needs of a meeting."""

    def gather(self, label: str, value: Any = True, /) -> list[Any]:
        """Every rank's value."""


class Clock:
    """Times calls that all ranks make alike."""

    def __init__(self, device: Watched, meeting: Gathering, effort: Effort) -> None:
        self._device, self._meeting, self.effort = device, meeting, effort

    def eager(self, call: Callable[[], Any]) -> Times:
        """Calls one after the other, events between them, behind a kernel that waits until all are submitted.

        An event between two calls keeps the second from starting early; the first iterations are not counted.
        """
        device, submit = self._device, 0.0
        first, last = device.marks(2)
        with device.on():
            for number in range(_WARM):
                if number == _WARM - 1:
                    device.mark(first)
                start = time.perf_counter()
                call()
                submit = time.perf_counter() - start
            device.mark(last)
        device.settle()
        found = self._meeting.gather("warm", [device.between(first, last), submit])
        count = self.effort.count(max(each for each, _ in found))
        depth = min(count + _DROPPED, MOST_DEPTH)
        hold = depth * (max(each for _, each in found) + 10e-6) * 1.5 + 0.5e-3
        times, tries = Times(), 0
        while len(times.device) < count:
            hold = min(hold, MOST_HOLD_S)
            part, late = self._burst(call, depth, hold)
            seen = [each for each in self._meeting.gather("late", late) if each is not None]
            if seen and tries < _TRIES:
                tries += 1
                stuck = min((at for at, _ in seen if at), default=0)
                if stuck and depth > _LEAST_DEPTH:
                    depth = max(stuck * 3 // 4, _LEAST_DEPTH)
                else:
                    hold = max(spent for _, spent in seen) * 1.5 + 0.5e-3
                continue
            times.note = times.note or (NOTE if seen else "")
            times.device += part.device
            times.submit += part.submit
            depth = min(depth, count - len(times.device) + _DROPPED)
        return times

    def _burst(
        self, call: Callable[[], Any], depth: int, hold: float
    ) -> tuple[Times, tuple[int, float] | None]:
        """Its times; if not all was submitted in time, also the call that stood still and the host's time."""
        device = self._device
        marks, submit, steps = device.marks(depth + 2), [], []
        self._meeting.gather("burst")
        with device.on():
            start = time.perf_counter()
            device.hold(hold)
            device.mark(marks[0])
            device.meet()
            device.mark(marks[1])
            for mark in marks[2:]:
                before = time.perf_counter()
                result = call()
                submit.append(time.perf_counter() - before)
                device.mark(mark)
                # Its buffer is free again before the next call, which is how a model drops it.
                del result
                steps.append(time.perf_counter() - before)
            late = device.ordinal is not None and device.passed(marks[1])
            spent = time.perf_counter() - start
        device.settle()
        each = [device.between(first, last) for first, last in pairwise(marks[1:])]
        times = Times(each[_DROPPED:], submit[_DROPPED:])
        return times, ((_stuck(steps, hold), spent) if late else None)

    def replayed(self, replay: Callable[[], None]) -> Times:
        """A graph of GRAPH_CALLS exchanges: a replay's time over their number."""
        device = self._device
        first, last = device.marks(2)
        with device.on():
            replay()
            device.mark(first)
            replay()
            device.mark(last)
        device.settle()
        one = max(self._meeting.gather("warm", device.between(first, last)))
        # A graph's submission is one call: little to hide.
        count = max(self.effort.count(one), 3)
        times = Times()
        for _ in range(min(count, 12)):
            self._meeting.gather("replay")
            with device.on():
                device.hold(0.5e-3)
                device.meet()
                device.mark(first)
                start = time.perf_counter()
                replay()
                times.submit.append(time.perf_counter() - start)
                device.mark(last)
            device.settle()
            times.device.append(device.between(first, last) / GRAPH_CALLS)
        return times


def _stuck(steps: list[float], hold: float) -> int:
    """How many calls had been submitted when one stood still; 0 if none did: all are slow."""
    usual = max(8 * statistics.median(steps), hold / 8)
    return next((at for at, step in enumerate(steps) if step > usual), 0)
