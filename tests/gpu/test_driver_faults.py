"""One driver call after another fails: a typed error, or a failed job naming its blocks; work goes on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from driver import Buffer, Stream, capture, device_array, until
from gpu_support import Pair, aligned_bytes, pair, scaled, shuffled
from reference import Geometry
from support import small

import kvferry as kf
from kvferry.testing import driver_fault

pytestmark = pytest.mark.gpu

OUT_OF_MEMORY, LAUNCH_FAILED, INVALID_VALUE, NOT_SUPPORTED = 2, 719, 1, 801
SRC, DST = [2, 3, 6, 0, 1], [6, 0, 5, 2, 3]

BATCH = "cuMemcpyBatchAsync_v2"
# What lies on each engine's way once a context and its rings are there.
ON_THE_WAY = {
    "kernel": ["cuLaunchKernel", "cuEventRecord"],
    "batch": [BATCH, "cuEventRecord"],
    "staged": [BATCH, "cuLaunchKernel", "cuEventRecord", "cuStreamWaitEvent"],
    "bounce": ["cuEventRecord"],
}
WAYS = {
    "kernel": [("pinned", "device"), ("device", "pinned"), ("device", "device")],
    "batch": [("pinned", "device"), ("device", "pinned"), ("device", "device")],
    "staged": [("pinned", "device"), ("device", "pinned")],
    "bounce": [("system", "device"), ("device", "system")],
}
# Every call that an engine might make somewhere, first use included.
ANYWHERE = [
    "cuCtxPushCurrent_v2",
    "cuCtxSetCurrent",
    "cuEventCreate",
    "cuEventQuery",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuKernelSetAttribute",
    "cuLaunchKernel",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuMemcpyAsync",
    BATCH,
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuStreamCreateWithPriority",
    "cuStreamGetCaptureInfo_v2",
    "cuStreamIsCapturing",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuThreadExchangeStreamCaptureMode",
]


def attempt(ctx: kf.TransferContext, both: Pair, src: Any, dst: Any, **options: Any) -> BaseException | None:
    """The error of a transfer, wherever it came out."""
    try:
        ctx.transfer(both.src, both.dst, src, dst, **options).wait(60)
    except kf.Error as error:
        return error
    return None


def explained(error: BaseException, call: str, code: int, both: Pair, ids: Any) -> None:
    """It names the call and the status. A failed job names its blocks, and what it does not name has moved.

    Nothing is written that was not asked for.
    """
    assert isinstance(error, (kf.CudaError, kf.TransferError)), repr(error)
    assert call in str(error), str(error)
    named = set(ids[1])
    if isinstance(error, kf.CudaError):
        assert (error.code, error.call) == (code, call)
        failed = named
    else:
        failed = set(error.failed_blocks)
        assert failed and failed <= named and len(failed) == len(error.failed_blocks)
    found, want = both.target.values(), both.expected(*ids)
    moved = sorted(named - failed)
    assert (found[moved] == want[moved]).all(), "a block that was not named has not moved"
    others = sorted(set(range(len(found))) - named)
    assert (found[others] == both.before[others]).all(), "a block that was not asked for was written"


def healthy(ctx: kf.TransferContext, both: Pair, **options: Any) -> None:
    both.target.put(both.before)
    ctx.transfer(both.src, both.dst, SRC, DST, **options).wait(60)
    both.check(SRC, DST)
    assert ctx.in_flight == 0


CASES = [
    pytest.param(engine, way, call, id=f"{engine}-{way[0]}-{way[1]}-{call}")
    for engine, calls in ON_THE_WAY.items()
    for way in WAYS[engine]
    for call in calls
]


@pytest.mark.parametrize(("engine", "way", "call"), CASES)
@pytest.mark.parametrize("code", [OUT_OF_MEMORY, LAUNCH_FAILED])
def test_a_call_on_the_way_fails(
    shared: kf.TransferContext, engine: Any, way: tuple[str, str], call: str, code: int
) -> None:
    both = pair(small(), *way)
    healthy(shared, both, engine=engine)
    both.target.put(both.before)
    shared.completed()
    with driver_fault(call, code=code) as fault:
        error = attempt(shared, both, SRC, DST, engine=engine, tag="faulty")
    assert fault.happened, f"{call} is not on the way of {engine}"
    assert error is not None, f"a failure of {call} went unnoticed"
    explained(error, call, code, both, (SRC, DST))
    for tag, outcome in shared.completed():
        assert tag == "faulty" and isinstance(outcome, kf.TransferError)
    healthy(shared, both, engine=engine)


@pytest.mark.parametrize("call", ["cuLaunchKernel", "cuEventRecord", "cuStreamWaitEvent"])
@pytest.mark.parametrize("nth", [1, 2, 3, 5, 8])
def test_a_later_call_of_a_pipeline_fails(shared: kf.TransferContext, call: str, nth: int) -> None:
    """Half of a staged transfer is under way when its next step fails."""
    geometry = Geometry(scaled(300, 24), 4, 2, 16, 8, 32, "float64")
    both = pair(geometry, "pinned", "device")
    ids = shuffled(geometry.blocks, geometry.blocks), shuffled(geometry.blocks, geometry.blocks, 2)
    with driver_fault(call, nth=nth, code=LAUNCH_FAILED):
        error = attempt(shared, both, *ids, engine="staged")
    if error is not None:
        explained(error, call, LAUNCH_FAILED, both, ids)
    both.target.put(both.before)
    shared.transfer(both.src, both.dst, *ids, engine="staged").wait(60)
    both.check(*ids)


@pytest.mark.parametrize("engine", list(WAYS))
@pytest.mark.parametrize("call", ANYWHERE)
@pytest.mark.parametrize("nth", [1, 2])
def test_any_call_fails_at_first_use(engine: Any, call: str, nth: int) -> None:
    """From the making of the context on: an error or none, never a hang, never success with wrong bytes."""
    both = pair(small(), *WAYS[engine][0])
    try:
        with driver_fault(call, nth=nth, code=OUT_OF_MEMORY), kf.TransferContext(0, threads=1) as ctx:
            error = attempt(ctx, both, SRC, DST, engine=engine)
            if error is None:
                both.check(SRC, DST, call)
            else:
                assert call in str(error), str(error)
    except kf.Error as error:
        assert call in str(error), str(error)  # noqa: PT017
    with kf.TransferContext(0, threads=1) as ctx:
        healthy(ctx, both, engine=engine)


@pytest.mark.parametrize("call", ["cuLaunchKernel", "cuEventRecord", "cuStreamWaitEvent"])
@pytest.mark.parametrize("stream", ["own", "legacy"])
@pytest.mark.parametrize("engine", ["kernel", "batch", "staged"])
def test_on_a_callers_stream(shared: kf.TransferContext, stream: str, engine: Any, call: str) -> None:
    both = pair(small(), "pinned", "device")
    with Stream() as own:
        handle = own.handle if stream == "own" else 0
        healthy(shared, both, engine=engine, stream=handle)
        both.target.put(both.before)
        with driver_fault(call, code=LAUNCH_FAILED):
            error = attempt(shared, both, SRC, DST, engine=engine, stream=handle)
        if error is not None:
            explained(error, call, LAUNCH_FAILED, both, (SRC, DST))
        else:
            both.check(SRC, DST)
        healthy(shared, both, engine=engine, stream=handle)
        own.synchronize()


@pytest.mark.parametrize("call", ["cuLaunchKernel", "cuStreamGetCaptureInfo_v2", "cuGraphRetainUserObject"])
def test_under_capture(shared: kf.TransferContext, call: str) -> None:
    both = pair(small(), "pinned", "device")
    with Stream() as stream:

        def body() -> None:
            with driver_fault(call, code=OUT_OF_MEMORY):
                try:
                    shared.transfer(both.src, both.dst, SRC, DST, stream=stream)
                except kf.CudaError as error:
                    assert error.call == call  # noqa: PT017

        capture(stream, body).close()
        healthy(shared, both, stream=stream)


def test_device_ids(shared: kf.TransferContext) -> None:
    both = pair(small(), "device", "device")
    for call in ("cuLaunchKernel", "cuEventRecord"):
        with driver_fault(call, code=LAUNCH_FAILED):
            error = attempt(shared, both, device_array(SRC), device_array(DST))
        assert error is not None
        assert call in str(error)
    healthy(shared, both)


def test_a_failed_job_fails_what_waits_for_it_on_the_host(shared: kf.TransferContext) -> None:
    """A job after a failed one does not run; where the failure is known only later, both say so."""
    first, second = pair(small(), "device", "pinned"), pair(small(), "pinned", "system")
    job = shared.transfer(first.src, first.dst, device_array([0, 99]), device_array([1, 2]))
    after = shared.transfer(second.src, second.dst, [0], [1], after=job)
    with pytest.raises(kf.TransferError, match="99"):
        job.wait(60)
    with pytest.raises(kf.TransferError) as caught:
        after.wait(60)
    assert caught.value.failed_blocks == [1]
    second.target.check(second.before)


def test_await_sees_the_failure(shared: kf.TransferContext) -> None:

    both = pair(small(), "device", "pinned")

    async def body() -> None:
        with pytest.raises(kf.TransferError, match="99"):
            await shared.transfer(both.src, both.dst, device_array([0, 99]), device_array([1, 2]))
        assert (await shared.transfer(both.src, both.dst, [0], [1])).blocks == 1

    asyncio.run(body())


class TestRegistrationAndPrimitives:
    @pytest.mark.parametrize("nth", [1, 2, 3])
    def test_registering_rolls_back(self, nth: int) -> None:

        whole = aligned_bytes(8 << 20)
        with driver_fault("cuMemHostRegister_v2", nth=nth, code=OUT_OF_MEMORY):
            try:
                kf.register_host(whole).close()
            except kf.CudaError as error:
                assert (error.code, error.call) == (OUT_OF_MEMORY, "cuMemHostRegister_v2")  # noqa: PT017
        rows = whole.reshape(2, -1)
        assert until(lambda: kf.PhysicalLayout.from_tensors(rows, axes="block dim").memory == kf.system())
        kf.register_host(whole).close()

    def test_memory(self) -> None:
        cfg = kf.LayoutConfig(num_blocks=2, num_layers=3, page_size=2, inner_dim=64, dtype="uint8")
        for memory, call in ((kf.device(0), "cuMemAlloc_v2"), (kf.pinned(), "cuMemHostAlloc")):
            for nth in (1, 2, 3):
                with driver_fault(call, nth=nth, code=OUT_OF_MEMORY):
                    try:
                        kf.PhysicalLayout.layer_separate(cfg, memory)
                    except (kf.CudaError, kf.HostMemoryError) as error:
                        assert call in str(error)  # noqa: PT017
            kf.PhysicalLayout.layer_separate(cfg, memory)

    @pytest.mark.parametrize("mode", ["batched_with_fallback", "batch_without_fallback", "fallback_only"])
    def test_memcpy_batch(self, mode: Any) -> None:
        """Only "not supported" falls back, never another failure."""
        a, b = Buffer(64, fill=1), Buffer(64, fill=2)
        with Stream() as stream:
            for code in (NOT_SUPPORTED, INVALID_VALUE):
                with driver_fault(BATCH, code=code):
                    falls_back = mode == "fallback_only" or (
                        mode == "batched_with_fallback" and code == NOT_SUPPORTED
                    )
                    if falls_back:
                        kf.memcpy_batch([a.addr], [b.addr], [64], stream=stream, mode=mode)
                    else:
                        with pytest.raises((kf.CudaError, kf.Unsupported), match="cuMemcpyBatchAsync"):
                            kf.memcpy_batch([a.addr], [b.addr], [64], stream=stream, mode=mode)
            stream.synchronize()


class TestTheFaultItself:
    def test_names(self) -> None:
        with driver_fault("cuNoSuchCall") as fault:
            kf.devices()
        assert fault.happened is False
        for nth in (0, -1):
            with pytest.raises(kf.OptionError, match="nth"), driver_fault("cuLaunchKernel", nth=nth):
                pass

    def test_it_ends_with_its_block(self, shared: kf.TransferContext) -> None:
        both = pair(small(), "device", "device")
        with pytest.raises(ZeroDivisionError), driver_fault("cuLaunchKernel"):
            raise ZeroDivisionError
        healthy(shared, both)
