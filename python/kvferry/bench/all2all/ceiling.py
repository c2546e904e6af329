"""The ceiling: plain peer copies of as many bytes as the exchange sends, all GPUs driven by rank 0 alone.

Through another process's mapping the same copies are slower, so they would be no ceiling. The other ranks
meanwhile wait on the host.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any

from kvferry.bench.all2all import device as devices
from kvferry.bench.all2all.clock import Clock, Times
from kvferry.bench.all2all.contenders import NotHereError
from kvferry.bench.all2all.data import POISON, Torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvferry.bench.all2all.cells import Cell
    from kvferry.bench.all2all.clock import Effort
    from kvferry.bench.all2all.device import Device
    from kvferry.bench.all2all.meeting import Meeting

WAYS = ("memcpy both", "memcpy")
_CYCLES = 2e9
"""A second of the delay kernel, at the highest clock: at a lower one it only takes longer."""
_BESIDE = 8
_WORD = 4


def unseen(meeting: Meeting, device: Device) -> str:
    """Why rank 0 cannot do it alone; empty if it can. All ranks learn the same."""
    if not isinstance(device, devices.Gpu):
        raise NotHereError("no peer memory")
    if meeting.world < 2:
        raise NotHereError("one rank has no peers")
    count = int(device.torch.cuda.device_count())
    found = "" if count >= meeting.world else f"rank 0 sees {count} of {meeting.world} GPUs"
    return str(meeting.first("seen", found))


def measure(meeting: Meeting, device: Device, cell: Cell, effort: Effort, *, both: bool) -> tuple[Times, str]:
    """Times of the slowest GPU of each iteration and what was wrong, by rank 0; the times for all ranks."""
    found, wrong = Times(), ""
    if meeting.rank == 0:
        try:
            found, wrong = _alone(device, cell, effort, both=both)
        finally:
            devices.free(device)
    said = meeting.first("ceiling", [found.device, found.submit, found.note])
    return Times(*said), wrong


def _alone(device: Device, cell: Cell, effort: Effort, *, both: bool) -> tuple[Times, str]:
    copies = Copies(device.torch, cell, range(cell.world) if both else (0,))
    copies.poison()
    copies.call()
    copies.lanes.settle()
    if wrong := copies.check():
        return Times(), wrong
    copies.poison()
    times = Clock(copies.lanes, Solo(), effort).eager(copies.call)
    wrong = copies.check()
    return times, f"after it was timed: {wrong}" if wrong else ""


class Solo:
    """A meeting of one."""

    def gather(self, label: str, value: Any = True, /) -> list[Any]:  # noqa: ARG002 - nobody to tell apart
        """The own value."""
        return [value]


class Lanes:
    """A stream on each of several GPUs, watched as one device: all marks at once, the slowest counts."""

    ordinal: int | None = 0

    def __init__(self, torch: Any, ordinals: Iterable[int]) -> None:
        self._torch, self.ordinals = torch, tuple(ordinals)
        self.streams = {ordinal: torch.cuda.Stream(ordinal) for ordinal in self.ordinals}

    def on(self, stream: Any = None, /) -> contextlib.AbstractContextManager[Any]:  # noqa: ARG002 - its own
        """Whatever is done here names its stream."""
        return contextlib.nullcontext()

    def settle(self) -> None:
        """Waits for everything."""
        for ordinal in self.ordinals:
            self._torch.cuda.synchronize(ordinal)

    def marks(self, count: int, /) -> list[Any]:
        """Events, one for each GPU."""
        event = self._torch.cuda.Event
        return [[event(enable_timing=True) for _ in self.ordinals] for _ in range(count)]

    def mark(self, mark: Any, /) -> None:
        """Records them."""
        for event, stream in zip(mark, self.streams.values(), strict=True):
            event.record(stream)

    def between(self, first: Any, last: Any, /) -> float:
        """Seconds of the slowest."""
        return max(float(a.elapsed_time(b)) / 1e3 for a, b in zip(first, last, strict=True))

    def passed(self, mark: Any, /) -> bool:
        """Whether any GPU has come past it."""
        return any(event.query() for event in mark)

    def hold(self, seconds: float, /) -> None:
        """Keeps the streams busy."""
        for stream in self.streams.values():
            with self._torch.cuda.stream(stream):
                # Not torch's documented interface, but its own tests' way to do this.
                self._torch.cuda._sleep(int(seconds * _CYCLES))

    def meet(self) -> None:
        """Each stream waits for all others."""
        (here,) = self.marks(1)
        self.mark(here)
        for stream in self.streams.values():
            for event in here:
                stream.wait_event(event)


@dataclass(frozen=True)
class _Part:
    """What one GPU sends to another."""

    source: int
    peer: int
    first: int
    """Of its words."""
    words: Any
    target: Any


class Copies:
    """Every source's bytes to all its peers, nearest in the ring first."""

    def __init__(self, torch: Any, cell: Cell, sources: Iterable[int]) -> None:
        self._torch = torch
        self.lanes = Lanes(torch, sources)
        ranks = range(cell.world)
        # torch orders a copy after the current stream of its target and that one after the copy. With one for
        # all each copy would wait for word from the other GPU; in turn, what they wait for is long past.
        self._beside = {rank: cycle([torch.cuda.Stream(rank) for _ in range(_BESIDE)]) for rank in ranks}
        self._maths = {rank: Torch(torch, devices.NAME.format(rank)) for rank in ranks}
        self._parts: list[_Part] = []
        for source in self.lanes.ordinals:
            first = source * 0x2545F
            for peer in ((source + step) % cell.world for step in ranks[1:]):
                if not torch.cuda.can_device_access_peer(source, peer):
                    raise NotHereError(f"GPU {source} cannot reach GPU {peer}")
                count = cell.sent(source, peer) // _WORD
                target = self._maths[peer].words(count, POISON)
                self._parts.append(_Part(source, peer, first, self._words(source, first, count), target))
                first += count
        self._settle()

    def _words(self, rank: int, first: int, count: int) -> Any:
        maths = self._maths[rank]
        return maths.mixed(maths.index(range(first, first + count), 1))

    def call(self) -> None:
        """Once, on all streams."""
        current = self._torch.cuda.stream
        for part in self._parts:
            with current(next(self._beside[part.peer])), current(self.lanes.streams[part.source]):
                part.target.copy_(part.words, non_blocking=True)

    def poison(self) -> None:
        """What is not written shows."""
        for part in self._parts:
            self._maths[part.peer].fill(part.target, POISON)
        self._settle()

    def check(self) -> str:
        """What is wrong; empty if nothing. The words are made again where they must have come."""
        self._settle()
        for part in self._parts:
            want = self._words(part.peer, part.first, len(part.target))
            if wrong := self._maths[part.peer].differing(part.target, want):
                return f"{wrong} wrong words from GPU {part.source} to GPU {part.peer}"
        return ""

    def _settle(self) -> None:
        for ordinal in self._maths:
            self._torch.cuda.synchronize(ordinal)
