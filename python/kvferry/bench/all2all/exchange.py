"""Exchanges of a cell on torch devices: every way made, checked bit by bit, timed and checked again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvferry.bench.all2all import ceiling, cells
from kvferry.bench.all2all.contenders import (
    BareNccl,
    Contender,
    InTurn,
    Kvferry,
    Memcpy,
    Nccl,
    NotHereError,
    Reference,
    tensors,
)
from kvferry.bench.all2all.data import Ground
from kvferry.bench.all2all.device import free
from kvferry.bench.all2all.plan import GRAPH_CALLS
from kvferry.bench.all2all.results import Record, ours

if TYPE_CHECKING:
    from kvferry.bench.all2all.cells import Cell
    from kvferry.bench.all2all.clock import Clock, Times
    from kvferry.bench.all2all.data import Maths
    from kvferry.bench.all2all.device import Device
    from kvferry.bench.all2all.plan import Task
    from kvferry.bench.all2all.ranks import Seat


def make(seat: Seat, device: Device, ground: Ground, way: str) -> Contender:
    """A way by its name."""
    first, _, rest = way.partition(" ")
    if first == "nccl":
        return BareNccl(device, ground) if rest.startswith("bare") else Nccl(device, ground)
    if first == "memcpy":
        return Memcpy(device, ground, both=rest in ("both", "ipc"))
    if first == "reference":
        return Reference(device, ground, int(rest or device.sms))
    if way == "in turn":
        return InTurn(seat.comm, ground)
    if first == "push":
        return Kvferry(seat.comm, ground, engine="push", num_sms=int(rest))
    if first == "copy":
        return Kvferry(seat.comm, ground, out=True, engine="copy")
    if way not in ("owned", "out", "graph", "graph out") and first != "only":
        raise NotHereError(f"no way is called {way}")
    return Kvferry(seat.comm, ground, out=way.endswith("out"))


class Exchanges:
    """Measures tasks of exchanges."""

    def __init__(self, seat: Seat, device: Device, maths: Maths, clock: Clock) -> None:
        self._seat, self._device, self._maths, self._clock = seat, device, maths, clock

    def run(self, task: Task) -> None:
        """Every way of a task."""
        ground = self._laid(task.cell)
        for way in task.ways:
            part = ground
            if way.startswith("only "):
                part = self._laid(cells.alone(task.cell, int(way[5:])))
            record = self._way(task, part, way)
            # The input is its own after every way, and the words around it.
            with self._device.on():
                record.wrong = record.wrong or part.intact()
            self._seat.write(record)
        free(self._device)

    def _laid(self, cell: Cell) -> Ground:
        with self._device.on():
            ground = Ground(self._maths, cell, self._seat.meeting.rank, self._seat.options.seed)
        self._device.settle()
        return ground

    def _way(self, task: Task, ground: Ground, way: str) -> Record:
        seat, device = self._seat, self._device
        record = Record(task.name, way)
        through_ipc = ""
        if way in ceiling.WAYS:
            through_ipc, fault = seat.together(lambda: ceiling.unseen(seat.meeting, device))
            if fault or not through_ipc:
                return self._ceiling(task, record, fault)
        contender, fault = seat.together(lambda: make(seat, device, ground, way))
        if not fault:
            wrong, fault = seat.together(lambda: self.check(ground, contender))
            record.wrong = wrong or ""
        if not fault:
            before = seat.stats().get("copied_out")
            held: list[Any] = []
            times, fault = seat.together(lambda: self._time(ground, contender, way, held))
            if times is not None:
                (found, wrong) = times
                record.device, record.submit, record.note = found.device, found.submit, found.note
                record.wrong = record.wrong or wrong
                if through_ipc:
                    record.note = "; ".join(filter(None, (f"copies through IPC: {through_ipc}", record.note)))
            after = seat.stats().get("copied_out")
            if ours(way) and before is not None and after is not None:
                record.values["copied_out"] = after - before
            if ours(way) and not fault and (ctas := seat.stats().get("ctas")):
                record.values["ctas"] = ctas
        if fault:
            record.why, record.device, record.submit = fault, [], []
            self.recover(record)
        return record

    def _ceiling(self, task: Task, record: Record, fault: str) -> Record:
        """Rank 0 copies; all others wait for its end."""
        if not fault:
            found, fault = self._seat.together(
                lambda: ceiling.measure(
                    self._seat.meeting,
                    self._device,
                    task.cell,
                    self._clock.effort,
                    both=record.way == "memcpy both",
                )
            )
            if found is not None and not fault:
                times, record.wrong = found
                record.device, record.submit, record.note = times.device, times.submit, times.note
        record.why = fault
        return record

    def recover(self, record: Record) -> None:
        """After a failure on any rank: a new communicator, counters set back."""
        if ours(record.way):
            self._seat.drop()
        timed_out, fault = self._seat.together(self._device.realign)
        record.why = "; ".join(text for text in (record.why, timed_out, fault) if text)

    def check(self, ground: Ground, contender: Contender) -> str:
        """One exchange into poisoned memory, every word compared; what is wrong."""
        device = self._device
        with device.on():
            contender.poison()
            device.settle()
            # Nobody writes into memory that another still poisons.
            self._seat.meeting.gather("poisoned")
            results = contender.call()
            device.settle()
            contender.verify()
            found = ground.check(tensors(results)) if contender.checked else ""
        device.settle()
        return found

    def _time(self, ground: Ground, contender: Contender, way: str, held: list[Any]) -> tuple[Times, str]:
        """Its times, and what is wrong with the results afterwards."""
        device = self._device
        owned = ours(way) and not way.endswith("out") and way not in ("copy", "in turn")
        if "graph" in way.split():
            with device.on():
                contender.call()
            device.settle()
            self._seat.meeting.gather("capture")
            replay, result = device.graph(contender.call, GRAPH_CALLS)
            self._seat.meeting.gather("captured")
            times = self._clock.replayed(replay)
            contender.verify()
            with device.on():
                wrong = ground.check(tensors(result)) if contender.checked else ""
            del replay, result
            device.settle()
            return times, f"after replays: {wrong}" if wrong else ""
        if owned:
            # A result held while all others come and go must not change.
            with device.on():
                held.append(contender.call())
            device.settle()
        times = self._clock.eager(contender.call)
        contender.verify()
        if fault := device.fault():
            raise RuntimeError(fault)
        with device.on():
            wrong = ground.check(tensors(held[0])) if held else ""
        held.clear()
        return times, f"held over later calls: {wrong}" if wrong else ""
