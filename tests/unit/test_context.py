from __future__ import annotations

import threading
from typing import Any

import pytest
from support import large, pair

import kvferry as kf


class TestContext:
    def test_devices_and_threads(self) -> None:
        for device in (None, "cpu"):
            with kf.TransferContext(device) as ctx:
                assert 1 <= ctx.threads <= 16
                assert ctx.device is None
        with kf.TransferContext(threads=3) as ctx:
            assert ctx.threads == 3
            assert repr(ctx) == "TransferContext(host, 3 threads, 0 in flight)"
        bad: Any
        for bad in (
            "gpu",
            "cuda:",
            "cuda:-1",
            "cuda:x",
            "CUDA:0",
            "",
            -1,
            1.5,
            1 << 32,
            1 << 200,
            [],
            b"cpu",
        ):
            with pytest.raises(kf.OptionError, match="device must be"):
                kf.TransferContext(bad)
        for bad in (0, -1, 1025, 1 << 70):
            with pytest.raises(kf.OptionError, match="threads"):
                kf.TransferContext(threads=bad)
        for bad in (1.5, "2"):
            with pytest.raises(TypeError, match="threads"):
                kf.TransferContext(threads=bad)

    def test_closing(self) -> None:
        source, target, _ = pair()
        ctx = kf.TransferContext(threads=1)
        route = ctx.route(source.layout, target.layout)
        plan = route.plan([0], [0])
        ctx.close()
        ctx.close()
        ctx.close(timeout=0)
        assert repr(ctx) == "TransferContext(closed)"
        for call in (
            lambda: ctx.transfer(source.layout, target.layout, [0], [0]),
            lambda: ctx.plan(source.layout, target.layout, [0], [0]),
            lambda: ctx.route(source.layout, target.layout),
            lambda: route([0], [0]),
            lambda: route([], []),
            lambda: ctx.threads,
            lambda: ctx.in_flight,
        ):
            with pytest.raises(kf.ClosedError):
                call()
        assert plan.explain()

    def test_closing_waits(self) -> None:
        src, dst, ids = large()
        with kf.TransferContext(threads=1) as ctx:
            jobs = [ctx.transfer(src, dst, ids, ids) for _ in range(3)]
        assert all(job.done() for job in jobs)

    def test_closing_with_a_limit(self) -> None:
        src, dst, ids = large()
        ctx = kf.TransferContext(threads=1)
        jobs = [ctx.transfer(src, dst, ids, ids) for _ in range(3)]
        with pytest.raises(kf.WaitTimeout):
            ctx.close(timeout=0)
        with pytest.raises(kf.ClosedError):
            ctx.transfer(src, dst, [0], [0])
        ctx.close(timeout=60)
        assert all(job.done() for job in jobs)

    def test_an_exception_in_the_block_is_not_hidden(self) -> None:
        with pytest.raises(ZeroDivisionError), kf.TransferContext() as ctx:
            _ = 1 // (ctx.threads - ctx.threads)

    def test_in_flight(self, lazy: kf.TransferContext) -> None:
        src, dst, ids = large()
        jobs = [lazy.transfer(src, dst, ids, ids) for _ in range(4)]
        assert 1 <= lazy.in_flight <= 4
        for job in jobs:
            job.wait()
        assert lazy.in_flight == 0

    def test_routes(self, ctx: kf.TransferContext) -> None:
        source, target, expected = pair()
        route = ctx.route(source.layout, target.layout, layers=range(1, 2), heads=range(2, 4))
        route([3, 5], [0, 1]).wait()
        target.check(expected([3, 5], [0, 1], layers=range(1, 2), heads=range(2, 4)))
        assert route.plan([3, 5], [0, 1]).blocks == 2
        with pytest.raises(kf.BlockIdError):
            route([7], [0])
        bad: Any = route
        with pytest.raises(TypeError):
            bad([0])
        with pytest.raises(TypeError):
            bad([0], [0], engine="host")


def test_many_jobs_from_many_threads() -> None:
    src, dst, _ = large(32)
    with kf.TransferContext(threads=3) as ctx:
        route = ctx.route(src, dst)
        failures: list[BaseException] = []

        def submit(worker: int) -> None:
            try:
                for turn in range(60):
                    ids = [(worker + 4 * turn) % 32]
                    job = route(ids, ids)
                    if turn % 2:
                        job.wait(60)
            except kf.Error as error:
                failures.append(error)

        threads = [threading.Thread(target=submit, args=(worker,)) for worker in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures and dst.num_blocks == 32
