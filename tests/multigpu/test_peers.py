"""Two GPUs: layouts to layouts over the link, both ways, and one thread that serves both devices."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import pytest
from driver import (
    SIMULATED,
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
    until,
)
from gpu_support import KINDS, Cache, Pair, scaled, shuffled
from reference import Geometry, Model
from support import optional, small

import kvferry as kf

pytestmark = [pytest.mark.gpu, pytest.mark.multigpu]

SRC, DST = [2, 3, 6, 0, 1], [6, 0, 5, 2, 3]
BOTH = pytest.mark.parametrize(("src", "dst"), [(0, 1), (1, 0)], ids=["0-to-1", "1-to-0"])
ENGINES = ["auto", "kernel"]
STEP = 3 if SIMULATED else 1


@pytest.fixture(params=[0, 1], ids=["context-0", "context-1"])
def either(request: pytest.FixtureRequest) -> Any:
    """A context of each of the two devices."""
    with kf.TransferContext(request.param, threads=2) as context:
        yield context


def peers(
    src: int,
    dst: int,
    geometry: Geometry | None = None,
    src_kind: tuple[str, str, str] = KINDS[3],
    dst_kind: tuple[str, str, str] = KINDS[0],
) -> Pair:
    geometry = geometry or small()
    return Pair(
        Cache(Model(geometry, *src_kind, alignment=64), "device", src),
        Cache(Model(geometry, *dst_kind, alignment=8), "device", dst),
    )


@BOTH
@pytest.mark.parametrize("dst_kind", KINDS, ids="-".join)
@pytest.mark.parametrize("engine", ENGINES)
def test_every_kind_to_every_kind(
    either: kf.TransferContext, src: int, dst: int, dst_kind: tuple[str, str, str], engine: Any
) -> None:
    for src_kind in KINDS[KINDS.index(dst_kind) % STEP :: STEP]:
        both = peers(src, dst, None, src_kind, dst_kind)
        result = either.transfer(both.src, both.dst, SRC, DST, engine=engine).wait(60)
        both.check(SRC, DST, src_kind)
        assert result.direction == "p2p"


@BOTH
class TestShapes:
    def test_parts(self, either: kf.TransferContext, src: int, dst: int) -> None:
        both = peers(src, dst, None, KINDS[4], KINDS[2])
        either.transfer(both.src, both.dst, SRC, DST, layers=range(1, 3), heads=range(2, 5)).wait(60)
        both.check(SRC, DST, layers=range(1, 3), heads=range(2, 5))

    def test_finer_pages(self, either: kf.TransferContext, src: int, dst: int) -> None:
        source = Cache(Model(small(page=8, blocks=4), "lw", "HND"), "device", src)
        target = Cache(Model(small(page=2, blocks=16), "fc"), "device", dst)
        both = Pair(source, target)
        ids = shuffled(8, 16)
        either.transfer(both.src, both.dst, [3, 1], ids).wait(60)
        both.check([3, 1], ids)

    @pytest.mark.parametrize("row", [1, 17, 132, 576, 584, 656])
    def test_odd_rows(self, either: kf.TransferContext, src: int, dst: int, row: int) -> None:
        both = peers(src, dst, Geometry(9, 2, 1, 4, 2, row, "uint8"), KINDS[4], KINDS[2])
        either.transfer(both.src, both.dst, SRC, DST).wait(60)
        both.check(SRC, DST)

    def test_large(self, either: kf.TransferContext, src: int, dst: int) -> None:
        geometry = Geometry(scaled(200, 8), 8, 2, 16, 8, 32, "float64")
        both = peers(src, dst, geometry)
        ids = shuffled(geometry.blocks, geometry.blocks), shuffled(geometry.blocks, geometry.blocks, 2)
        either.transfer(both.src, both.dst, *ids).wait(60)
        both.check(*ids)

    def test_many_ids(self, either: kf.TransferContext, src: int, dst: int) -> None:
        count = scaled(9000, 1500)
        both = peers(src, dst, Geometry(count, 1, 1, 1, 1, 24, "uint8"))
        ids = shuffled(count, count), shuffled(count, count, 2)
        either.transfer(both.src, both.dst, *ids).wait(60)
        both.check(*ids)

    def test_device_ids(self, either: kf.TransferContext, src: int, dst: int) -> None:
        """Ids on the GPU that runs the kernel, the destination's; elsewhere they work or are refused."""
        both = peers(src, dst)
        either.transfer(
            both.src, both.dst, device_array(SRC, ordinal=dst), device_array(DST, ordinal=dst)
        ).wait(60)
        both.check(SRC, DST)
        both.target.put(both.before)
        try:
            job = either.transfer(
                both.src, both.dst, device_array(SRC, ordinal=src), device_array(DST, ordinal=src)
            )
        except kf.Error:
            both.check([], [])
        else:
            job.wait(60)
            both.check(SRC, DST)

    def test_bad_device_ids(self, either: kf.TransferContext, src: int, dst: int) -> None:
        both = peers(src, dst)
        ids = device_array([0, 99], ordinal=dst), device_array([1, 2], ordinal=dst)
        with pytest.raises(kf.TransferError, match="99"):
            either.transfer(both.src, both.dst, *ids).wait(60)
        both.check([0], [1])

    def test_staged_and_bounce_have_no_business_here(
        self, either: kf.TransferContext, src: int, dst: int
    ) -> None:
        both = peers(src, dst)
        for engine in ("staged", "bounce", "host"):
            with pytest.raises(kf.Unsupported, match=engine):
                either.transfer(both.src, both.dst, SRC, DST, engine=engine)


class TorchStream:
    """A default stream as torch shows one: its handle is the same on every GPU."""

    def __init__(self, ordinal: int) -> None:
        self.cuda_stream, self.device_index = 0, ordinal


@BOTH
class TestOrder:
    def test_the_default_stream_of_either_device(self, src: int, dst: int) -> None:
        """Handle 0 is one stream per GPU: the one that the object says, not that of whichever GPU copies."""
        both = peers(src, dst)
        with kf.TransferContext(dst) as ctx:
            for ordinal in (src, dst):
                stream = DefaultStream(1, ordinal)
                with Hold(stream) as hold:
                    job = ctx.transfer(both.src, both.dst, SRC, DST, after=TorchStream(ordinal))
                    time.sleep(0.02)
                    assert not job.done()
                    job.wait_on(TorchStream(ordinal))
                    with current(ordinal):
                        mark = Mark(stream)
                    assert not mark.reached
                    hold.release()
                    job.wait(60)
                    assert until(lambda mark=mark: mark.reached)  # type: ignore[misc]
        both.check(SRC, DST)

    @pytest.mark.parametrize("of", ["source", "destination"])
    @pytest.mark.parametrize("kind", ["own", "legacy"])
    def test_a_callers_stream_of_either_device(self, src: int, dst: int, of: str, kind: str) -> None:
        ordinal = src if of == "source" else dst
        both = peers(src, dst)
        with kf.TransferContext(ordinal) as ctx:
            stream = Stream(ordinal) if kind == "own" else DefaultStream(1, ordinal)
            with Hold(stream) as hold:
                try:
                    with current(ordinal):
                        job = ctx.transfer(both.src, both.dst, SRC, DST, stream=stream.handle)
                except kf.Unsupported as error:
                    assert "stream" in str(error) or "device" in str(error)  # noqa: PT017
                    return
                mark = Mark(stream)
                time.sleep(0.02)
                assert not job.done() and not mark.reached
                both.target.check(both.before)
                hold.release()
                job.wait(60)
                assert until(lambda: mark.reached)
            both.check(SRC, DST)
            stream.close()

    def test_after_streams_of_both_devices(self, either: kf.TransferContext, src: int, dst: int) -> None:
        both = peers(src, dst)
        # A context's first copy to another GPU opens it, and loading kernels waits for that GPU's work.
        either.transfer(both.src, both.dst, SRC[:1], DST[:1]).wait(60)
        both.target.poison()
        with Stream(src) as a, Stream(dst) as b, Hold(a) as first, Hold(b) as second:
            job = either.transfer(both.src, both.dst, SRC, DST, after=[a, b])
            for hold in (first, second):
                time.sleep(0.01)
                assert not job.done()
                hold.release()
            job.wait(60)
        both.check(SRC, DST)

    def test_streams_of_both_devices_wait(self, either: kf.TransferContext, src: int, dst: int) -> None:
        both = peers(src, dst)
        with Stream(src) as a, Stream(dst) as b, Hold(a) as hold:
            job = either.transfer(both.src, both.dst, SRC, DST, after=a)
            with Stream(src) as c:
                job.wait_on(b)
                job.wait_on(c)
                marks = Mark(b), Mark(c)
                time.sleep(0.02)
                assert not any(mark.reached for mark in marks)
                hold.release()
                job.wait(60)
                assert all(until(lambda mark=mark: mark.reached) for mark in marks)  # type: ignore[misc]
        both.check(SRC, DST)

    def test_a_chain_through_three_memories(self, src: int, dst: int) -> None:
        """Down to pinned in one context, up to the other device in another, over the link: events only."""
        down = Pair(Cache(Model(small(), "lw"), "device", src), Cache(Model(small(), "fc"), "pinned"))
        up = Cache(Model(small(), "lw", "HND"), "device", dst)
        up.poison()
        last = Cache(Model(small(), "fc", "universal"), "device", src)
        last.poison()
        ids = range(7)
        with kf.TransferContext(src) as one, kf.TransferContext(dst) as two:
            with Stream(src) as stream, Hold(stream) as hold:
                a = one.transfer(down.src, down.dst, ids, ids, stream=stream)
                b = two.transfer(down.dst, up.layout, ids, ids, after=a)
                c = one.transfer(up.layout, last.layout, ids, ids, after=b)
                time.sleep(0.02)
                assert not (a.done() or b.done() or c.done())
                hold.release()
                c.wait(60)
            last.check(down.values)

    def test_capture(self, src: int, dst: int) -> None:
        both = peers(src, dst)
        with kf.TransferContext(dst) as ctx, Stream(dst) as stream:
            graph = capture(stream, lambda: ctx.transfer(both.src, both.dst, SRC, DST, stream=stream))
            for key in (4, 5):
                both.values = both.source.fill(key)
                both.target.put(both.before)
                graph.replay(stream)
                both.check(SRC, DST, key)
            graph.close()


class TestTwoDevicesInOneThread:
    def test_each_context_serves_its_device(self) -> None:
        with kf.TransferContext(0) as zero, kf.TransferContext(1) as one:
            assert (zero.device, one.device) == (0, 1)
            for _ in range(3):
                for ordinal, ctx in ((0, zero), (1, one)):
                    for host in ("pinned", "registered", "system"):
                        up = Pair(
                            Cache(Model(small(), "fc"), host),
                            Cache(Model(small(), "lw"), "device", ordinal),
                        )
                        ctx.transfer(up.src, up.dst, SRC, DST).wait(60)
                        up.check(SRC, DST)
                        down = Pair(up.target, up.source)
                        ctx.transfer(down.src, down.dst, SRC, DST).wait(60)
                        down.check(SRC, DST)

    @pytest.mark.parametrize("engine", ["auto", "kernel", "batch", "staged"])
    def test_a_context_that_is_not_device_zero(self, engine: Any) -> None:
        with kf.TransferContext(1) as ctx, Stream(1) as stream:
            up = Pair(Cache(Model(small(), "fc"), "pinned"), Cache(Model(small(), "lw"), "device", 1))
            ctx.transfer(up.src, up.dst, SRC, DST, engine=engine, stream=stream).wait(60)
            up.check(SRC, DST)
            down = Pair(Cache(Model(small(), "lw"), "device", 1), Cache(Model(small(), "fc"), "pinned"))
            ctx.transfer(down.src, down.dst, SRC, DST, engine=engine).wait(60)
            down.check(SRC, DST)

    def test_the_other_device_s_layouts(self) -> None:
        """A context serves layouts of its device; another's are served right, or refused naming both."""
        both = Pair(Cache(Model(small(), "fc"), "pinned"), Cache(Model(small(), "lw"), "device", 1))
        with kf.TransferContext(0) as ctx:
            try:
                job = ctx.transfer(both.src, both.dst, SRC, DST)
            except kf.Unsupported as error:
                assert "1" in str(error) and "0" in str(error)  # noqa: PT017
                both.check([], [])
            else:
                job.wait(60)
                both.check(SRC, DST)

    def test_a_stream_of_another_device_is_refused(self) -> None:
        both = Pair(Cache(Model(small(), "fc"), "pinned"), Cache(Model(small(), "lw"), "device", 0))
        with kf.TransferContext(0) as ctx, Stream(1) as stream:
            with pytest.raises(kf.Error, match=r"device|stream"):
                ctx.transfer(both.src, both.dst, SRC, DST, stream=stream)
            both.check([], [])

    @pytest.mark.parametrize("thread_s", [None, 0, 1])
    def test_the_threads_context_is_as_it_was(self, thread_s: int | None) -> None:
        found: list[Any] = []

        def entries() -> None:
            for ordinal in (0, 1):
                with kf.TransferContext(ordinal) as ctx:
                    up = Pair(
                        Cache(Model(small(), "fc"), "pinned"), Cache(Model(small(), "lw"), "device", ordinal)
                    )
                    job = ctx.transfer(up.src, up.dst, SRC, DST)
                    found.append(current_context())
                    job.wait(60)
                    found.append(current_context())
                    across = peers(ordinal, 1 - ordinal)
                    ctx.transfer(across.src, across.dst, SRC, DST).wait(60)
                    found.append(current_context())
                    del up, across, job
                    gc.collect()
                found.append(current_context())
            array = CudaArray(Buffer(4096, 1, 0), (8, 512), "|u1")
            kf.PhysicalLayout.from_tensors(array, axes="block dim")
            found.append(current_context())

        def body() -> None:
            if thread_s is None:
                entries()
            else:
                with current(thread_s):
                    entries()

        thread = threading.Thread(target=body)
        thread.start()
        thread.join(100)
        want = 0 if thread_s is None else primary(thread_s)
        assert len(found) == 9 and set(found) == {want}

    def test_pinned_memory_belongs_to_no_device(self) -> None:
        """Allocated with device 1 current, used by device 0, and the other way round."""
        for owner, user in ((0, 1), (1, 0)):
            with current(owner):
                both = Pair(
                    Cache(Model(small(), "fc"), "pinned"), Cache(Model(small(), "lw"), "device", user)
                )
            with kf.TransferContext(user) as ctx:
                for engine in ("kernel", "batch", "staged"):
                    both.target.put(both.before)
                    ctx.transfer(both.src, both.dst, SRC, DST, engine=engine).wait(60)
                    both.check(SRC, DST, engine)

    def test_wrapped_arrays_know_their_device(self) -> None:
        for ordinal in (0, 1):
            cache = Cache(Model(small(), "lw"), "wrapped", ordinal)
            assert cache.layout.memory == kf.device(ordinal)
            with pytest.raises(kf.LayoutError, match="lies in"):
                kf.PhysicalLayout.from_tensors(
                    [
                        CudaArray(Buffer(2048, 0), (4, 512), "|u1"),
                        CudaArray(Buffer(2048, 1), (4, 512), "|u1"),
                    ],
                    axes="block dim",
                )


class Particular:
    """Exports memory of the current device only, as torch does."""

    def __init__(self, region: Any, ordinal: int) -> None:
        self._region, self._ordinal = region, ordinal

    def __dlpack_device__(self) -> Any:
        return self._region.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        if current_context() != primary(self._ordinal):
            raise BufferError("another device is current")
        return self._region.__dlpack__(**options)


@pytest.mark.parametrize("ordinal", [0, 1])
@pytest.mark.parametrize("before", [0, 1])
def test_arrays_of_a_device_that_is_not_current(ordinal: int, before: int) -> None:
    whole = Cache(Model(small(), "fc"), "device", ordinal).layout
    region = whole.regions[0]
    with current(before):
        layout = kf.PhysicalLayout.from_tensors(Particular(region, ordinal), axes=" ".join(whole.region_axes))
        assert current_context() == primary(before)
    assert layout.memory == region.memory


@pytest.mark.skipif(SIMULATED, reason="torch needs real GPUs")
class TestTorch:
    def test_tensors_of_two_devices(self) -> None:
        torch = optional("torch")
        source = torch.randint(0, 100, (7, 2, 4, 6, 5), dtype=torch.int16, device="cuda:1")
        target = torch.zeros((7, 2, 4, 6, 5), dtype=torch.int16, device="cuda:0")
        layouts = [
            kf.PhysicalLayout.from_tensors(tensor, axes="block outer page head dim")
            for tensor in (source, target)
        ]
        with kf.TransferContext(0) as ctx, torch.cuda.device(1):
            torch.cuda._sleep(200_000_000)
            source.fill_(7)
            job = ctx.transfer(layouts[0], layouts[1], range(7), range(7))
            job.wait_on(torch.cuda.current_stream(0))
            assert torch.cuda.current_device() == 1
            job.wait(60)
        assert bool((target == 7).all())
