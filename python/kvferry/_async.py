"""The asyncio side of a transfer's completion: one watched descriptor per event loop.

Imports asyncio when it is first needed: whoever awaits has it already, others need not pay for it.
"""

from __future__ import annotations

import itertools
from weakref import WeakKeyDictionary, ref

from kvferry._core import Notifier
from kvferry._errors import Error

TYPE_CHECKING = False  # typing's, without importing typing
if TYPE_CHECKING:
    import asyncio
    from collections.abc import Generator
    from typing import Any, TypeAlias
    from weakref import ReferenceType

    from kvferry._core import Transfer, TransferResult

    _Future: TypeAlias = asyncio.Future[TransferResult]


class _LoopNotifier:
    """Settles the futures of one loop, which alone owns it, through its reader, until it closes."""

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


# Weak on both sides: futures refer to their loop, so a strong value would keep a closed loop with pending
# futures, and the layouts of their jobs, for ever.
_notifiers: WeakKeyDictionary[asyncio.AbstractEventLoop, ReferenceType[_LoopNotifier]] = WeakKeyDictionary()


def wait_for(job: Transfer) -> Generator[Any, None, TransferResult]:
    """What `await job` runs: a generator, so that no Python code runs inside the native call.

    The interpreter's exit ends daemon threads; before Python 3.14, one that is in Python code which native
    code called takes the process down.
    """
    return (yield from _future_of(job).__await__())


def _future_of(job: Transfer) -> _Future:
    """A future of the running loop that ends as `job` ends. Cancelling it does not stop the job."""
    import asyncio  # noqa: PLC0415 see above

    loop = asyncio.get_running_loop()
    future: _Future = loop.create_future()
    if job.done():
        _settle(future, job)
        return future
    known = _notifiers.get(loop)
    notifier = known() if known is not None else None
    if notifier is None:
        notifier = _LoopNotifier(loop)
        _notifiers[loop] = ref(notifier)
    notifier.watch(future, job)
    return future


def _settle(future: _Future, job: Transfer) -> None:
    if future.done():
        return
    try:
        future.set_result(job.result())
    except Error as error:
        future.set_exception(error)
