"""Dropped handles, layouts and arrays, closed contexts, exits and forks while a GPU still works."""

from __future__ import annotations

import gc
import os
import textwrap
import time
import weakref
from typing import Any

import pytest
from driver import Buffer, CudaArray, Hold, Stream, free_bytes, until
from gpu_support import Cache, pair, scaled
from reference import Model
from support import config, small, succeeds, with_tests

import kvferry as kf

pytestmark = pytest.mark.gpu

SRC, DST = [2, 3, 6, 0, 1], [6, 0, 5, 2, 3]
AXES = "block layer outer page head dim"

SETUP = """
import gc, os, sys, threading, time
import kvferry as kf
cfg = kf.LayoutConfig(num_blocks=64, num_layers=4, page_size=16, num_heads=16, head_dim=64, dtype="float16")
src = kf.PhysicalLayout.layer_separate(cfg, kf.device(0))
dst = kf.PhysicalLayout.fully_contiguous(cfg, kf.pinned(), order="universal")
pageable = kf.PhysicalLayout.fully_contiguous(cfg, kf.system())
ids = list(range(64))
ctx = kf.TransferContext(0)
"""


def lent(values: Any) -> CudaArray:
    model = Model(small(), "fc")
    image = model.allocate()
    model.store(values, image)
    shape = tuple(model.geometry.extents[axis] for axis in model.axes)
    return CudaArray(Buffer.of(image[0]), shape, "<f2")


class TestDropping:
    @pytest.mark.parametrize("engine", ["auto", "kernel", "batch", "staged"])
    def test_the_handle(self, gpu: kf.TransferContext, engine: Any) -> None:
        both = pair(small(blocks=200), "device", "pinned")
        for at in range(200):
            gpu.transfer(both.src, both.dst, [at], [199 - at], engine=engine)
        gpu.close()
        both.check(range(200), range(199, -1, -1))

    @pytest.mark.parametrize("engine", ["kernel", "batch", "staged"])
    def test_layouts_and_arrays(self, gpu: kf.TransferContext, engine: Any) -> None:
        values = Cache(Model(small(), "fc"), "pinned").fill()
        target = Cache(Model(small(), "lw"), "pinned")
        before = target.poison()
        array = lent(values)
        alive = weakref.ref(array)
        layout = kf.PhysicalLayout.from_tensors(array, axes=AXES, config=config(small()))
        stream = Stream()
        with Hold(stream) as hold:
            job = gpu.transfer(layout, target.layout, SRC, DST, stream=stream, engine=engine)
            del layout, array
            gc.collect()
            time.sleep(0.01)
            assert alive() is not None and not job.done()
            hold.release()
            job.wait(60)
        want = before.copy()
        want[DST] = values[SRC]
        target.check(want)

        def released() -> bool:
            gpu.transfer(target.layout, target.layout, [], []).wait(10)
            gc.collect()
            return alive() is None

        assert until(released), "the array outlives the job"
        stream.close()

    def test_everything_at_once(self, gpu: kf.TransferContext) -> None:
        """Handle, layouts and memory of kvferry's own: freed after the copy, never before."""
        model = Model(small(), "fc")
        for _ in range(20):
            both = pair(small(), "device", "device")
            out = Cache(model, "pinned")
            out.poison()
            want = both.values
            with Stream() as stream, Hold(stream) as hold:
                a = gpu.transfer(both.src, both.dst, range(7), range(7), stream=stream)
                b = gpu.transfer(both.dst, out.layout, range(7), range(7), after=a)
                del both, a
                gc.collect()
                hold.release()
                b.wait(60)
            out.check(want)

    def test_device_memory_comes_back(self, gpu: kf.TransferContext) -> None:
        cfg = kf.LayoutConfig(
            num_blocks=scaled(64, 8), num_layers=4, page_size=16, num_heads=64, head_dim=64, dtype="float16"
        )
        host = kf.PhysicalLayout.fully_contiguous(cfg, kf.pinned())
        ids = range(cfg.num_blocks)

        def turn() -> None:
            layout = kf.PhysicalLayout.layer_separate(cfg, kf.device(0))
            gpu.transfer(host, layout, ids, ids)
            job = gpu.transfer(host, layout, ids, ids, engine="staged")
            del layout
            job.wait(60)

        turn()
        before = free_bytes()
        for _ in range(10):
            turn()
        gpu.transfer(host, host, [], []).wait(10)
        assert until(lambda: before - free_bytes() < 4 * host.nbytes)

    def test_contexts_give_their_memory_back(self) -> None:
        both = pair(small(), "device", "pinned")

        def turn() -> None:
            with kf.TransferContext(0) as ctx:
                for engine in ("kernel", "batch", "staged"):
                    ctx.transfer(both.src, both.dst, SRC, DST, engine=engine).wait(60)

        turn()
        before = free_bytes()
        for _ in range(5):
            turn()
        assert until(lambda: before - free_bytes() < 96 << 20)


class TestClosing:
    def test_close_waits(self) -> None:
        both = pair(small(), "device", "pinned")
        ctx = kf.TransferContext(0)
        with Stream() as stream, Hold(stream) as hold:
            job = ctx.transfer(both.src, both.dst, SRC, DST, stream=stream)
            with pytest.raises(kf.WaitTimeout):
                ctx.close(0.05)
            with pytest.raises(kf.ClosedError):
                ctx.transfer(both.src, both.dst, SRC, DST)
            assert not job.done()
            hold.release()
            ctx.close(60)
            assert job.done()
        both.check(SRC, DST)
        ctx.close()

    def test_a_handle_outlives_its_context(self) -> None:
        both = pair(small(), "device", "pinned")
        with kf.TransferContext(0) as ctx:
            job = ctx.transfer(both.src, both.dst, SRC, DST)
        del ctx
        assert job.done() and job.result().blocks == 5
        both.check(SRC, DST)

    def test_a_dropped_context(self) -> None:
        both = pair(small(), "device", "pinned")
        ctx = kf.TransferContext(0)
        job = ctx.transfer(both.src, both.dst, SRC, DST)
        del ctx
        job.wait(60)
        both.check(SRC, DST)

    def test_limits_of_rings(self) -> None:
        """Small rings move the same bytes; absurd ones are refused."""
        both = pair(small(blocks=64), "device", "pinned")
        back = pair(small(blocks=64), "system", "device")
        for staging, pinned in ((1 << 20, 1 << 20), (4 << 20, 2 << 20)):
            with kf.TransferContext(0, staging_bytes=staging, pinned_bytes=pinned) as ctx:
                for engine in ("staged", "kernel"):
                    both.target.put(both.before)
                    ctx.transfer(both.src, both.dst, range(64), range(64), engine=engine).wait(60)
                    both.check(range(64), range(64), f"{staging} {engine}")
                back.target.put(back.before)
                ctx.transfer(back.src, back.dst, range(64), range(64)).wait(60)
                back.check(range(64), range(64))
        bad: Any
        for name in ("staging_bytes", "pinned_bytes"):
            for bad in (-1, 1 << 70, "1"):
                with pytest.raises((kf.OptionError, TypeError), match=name):
                    kf.TransferContext(0, **{name: bad})


class TestExit:
    @pytest.mark.parametrize(
        "work",
        [
            "jobs = [ctx.transfer(src, dst, ids, ids) for _ in range(20)]",
            "for _ in range(20): ctx.transfer(src, dst, ids, ids)",
            "ctx.transfer(pageable, src, ids, ids)",
            "for _ in range(5): ctx.transfer(dst, src, ids, ids, engine='staged')",
            "jobs = [ctx.transfer(src, dst, ids, ids), src, dst]; del src, dst",
            "threading.Thread(target=lambda: ctx.transfer(src, dst, ids, ids).wait(), daemon=True).start()",
            "ctx.transfer(src, dst, ids, ids); sys.exit(0)",
        ],
    )
    def test_with_work_in_flight(self, work: str) -> None:
        succeeds(SETUP + work)

    def test_behind_a_held_stream(self) -> None:
        """The end of the process waits for a held job and does not crash."""
        code = """
        from driver import Hold, Stream
        stream = Stream()
        hold = Hold(stream, limit=600)
        job = ctx.transfer(src, dst, ids, ids, stream=stream)
        threading.Timer(2, hold.release).start()
        """
        succeeds(SETUP + textwrap.dedent(code), timeout=100, **with_tests())

    def test_in_a_cycle_with_a_finaliser(self) -> None:
        succeeds(
            SETUP
            + """
class Node: pass
node = Node(); node.me = node; node.all = [ctx, src, dst, ctx.transfer(src, dst, ids, ids)]
del node, ctx, src, dst
"""
        )


class TestFork:
    def test_a_child_gets_a_fork_error(self) -> None:
        succeeds(
            SETUP
            + """
job = ctx.transfer(src, dst, ids, ids)
route = ctx.route(src, dst)
pid = os.fork()
if pid == 0:
    code = 1
    try:
        for use in (lambda: ctx.transfer(src, dst, ids, ids), lambda: route([0], [1])):
            try:
                use()
            except kf.ForkError:
                continue
            raise AssertionError("no ForkError")
        code = 0
    finally:
        os._exit(code)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
job.wait(30)
assert ctx.transfer(src, dst, ids, ids).wait(30).blocks == 64
"""
        )

    def test_new_contexts_and_memory_in_a_child_say_why_not(self) -> None:
        succeeds(
            SETUP
            + """
ctx.transfer(src, dst, ids, ids).wait(30)
pid = os.fork()
if pid == 0:
    code = 1
    try:
        new_layout = kf.PhysicalLayout.fully_contiguous
        for make in (lambda: kf.TransferContext(0), lambda: new_layout(cfg, kf.device(0))):
            try:
                make()
            except kf.Error:
                continue
            raise AssertionError("CUDA does not work after a fork, and nothing said so")
        with kf.TransferContext() as host:  # host memory is fine
            a, b = (kf.PhysicalLayout.fully_contiguous(cfg, kf.system()) for _ in range(2))
            host.transfer(a, b, ids, ids).wait(30)
        code = 0
    finally:
        os._exit(code)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
ctx.transfer(src, dst, ids, ids).wait(30)
"""
        )

    def test_pinned_memory_after_a_fork(self) -> None:
        """What the parent writes after a fork reaches the GPU: its pages are not copied away (hazard 38)."""
        for where in ("pinned", "registered"):
            both = pair(small(), where, "device")
            pid = os.fork()
            if pid == 0:
                time.sleep(1)
                os._exit(0)
            try:
                with kf.TransferContext(0) as ctx:
                    values = both.source.fill(9)
                    ctx.transfer(both.src, both.dst, range(7), range(7)).wait(60)
                    both.target.check(values)
            finally:
                os.waitpid(pid, 0)
