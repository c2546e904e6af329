"""One rank's seat in a bench: its communicator, what it writes down, steps that all go through together."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import kvferry as kf
from kvferry.bench.all2all.contenders import NotHereError
from kvferry.bench.all2all.meeting import LeftError
from kvferry.bench.all2all.results import Record

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvferry.bench.all2all.meeting import Meeting
    from kvferry.bench.all2all.plan import Options, Task

_MOST_COMMUNICATORS = 6
DONE, SKIPPED = "(done)", "(skipped)"
"""Ways that stand for a task's end in a rank's file."""


def said(error: BaseException) -> str:
    """An exception in a line."""
    text = str(error).strip().splitlines()
    name = "" if isinstance(error, (NotHereError, LeftError)) else f"{type(error).__name__}: "
    return f"{name}{text[0] if text else ''}"


def all2all() -> Any:
    """The class, where this build has it."""
    found = getattr(kf, "All2All", None)
    if found is None:
        raise NotHereError("this kvferry has no All2All")
    return found


class Seat:
    """What all of a rank's measurements share."""

    def __init__(self, folder: Path, options: Options, meeting: Meeting, device: Any) -> None:
        self.folder, self.options, self.meeting = folder, options, meeting
        self.device = device
        """As kvferry is told."""
        self.capacity = 1 << 20
        self._file = (folder / f"rank-{meeting.rank}.jsonl").open("a")
        self._comm: Any = None
        self._made = 0

    def write(self, record: Record) -> None:
        """A line, at once."""
        self._file.write(record.dump())
        self._file.flush()

    def ended(self, task: Task, way: str = DONE, why: str = "") -> None:
        """The task's last line."""
        self.write(Record(task.name, way, why=why))

    def connect(self, name: str, capacity: int, **options: Any) -> Any:
        """A communicator of all ranks."""
        meeting = self.meeting
        return all2all()(
            meeting.rank,
            meeting.world,
            capacity_bytes=capacity,
            rendezvous=f"file://{self.folder}/meet-{name}",
            device=self.device,
            **({"timeout": self.options.timeout, "name": name} | options),
        )

    @property
    def comm(self) -> Any:
        """The communicator of the exchanges; made when first asked for, by all ranks at once."""
        if self._comm is None:
            if self._made >= _MOST_COMMUNICATORS:
                raise NotHereError(f"given up: {self._made} communicators have failed")
            self._made += 1
            self._comm = self.connect(f"bench-{self._made}", self.capacity)
        return self._comm

    def drop(self) -> None:
        """After a failure: the next way gets a new one."""
        comm, self._comm = self._comm, None
        if comm is not None:
            with contextlib.suppress(Exception):
                comm.close()

    def stats(self) -> dict[str, Any]:
        """Of the communicator, where there is one."""
        return dict(self._comm.stats()) if self._comm is not None else {}

    def together(self, work: Callable[[], Any]) -> tuple[Any, str]:
        """Does a step on every rank; what came out, and the first failure of any rank."""
        found, fault = None, ""
        try:
            found = work()
        except Exception as error:  # noqa: BLE001 - a way that fails is a result
            fault = said(error)
        return found, self.meeting.end(fault)
