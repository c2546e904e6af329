"""Handles, tags, counts and awaits of GPU jobs: events, no polling, no lost completions."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from driver import SIMULATED, Hold, Stream, until
from gpu_support import Cache, Pair, pair, reported, scaled
from reference import Geometry, Model
from support import config, small

import kvferry as kf

pytestmark = pytest.mark.gpu

SRC, DST = [2, 3, 6, 0, 1], [6, 0, 5, 2, 3]
WAYS = [
    ("pinned", "device"),
    ("device", "pinned"),
    ("device", "device"),
    ("system", "device"),
    ("device", "system"),
]


@pytest.mark.parametrize(("src", "dst"), WAYS, ids=["-".join(way) for way in WAYS])
class TestHandles:
    def test_a_held_job(self, gpu: kf.TransferContext, src: str, dst: str) -> None:
        both = pair(small(), src, dst)
        with Stream() as stream, Hold(stream) as hold:
            job = gpu.transfer(both.src, both.dst, SRC, DST, after=stream, tag="t")
            assert not job.done() and gpu.in_flight == 1 and gpu.completed() == []
            assert "pending" in repr(job)
            with pytest.raises(kf.Busy):
                job.result()
            start = time.monotonic()
            with pytest.raises(kf.WaitTimeout):
                job.wait(0.05)
            assert 0.04 < time.monotonic() - start < 5
            hold.release()
            result = job.wait(60)
        assert job.done() and gpu.in_flight == 0 and "done" in repr(job)
        assert (result.bytes, result.blocks) == (5 * config(small()).block_bytes, 5)
        assert result.seconds >= 0.05
        [(tag, outcome)] = gpu.completed()
        assert tag == "t" and not isinstance(outcome, kf.TransferError) and outcome.bytes == result.bytes
        assert gpu.completed() == []
        both.check(SRC, DST)

    def test_many_waiters(self, gpu: kf.TransferContext, src: str, dst: str) -> None:
        both = pair(small(), src, dst)
        seen: list[int] = []
        with Stream() as stream, Hold(stream) as hold:
            job = gpu.transfer(both.src, both.dst, SRC, DST, after=stream)
            threads = [threading.Thread(target=lambda: seen.append(job.wait(30).blocks)) for _ in range(6)]
            for thread in threads:
                thread.start()
            time.sleep(0.02)
            assert seen == []
            hold.release()
            for thread in threads:
                thread.join(30)
        assert seen == [5] * 6

    def test_await(self, gpu: kf.TransferContext, src: str, dst: str) -> None:
        both = pair(small(), src, dst)

        async def body() -> None:
            ticks = 0
            with Stream() as stream, Hold(stream) as hold:
                job = gpu.transfer(both.src, both.dst, SRC, DST, after=stream)
                loop = asyncio.get_running_loop()
                loop.call_later(0.05, hold.release)

                async def other() -> None:
                    nonlocal ticks
                    while not job.done():
                        ticks += 1
                        await asyncio.sleep(0.002)

                async def wait() -> kf.TransferResult:
                    return await job

                result, _ = await asyncio.wait_for(asyncio.gather(wait(), other()), 30)
                assert result.blocks == 5
            assert ticks > 3, "the loop was blocked"

        asyncio.run(body())
        both.check(SRC, DST)

    def test_hundreds_of_awaits(self, gpu: kf.TransferContext, src: str, dst: str) -> None:
        count = scaled(300, 60)
        both = pair(small(blocks=count), src, dst)

        async def body() -> None:
            async def one(at: int) -> int:
                return (await gpu.transfer(both.src, both.dst, [at], [count - 1 - at])).blocks

            assert await asyncio.wait_for(asyncio.gather(*map(one, range(count))), 60) == [1] * count

        asyncio.run(body())
        both.check(range(count), range(count - 1, -1, -1))


class TestTags:
    def test_every_tag_once_in_order_of_the_ends(self, gpu: kf.TransferContext) -> None:
        first, second = pair(small(), "device", "pinned"), pair(small(), "pinned", "device")
        with Stream() as stream, Hold(stream) as hold:
            gpu.transfer(first.src, first.dst, SRC, DST, after=stream, tag="late")
            gpu.transfer(second.src, second.dst, SRC, DST, tag="early").wait(20)
            [(tag, _)] = gpu.completed()
            assert tag == "early"
            hold.release()
            assert [tag for tag, _ in reported(gpu, 1)] == ["late"]

    def test_nobody_waits(self, gpu: kf.TransferContext) -> None:
        """completed() alone sees the ends of GPU jobs: nobody has to wait for a handle or poll it."""
        both = pair(small(blocks=100), "device", "pinned")
        for at in range(100):
            gpu.transfer(both.src, both.dst, [at], [at], tag=at)
        assert sorted(tag for tag, _ in reported(gpu, 100)) == list(range(100))
        assert gpu.in_flight == 0
        both.check(range(100), range(100))

    def test_in_flight_falls_by_itself(self, gpu: kf.TransferContext) -> None:
        both = pair(small(), "device", "pinned")
        gpu.transfer(both.src, both.dst, SRC, DST)
        assert until(lambda: gpu.in_flight == 0)

    def test_host_and_gpu_jobs_count_together(self, gpu: kf.TransferContext) -> None:
        device, host = pair(small(), "device", "pinned"), pair(small(), "system", "system")
        with Stream() as stream, Hold(stream) as hold:
            job = gpu.transfer(device.src, device.dst, SRC, DST, after=stream)
            behind = gpu.transfer(host.src, host.dst, SRC, DST, after=job)
            assert gpu.in_flight == 2
            hold.release()
            behind.wait(60)
            assert gpu.in_flight == 0


class TestLayers:
    @pytest.mark.parametrize("engine", ["auto", "kernel", "batch", "staged"])
    @pytest.mark.parametrize(("src", "dst"), WAYS[:2], ids=["-".join(way) for way in WAYS[:2]])
    def test_layer_by_layer(self, gpu: kf.TransferContext, src: str, dst: str, engine: Any) -> None:
        both = pair(small(layers=6), src, dst)
        job = gpu.transfer(both.src, both.dst, SRC, DST, per_layer=True, engine=engine, layers=range(1, 6))
        for layer in range(1, 6):
            assert job.wait(60, layer=layer).bytes == 5 * config(small()).block_bytes // 3
            assert job.done(layer=layer)
        job.wait(60)
        both.check(SRC, DST, layers=range(1, 6))
        for layer in (0, 6):
            with pytest.raises(kf.OptionError):
                job.done(layer=layer)

    def test_pageable(self, gpu: kf.TransferContext) -> None:
        both = pair(small(layers=6), "system", "device")
        job = gpu.transfer(both.src, both.dst, SRC, DST, per_layer=True)
        for layer in range(6):
            job.wait(60, layer=layer)
        both.check(SRC, DST)

    def test_a_route(self, gpu: kf.TransferContext) -> None:
        both = pair(small(), "pinned", "device")
        route = gpu.route(both.src, both.dst, per_layer=True)
        for turn in range(3):
            both.target.put(both.before)
            job = route(SRC, DST)
            job.wait(60, layer=2)
            job.wait(60)
            both.check(SRC, DST, turn)


class TestRoutes:
    @pytest.mark.parametrize("engine", ["auto", "kernel", "batch", "staged"])
    def test_many_transfers_of_one_route(self, gpu: kf.TransferContext, engine: Any) -> None:
        both = pair(small(blocks=64), "device", "pinned")
        route = gpu.route(both.src, both.dst, engine=engine)
        jobs = [route([at], [63 - at]) for at in range(64)]
        for job in jobs:
            job.wait(60)
        both.check(range(64), range(63, -1, -1))
        assert route.plan([0], [1]).engine == engine or engine == "auto"

    def test_a_route_on_a_stream(self, gpu: kf.TransferContext) -> None:
        both = pair(small(), "device", "pinned")
        with Stream() as stream:
            route = gpu.route(both.src, both.dst, stream=stream, num_sms=2)
            with Hold(stream) as hold:
                job = route(SRC, DST)
                time.sleep(0.01)
                assert not job.done()
                hold.release()
                job.wait(60)
        both.check(SRC, DST)


class TestLoad:
    def test_more_jobs_than_rings_have_room_for(self, gpu: kf.TransferContext) -> None:
        """A caller's stream that does not move holds ids and rings: refused as busy, or served; not stuck."""
        count = 2000
        geometry = Geometry(count, 1, 1, 1, 1, 16, "uint8")
        both = pair(geometry, "device", "pinned")
        ids = list(range(count))
        refused, jobs = 0, []
        with Stream() as stream, Hold(stream, limit=60) as hold:
            for _ in range(40):
                try:
                    jobs.append(gpu.transfer(both.src, both.dst, ids, ids, stream=stream))
                except kf.Busy:
                    refused += 1
            hold.release()
            for job in jobs:
                job.wait(60)
        assert jobs
        both.check(ids, ids)
        gpu.transfer(both.src, both.dst, ids, ids).wait(60)

    def test_staged_jobs_that_cannot_start(self, gpu: kf.TransferContext) -> None:
        geometry = Geometry(scaled(64, 12), 8, 2, 16, 8, 32, "float64")
        held = [pair(geometry, "pinned", "device") for _ in range(3)]
        free = Pair(Cache(Model(geometry, "lw"), "pinned"), Cache(Model(geometry, "fc")))
        ids = range(geometry.blocks)
        with Stream() as stream, Hold(stream, limit=60) as hold:
            jobs = []
            for each in held:
                try:
                    jobs.append(gpu.transfer(each.src, each.dst, ids, ids, stream=stream, engine="staged"))
                except kf.Busy:
                    break
            assert jobs
            # auto finds a way past a ring that is taken.
            gpu.transfer(free.src, free.dst, ids, ids).wait(30)
            free.check(ids, ids)
            hold.release()
            for job in jobs:
                job.wait(60)
        for each, _ in zip(held, jobs, strict=False):
            each.check(ids, ids)

    @pytest.mark.slow
    def test_small_jobs_by_the_thousand(self, gpu: kf.TransferContext) -> None:
        count = scaled(3000, 300)
        both = pair(small(blocks=count), "pinned", "device")
        threads = [
            threading.Thread(
                target=lambda part=part: [
                    gpu.transfer(both.src, both.dst, [at], [at], tag=at) for at in range(part, count, 8)
                ]
            )
            for part in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
        reported(gpu, count, 60)
        both.check(range(count), range(count))

    @pytest.mark.skipif(SIMULATED, reason="a simulated GPU has no speed")
    def test_waiting_adds_little(self, gpu: kf.TransferContext) -> None:
        """wait() returns within 100 µs of the last byte, in the median (the bench says how much exactly)."""
        both = pair(small(), "device", "device")
        for _ in range(50):
            gpu.transfer(both.src, both.dst, SRC, DST).wait(60)
        times = []
        for _ in range(200):
            start = time.perf_counter()
            gpu.transfer(both.src, both.dst, SRC, DST).wait(60)
            times.append(time.perf_counter() - start)
        assert sorted(times)[100] < 300e-6, f"median of a small job: {sorted(times)[100] * 1e6:.0f} µs"
