"""Pinned and device memory: allocated, wrapped, told apart by the driver, and moved where the host can."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from driver import read, until
from reference import GUARD, Model, content, transferred
from support import Cache, config, flat, optional, owned, small

import kvferry as kf
from kvferry.testing import guard

pytestmark = pytest.mark.gpu

AXES = "outer block page head dim"


def same_bits(tensor: Any) -> Any:
    """The bytes of a CPU torch tensor, of whatever type, as NumPy without copying."""
    torch = optional("torch")
    return tensor.view(torch.uint8).numpy()


def test_devices() -> None:
    found = kf.devices()
    assert [each["ordinal"] for each in found] == list(range(len(found)))
    for each in found:
        assert each["name"] and each["uuid"] and each["sm_count"] > 0 and each["total_memory"] > 1 << 30
        assert each["compute_capability"] >= (8, 0)
    assert len({each["uuid"] for each in found}) == len(found)


def test_devices_are_torch_s() -> None:
    torch = optional("torch")
    assert len(kf.devices()) == torch.cuda.device_count()
    for each in kf.devices():
        properties = torch.cuda.get_device_properties(each["ordinal"])
        assert each["name"] == properties.name
        assert each["compute_capability"] == (properties.major, properties.minor)
        assert each["sm_count"] == properties.multi_processor_count


@pytest.mark.parametrize("kind", ["fc", "lw", "split", "pool"])
@pytest.mark.parametrize("alignment", [1, 4096])
def test_pinned_layouts(kind: str, alignment: int) -> None:
    model = Model(small(), kind, "HND", alignment=alignment)
    layout = owned(model, kf.pinned())
    assert layout.memory == kf.pinned() and layout.memory.kind == "pinned"
    assert all(region.addr % max(alignment, 64) == 0 for region in layout.regions)
    layout.fill(GUARD)
    values = content(model.geometry)
    model.store(values, flat(layout))
    arrays = layout.numpy()
    arrays = [arrays] if isinstance(arrays, np.ndarray) else arrays
    for array, region in zip(arrays, flat(layout), strict=True):
        assert array.flags.writeable
        assert (array.view(np.uint16) == model.view(region).view(np.uint16)[..., 0]).all()
    del layout
    arrays[0][...] = 1
    assert (arrays[0] == 1).all()


@pytest.mark.parametrize("kind", ["fc", "lw", "split", "pool"])
def test_device_layouts(kind: str) -> None:
    layout = owned(Model(small(), kind), kf.device(0))
    assert layout.memory == kf.device(0) and layout.memory.ordinal == 0
    region = layout.regions[0]
    interface = region.__cuda_array_interface__
    assert interface["version"] == 3 and interface["data"] == (region.addr, False)
    assert interface["typestr"] == "<f2" and len(interface["shape"]) == len(layout.region_axes)
    assert layout.region(0, 0).__cuda_array_interface__["shape"] == (layout.config.chunk_bytes,)
    assert not hasattr(region, "__array_interface__")
    with pytest.raises(kf.Unsupported, match="device:0"):
        layout.numpy()
    layout.fill(0x5C)
    for each in layout.regions:
        assert (read(each.addr, each.nbytes) == 0x5C).all()
    with guard(layout, [1], value=0xA5):
        layout.fill_pattern(7, [1])
    layout.verify_pattern(7, [1])
    with pytest.raises(kf.MismatchError):
        layout.verify_pattern(8, [1])
    host = owned(Model(small(), kind), kf.pinned())
    host.fill_pattern(7, [1])
    assert layout.checksum([1]) == host.checksum([1])


def test_pinned_memory_through_a_device_of_choice() -> None:
    memory = kf.pinned(device=0)
    assert memory == kf.pinned() and hash(memory) == hash(kf.pinned()) and repr(memory) == "pinned()"
    layout = owned(Model(small(), "fc"), memory)
    assert layout.memory == kf.pinned() and (layout.numpy() == 0).all()
    for bad in (-1, 1 << 40):
        with pytest.raises(kf.OptionError, match="device"):
            kf.pinned(device=bad)
    with pytest.raises(kf.CudaError):
        owned(Model(small(), "fc"), kf.pinned(device=len(kf.devices())))


def test_a_device_that_is_not_there() -> None:
    with pytest.raises((kf.CudaError, kf.Unsupported), match=str(len(kf.devices()))):
        owned(Model(small(), "fc"), kf.device(len(kf.devices())))


def test_too_much_device_memory() -> None:
    huge = config(small()).replace(num_blocks=(1 << 32) - 1, page_size=1 << 20)
    for memory in (kf.device(0), kf.pinned()):
        with pytest.raises((kf.CudaError, kf.HostMemoryError)):
            kf.PhysicalLayout.fully_contiguous(huge, memory)
    # The failure leaves nothing behind.
    owned(Model(small(), "fc"), kf.device(0))


def test_device_memory_is_given_back() -> None:
    torch = optional("torch")
    cfg = kf.LayoutConfig(
        num_blocks=64, num_layers=4, page_size=16, num_heads=64, head_dim=64, dtype="float16"
    )
    kf.PhysicalLayout.fully_contiguous(cfg, kf.device(0))
    before = torch.cuda.mem_get_info(0)[0]
    for _ in range(20):
        kf.PhysicalLayout.fully_contiguous(cfg, kf.device(0))
    taken = 4 * cfg.num_blocks * cfg.block_bytes
    assert until(lambda: before - torch.cuda.mem_get_info(0)[0] < taken)


@pytest.mark.parametrize(("src", "dst"), [("system", "pinned"), ("pinned", "system"), ("pinned", "pinned")])
@pytest.mark.parametrize("kind", ["fc", "lw", "split", "pool"])
def test_host_transfers(ctx: kf.TransferContext, src: str, dst: str, kind: str) -> None:
    geometry = small(blocks=300)
    a, b = Model(geometry, "lw", "HND", alignment=64), Model(geometry, kind, "NHD", alignment=512)
    source, target = owned(a, getattr(kf, src)()), owned(b, getattr(kf, dst)())
    source.fill(GUARD)
    target.fill(GUARD)
    values = content(geometry)
    a.store(values, flat(source))
    before = np.full(geometry.shape, 0xEE, np.uint8)
    b.store(before, flat(target))
    src_blocks, dst_blocks = list(range(5, 260)), list(range(299, 44, -1))
    result = ctx.transfer(source, target, src_blocks, dst_blocks).wait(60)
    assert (result.engine, result.direction) == ("host", "memcpy")
    expected = transferred((geometry, values), (geometry, before), src_blocks, dst_blocks)
    assert (b.load(flat(target)) == expected).all()
    assert b.padding_untouched(flat(target)) and a.padding_untouched(flat(source))


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float16", "float32", "int8"])
@pytest.mark.parametrize("pinned", [False, True])
def test_torch_host_tensors(ctx: kf.TransferContext, dtype: str, pinned: bool) -> None:
    torch = optional("torch")
    geometry = small(dtype=dtype)
    tensors = [torch.zeros((2, 7, 4, 6, 5), dtype=getattr(torch, dtype), pin_memory=pinned) for _ in range(3)]
    layout = kf.PhysicalLayout.from_tensors(tensors, axes=AXES, config=config(geometry))
    assert layout.memory.kind == ("pinned" if pinned else "system")
    assert [region.addr for region in layout.regions] == [tensor.data_ptr() for tensor in tensors]
    source = Cache(Model(geometry, "fc", "universal"))
    values = source.fill(1)
    ctx.transfer(source.layout, layout, range(7), range(7)).wait(60)
    for layer, tensor in enumerate(tensors):
        found = same_bits(tensor).reshape(2, 7, 4, 6, 5, geometry.item)
        assert (found == values[:, layer].swapaxes(0, 1)).all()
    back = Cache(Model(geometry, "split", "HND"))
    back.poison()
    ctx.transfer(layout, back.layout, range(7), range(7)).wait(60)
    back.check(values)


def test_torch_views_and_pairs(ctx: kf.TransferContext) -> None:
    torch = optional("torch")
    kv = torch.arange(7 * 2 * 4 * 6 * 5, dtype=torch.int32).reshape(7, 2, 4, 6, 5)
    layout = kf.PhysicalLayout.from_tensors([(kv[:, 0], kv[:, 1])], axes="block page head dim")
    out = np.zeros((7, 2, 4, 6, 5), np.int32)
    target = kf.PhysicalLayout.from_tensors(out, axes="block outer page head dim")
    ctx.transfer(layout, target, range(7), range(7)).wait(60)
    assert (out == kv.numpy()).all()
    heads_first = kf.PhysicalLayout.from_tensors(kv.transpose(2, 3), axes="block outer head page dim")
    assert heads_first.strides == target.strides


def test_tensors_that_require_grad_name_themselves() -> None:
    torch = optional("torch")
    bad = torch.zeros((7, 4, 6, 5), requires_grad=True)
    with pytest.raises((kf.Error, BufferError, RuntimeError)) as caught:
        kf.PhysicalLayout.from_tensors({"k": torch.zeros((7, 4, 6, 5)), "v": bad}, axes="block page head dim")
    assert "tensors['v']" in "".join([str(caught.value), *getattr(caught.value, "__notes__", [])])


def test_ids_from_torch(ctx: kf.TransferContext) -> None:
    torch = optional("torch")
    source, target = Cache(Model(small(), "fc")), Cache(Model(small(), "lw"))
    values, before = source.fill(1), target.poison()
    for dtype in (torch.int64, torch.int32):
        src, dst = torch.tensor([3, 1], dtype=dtype), torch.tensor([0, 6, 5], dtype=dtype)[::2]
        ctx.transfer(source.layout, target.layout, src, dst).wait(60)
    target.check(transferred((small(), values), (small(), before), [3, 1], [0, 5]))
    with pytest.raises(kf.Unsupported, match="device memory"):
        ctx.transfer(source.layout, target.layout, torch.tensor([0], device="cuda"), [0])


class TestDriverKnows:
    def test_torch_device_tensors(self) -> None:
        torch = optional("torch")
        for name in ("bfloat16", "float8_e4m3fn", "float16"):
            tensors = [
                torch.zeros((2, 7, 4, 6, 5), dtype=getattr(torch, name), device="cuda:0") for _ in range(3)
            ]
            layout = kf.PhysicalLayout.from_tensors(tensors, axes=AXES)
            assert layout.memory == kf.device(0)
            assert layout.config == config(small(dtype=name))
            assert [region.addr for region in layout.regions] == [tensor.data_ptr() for tensor in tensors]

    def test_cupy_arrays(self) -> None:
        cupy = optional("cupy")
        array = cupy.zeros((2, 7, 4, 6, 5), cupy.float16)
        layout = kf.PhysicalLayout.from_tensors(array, axes=AXES)
        assert layout.memory == kf.device(0) and layout.regions[0].addr == array.data.ptr

    def test_cupy_reads_a_region(self) -> None:
        cupy = optional("cupy")
        layout = owned(Model(small(), "lw"), kf.device(0))
        view = cupy.asarray(layout.regions[1])
        assert view.shape == (7, 2, 4, 6, 5) and view.data.ptr == layout.regions[1].addr
        view[...] = 3
        del layout
        assert bool((view == 3).all())

    def test_numpy_over_pinned_memory(self) -> None:
        torch = optional("torch")
        pinned = torch.zeros((7, 4, 6, 5), dtype=torch.float16, pin_memory=True)
        # NumPy does not know, the driver does; also for a view in the middle.
        for array in (pinned.numpy(), pinned.numpy()[3:, 1:]):
            assert kf.PhysicalLayout.from_tensors(array, axes="block page head dim").memory == kf.pinned()
        plain = np.zeros((7, 4, 6, 5), np.float16)
        assert kf.PhysicalLayout.from_tensors(plain, axes="block page head dim").memory == kf.system()

    def test_mixed_memory_is_refused(self) -> None:
        torch = optional("torch")
        shape = (2, 7, 4, 6, 5)
        for other in ({"device": "cuda:0"}, {"pin_memory": True}):
            tensors = {"a": torch.zeros(shape), "b": torch.zeros(shape, **other)}
            with pytest.raises(kf.LayoutError, match=r"tensors\['b'\] lies in"):
                kf.PhysicalLayout.from_tensors(tensors, axes=AXES)

    def test_managed_memory_is_refused(self) -> None:
        cupy = optional("cupy")
        memory = cupy.cuda.malloc_managed(4096)
        array = cupy.ndarray((16, 128), cupy.float16, memory)
        with pytest.raises(kf.Unsupported, match=r"managed|device type 13"):
            kf.PhysicalLayout.from_tensors(array, axes="block dim")


@pytest.mark.parametrize(
    ("src", "dst", "words"),
    [("system", "device", "h2d"), ("device", "pinned", "d2h"), ("device", "device", "d2d")],
)
def test_device_transfers_are_refused_by_a_host_context(
    ctx: kf.TransferContext, src: str, dst: str, words: str
) -> None:
    def make(kind: str) -> kf.PhysicalLayout:
        return owned(Model(small(), "fc"), kf.device(0) if kind == "device" else getattr(kf, kind)())

    source, target = make(src), make(dst)
    with pytest.raises(kf.Unsupported, match=words):
        ctx.transfer(source, target, [0], [1])
