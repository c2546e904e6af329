"""What goes wrong in such systems: one test for each critical and high schedule of a transfer, by name.

Numbers are those of the project's list of hazards; the suites beside this one go into breadth.
"""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import numpy as np
import pytest
from driver import (
    GLOBAL,
    Buffer,
    CudaArray,
    DefaultStream,
    Hold,
    Mark,
    Stream,
    capture,
    current,
    current_context,
    device_array,
    primary,
    read,
)
from gpu_support import Cache, Pair, pair, reported, scaled, shuffled
from reference import Geometry, Model
from support import config, small, succeeds, with_tests

import kvferry as kf
from kvferry.testing import driver_fault

pytestmark = pytest.mark.gpu

SRC, DST = [2, 3, 6, 0, 1], [6, 0, 5, 2, 3]
STREAMED: list[Any] = ["auto", "kernel", "batch", "staged"]


def test_23_a_captured_transfer_shares_nothing_with_eager_ones(shared: kf.TransferContext) -> None:
    """Capture with ids in a table, run eager jobs through the rings, drop the layouts, replay."""
    count = scaled(5000, 1000)
    geometry = Geometry(count, 1, 1, 1, 1, 16, "uint8")
    other = pair(geometry, "pinned", "device", key=2)
    stream = Stream()

    def captured_and_dropped() -> tuple[Any, Any, Any]:
        both = pair(geometry, "pinned", "device")
        ids = shuffled(count - 7, count), shuffled(count - 7, count, 2)
        jobs: list[kf.Transfer] = []
        graph = capture(stream, lambda: jobs.append(shared.transfer(both.src, both.dst, *ids, stream=stream)))
        assert jobs[0].captured
        return graph, both.expected(*ids), (both.target.model, both.target.spans[0][0])

    graph, want, (model, addr) = captured_and_dropped()
    gc.collect()
    for turn in range(8):
        shared.transfer(other.src, other.dst, shuffled(count, count, turn), range(count)).wait(60)
    graph.replay(stream)
    assert (model.load([read(addr, model.region_bytes)]) == want).all()
    graph.close()
    stream.close()


@pytest.mark.parametrize("engine", STREAMED)
def test_24_a_handle_on_a_callers_stream_is_not_complete_before_its_copy(
    shared: kf.TransferContext, engine: Any
) -> None:
    both = pair(small(), "device", "pinned")
    want, target = both.expected(SRC, DST), both.target
    with Stream() as stream, Hold(stream) as hold:
        job = shared.transfer(both.src, both.dst, SRC, DST, stream=stream, engine=engine)
        del both
        gc.collect()
        with pytest.raises(kf.WaitTimeout):
            job.wait(0.05)
        assert shared.in_flight == 1
        hold.release()
        job.wait(60)
        target.check(want)  # at once, without a look at the stream


def test_25_the_threads_context_is_as_it_was(shared: kf.TransferContext) -> None:
    """Every entry, with no context and with the primary one current; refusals included."""
    both, pageable = pair(small(), "pinned", "device"), pair(small(), "system", "device")
    found: list[Any] = []

    def entries() -> None:
        with kf.TransferContext(0) as ctx:
            job = ctx.transfer(both.src, both.dst, SRC, DST)
            job.wait(60)
            with Stream() as stream:
                for engine in STREAMED:
                    ctx.transfer(both.src, both.dst, SRC, DST, engine=engine, stream=stream).wait(60)
                job.wait_on(stream)
                kf.memcpy_batch([both.source.spans[0][0]], [both.target.spans[0][0]], [4], stream=stream)
            ctx.transfer(pageable.src, pageable.dst, SRC, DST).wait(60)
            ctx.plan(both.src, both.dst, SRC, DST).explain()
            ctx.route(both.src, both.dst)(SRC, DST).wait(60)
            with pytest.raises(kf.Error):
                ctx.transfer(both.src, both.dst, [99], [0])
        kf.devices()
        kf.PhysicalLayout.fully_contiguous(config(small()), kf.device(0))
        kf.PhysicalLayout.fully_contiguous(config(small()), kf.pinned())
        array = np.zeros(1 << 16, np.uint8)
        kf.register_host(array).close()
        kf.PhysicalLayout.from_tensors(device_array([[1, 2], [3, 4]]), axes="block dim")

    def body() -> None:
        before = current_context()
        entries()
        found.append((before, current_context()))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join(60)
    with current(0):
        body()
    assert found == [(0, 0), (primary(0), primary(0))]


@pytest.mark.parametrize("handle", [0, 1, 2])
def test_26_the_batch_engine_on_default_streams(shared: kf.TransferContext, handle: int) -> None:
    """The driver's batch call refuses the legacy stream: forked and joined by events, in order."""
    both = pair(small(), "pinned", "device")
    stream = DefaultStream(handle)
    with Hold(stream) as hold:
        job = shared.transfer(both.src, both.dst, SRC, DST, stream=handle, engine="batch")
        mark = Mark(stream)
        time.sleep(0.02)
        assert not job.done() and not mark.reached
        hold.release()
        assert job.wait(60).engine == "batch"
    stream.synchronize()
    both.check(SRC, DST)


def test_27_more_layers_than_parameters_hold(shared: kf.TransferContext) -> None:
    layers = scaled(2100, 400)
    geometry = Geometry(3, layers, 1, 1, 1, 16, "uint8")
    both = pair(geometry, "pinned", "device", ("lw", "NHD", "block_first"), ("lw", "NHD", "block_first"))
    with Stream() as stream:
        shared.transfer(both.src, both.dst, [2, 0], [0, 1], engine="kernel", stream=stream).wait(60)
        both.check([2, 0], [0, 1])
        both.target.put(both.before)
        graph = capture(stream, lambda: shared.transfer(both.src, both.dst, [2, 0], [0, 1], stream=stream))
        graph.replay(stream)
        both.check([2, 0], [0, 1])
        graph.close()


def test_28_library_threads_do_not_break_captures(shared: kf.TransferContext) -> None:
    """Pageable and ordinary jobs of another thread come and go while this one captures globally."""
    pageable, both = pair(small(blocks=50), "system", "device"), pair(small(), "pinned", "device")
    inside = pair(small(), "device", "device")
    stop, failures = threading.Event(), []

    def busy() -> None:
        try:
            while not stop.is_set():
                shared.transfer(pageable.src, pageable.dst, range(50), range(50)).wait(60)
                shared.transfer(both.src, both.dst, SRC, DST, tag=1).wait(60)
                shared.completed()
        except BaseException as error:  # noqa: BLE001 reported below
            failures.append(error)

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        with Stream() as stream:
            for _ in range(scaled(50, 5)):

                def body() -> None:
                    shared.transfer(inside.src, inside.dst, SRC, DST, stream=stream)
                    time.sleep(0.002)

                graph = capture(stream, body, GLOBAL)
                inside.target.put(inside.before)
                graph.replay(stream)
                inside.check(SRC, DST)
                graph.close()
    finally:
        stop.set()
        thread.join(60)
    assert not failures, failures[0]


def many_blocks() -> tuple[Pair, list[int]]:
    """More blocks than the parameters of a launch hold, and their ids."""
    count = 6000
    return pair(Geometry(count, 1, 1, 1, 1, 16, "uint8"), "pinned", "device"), list(range(count))


def crowd(ctx: kf.TransferContext, both: Pair, ids: list[int], *, calls: int, least: int) -> None:
    """Transfers behind a stream that this thread holds, until Busy: at least so many, none of them late."""
    with Stream() as stream, Hold(stream, limit=30) as hold:
        jobs, slowest = [], 0.0
        for _ in range(calls):
            start = time.monotonic()
            try:
                jobs.append(ctx.transfer(both.src, both.dst, ids, ids, stream=stream, engine="kernel"))
            except kf.Busy:
                break
            finally:
                slowest = max(slowest, time.monotonic() - start)
        assert len(jobs) >= least and slowest < 5
        hold.release()
        for job in jobs:
            job.wait(60)
    both.check(ids, ids)


def test_29_a_full_ring_never_blocks_the_thread_that_would_empty_it(shared: kf.TransferContext) -> None:
    """Ring slots held by a stream that waits for this very thread: submitting goes on, or says Busy."""
    crowd(shared, *many_blocks(), calls=scaled(100, 40), least=1)


def test_29_batch_copies_behind_a_held_stream_keep_only_their_own_thread(
    shared: kf.TransferContext,
) -> None:
    """The driver waits in a batch copy when its queue is full (README, pitfalls); others must run on."""
    both, ids = many_blocks()
    jobs: list[kf.Transfer] = []

    def submit(stream: Stream) -> None:
        jobs.extend(
            shared.transfer(both.src, both.dst, ids, ids, stream=stream, engine="batch")
            for _ in range(scaled(40, 10))
        )

    with Stream() as stream, Hold(stream, limit=30) as hold:
        thread = threading.Thread(target=submit, args=(stream,))
        thread.start()
        longest, last = 0.0, time.monotonic()
        end = last + 1
        while last < end:
            time.sleep(0.001)
            now = time.monotonic()
            longest, last = max(longest, now - last), now
        assert longest < 0.5, f"this thread stood still for {longest} s"
        hold.release()
        thread.join(60)
        assert not thread.is_alive()
        for job in jobs:
            job.wait(60)
    both.check(ids, ids)


def test_29_launches_with_large_parameters_fill_the_queue_sooner(shared: kf.TransferContext) -> None:
    """The driver takes fewer of them: submitting goes on, or says Busy, and waits for nobody."""
    both = pair(Geometry(1000, 1, 1, 1, 1, 16, "uint8"), "pinned", "device")
    crowd(shared, both, shuffled(1000, 1000, 3), calls=200, least=32)


def test_29_medium_lists_need_no_table(shared: kf.TransferContext) -> None:
    """More layers than the ring has tables, all behind a held stream: ids travel with the launches then."""
    both = pair(Geometry(1100, 20, 1, 1, 1, 16, "uint8"), "pinned", "device")
    ids = shuffled(1100, 1100, 4)
    with Stream() as stream, Hold(stream, limit=30) as hold:
        job = shared.transfer(both.src, both.dst, ids, ids, after=stream, per_layer=True, engine="kernel")
        assert not job.done()
        hold.release()
        job.wait(60)
    both.check(ids, ids)


def test_29_auto_keeps_out_of_a_ring_that_a_callers_stream_holds(shared: kf.TransferContext) -> None:
    """One slot is enough to hold up a job that takes them in turn; the job after it must see that as well."""
    both = pair(Geometry(64, 16, 2, 16, 8, 128), "device", "pinned")
    ids = list(range(1, 64))
    assert "engine: staged" in shared.plan(both.src, both.dst, ids, ids).explain()
    with Stream() as stream, Hold(stream, limit=30) as hold:
        held = shared.transfer(both.src, both.dst, [0], [0], stream=stream, engine="staged")
        for _ in range(2):
            shared.transfer(both.src, both.dst, ids, ids).wait(10)
        assert not held.done()
        hold.release()
        held.wait(60)
    both.check([0, *ids], [0, *ids])


@pytest.mark.parametrize(("src", "dst"), [("pinned", "device"), ("device", "pinned"), ("device", "device")])
def test_lists_of_several_tables(shared: kf.TransferContext, src: str, dst: str) -> None:
    """Each table is written, uploaded and read by a kernel of its own."""
    both = pair(Geometry(70_000, 1, 1, 1, 1, 16, "uint8"), src, dst)
    ids, back = shuffled(70_000, 70_000, 5), shuffled(70_000, 70_000, 6)
    shared.transfer(both.src, both.dst, ids, back, engine="kernel").wait(60)
    both.check(ids, back)
    many = pair(Geometry(500_000, 1, 1, 1, 1, 1, "uint8"), src, dst)
    with pytest.raises(kf.Unsupported, match="ring for long lists holds"):
        shared.transfer(many.src, many.dst, range(500_000), range(500_000), engine="kernel")


@pytest.mark.parametrize(("src", "dst"), [("pinned", "device"), ("device", "pinned")])
def test_30_both_halves_of_a_staged_transfer_wait_for_the_callers_stream(
    shared: kf.TransferContext, src: str, dst: str
) -> None:
    """The host side may be the target of an earlier copy there, and destination blocks may still be read."""
    both = pair(small(), src, dst)
    new = Cache(both.source.model, "device")
    values = new.fill(7)
    seen = [Buffer(nbytes) for _, nbytes in both.target.spans]
    with Stream() as stream, Hold(stream) as hold:
        for (from_, nbytes), (to, _) in zip(new.spans, both.source.spans, strict=True):
            stream.copy(to, from_, nbytes)
        for buffer, (addr, nbytes) in zip(seen, both.target.spans, strict=True):
            stream.copy(buffer.addr, addr, nbytes)
        job = shared.transfer(both.src, both.dst, SRC, DST, stream=stream, engine="staged")
        time.sleep(0.03)
        hold.release()
        job.wait(60)
    both.values = values
    both.target.check(both.expected(SRC, DST))
    found = both.target.model.load([read(buffer.addr, buffer.nbytes) for buffer in seen])
    assert (found == both.before).all(), "the destination was written while it was being read"


def test_32_pageable_memory_is_refused_on_a_callers_stream_by_name(shared: kf.TransferContext) -> None:
    both = pair(small(), "system", "device")
    with Stream() as stream, pytest.raises(kf.Unsupported, match="stream"):
        shared.transfer(both.src, both.dst, SRC, DST, stream=stream)
    assert shared.transfer(both.src, both.dst, SRC, DST).wait(60).engine == "bounce"
    both.check(SRC, DST)


def test_34_k_and_v_of_one_tensor_are_two_layouts(shared: kf.TransferContext) -> None:
    """Their bounding intervals interleave, their bytes do not: K may be copied to V; K to itself may not."""
    blocks, page, heads, dim = 7, 4, 6, 5
    whole = np.random.default_rng(1).integers(0, 1 << 16, (blocks, 2, page, heads, dim), np.uint16)
    buffer = Buffer.of(whole)
    strides = (whole.strides[0], *whole.strides[2:])

    def part(outer: int) -> kf.PhysicalLayout:
        array = CudaArray(
            buffer, (blocks, page, heads, dim), "<u2", offset=outer * whole.strides[1], strides=strides
        )
        return kf.PhysicalLayout.from_tensors(array, axes="block page head dim", dtype="float16")

    k, v = part(0), part(1)
    shared.transfer(k, v, range(blocks), range(blocks - 1, -1, -1)).wait(60)
    found = read(buffer.addr, buffer.nbytes).view(np.uint16).reshape(whole.shape)
    assert (found[:, 0] == whole[:, 0]).all() and (found[:, 1] == whole[::-1, 0]).all()
    with pytest.raises(kf.OverlapError):
        shared.transfer(k, part(0), [0, 1], [1, 0])


def test_35_owners_are_released_without_waiting_for_a_held_device(shared: kf.TransferContext) -> None:
    """Freeing device memory waits for the device: not inside a call while somebody's stream is held."""
    small_pair = pair(small(), "device", "pinned")
    victim = Pair(Cache(Model(small(), "fc")), Cache(Model(small(), "lw")))
    job = shared.transfer(victim.src, victim.dst, SRC, DST)
    job.wait(60)
    with Stream() as stream, Hold(stream, limit=30) as hold:
        held = shared.transfer(small_pair.src, small_pair.dst, SRC, DST, stream=stream)
        in_flight = shared.transfer(victim.src, victim.dst, [4], [1])
        del victim, job
        start = time.monotonic()
        in_flight.wait(20)
        shared.transfer(small_pair.dst, small_pair.dst, [], []).wait(20)
        took = time.monotonic() - start
        hold.release()
        held.wait(60)
    assert took < 10, f"a call waited {took:.1f} s for a stream it has nothing to do with"


def test_39_an_asynchronous_error_fails_whole_jobs(shared: kf.TransferContext) -> None:
    """Where an error names no block, every block of the job is named."""
    both = pair(small(), "device", "pinned")
    with driver_fault("cuEventRecord", code=700):
        try:
            shared.transfer(both.src, both.dst, SRC, DST).wait(60)
        except kf.TransferError as error:
            assert sorted(error.failed_blocks) == sorted(DST)  # noqa: PT017
        except kf.CudaError as error:
            assert error.code == 700  # noqa: PT017
        else:
            pytest.fail("the error went unnoticed")
    both.target.put(both.before)
    shared.transfer(both.src, both.dst, SRC, DST).wait(60)
    both.check(SRC, DST)


@pytest.mark.simulated
@pytest.mark.parametrize("engine", ["kernel", "batch", "staged"])
def test_39_a_lost_device_fails_every_pending_job(engine: str) -> None:
    """Whole, in a process that goes on: nothing hangs, and host copies still work."""
    succeeds(
        f"""
        import ctypes
        from driver import Hold, Stream, _library
        from gpu_support import pair
        from support import small
        import kvferry as kf
        one, two = pair(small(), "device", "pinned"), pair(small(), "pinned", "device")
        ctx, stream = kf.TransferContext(0), Stream()
        ctx.transfer(one.src, one.dst, [0], [1], engine="{engine}").wait(20)
        hold = Hold(stream)
        fail = _library().kvferryFakeFail
        fail.argtypes = [ctypes.c_void_p, ctypes.c_int]
        fail(stream.handle, 700)
        jobs = [
            ctx.transfer(each.src, each.dst, [0, 3], [4, 1], stream=stream, engine="{engine}", tag=each)
            for each in (one, two, one)
        ]
        hold.release()
        for job in jobs:
            try:
                job.wait(20)
            except kf.TransferError as error:
                assert sorted(error.failed_blocks) == [1, 4], error.failed_blocks
                assert "700" in str(error) or "ILLEGAL_ADDRESS" in str(error), str(error)
                continue
            raise AssertionError("a job of a lost device succeeded")
        assert ctx.in_flight == 0 and len(ctx.completed()) == 3
        try:
            ctx.transfer(one.src, one.dst, [0], [1]).wait(20)
        except kf.Error:
            pass
        else:
            raise AssertionError("a lost device works again")
        host = pair(small(), "system", "system")
        ctx.transfer(host.src, host.dst, [0], [1]).wait(20)
        """,
        **with_tests(),
    )


def test_no_kernel_is_loaded_at_first_use() -> None:
    """A first transfer inside a capture, in a process that loads modules lazily."""
    succeeds(
        """
        import os
        os.environ["CUDA_MODULE_LOADING"] = "LAZY"
        from driver import GLOBAL, Stream, capture
        from gpu_support import pair, shuffled
        from reference import Geometry
        import kvferry as kf
        with kf.TransferContext(0) as ctx, Stream() as stream:
            both = pair(Geometry(700, 2, 2, 2, 2, 8), "pinned", "device")
            ids = shuffled(600, 700), shuffled(600, 700, 2)
            graph = capture(stream, lambda: ctx.transfer(both.src, both.dst, *ids, stream=stream), GLOBAL)
            graph.replay(stream)
            both.check(*ids)
            graph.close()
        """,
        **with_tests(),
    )


def test_a_job_is_reported_although_nobody_holds_it(gpu: kf.TransferContext) -> None:
    """Lost completions: handles dropped at once, jobs ending in any order, every one reported once."""
    both = pair(small(blocks=60), "device", "pinned")
    for at in range(60):
        gpu.transfer(both.src, both.dst, [at], [at], tag=at)
    assert sorted(tag for tag, _ in reported(gpu, 60)) == list(range(60))
