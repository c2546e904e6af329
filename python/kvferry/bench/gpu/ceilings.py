"""What no copy can beat: one large memcpy in each direction, measured in the same run."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry.bench.gpu import driver

if TYPE_CHECKING:
    from kvferry.bench.gpu.cells import Direction
    from kvferry.bench.gpu.memory import Arena
    from kvferry.bench.gpu.place import Place

_CALLS = 9


@dataclass(frozen=True)
class Ceiling:
    """One memcpy of `nbytes`, payload counted once; in bytes a second."""

    direction: Direction
    nbytes: int
    end: float
    event: float

    def share(self, payload: int, seconds: float) -> float:
        """What part of it so many bytes in so many seconds are, end to end."""
        return payload / seconds / self.end

    def event_share(self, payload: int, seconds: float) -> float:
        """The same between events."""
        return payload / seconds / self.event


def arenas(place: Place, direction: Direction) -> tuple[Arena, Arena]:
    """Source and target."""
    if direction == "p2p":
        if place.peer_dst is None:
            raise ValueError("there is no second GPU")
        return place.device_src, place.peer_dst
    return {
        "h2d": (place.host_src, place.device_dst),
        "d2h": (place.device_src, place.host_dst),
        "d2d": (place.device_src, place.device_dst),
    }[direction]


def measure(place: Place, direction: Direction, payload: int) -> Ceiling:
    """The median of a few."""
    src, dst = arenas(place, direction)
    driver.use(place.ordinal)
    first, last = driver.Event(), driver.Event()
    ends, events = [], []
    for number in range(-2, _CALLS):
        # Neither side begins where the last copy did, so that no cache holds it.
        at = (abs(number) % 2) * (min(src.nbytes, dst.nbytes) - payload) // 4096 * 4096
        place.stream.synchronize()
        start = time.perf_counter()
        first.record(place.stream)
        place.stream.copy(dst.addr + at, src.addr + at, payload)
        last.record(place.stream)
        place.stream.synchronize()
        if number >= 0:
            ends.append(time.perf_counter() - start)
            events.append(last.seconds_since(first))
    end, event = statistics.median(ends), statistics.median(events) or statistics.median(ends)
    return Ceiling(direction, payload, payload / end, payload / event)
