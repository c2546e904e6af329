"""What transfers do to a model that computes meanwhile: a loop of matrix products, with and without them."""

from __future__ import annotations

import importlib
import time
from typing import TYPE_CHECKING, Any

import kvferry as kf
from kvferry.bench.gpu import cells, driver
from kvferry.bench.gpu.bar import Bar, median
from kvferry.bench.gpu.contenders import DriverBatch
from kvferry.bench.gpu.reference import Reference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvferry.bench.gpu.bar import Scene

_SIDE = 8192
_LIMIT = 0.05


def gemm(scene: Scene) -> Iterator[Bar]:
    """Slowdown of an 8192^3 bfloat16 product while both directions are always busy."""
    case = f"{_SIDE}^3 bf16 products during h2d and d2h, slowed by"
    try:
        loop = Products(scene)
    except Exception as error:  # noqa: BLE001 - optional library
        yield Bar(case, _LIMIT, at_least=False, why_not=f"needs torch: {type(error).__name__}")
        return
    small = scene.units(16)
    ways = {
        "auto, FC<->LW 32 KiB runs": ("auto", cells.fc_lw, 32 << 10),
        "kernel, FC<->LW 32 KiB runs": ("kernel", cells.fc_lw, 32 << 10),
        "staged, FC<->LW 32 KiB runs": ("staged", cells.fc_lw, 32 << 10),
        "batch, FC<->FC 2 MiB blocks": ("batch", cells.fc_fc, 2 << 20),
        "auto, FC<->FC 4 KiB runs": ("auto", cells.fc_fc, 4 << 10),
    }
    for name, (engine, make, run) in ways.items():
        movers = [scene.kvferry(make(direction, run, small), engine)[1] for direction in ("h2d", "d2h")]
        yield _row(
            f"{case}, kvferry {name}", loop, movers, make("h2d", run, small).payload_bytes, judged=True
        )
    for name, make_other, cell in (
        ("driver batch, FC-FC 2 MiB blocks", DriverBatch, cells.fc_fc("h2d", 2 << 20, small)),
        ("reference, FC-LW 32 KiB runs", Reference, cells.fc_lw("h2d", 32 << 10, small)),
    ):
        try:
            both: list[Any] = []
            for direction in ("h2d", "d2h"):
                make = cells.fc_fc if cell.pair == "FC-FC" else cells.fc_lw
                of = make("h2d" if direction == "h2d" else "d2h", cell.run_bytes, small)
                ground = scene.ground(of)
                contender: Any = make_other(ground, driver.Stream(scene.place.ordinal))
                contender.prepare(0)
                both.append(_Fixed(contender))
            yield _row(f"{case}, {name} (to compare)", loop, both, cell.payload_bytes, judged=False)
        except (driver.DriverError, kf.Error) as error:
            yield Bar(f"{case}, {name}", _LIMIT, at_least=False, why_not=str(error))


class _Fixed:
    """A contender that moves one call's blocks again and again, its addresses known."""

    def __init__(self, contender: Any) -> None:
        self._contender = contender

    def start(self, call: int, /) -> Callable[[], object]:  # noqa: ARG002 - always the same
        wait: Callable[[], object] = self._contender.start(0)
        return wait


class Products:
    """A loop of matrix products on a stream of its own."""

    def __init__(self, scene: Scene) -> None:
        self._torch: Any = importlib.import_module("torch")
        device = f"cuda:{scene.place.ordinal}"
        side = _SIDE if not scene.quick else 256
        self._a, self._b = (
            self._torch.randn(side, side, device=device, dtype=self._torch.bfloat16) for _ in range(2)
        )
        self._out = self._torch.empty_like(self._a)
        self._stream = self._torch.cuda.Stream(device)
        self._count = 60 if not scene.quick else 2
        self._torch.cuda.synchronize(device)
        for _ in range(2):
            self.run([])

    def run(self, movers: list[Any]) -> tuple[float, int]:
        """Seconds of the products between two events, and how many transfers ended meanwhile."""
        torch, ended = self._torch, 0
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        waiting: list[Any] = []
        call = 0
        try:
            for mover in movers:
                # Two in flight each way, and already running when the clock starts.
                for _ in range(2):
                    waiting.append((mover, mover.start(call)))
                    call += 1
            with torch.cuda.stream(self._stream):
                first.record()
                for _ in range(self._count):
                    torch.mm(self._a, self._b, out=self._out)
                last.record()
            while waiting and not last.query():
                mover, wait = waiting.pop(0)
                wait()
                ended += 1
                call += 1
                waiting.append((mover, mover.start(call)))
        finally:
            # What still moves would spoil the bar after this one.
            for _, wait in waiting:
                wait()
        last.synchronize()
        return first.elapsed_time(last) / 1e3, ended


def _row(name: str, loop: Products, movers: list[Any], payload: int, *, judged: bool) -> Bar:
    alone, beside, moved, spent = [], [], 0, 0.0
    for _ in range(3):
        alone.append(loop.run([])[0])
        start = time.perf_counter()
        seconds, ended = loop.run(movers)
        spent += time.perf_counter() - start
        beside.append(seconds)
        moved += ended
    slowed = median(beside) / median(alone) - 1
    detail = f"{moved * payload / spent / 1e9:.1f} GB/s moved meanwhile in both directions together"
    if not judged:
        return Bar(name, _LIMIT, at_least=False, why_not=f"for comparison: {slowed:.3f}; {detail}")
    return Bar(name, _LIMIT, at_least=False, value=slowed, detail=detail)
