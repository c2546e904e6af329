"""The asyncio side of a transfer's completion: one watched descriptor per event loop."""

from __future__ import annotations

import asyncio
import itertools
from weakref import WeakKeyDictionary

from kvferry._core import Notifier, Transfer, TransferResult
from kvferry._errors import Error

_Future = asyncio.Future[TransferResult]


class _LoopNotifier:
    """Settles the futures of one loop. The loop owns it through its reader and drops it when it closes."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._notifier = Notifier()
        self._pending: dict[int, tuple[_Future, Transfer]] = {}
        self._keys = itertools.count()
        loop.add_reader(self._notifier.fileno(), self._drain)

    def watch(self, future: _Future, job: Transfer) -> None:
        key = next(self._keys)
        self._pending[key] = (future, job)
        self._notifier.watch(job, key)

    def _drain(self) -> None:
        for key in self._notifier.drain():
            _settle(*self._pending.pop(key))


_notifiers: WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopNotifier] = WeakKeyDictionary()


def future_of(job: Transfer) -> _Future:
    """A future of the running loop that ends as `job` ends. Cancelling it does not stop the job."""
    loop = asyncio.get_running_loop()
    future: _Future = loop.create_future()
    if job.done():
        _settle(future, job)
        return future
    notifier = _notifiers.get(loop)
    if notifier is None:
        notifier = _notifiers[loop] = _LoopNotifier(loop)
    notifier.watch(future, job)
    return future


def _settle(future: _Future, job: Transfer) -> None:
    if future.done():
        return
    try:
        future.set_result(job.result())
    except Error as error:
        future.set_exception(error)
