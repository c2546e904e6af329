"""The CPU backend with NumPy arrays: wall time of each call, beside a plain copy of the result's bytes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from kvferry.bench.all2all import extra
from kvferry.bench.all2all.clock import Effort
from kvferry.bench.all2all.contenders import Kvferry, tensors
from kvferry.bench.all2all.data import Ground, Numpy
from kvferry.bench.all2all.results import Record

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvferry.bench.all2all.plan import Task
    from kvferry.bench.all2all.ranks import Seat

EFFORTS = {"quick": Effort(0.0, 3, 3), "default": Effort(0.3, 7, 300), "full": Effort(1.0, 15, 1000)}
_WARM = 2


class Memcpy:
    """A copy of as many bytes as the rank gets, by every rank at once."""

    checked = False

    def __init__(self, ground: Ground) -> None:
        words = sum(tensor.nbytes for tensor in ground.inputs) // 8
        self._source, self._target = np.ones(words, np.int64), np.zeros(words, np.int64)

    def call(self) -> Any:
        """One copy."""
        np.copyto(self._target, self._source)

    def poison(self) -> None:
        """Nothing is looked at."""

    def verify(self) -> None:
        """Nothing is looked at."""


def run(seat: Seat, task: Task) -> None:
    """A task of the CPU plan."""
    if task.kind == "setup":
        extra.setup(seat, task)
        return
    ground = Ground(Numpy(), task.cell, seat.meeting.rank, seat.options.seed)
    if task.kind == "cost":
        extra.cost(seat, task, ground, lambda: None)
        return
    for way in task.ways:
        record = Record(task.name, way)
        _, record.why = seat.together(lambda: _measure(seat, ground, way, record))  # noqa: B023 - called here
        if record.why:
            record.device, record.submit = [], []
            seat.drop()
        record.wrong = record.wrong or ground.intact()
        seat.write(record)


def _measure(seat: Seat, ground: Ground, way: str, record: Record) -> None:
    contender = Memcpy(ground) if way == "memcpy" else Kvferry(seat.comm, ground, out=way == "out")
    contender.poison()
    seat.meeting.gather("poisoned")
    held = tensors(contender.call())
    record.wrong = ground.check(held) if contender.checked else ""
    if way != "owned":
        held = []
    took = _times(seat, contender.call)
    contender.verify()
    if held and not record.wrong:
        wrong = ground.check(held)
        record.wrong = f"held over later calls: {wrong}" if wrong else ""
    record.device = took


def _times(seat: Seat, call: Callable[[], Any]) -> list[float]:
    first = time.perf_counter()
    for _ in range(_WARM):
        call()
    each = max(seat.meeting.gather("warm", (time.perf_counter() - first) / _WARM))
    count = EFFORTS[seat.options.selection].count(each)
    seat.meeting.gather("burst")
    took = []
    for _ in range(count):
        start = time.perf_counter()
        result = call()
        took.append(time.perf_counter() - start)
        del result
    return took
