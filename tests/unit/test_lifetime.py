"""Who keeps what alive, and what happens when the process ends, forks, or is interrupted in between."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest
from reference import Model, transferred
from support import Cache, large, small, succeeds

import kvferry as kf

SETUP = """
import gc, os, sys, threading, time
import kvferry as kf
cfg = kf.LayoutConfig(num_blocks=64, num_layers=4, page_size=16, num_heads=64, head_dim=64, dtype="float16")
src = kf.PhysicalLayout.fully_contiguous(cfg, kf.system())
dst = kf.PhysicalLayout.fully_contiguous(cfg, kf.system(), order="universal")
ids = list(range(64))
ctx = kf.TransferContext(threads=2)
"""


class Owner(np.ndarray):
    """An array that can be watched."""


def watched(shape: tuple[int, ...] = (64, 16, 64, 64)) -> tuple[Any, weakref.ref[Any]]:
    array = np.zeros(shape, np.float16).view(Owner)
    return array, weakref.ref(array)


def until(condition: Any, seconds: float = 30) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        kf.usable_cpus()
        time.sleep(0.001)
    return True


class TestDropping:
    def test_the_handle(self, lazy: kf.TransferContext) -> None:
        source, target = (
            Cache(Model(small(blocks=3000), "lw")),
            Cache(Model(small(blocks=3000), "fc", "universal")),
        )
        values = source.fill(1)
        target.poison()
        for at in range(3000):
            lazy.transfer(source.layout, target.layout, [at], [at])
        lazy.close()
        target.check(values)

    def test_the_layouts_and_their_arrays(self) -> None:
        (source, source_gone), (target, target_gone) = watched(), watched()
        source[...] = 3
        with kf.TransferContext(threads=1) as ctx:
            axes = "block page head dim"
            a = kf.PhysicalLayout.from_tensors(source, axes=axes)
            b = kf.PhysicalLayout.from_tensors(target.transpose(0, 2, 1, 3), axes="block head page dim")
            jobs = [ctx.transfer(a, b, range(64), range(64)) for _ in range(4)]
            kept = target[5, 3, 2, 1:3].base is not None
            del source, a, b
            gc.collect()
            if not jobs[-1].done():
                assert source_gone() is not None
            for job in jobs:
                job.wait(60)
            assert kept and (target == 3).all()
            # The plans that the context keeps hold no memory; neither do the handles.
            assert until(lambda: source_gone() is None)
            del target
            gc.collect()
            assert until(lambda: target_gone() is None)
        assert len(jobs) == 4

    def test_arrays_go_when_the_last_job_ends(self, lazy: kf.TransferContext) -> None:
        source, gone = watched()
        axes = "block page head dim"
        target = np.zeros((64, 16, 64, 64), np.float16)
        layout = kf.PhysicalLayout.from_tensors(source, axes=axes)
        job = lazy.transfer(layout, kf.PhysicalLayout.from_tensors(target, axes=axes), range(64), range(64))
        del source, layout
        job.wait(60)
        assert until(lambda: gone() is None)
        assert job.result().blocks == 64

    def test_the_context_mid_flight(self) -> None:
        src, dst, ids = large()
        ctx = kf.TransferContext(threads=1)
        jobs = [ctx.transfer(src, dst, ids, ids) for _ in range(3)]
        route = ctx.route(src, dst)
        del ctx
        gc.collect()
        assert all(job.done() for job in jobs), "a dropped context waits, as close() does"
        with pytest.raises(kf.ClosedError):
            route(ids, ids)

    def test_dropping_a_context_leaves_other_threads_running(self) -> None:
        src, dst, ids = large(256)
        ctx: kf.TransferContext | None = kf.TransferContext(threads=1)
        assert ctx is not None
        jobs = [ctx.transfer(src, dst, ids, ids) for _ in range(3)]
        ticks, stop = [0], threading.Event()

        def tick() -> None:
            while not stop.is_set():
                ticks[0] += 1
                time.sleep(0.001)

        thread = threading.Thread(target=tick)
        thread.start()
        before = ticks[0]
        ctx = None
        moved = ticks[0] - before
        stop.set()
        thread.join()
        assert all(job.done() for job in jobs)
        assert moved >= 5

    def test_everything_at_once(self) -> None:
        for _ in range(20):
            src, dst, ids = large(8)
            ctx = kf.TransferContext(threads=2)
            first = ctx.transfer(src, dst, ids, ids)
            ctx.transfer(src, dst, ids, ids, after=first)
            del src, dst, first, ctx

    def test_a_read_only_view_of_a_running_copy(self, ctx: kf.TransferContext) -> None:
        source, target = Cache(Model(small(), "fc")), Cache(Model(small(), "fc", "HND"))
        values, before = source.fill(1), target.poison()
        ctx.transfer(source.layout, target.layout, [1], [2]).wait()
        view = target.layout.numpy()
        view.flags.writeable = False
        expected = transferred((small(), values), (small(), before), [1], [2])
        target.check(expected)

    def test_refcounts_are_level(self, ctx: kf.TransferContext) -> None:
        source, target = np.zeros((64, 16), np.uint8), np.zeros((64, 16), np.uint8)
        ids = np.arange(64)
        before = [sys.getrefcount(each) for each in (source, target, ids)]
        for _ in range(50):
            a = kf.PhysicalLayout.from_tensors([source], axes="block dim")
            b = kf.PhysicalLayout.from_tensors(target, axes="block dim")
            ctx.transfer(a, b, ids, ids).wait()
            with pytest.raises(kf.BlockIdError):
                ctx.transfer(a, b, ids + 1, ids)
        del a, b
        gc.collect()
        kf.usable_cpus()
        assert [sys.getrefcount(each) for each in (source, target, ids)] == before


class TestExit:
    """Every way to leave the interpreter while something is going on ends with exit code 0 and in silence."""

    @pytest.mark.parametrize(
        "code",
        [
            "ctx.transfer(src, dst, ids, ids)",
            "jobs = [ctx.transfer(src, dst, ids, ids) for _ in range(4)]",
            "jobs = [ctx.transfer(src, dst, ids, ids) for _ in range(4)]; del ctx, src, dst",
            "a = ctx.transfer(src, dst, ids, ids); ctx.transfer(src, dst, ids, ids, after=a); sys.exit(0)",
            "job = ctx.transfer(src, dst, ids, ids); os._exit(0)",
            "ctx.close(); ctx = None",
            "kept = [ctx]; kept.append(kept); job = ctx.transfer(src, dst, ids, ids)",
            "sys.modules['mine'] = ctx; job = ctx.transfer(src, dst, ids, ids); del job",
            "import atexit; atexit.register(ctx.close); job = ctx.transfer(src, dst, ids, ids)",
            "import atexit; atexit.register(lambda: ctx.transfer(src, dst, ids, ids))",
        ],
    )
    def test_with_jobs_in_flight(self, code: str) -> None:
        succeeds(SETUP + code)

    def test_with_borrowed_arrays(self) -> None:
        succeeds(
            SETUP
            + """
a = bytearray(1 << 26); b = bytearray(1 << 26)
shape = (1 << 16, 1 << 10)
wrap = lambda data: kf.PhysicalLayout.from_tensors(memoryview(data).cast("B", shape), axes="block dim")
jobs = [ctx.transfer(wrap(a), wrap(b), range(1 << 16), range(1 << 16)) for _ in range(3)]
del a, b, ctx
"""
        )

    @pytest.mark.parametrize("what", ["job.wait()", "ctx.close()", "asyncio.run(awaited())"])
    def test_with_a_daemon_thread_waiting(self, what: str) -> None:
        succeeds(
            SETUP
            + f"""
import asyncio
jobs = [ctx.transfer(src, dst, ids, ids) for _ in range(30)]
job = jobs[-1]
async def awaited():
    await job
threading.Thread(target=lambda: {what}, daemon=True).start()
time.sleep(0.02)
"""
        )

    def test_with_daemon_threads_polling(self) -> None:
        # Raising is native code that makes Python objects; it must not run Python code.
        for delay in (0.005, 0.03, 0.06):
            succeeds(
                SETUP
                + f"""
job = ctx.transfer(src, dst, ids, ids)
for _ in range(50):
    job = ctx.transfer(src, dst, ids, ids, after=job)
def poll():
    while True:
        try:
            job.wait(1e-6)
        except kf.WaitTimeout:
            pass
for _ in range(3):
    threading.Thread(target=poll, daemon=True).start()
time.sleep({delay})
"""
            )

    def test_with_threads_submitting(self) -> None:
        succeeds(
            SETUP
            + """
def submit():
    route = ctx.route(src, dst)
    while True:
        route(ids[:4], ids[:4])
for _ in range(3):
    threading.Thread(target=submit, daemon=True).start()
time.sleep(0.05)
"""
        )

    def test_with_awaits_pending(self) -> None:
        succeeds(
            SETUP
            + """
import asyncio
async def one(job):
    return await job
async def main():
    jobs = [ctx.transfer(src, dst, ids, ids) for _ in range(10)]
    tasks = [asyncio.ensure_future(one(job)) for job in jobs]
    await asyncio.sleep(0)
asyncio.run(main())
"""
        )
        succeeds(
            SETUP
            + """
import asyncio
loop = asyncio.new_event_loop()
async def main():
    jobs = [ctx.transfer(src, dst, ids, ids) for _ in range(10)]
    for job in jobs:
        asyncio.ensure_future(wrapped(job))
    await asyncio.sleep(0)
async def wrapped(job):
    await job
loop.run_until_complete(main())
for task in asyncio.all_tasks(loop):
    task.cancel()
loop.run_until_complete(asyncio.sleep(0))
loop.close()
"""
        )

    def test_interrupted_while_waiting(self) -> None:
        succeeds(
            SETUP
            + """
import signal
big = kf.TransferContext(threads=1)
blocked = big.transfer(src, dst, ids, ids)
for _ in range(400):
    blocked = big.transfer(src, dst, ids[:8], ids[:8], after=blocked)
for wait in (blocked.wait, big.close):
    if blocked.done():
        break
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    try:
        wait()
    except KeyboardInterrupt:
        assert time.monotonic() - start < 5
    else:
        try:
            time.sleep(1)
        except KeyboardInterrupt:
            pass
"""
        )


class TestFork:
    def test_the_child_is_told(self) -> None:
        out = succeeds(
            SETUP
            + """
import asyncio
wide = kf.TransferContext(threads=1)
jobs = [wide.transfer(src, dst, ids, ids)]
for _ in range(50):
    jobs.append(wide.transfer(src, dst, ids, ids, after=jobs[-1]))
pending, route = jobs[-1], ctx.route(src, dst)
done = ctx.transfer(src, dst, [0], [0]); done.wait()
assert not pending.done()
import warnings
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 says what we test
child = os.fork()
if child == 0:
    async def wait_for(job):
        return await job
    fresh = kf.TransferContext(threads=1)
    calls = {
        "transfer": lambda: ctx.transfer(src, dst, [0], [0]),
        "plan": lambda: ctx.plan(src, dst, [0], [0]),
        "route": lambda: ctx.route(src, dst),
        "call": lambda: route([0], [0]),
        "close": lambda: ctx.close(),
        "done": lambda: pending.done(),
        "wait": lambda: pending.wait(),
        "result": lambda: pending.result(),
        "await": lambda: asyncio.run(wait_for(pending)),
        "after": lambda: fresh.transfer(src, dst, [0], [0], after=pending),
        "after list": lambda: fresh.transfer(src, dst, [0], [0], after=[pending]),
    }
    for name, call in calls.items():
        try:
            call()
        except kf.ForkError as error:
            assert str(os.getpid()) in str(error)
        else:
            print(name, "did not raise", flush=True)
    # What had ended is known, memory is memory, and a new context works.
    assert done.done() and done.wait().blocks == done.result().blocks == 1
    assert asyncio.run(wait_for(done)).blocks == 1
    src.fill(9)
    assert fresh.transfer(src, dst, ids, ids).wait(60).blocks == 64
    repr(pending), repr(ctx)
    fresh.close()
    sys.stdout.flush()
    del ctx, wide, pending, jobs, route
    gc.collect()
    os._exit(0)
_, status = os.waitpid(child, 0)
assert status == 0, status
assert pending.wait(60).blocks == 64
assert ctx.transfer(src, dst, ids, ids).wait(60).blocks == 64
print("parent fine")
"""
        )
        assert out == "parent fine\n"

    def test_a_child_that_exits_normally(self) -> None:
        succeeds(
            SETUP
            + """
jobs = [ctx.transfer(src, dst, ids, ids) for _ in range(5)]
import warnings
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 says what we test
child = os.fork()
if child == 0:
    sys.exit(0)
_, status = os.waitpid(child, 0)
assert status == 0, status
assert all(job.wait(60).blocks == 64 for job in jobs)
"""
        )

    def test_multiprocessing_by_fork(self) -> None:
        succeeds(
            SETUP
            + """
import multiprocessing
def work(queue):
    mine = kf.TransferContext()
    queue.put(mine.transfer(src, dst, ids, ids).wait(60).blocks)
context = multiprocessing.get_context("fork")
queue = context.Queue()
ctx.transfer(src, dst, ids, ids).wait()
process = context.Process(target=work, args=(queue,))
process.start()
assert queue.get(timeout=60) == 64
process.join()
assert process.exitcode == 0
"""
        )


class TestGil:
    """Other threads run Python while kvferry waits, plans and copies."""

    @staticmethod
    def progress_during(call: Any) -> tuple[int, float]:
        ticks, stop = [0], threading.Event()

        def tick() -> None:
            while not stop.is_set():
                ticks[0] += 1
                time.sleep(0.0005)

        thread = threading.Thread(target=tick)
        thread.start()
        start, before = time.monotonic(), ticks[0]
        call()
        moved, seconds = ticks[0] - before, time.monotonic() - start
        stop.set()
        thread.join()
        return moved, seconds

    def test_wait(self, lazy: kf.TransferContext) -> None:
        src, dst, ids = large(256)
        job = lazy.transfer(src, dst, ids, ids)
        last = lazy.transfer(src, dst, ids, ids, after=job)
        moved, seconds = self.progress_during(last.wait)
        assert seconds < 0.02 or moved >= 5

    def test_close(self) -> None:
        src, dst, ids = large(256)
        ctx = kf.TransferContext(threads=1)
        for _ in range(2):
            ctx.transfer(src, dst, ids, ids)
        moved, seconds = self.progress_during(ctx.close)
        assert seconds < 0.02 or moved >= 5

    def test_fill(self) -> None:
        src, _, _ = large(512)
        moved, seconds = self.progress_during(lambda: src.fill(3))
        assert seconds < 0.02 or moved >= 5

    def test_plan_and_submit(self, ctx: kf.TransferContext) -> None:
        cfg = kf.LayoutConfig(
            num_blocks=1 << 20, num_layers=1, outer_dim=1, page_size=1, inner_dim=16, dtype="uint8"
        )
        src = kf.PhysicalLayout.fully_contiguous(cfg, kf.system())
        dst = kf.PhysicalLayout.fully_contiguous(cfg, kf.system())
        ids = np.random.default_rng(1).permutation(1 << 20)
        moved, seconds = self.progress_during(lambda: [ctx.plan(src, dst, ids, ids) for _ in range(3)])
        assert seconds < 0.02 or moved >= 5
        moved, seconds = self.progress_during(lambda: ctx.transfer(src, dst, ids, ids).wait())
        assert seconds < 0.02 or moved >= 5
