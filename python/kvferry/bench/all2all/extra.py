"""What is no exchange between two events: set-up, host time, products beside exchanges, late ranks."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

from kvferry.bench.all2all import exchange
from kvferry.bench.all2all.contenders import tensors
from kvferry.bench.all2all.data import Ground
from kvferry.bench.all2all.results import Record, ours

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvferry.bench.all2all.clock import Clock
    from kvferry.bench.all2all.data import Maths
    from kvferry.bench.all2all.device import Device
    from kvferry.bench.all2all.plan import Task
    from kvferry.bench.all2all.ranks import Seat

SETUP_CAPACITY = 1 << 28
_SETUPS = 3
_BURSTS, _CALLS = 10, 20
SIDE = 8192
_PRODUCTS = 30
_SKEWED = 5


def setup(seat: Seat, task: Task) -> None:
    """Communicators made and closed; the first one pays for what is made once."""
    record = Record(task.name, "communicator")
    for number in range(_SETUPS if seat.options.selection != "quick" else 1):

        def make() -> float:
            seat.meeting.gather("ready")
            start = time.monotonic()
            comm = seat.connect(f"setup-{number}", min(SETUP_CAPACITY, 64 * seat.capacity))  # noqa: B023 - called here
            took = time.monotonic() - start
            record.values.setdefault("stats", dict(comm.stats()))
            comm.close()
            return took

        took, fault = seat.together(make)
        if fault:
            record.why = fault
            break
        record.device.append(took)
    record.values["first_s"] = record.device[0] if record.device else None
    seat.write(record)


def cost(seat: Seat, task: Task, ground: Ground, settle: Callable[[], None]) -> None:
    """CPU time of the calling thread in a fused call, and in dropping its results."""
    record = Record(task.name, task.ways[0])

    def measure() -> None:
        inputs = tuple(ground.inputs)
        clock, comm = time.thread_time, seat.comm
        called, dropped, walls = [], [], []
        for burst in range(_BURSTS):
            seat.meeting.gather("burst")
            for _ in range(_CALLS):
                wall, start = time.perf_counter(), clock()
                results = comm.send_recv_heads(inputs)
                middle, later = clock(), time.perf_counter()
                del results
                if burst:
                    called.append(middle - start)
                    dropped.append(clock() - middle)
                    walls.append(later - wall)
            settle()
        comm.check()
        # Reading the clock costs something too.
        idle = statistics.median(-(clock() - clock()) for _ in range(200))
        record.submit = walls
        record.values = {
            "cpu_us": max(statistics.median(called) - idle, 0.0) * 1e6,
            "drop_us": max(statistics.median(dropped) - idle, 0.0) * 1e6,
            "wall_us": statistics.median(walls) * 1e6,
            "clock_us": idle * 1e6,
        }

    _, record.why = seat.together(measure)
    if record.why:
        seat.drop()
    seat.write(record)


class Beside:
    """Exchanges beside other work, on torch devices."""

    def __init__(self, seat: Seat, device: Device, maths: Maths, clock: Clock) -> None:
        self._seat, self._device, self._maths, self._clock = seat, device, maths, clock
        self._exchanges = exchange.Exchanges(seat, device, maths, clock)

    def _ground(self, task: Task) -> Ground:
        with self._device.on():
            ground = Ground(self._maths, task.cell, self._seat.meeting.rank, self._seat.options.seed)
        self._device.settle()
        return ground

    def gemm(self, task: Task) -> None:
        """How much longer bf16 products take while exchanges follow one another on another stream."""
        device, torch = self._device, self._device.torch
        ground = self._ground(task)
        side = SIDE if device.ordinal is not None and self._seat.options.selection != "quick" else 64
        a, b = (torch.randn(side, side, device=device.name).to(torch.bfloat16) for _ in range(2))
        out, stream = torch.empty_like(a), device.side()
        first, last, moved = device.marks(3)
        device.settle()

        def products(call: Callable[[], Any], count: int) -> dict[str, float]:
            self._seat.meeting.gather("products")
            with device.on():
                device.hold(2e-3)
                device.meet()
                device.mark(first)
            with device.on(stream):
                if device.ordinal is not None:
                    stream.wait_event(first)
                for _ in range(_PRODUCTS):
                    torch.mm(a, b, out=out)
                device.mark(last)
            with device.on():
                for _ in range(count):
                    call()
                device.mark(moved)
            device.settle()
            return {"seconds": device.between(first, last), "moved_s": device.between(first, moved)}

        products(int, 0)
        base = 0.0
        for way in task.ways:
            record = Record(task.name, way)

            def measure() -> None:
                nonlocal base
                if way == "alone":  # noqa: B023 - called here
                    base = statistics.median(products(int, 0)["seconds"] for _ in range(3))
                    record.device, record.values = [base], {"slowdown": 0.0}  # noqa: B023 - called here
                    return
                contender = exchange.make(self._seat, device, ground, way)  # noqa: B023 - called here
                each = statistics.median(self._clock.eager(contender.call).device)
                # More than the products take even if they are slowed to the half.
                count = max(self._seat.meeting.gather("count", min(int(2 * base / each) + 1, 4000)))
                runs = [products(contender.call, count) for _ in range(3)]
                contender.verify()
                found = sorted(runs, key=lambda run: run["seconds"])[1]
                record.device = [found["seconds"]]  # noqa: B023 - called here
                record.values = {  # noqa: B023 - called here
                    "slowdown": found["seconds"] / base - 1,
                    "exchanges": count,
                    "exchange_us": found["moved_s"] / count * 1e6,
                    "alone_us": each * 1e6,
                    "covered": found["moved_s"] >= found["seconds"],
                }

            _, record.why = self._seat.together(measure)
            if record.why:
                self._exchanges.recover(record)
            self._seat.write(record)

    def skew(self, task: Task) -> None:
        """The last rank comes late: what the others wait, and what it still takes itself."""
        device, meeting = self._device, self._seat.meeting
        ground, late = self._ground(task), meeting.rank == meeting.world - 1
        for way in task.ways:
            kind, delay = way.rsplit(" ", 1)
            record = Record(task.name, way)

            def measure() -> None:
                contender = exchange.make(self._seat, device, ground, kind)  # noqa: B023 - called here
                usual = statistics.median(self._clock.eager(contender.call).device)
                first, last = device.marks(2)
                took = []
                for _ in range(_SKEWED):
                    meeting.gather("skew")
                    with device.on():
                        device.hold(1e-3)
                        device.meet()
                        if late:
                            device.hold(float(delay) / 1e3)  # noqa: B023 - called here
                        device.mark(first)
                        result = tensors(contender.call())
                        device.mark(last)
                        del result
                    device.settle()
                    took.append(device.between(first, last))
                contender.verify()
                middle = statistics.median(took)
                waited = 0.0 if late else float(delay) / 1e3  # noqa: B023 - called here
                # An early rank's time without the delay that it had to wait for.
                record.device = [middle - waited]  # noqa: B023 - called here
                record.values = {"usual_us": usual * 1e6, "late_us" if late else "early_us": middle * 1e6}  # noqa: B023

            _, record.why = self._seat.together(measure)
            if record.why:
                self._exchanges.recover(record)
            self._seat.write(record)


def failed(record: Record) -> bool:
    """Whether it is one of ours that failed."""
    return bool(record.why) and ours(record.way)
