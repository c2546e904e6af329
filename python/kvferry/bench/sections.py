"""Sections of a run, timed."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator


class _Timed(Protocol):
    seconds: dict[str, float]


class _Listener(Protocol):
    def section(self, name: str, /) -> None: ...


@contextmanager
def timed(results: _Timed, listener: _Listener, name: str) -> Iterator[None]:
    """Says that a section begins, and notes in the results how long it took, however it ends."""
    listener.section(name)
    start = time.monotonic()
    try:
        yield
    finally:
        results.seconds[name] = round(time.monotonic() - start, 1)
