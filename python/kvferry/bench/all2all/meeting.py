"""How the ranks of a bench agree: small files in a folder of their own, which need no library to work."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

STOP = "stop"
_POLL = 100e-6


class Stopped(BaseException):
    """The launcher has ended the run, or a rank did not come."""


class LeftError(RuntimeError):
    """Another rank has already ended the step, having failed."""


class Meeting:
    """One rank's seat. Every rank goes through the same steps; within a step all gather in the same order."""

    def __init__(self, folder: Path, rank: int, world: int, timeout: float = 45.0) -> None:
        self.folder, self.rank, self.world, self.timeout = folder, rank, world, timeout
        self._step, self._count = 0, 0

    def set(self, key: str, value: Any) -> None:
        """Makes a value known; a reader sees all of it or nothing."""
        path = self.folder / f"{key}.json"
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(value))
        draft.rename(path)

    def peek(self, key: str) -> Any:
        """A value, or None where there is none yet."""
        try:
            return json.loads((self.folder / f"{key}.json").read_text())
        except FileNotFoundError:
            return None

    def get(self, key: str, timeout: float | None = None, *, unless: str = "") -> Any:
        """A value, as soon as there is one. LeftError once `unless` is there instead."""
        patience = self.timeout if timeout is None else timeout
        end = time.monotonic() + patience
        while (found := self.peek(key)) is None:
            if unless and (left := self.peek(unless)) is not None:
                if (found := self.peek(key)) is not None:
                    break
                raise LeftError(left or f"no {key}, but {unless}")
            if (self.folder / STOP).exists():
                raise Stopped(f"the run was ended while {key} was awaited")
            if time.monotonic() > end:
                raise Stopped(f"{key} did not come within {patience:g} s")
            time.sleep(_POLL)
        return found

    def gather(self, label: str, value: Any = True) -> list[Any]:
        """Every rank's value, in their order. LeftError where a rank has ended the step instead."""
        self._count += 1
        key = f"at-{self._step}-{self._count}"
        self.set(f"{key}-{self.rank}", [label, value])
        found = [self.get(f"{key}-{rank}", unless=f"end-{self._step}-{rank}") for rank in range(self.world)]
        for rank, (theirs, _) in enumerate(found):
            if theirs != label:
                raise Stopped(f"rank {rank} is at {theirs!r}, rank {self.rank} at {label!r}")
        return [value for _, value in found]

    def first(self, label: str, value: Any) -> Any:
        """Rank 0's value."""
        return self.gather(label, value)[0]

    def end(self, fault: str) -> str:
        """Ends a step, however far one has come in it: the first fault of any rank, if there is one."""
        step = self._step
        self.set(f"end-{step}-{self.rank}", fault)
        try:
            faults = [self.get(f"end-{step}-{rank}") for rank in range(self.world)]
        except Stopped as stopped:
            raise Stopped(f"{stopped}; here {fault}" if fault else str(stopped)) from None
        self._step, self._count = step + 1, 0
        # Who is at this step's end has read all of the one before.
        for path in self.folder.glob(f"*-{step - 1}-*{self.rank}.json"):
            if path.name.startswith(("at-", "end-")) and path.stem.endswith(f"-{self.rank}"):
                path.unlink(missing_ok=True)
        return next((f"rank {rank}: {text}" for rank, text in enumerate(faults) if text), "")
