"""How exchanges are timed: behind work that hides the submission, all ranks' streams starting together."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from kvferry.bench.all2all.plan import GRAPH_CALLS

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvferry.bench.all2all.device import Device
    from kvferry.bench.all2all.meeting import Meeting

MOST_HOLD_S = 40e-3
_WARM = 3
_DROPPED = 2
"""First iterations of a burst, which start a little apart."""


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


class Clock:
    """Times calls that all ranks make alike."""

    def __init__(self, device: Device, meeting: Meeting, effort: Effort) -> None:
        self._device, self._meeting, self._effort = device, meeting, effort

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
        count = self._effort.count(max(each for each, _ in found)) + _DROPPED
        hold = count * (max(each for _, each in found) + 10e-6) * 1.5 + 0.5e-3
        for attempt in range(3):
            hold = min(hold, MOST_HOLD_S)
            times, covered = self._burst(call, count, hold)
            if all(self._meeting.gather("covered", covered)):
                break
            hold *= 2.5
            times.note = "host time in it: the delay was too short" if attempt == 2 else ""
        return times

    def _burst(self, call: Callable[[], Any], count: int, hold: float) -> tuple[Times, bool]:
        device = self._device
        marks, submit = device.marks(count + 2), []
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
            covered = time.perf_counter() - start < hold or device.ordinal is None
        device.settle()
        each = [device.between(first, last) for first, last in pairwise(marks[1:])]
        return Times(each[_DROPPED:], submit[_DROPPED:]), covered

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
        count = max(self._effort.count(one), 3)
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
