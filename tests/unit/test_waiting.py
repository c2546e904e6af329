from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest
from reference import Model
from support import Cache, large, pair, small

import kvferry as kf


class TestWaiting:
    def test_timeouts(self, lazy: kf.TransferContext) -> None:
        src, dst, ids = large()
        jobs = [lazy.transfer(src, dst, ids, ids) for _ in range(3)]
        last = jobs[-1]
        for timeout in (0, 0.0, 1e-9, False):
            with pytest.raises(kf.WaitTimeout) as caught:
                last.wait(timeout)
            assert caught.value.seconds == pytest.approx(float(timeout), abs=1e-9)
            assert isinstance(caught.value, TimeoutError)
        for timeout in (float("nan"), -1, -1e-9, float("-inf"), -(10**400)):
            with pytest.raises(kf.OptionError, match="timeout"):
                last.wait(timeout)
            with pytest.raises(kf.OptionError, match="timeout"):
                lazy.close(timeout)
        bad: Any
        for bad in ("1", [], object()):
            with pytest.raises(TypeError, match="timeout"):
                last.wait(bad)
        endless: Any
        for endless in (float("inf"), 1e300, 10**400, None, 60, np.float32(60)):
            assert last.wait(endless).bytes == 64 << 20
        assert last.wait(timeout=0).bytes == 64 << 20

    def test_a_timeout_is_kept(self, lazy: kf.TransferContext) -> None:
        src, dst, ids = large(256)
        jobs = [lazy.transfer(src, dst, ids, ids, after=None) for _ in range(4)]
        start = time.monotonic()
        with pytest.raises(kf.WaitTimeout):
            # Held behind the others, so that waiting cannot help it along.
            lazy.transfer(src, dst, ids, ids, after=jobs).wait(0.05)
        assert 0.05 <= time.monotonic() - start < 5

    def test_result_of_a_pending_job(self, lazy: kf.TransferContext) -> None:
        src, dst, ids = large()
        first = lazy.transfer(src, dst, ids, ids)
        job = lazy.transfer(src, dst, ids, ids, after=first)
        assert not job.done() and repr(job) == "Transfer(pending)"
        with pytest.raises(kf.Busy):
            job.result()
        result = job.wait()
        assert job.done() and first.done()
        assert job.result().bytes == result.bytes and "bytes in" in repr(job)
        assert repr(result).startswith("TransferResult(bytes=67108864, blocks=64, seconds=")

    def test_many_threads_wait_for_one(self, ctx: kf.TransferContext) -> None:
        src, dst, ids = large()
        job = ctx.transfer(src, dst, ids, ids)
        results: list[int] = []
        threads = [threading.Thread(target=lambda: results.append(job.wait(60).bytes)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [64 << 20] * 8

    def test_after(self, lazy: kf.TransferContext) -> None:
        first, second, third = (
            Cache(Model(small(blocks=3000), "fc", order)) for order in ("NHD", "HND", "universal")
        )
        values = first.fill(1)
        second.poison()
        third.poison()
        ids = np.arange(3000)
        for _ in range(5):
            a = lazy.transfer(first.layout, second.layout, ids, ids)
            b = lazy.transfer(second.layout, third.layout, ids, ids, after=a)
            c = lazy.transfer(third.layout, second.layout, ids, ids[::-1], after=[a, b])
            d = lazy.transfer(second.layout, third.layout, ids, ids[::-1], after=(c,))
            assert d.wait(60).blocks == 3000
            assert a.done() and b.done() and c.done()
            third.check(values)

    def test_after_what_is_done_and_after_nothing(self, ctx: kf.TransferContext) -> None:
        source, target, expected = pair()
        done = ctx.transfer(source.layout, target.layout, [0], [0])
        done.wait()
        options: Any
        for options in ([], (), None, done, [done, done]):
            ctx.transfer(source.layout, target.layout, [1], [1], after=options).wait(60)
        ctx.transfer(source.layout, target.layout, [], [], after=[done]).wait(60)
        with kf.TransferContext() as other:
            other.transfer(source.layout, target.layout, [2], [2], after=done).wait(60)
        target.check(expected([0, 1, 2], [0, 1, 2]))
        for options in ("x", [True], [None], [[done]], {done}, iter([done]), object()):
            with pytest.raises(kf.OptionError, match="after"):
                ctx.transfer(source.layout, target.layout, [3], [3], after=options)


class TestAwait:
    def test_one(self, ctx: kf.TransferContext) -> None:
        async def main() -> kf.TransferResult:
            src, dst, ids = large()
            return await ctx.transfer(src, dst, ids, ids)

        assert asyncio.run(main()).bytes == 64 << 20

    def test_a_finished_job(self, ctx: kf.TransferContext) -> None:
        source, target, _ = pair()

        async def main() -> int:
            job = ctx.transfer(source.layout, target.layout, [0], [0])
            job.wait()
            return (await job).blocks + (await job).blocks

        assert asyncio.run(main()) == 2

    def test_many_at_once(self, ctx: kf.TransferContext) -> None:
        src, dst, _ = large(8)

        async def one(index: int) -> int:
            job = ctx.transfer(src, dst, [index % 8], [index % 8])
            if index % 3 == 0:
                await asyncio.sleep(0)
            return (await job).blocks

        async def main() -> list[int]:
            return await asyncio.gather(*[one(index) for index in range(300)])

        assert asyncio.run(main()) == [1] * 300

    def test_the_loop_runs_meanwhile(self, lazy: kf.TransferContext) -> None:
        src, dst, ids = large(128)

        async def main() -> int:
            jobs = [lazy.transfer(src, dst, ids, ids) for _ in range(3)]
            waiting = asyncio.gather(*[_result(job) for job in jobs])
            ticks = 0
            while not waiting.done():
                ticks += 1
                await asyncio.sleep(0.001)
            await waiting
            return ticks

        assert asyncio.run(main()) >= 3

    def test_two_loops_one_after_the_other_and_at_once(self, ctx: kf.TransferContext) -> None:
        src, dst, ids = large(16)

        async def main() -> int:
            return sum([(await ctx.transfer(src, dst, [i], [i])).blocks for i in ids])

        assert asyncio.run(main()) == 16
        assert asyncio.run(main()) == 16
        results: list[int] = []
        threads = [threading.Thread(target=lambda: results.append(asyncio.run(main()))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [16] * 4

    def test_one_job_in_two_loops(self, lazy: kf.TransferContext) -> None:
        src, dst, ids = large(128)
        job = lazy.transfer(src, dst, ids, ids)
        results: list[int] = []

        def other() -> None:
            results.append(asyncio.run(_result(job)).blocks)

        threads = [threading.Thread(target=other) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [128] * 3

    def test_cancelling_does_not_stop_the_job(self, lazy: kf.TransferContext) -> None:
        src, dst, ids = large(128)

        async def main() -> None:
            job = lazy.transfer(src, dst, ids, ids)
            task = asyncio.create_task(_result(job))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(_result(lazy.transfer(src, dst, ids, ids, after=job)), 1e-4)
            assert (await job).blocks == 128

        asyncio.run(main())

    def test_a_loop_that_closes_first(self, lazy: kf.TransferContext) -> None:
        src, dst, ids = large(128)
        first = lazy.transfer(src, dst, ids, ids)
        jobs = [lazy.transfer(src, dst, ids, ids, after=first) for _ in range(2)]
        loop = asyncio.new_event_loop()
        gone = weakref.ref(loop)

        async def main() -> None:
            for job in jobs:
                task = asyncio.ensure_future(_result(job))
                await asyncio.sleep(0)
                task.cancel()

        loop.run_until_complete(main())
        loop.close()
        for job in jobs:
            assert job.wait(60).blocks == 128
        assert asyncio.run(_result(jobs[0])).blocks == 128
        del loop, main
        gc.collect()
        assert gone() is None, "pending futures keep a closed loop"

    def test_outside_a_loop(self, ctx: kf.TransferContext) -> None:
        source, target, _ = pair()
        job = ctx.transfer(source.layout, target.layout, [0], [0])
        with pytest.raises(RuntimeError, match="no running event loop"):
            next(job.__await__())


async def _result(job: kf.Transfer) -> kf.TransferResult:
    return await job
