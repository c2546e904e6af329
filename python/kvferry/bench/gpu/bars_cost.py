"""Bars on what a transfer costs beside the copying: submission, waiting, memory, many small jobs."""

from __future__ import annotations

import itertools
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import kvferry as kf
from kvferry.bench.cells import Shape
from kvferry.bench.gpu import cells, driver
from kvferry.bench.gpu.bar import Bar, median
from kvferry.bench.gpu.stats import slope

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvferry.bench.gpu.bar import Scene
    from kvferry.bench.gpu.contenders import Kvferry

_70B = Shape(80, 2, 16, 1, 128)
"""One rank of eight of Llama-3.1-70B: 80 layers."""
_TINY = Shape(1, 2, 1, 1, 64)
_WORKERS = 8
_SMALL = Shape(2, 2, 4, 2, 64)


def submit_us(contender: Kvferry, calls: int) -> float:
    """Median microseconds until a submission returns, each waited for before the next."""
    taken = []
    for call in range(-max(calls // 10, 1), calls):
        start = time.perf_counter()
        wait = contender.start(call % 97)
        end = time.perf_counter()
        wait()
        if call >= 0:
            taken.append(end - start)
    return median(taken) * 1e6


def submission(scene: Scene) -> Iterator[Bar]:
    """The kernel engine, then the engines that pay for each copy."""
    calls = 300 if not scene.quick else 5
    for ids in (1, 64):
        cell = cells.Cell("h2d", "FC-LW", cells.FC, cells.LW, _70B, 4 << 10, ids)
        if cell.payload_bytes > scene.payload:
            continue
        _, contender = scene.kvferry(cell, "kernel")
        value = submit_us(contender, calls)
        name = f"submit from Python, kernel engine, {ids} block(s) x 80 layers, FC-LW h2d"
        yield Bar(name, 12.0, at_least=False, value=value, unit="us", detail="route(), ids in int64 arrays")
    yield Bar(
        "submit from Rust, kernel engine, up to 64 blocks x 80 layers",
        5.0,
        at_least=False,
        unit="us",
        why_not="a Rust program measures it: see the report's rust sections",
    )
    yield from _more_ids(scene, calls)
    for engine, cell in (
        ("batch", cells.fc_fc("h2d", 2 << 20, scene.units(256))),
        ("staged", cells.fc_lw("h2d", 32 << 10, scene.units(256))),
        ("staged", cells.fc_lw("d2h", 32 << 10, scene.units(256))),
    ):
        _, contender = scene.kvferry(cell, engine)
        held = _gil_held(contender, max(calls // 10, 2))
        value = submit_us(contender, max(calls // 6, 2))
        limit = 12.0 + 1.0 * cell.ids
        name = f"submit from Python, {engine} engine, {cell.ids} descriptors, {cell.pair} {cell.direction}"
        detail = (
            f"{value / cell.ids:.2f} us a descriptor; the GIL was held for at most {held:.0f} us at a time"
        )
        yield Bar(name, limit, at_least=False, value=value, unit="us", detail=detail)


def _more_ids(scene: Scene, calls: int) -> Iterator[Bar]:
    """What each further id pair costs, in a list that the kernel's parameters still hold and beyond."""
    times = {}
    for ids in (64, 2048, 32_768):
        cell = cells.Cell("h2d", "FC-FC", cells.FC, cells.FC, _TINY, _TINY.block_bytes, ids)
        if cell.payload_bytes > scene.payload // 2:
            continue
        _, contender = scene.kvferry(cell, "kernel")
        times[ids] = submit_us(contender, max(calls // (1 + ids // 1024), 3))
    known = sorted(times)
    for few, many in itertools.pairwise(known):
        per = slope((few, times[few]), (many, times[many])) * 1e3
        detail = f"{times[few]:.1f} us for {few} ids, {times[many]:.1f} us for {many}"
        name = f"submit, each further id pair from {few} to {many}"
        yield Bar(name, 8.0, at_least=False, value=per, unit="ns", detail=detail)


def _gil_held(contender: Kvferry, calls: int) -> float:
    """Median over submissions of the longest time that another Python thread could not run, in us."""
    gaps: list[tuple[float, float]] = []
    stop = False

    def watch() -> None:
        last = time.perf_counter()
        while not stop:
            now = time.perf_counter()
            if now - last > 5e-6:
                gaps.append((last, now))
            last = now

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    longest = []
    for call in range(calls):
        start = time.perf_counter()
        wait = contender.start(call)
        end = time.perf_counter()
        wait()
        inside = [min(end, last) - max(start, first) for first, last in gaps if last > start and first < end]
        longest.append(max(inside, default=0.0))
        gaps.clear()
    stop = True
    watcher.join()
    return median(longest) * 1e6


def waiting(scene: Scene) -> Iterator[Bar]:
    """wait() against a thread that spins on an event: what it adds after the last byte."""
    calls = 60 if not scene.quick else 3
    for direction, units in (("h2d", 8), ("d2h", 8), ("d2h", 64)):
        cell = cells.fc_fc("h2d" if direction == "h2d" else "d2h", 2 << 20, scene.units(units))
        _, contender = scene.kvferry(cell)
        stream, event = scene.place.stream_of(cell), driver.Event()
        spun: list[float] = []
        waited: list[float] = []
        for call in range(calls):
            for way in (spun, waited) if call % 2 else (waited, spun):
                start = time.perf_counter()
                wait = contender.enqueue(call)
                event.record(stream)
                if way is spun:
                    while not event.done():
                        pass
                elif wait is not None:
                    wait()
                way.append(time.perf_counter() - start)
                event.synchronize()
                if wait is not None:
                    wait()
        value = (median(waited) - median(spun)) * 1e6
        detail = (
            f"{median(waited) * 1e6:.1f} us with wait(), {median(spun) * 1e6:.1f} us spinning on an event"
        )
        name = f"wait() after the last byte, {direction}, {cell.ids} blocks"
        yield Bar(name, 20.0, at_least=False, value=value, unit="us", detail=detail)


def memory(scene: Scene) -> Iterator[Bar]:
    """What a context takes beside the layouts, after it has used its rings."""
    cell = cells.fc_lw("h2d", 32 << 10, scene.units(64))
    back = cells.fc_lw("d2h", 32 << 10, scene.units(64))
    many = cells.fc_fc("h2d", 4 << 10, scene.units(64))
    grounds = [scene.ground(each) for each in (cell, back, many)]
    driver.use(scene.place.ordinal)
    driver.call("cuCtxSynchronize")
    free, pinned = driver.free_bytes(), _resident()
    with kf.TransferContext(scene.place.ordinal) as context:
        engines: list[Any] = ["staged", "staged", "kernel"]
        for ground, engine in zip(grounds, engines, strict=True):
            route = context.route(ground.src.layout, ground.dst.layout, engine=engine)
            jobs = [route(*ground.ids(call)) for call in range(min(ground.calls, 4))]
            for job in jobs:
                job.wait()
        taken = (free - driver.free_bytes()) / (1 << 20)
        grown = (_resident() - pinned) / (1 << 20)
    yield Bar(
        "device memory beside layouts",
        64.0,
        at_least=False,
        value=taken,
        unit="MiB",
        detail="free before - after",
    )
    detail = "growth of the resident set: pinned memory and whatever else; TransferContext(pinned_bytes=...)"
    yield Bar("pinned memory beside layouts", 16.0, at_least=False, value=grown, unit="MiB", detail=detail)


def soak(scene: Scene) -> Iterator[Bar]:
    """Small jobs from eight threads, fewer than `make soak`: all that must stay flat, and every byte."""
    jobs = scene.soak_jobs if not scene.quick else 64
    cell = cells.Cell("h2d", "FC-FC", cells.FC, cells.FC, _SMALL, _SMALL.block_bytes, 4)
    ground = scene.ground(cell)
    scene.place.poison(ground.dst.arena)
    slots = min(ground.src.slots, ground.dst.slots) // _WORKERS
    driver.use(scene.place.ordinal)
    # A first round takes what is kept for later ones.
    rounds: list[tuple[int, int, int]] = []
    start = time.monotonic()
    failures: list[str] = []
    moved = [0] * _WORKERS
    with kf.TransferContext(scene.place.ordinal) as context:
        route = context.route(ground.src.layout, ground.dst.layout)
        for share in (jobs // 10, jobs - jobs // 10):
            workers = [
                threading.Thread(
                    target=_guarded, args=(failures, _work, route, number, slots, share // _WORKERS, moved)
                )
                for number in range(_WORKERS)
            ]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            rounds.append((_descriptors(), _resident(), driver.free_bytes()))
    named = np.concatenate(
        [np.arange(number * slots, number * slots + moved[number]) for number in range(_WORKERS)]
    )
    check = scene.place.check(ground, (named, named))
    if failures or not check.good:
        scene.wrong.append(f"soak: {failures[:1] or check}")
    grown = [after - before for before, after in zip(*rounds, strict=True)]
    flat = grown[0] <= 0 and grown[1] < (16 << 20) and -grown[2] < (4 << 20)
    detail = (
        f"{jobs} jobs, {_WORKERS} threads, {time.monotonic() - start:.1f} s: descriptors {grown[0]:+d}, "
        f"resident {grown[1] / 1e6:+.1f} MB, device {-grown[2] / 1e6:+.1f} MB from a tenth to the end; "
        f"{'every byte same' if check.good and not failures else 'WRONG'}"
    )
    good = float(flat and check.good and not failures)
    yield Bar(
        "small jobs, 8 threads: flat and every byte same", 1.0, at_least=True, value=good, detail=detail
    )


def _work(route: kf.Route, number: int, slots: int, jobs: int, moved: list[int]) -> None:
    """Moves a worker's own blocks, four at a time, a few jobs in flight."""
    first, per = number * slots, slots // 4
    flying: list[kf.Transfer] = []
    for job in range(jobs):
        at = first + job % per * 4
        ids = np.arange(at, at + 4)
        # The same blocks again only when the job before them has ended.
        if len(flying) >= min(8, per):
            flying.pop(0).wait()
        flying.append(route(ids, ids))
        moved[number] = max(moved[number], at + 4 - first)
    for flight in flying:
        flight.wait()


def _guarded(failures: list[str], work: Callable[..., None], *arguments: object) -> None:
    try:
        work(*arguments)
    except Exception as error:  # noqa: BLE001 - told by the caller
        failures.append(f"{type(error).__name__}: {error}")


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _resident() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    return 0


def cost(scene: Scene) -> Iterator[Bar]:
    """All of them."""
    for bars in (submission, waiting, memory, soak):
        yield from bars(scene)
