"""torch tensors and streams: what an engine does, without a synchronize in it."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from driver import SIMULATED, until
from gpu_support import KINDS, Cache
from reference import Geometry, Model
from support import config, optional, small

import kvferry as kf

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(SIMULATED, reason="torch needs a real GPU"),
]

AXES = "outer block page head dim"
SPIN = 200_000_000  # cycles: about 100 ms


@pytest.fixture(scope="module")
def torch() -> Any:
    return optional("torch")


def caches(torch: Any, geometry: Geometry, fill: bool = True) -> list[Any]:
    """One tensor per layer, as vLLM keeps them."""
    shape = (geometry.outer, geometry.blocks, geometry.page, geometry.heads, geometry.dim)
    dtype = getattr(torch, geometry.dtype)
    made = []
    for _ in range(geometry.layers):
        raw = torch.randint(0, 256, (*shape, geometry.item), dtype=torch.uint8, device="cuda:0")
        if not fill:
            raw.fill_(0xEE)
        made.append(raw.view(dtype).reshape(shape))
    return made


def canonical(torch: Any, tensors: list[Any], geometry: Geometry) -> Any:
    """[block, layer, outer, page, head, dim, byte]"""
    stacked = torch.stack([tensor.view(torch.uint8) for tensor in tensors])
    return stacked.permute(2, 0, 1, 3, 4, 5).cpu().numpy().reshape(geometry.shape)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float32", "int8"])
@pytest.mark.parametrize("host", ["pinned", "system", "device"])
def test_types_both_ways(shared: kf.TransferContext, torch: Any, dtype: str, host: str) -> None:
    geometry = small(dtype=dtype)
    tensors = caches(torch, geometry)
    values = canonical(torch, tensors, geometry)
    layout = kf.PhysicalLayout.from_tensors(tensors, axes=AXES)
    assert layout.memory == kf.device(0) and layout.config == config(geometry)
    target = Cache(Model(geometry, *KINDS[2]), host)
    target.poison()
    shared.transfer(layout, target.layout, range(7), range(7)).wait(60)
    target.check(values)
    back = caches(torch, geometry, fill=False)
    again = kf.PhysicalLayout.from_tensors(back, axes=AXES)
    torch.cuda.synchronize()
    shared.transfer(target.layout, again, range(7), range(7)).wait(60)
    assert (canonical(torch, back, geometry) == values).all()


class TestCurrentStream:
    """stream=None runs after torch's current stream; wait_on() brings torch after the transfer."""

    @pytest.mark.parametrize("engine", ["auto", "kernel", "batch", "staged"])
    def test_an_operation_before_and_after(self, shared: kf.TransferContext, torch: Any, engine: Any) -> None:
        geometry = Geometry(64, 4, 2, 16, 8, 64, "bfloat16")
        tensors = caches(torch, geometry)
        layout = kf.PhysicalLayout.from_tensors(tensors, axes=AXES)
        pool = kf.PhysicalLayout.fully_contiguous(layout.config, kf.pinned(), order="universal")
        ids = list(range(64))
        for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
            with torch.cuda.stream(stream):
                for turn in range(3):
                    stream.wait_stream(torch.cuda.default_stream())
                    torch.cuda._sleep(SPIN)
                    for tensor in tensors:
                        tensor.fill_(turn + 1)
                    down = shared.transfer(layout, pool, ids, ids, engine=engine)
                    down.wait_on(stream)
                    for tensor in tensors:
                        tensor.fill_(77)  # after the copy out, before the copy back
                    up = shared.transfer(pool, layout, ids, ids, engine=engine, after=down)
                    up.wait_on(stream)
                    sums = [tensor.float().mean() for tensor in tensors]
                    assert [float(each) for each in sums] == [turn + 1.0] * 4

    def test_torch_s_stream_given(self, shared: kf.TransferContext, torch: Any) -> None:
        geometry = Geometry(64, 4, 2, 16, 8, 64, "bfloat16")
        tensors = caches(torch, geometry)
        layout = kf.PhysicalLayout.from_tensors(tensors, axes=AXES)
        pool = kf.PhysicalLayout.layer_separate(layout.config, kf.pinned(), order="HND")
        ids = list(range(64))
        for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(SPIN)
                for tensor in tensors:
                    tensor.fill_(5)
                job = shared.transfer(layout, pool, ids, ids, stream=stream)
                assert not job.done()
                for tensor in tensors:
                    tensor.fill_(6)
                shared.transfer(pool, layout, ids, ids, stream=stream)
                assert all(float(tensor.float().mean()) == 5.0 for tensor in tensors)
                assert job.wait(10).blocks == 64

    def test_events(self, shared: kf.TransferContext, torch: Any) -> None:
        tensors = caches(torch, small())
        layout = kf.PhysicalLayout.from_tensors(tensors, axes=AXES)
        pool = kf.PhysicalLayout.fully_contiguous(layout.config, kf.pinned())
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.cuda._sleep(SPIN)
            tensors[0].fill_(9)
            event = side.record_event()
        job = shared.transfer(layout, pool, range(7), range(7), after=event)
        assert not job.done()
        job.wait(60)
        assert (pool.numpy()[:, 0].astype(float) == 9).all()

    def test_exported_layouts_follow_torch_too(self, shared: kf.TransferContext, torch: Any) -> None:
        """Our own device memory that torch writes through DLPack: only torch's stream knows of the write."""
        made = kf.PhysicalLayout.layer_separate(config(small(dtype="bfloat16")), kf.device(0))
        tensors = [torch.from_dlpack(region) for region in made.regions]
        pool = kf.PhysicalLayout.fully_contiguous(made.config, kf.pinned())
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.cuda._sleep(SPIN)
            for tensor in tensors:
                tensor.fill_(3)
            job = shared.transfer(made, pool, range(7), range(7))
            assert not job.done()
            job.wait(60)
        raw = torch.from_dlpack(pool.regions[0].__dlpack__(max_version=(1, 0), dl_device=(1, 0)))
        assert bool((raw == 3).all())

    def test_a_destination_still_being_read(self, shared: kf.TransferContext, torch: Any) -> None:
        tensors = caches(torch, small())
        layout = kf.PhysicalLayout.from_tensors(tensors, axes=AXES)
        pool = kf.PhysicalLayout.fully_contiguous(layout.config, kf.pinned())
        pool.fill(0)
        torch.cuda.synchronize()
        before = [tensor.clone() for tensor in tensors]
        torch.cuda.synchronize()
        torch.cuda._sleep(SPIN)
        seen = [tensor.clone() for tensor in tensors]
        job = shared.transfer(pool, layout, range(7), range(7))
        job.wait(60)
        for a, b in zip(before, seen, strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


class TestGraphs:
    def test_torch_captures_a_transfer(self, shared: kf.TransferContext, torch: Any) -> None:
        geometry = Geometry(32, 3, 2, 4, 4, 32, "bfloat16")
        tensors = caches(torch, geometry)
        layout = kf.PhysicalLayout.from_tensors(tensors, axes=AXES)
        pool = kf.PhysicalLayout.fully_contiguous(layout.config, kf.device(0), order="universal")
        out = [torch.zeros_like(tensor) for tensor in tensors]
        back = kf.PhysicalLayout.from_tensors(out, axes=AXES)
        ids, there = list(range(32)), list(range(31, -1, -1))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for tensor in tensors:
                tensor.mul_(2)
            stream = torch.cuda.current_stream()
            a = shared.transfer(layout, pool, ids, there, stream=stream)
            b = shared.transfer(pool, back, there, ids, stream=stream)
            for tensor in out:
                tensor.add_(1)
        assert a.captured and b.captured
        del layout, pool, back
        gc.collect()
        for value in (1.0, 4.0):
            for tensor in tensors:
                tensor.fill_(value)
            graph.replay()
            torch.cuda.synchronize()
            assert all(bool((tensor == 2 * value + 1).all()) for tensor in out)

    def test_stream_none_under_torch_s_capture_joins_it_or_says_no(
        self, shared: kf.TransferContext, torch: Any
    ) -> None:
        """An eager job between captured operations would read what the graph has not yet made."""
        tensors = caches(torch, small())
        layout = kf.PhysicalLayout.from_tensors(tensors, axes=AXES)
        pool = kf.PhysicalLayout.fully_contiguous(layout.config, kf.pinned())
        graph = torch.cuda.CUDAGraph()
        outcome: list[Any] = []
        with torch.cuda.graph(graph):
            tensors[0].fill_(2)
            try:
                outcome.append(shared.transfer(layout, pool, range(7), range(7)))
            except kf.Error as error:
                outcome.append(error)
        [found] = outcome
        if isinstance(found, kf.Transfer):
            assert found.captured
            graph.replay()
            torch.cuda.synchronize()
            assert (pool.numpy()[:, 0].astype(float) == 2).all()
        else:
            assert "captur" in str(found)

    @pytest.mark.parametrize("dtype", ["int32", "int64"])
    def test_device_ids_in_a_graph(self, shared: kf.TransferContext, torch: Any, dtype: str) -> None:
        geometry = Geometry(32, 3, 2, 4, 4, 32, "bfloat16")
        tensors = caches(torch, geometry)
        layout = kf.PhysicalLayout.from_tensors(tensors, axes=AXES)
        target = Cache(Model(geometry, "fc"))
        before = target.poison()
        values = canonical(torch, tensors, geometry)
        src = torch.zeros(10, dtype=getattr(torch, dtype), device="cuda")
        dst = torch.arange(10, dtype=getattr(torch, dtype), device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            shared.transfer(layout, target.layout, src, dst, stream=torch.cuda.current_stream())
        for turn in range(3):
            ids = torch.randperm(32)[:10]
            src.copy_(ids)
            graph.replay()
            torch.cuda.synchronize()
            want = before.copy()
            want[:10] = values[ids.tolist()]
            target.check(want, turn)


class TestIds:
    @pytest.mark.parametrize("dtype", ["int32", "int64"])
    def test_on_the_gpu(self, shared: kf.TransferContext, torch: Any, dtype: str) -> None:
        """Computed by torch on its current stream, used without a synchronize."""
        geometry = small(blocks=40)
        source, target = Cache(Model(geometry, "lw"), "pinned"), Cache(Model(geometry, "fc"))
        values, before = source.fill(), target.poison()
        torch.cuda._sleep(SPIN)
        src = torch.randperm(40, device="cuda")[:20].to(getattr(torch, dtype))
        dst = torch.arange(40, device="cuda", dtype=getattr(torch, dtype))[::2].contiguous()
        shared.transfer(source.layout, target.layout, src, dst, stream=torch.cuda.current_stream()).wait(60)
        want = before.copy()
        want[dst.tolist()] = values[src.tolist()]
        target.check(want)

    def test_default_stream_rule_covers_ids(self, shared: kf.TransferContext, torch: Any) -> None:
        source, target = Cache(Model(small(), "lw")), Cache(Model(small(), "fc"))
        values, before = source.fill(), target.poison()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.cuda._sleep(SPIN)
            src, dst = torch.tensor([3, 1]).cuda(), torch.zeros(2, dtype=torch.int64, device="cuda")
            dst[1] = 5
            shared.transfer(source.layout, target.layout, src, dst).wait(60)
        want = before.copy()
        want[[0, 5]] = values[[3, 1]]
        target.check(want)

    def test_strided_and_float_ids_are_refused(self, shared: kf.TransferContext, torch: Any) -> None:
        source, target = Cache(Model(small(), "lw")), Cache(Model(small(), "fc"))
        for bad in (torch.arange(6, device="cuda")[::2], torch.zeros(3, device="cuda")):
            with pytest.raises((kf.Error, TypeError), match="source"):
                shared.transfer(source.layout, target.layout, bad, [0, 1, 2])


class TestTensors:
    def test_views_and_pairs(self, shared: kf.TransferContext, torch: Any) -> None:
        kv = torch.arange(7 * 2 * 4 * 6 * 5, dtype=torch.int32, device="cuda").reshape(7, 2, 4, 6, 5)
        layout = kf.PhysicalLayout.from_tensors([(kv[:, 0], kv[:, 1])], axes="block page head dim")
        out = torch.zeros((7, 2, 4, 6, 5), dtype=torch.int32, pin_memory=True)
        target = kf.PhysicalLayout.from_tensors(out, axes="block outer page head dim")
        shared.transfer(layout, target, range(7), range(7)).wait(60)
        assert torch.equal(out, kv.cpu())

    def test_parameters_and_their_gradients(self, torch: Any) -> None:
        bad = torch.zeros((7, 4, 6, 5), device="cuda", requires_grad=True)
        with pytest.raises((kf.Error, BufferError, RuntimeError)):
            kf.PhysicalLayout.from_tensors(bad, axes="block page head dim")

    def test_tensors_live_as_long_as_their_job(self, shared: kf.TransferContext, torch: Any) -> None:
        """The caching allocator would hand their memory out again."""
        shape = (2, 64, 16, 8, 64)
        pool = None
        for turn in range(5):
            tensor = torch.full(shape, turn + 1, dtype=torch.bfloat16, device="cuda")
            layout = kf.PhysicalLayout.from_tensors(tensor, axes=AXES)
            pool = pool or kf.PhysicalLayout.fully_contiguous(layout.config, kf.pinned())
            torch.cuda._sleep(SPIN)
            job = shared.transfer(layout, pool, range(64), range(64))
            del tensor, layout
            gc.collect()
            junk = torch.full(shape, 99, dtype=torch.bfloat16, device="cuda")
            job.wait(60)
            raw = torch.from_dlpack(pool.regions[0].__dlpack__(max_version=(1, 0), dl_device=(1, 0)))
            assert bool((raw == turn + 1).all())
            del junk

    def test_pinned_torch_memory(self, shared: kf.TransferContext, torch: Any) -> None:
        source = torch.randint(0, 100, (7, 2, 4, 6, 5), dtype=torch.int16).pin_memory()
        target = torch.zeros((7, 2, 4, 6, 5), dtype=torch.int16, device="cuda")
        a = kf.PhysicalLayout.from_tensors(source, axes="block outer page head dim")
        b = kf.PhysicalLayout.from_tensors(target, axes="block outer page head dim")
        torch.cuda.synchronize()
        for engine in ("auto", "kernel", "batch", "staged"):
            target.zero_()
            shared.transfer(a, b, range(7), range(7), engine=engine).wait(60)
            assert torch.equal(target.cpu(), source)

    def test_views_in_the_middle_of_an_allocation(self, shared: kf.TransferContext, torch: Any) -> None:
        whole = torch.full((9, 2, 4, 6, 8), 1, dtype=torch.float16, device="cuda")
        layout = kf.PhysicalLayout.from_tensors(whole[1:8, :, :, 1:5], axes="block outer page head dim")
        source = kf.PhysicalLayout.fully_contiguous(layout.config, kf.pinned())
        source.fill(0)
        torch.cuda.synchronize()
        shared.transfer(source, layout, range(7), range(7)).wait(60)
        assert bool((whole[1:8, :, :, 1:5] == 0).all())
        whole[1:8, :, :, 1:5] = 1
        assert bool((whole == 1).all()), "what surrounds the view was written"

    def test_primitives_on_tensors_of_addresses(self, torch: Any) -> None:
        rows = torch.randint(0, 256, (64, 128), dtype=torch.uint8, device="cuda")
        out = torch.zeros_like(rows)
        order = torch.randperm(64)
        src = torch.tensor([rows[i].data_ptr() for i in order.tolist()], dtype=torch.int64)
        dst = torch.tensor([out[i].data_ptr() for i in range(64)], dtype=torch.int64)
        stream = torch.cuda.current_stream()
        kf.memcpy_batch(src, dst, torch.full((64,), 128), stream=stream)
        torch.cuda.synchronize()
        assert torch.equal(out, rows[order.cuda()])
        out.zero_()
        kf.vectorized_copy(src.cuda(), dst.cuda(), 128, stream=stream)
        torch.cuda.synchronize()
        assert torch.equal(out, rows[order.cuda()])


def test_torch_s_device_is_as_it_was(shared: kf.TransferContext, torch: Any) -> None:
    tensors = caches(torch, small())
    layout = kf.PhysicalLayout.from_tensors(tensors, axes=AXES)
    pool = kf.PhysicalLayout.fully_contiguous(layout.config, kf.pinned())
    shared.transfer(layout, pool, range(7), range(7)).wait(60)
    assert torch.cuda.current_device() == 0
    again = torch.zeros(1000, device="cuda") + 1
    assert float(again.sum()) == 1000


def test_tensors_are_released_after_their_jobs(gpu: kf.TransferContext, torch: Any) -> None:
    tensor = torch.zeros((2, 64, 16, 8, 64), dtype=torch.bfloat16, device="cuda")
    layout = kf.PhysicalLayout.from_tensors(tensor, axes=AXES)
    pool = kf.PhysicalLayout.fully_contiguous(layout.config, kf.pinned())
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    gpu.transfer(layout, pool, range(64), range(64))
    del tensor, layout

    def released() -> bool:
        gpu.transfer(pool, pool, [], [])
        gc.collect()
        return bool(torch.cuda.memory_allocated() <= before - (2 * 64 * 16 * 8 * 64 * 2))

    assert until(released)
