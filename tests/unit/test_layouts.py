from __future__ import annotations

import errno
import gc
import os
import pickle
from typing import Any

import numpy as np
import pytest
from reference import GUARD, Model, content
from support import config, flat, owned, small

import kvferry as kf

MODELS = [
    *[Model(small(), "fc", order) for order in ("NHD", "HND", "universal")],
    *[
        Model(small(), "lw", order, block_dim)
        for order in ("NHD", "HND")
        for block_dim in ("block_first", "outer_first")
    ],
    *[Model(small(), "split", order) for order in ("NHD", "HND")],
    *[Model(small(), "pool", order) for order in ("NHD", "HND", "universal")],
]
IDS = [f"{model.kind}-{model.order}-{model.block_dim}" for model in MODELS]
KINDS = {"fc": "FullyContiguous", "lw": "LayerSeparate", "split": "SplitKv", "pool": "BlockPool"}
every_model = pytest.mark.parametrize("model", MODELS, ids=IDS)


@every_model
@pytest.mark.parametrize("alignment", [1, 64, 4096])
def test_shapes_and_strides_are_the_table_s(model: Model, alignment: int) -> None:
    model = Model(model.geometry, model.kind, model.order, model.block_dim, alignment)
    layout = owned(model)
    assert (layout.kind, layout.order) == (KINDS[model.kind], model.order)
    assert layout.config == config(model.geometry, alignment)
    assert (layout.num_blocks, layout.num_regions) == (7, model.num_regions)
    assert layout.region_axes == list(model.axes)
    assert layout.memory == kf.system()
    assert layout.nbytes == model.num_regions * model.region_bytes
    expected = {axis: model.strides.get(axis, 0) for axis in layout.strides}
    assert layout.strides == expected
    for region in layout.regions:
        assert region.nbytes == model.region_bytes
        assert region.addr % max(alignment, 64) == 0
        assert region.memory == kf.system()


@every_model
def test_axes_are_named_outermost_first(model: Model) -> None:
    axes = owned(model).axes
    assert sorted(axes) == sorted(["layer", "outer", "page", "head", "dim"])
    assert (
        axes.index("page") < axes.index("head")
        if model.order == "NHD"
        else axes.index("head") < axes.index("page")
    )
    assert axes[-1] == "dim"


@every_model
def test_numpy_is_the_memory(model: Model) -> None:
    layout = owned(model)
    layout.fill(0)
    arrays = layout.numpy()
    if model.num_regions == 1:
        assert isinstance(arrays, np.ndarray)
        arrays = [arrays]
    assert len(arrays) == model.num_regions
    values = content(model.geometry)
    model.store(values, flat(layout))
    for index, array in enumerate(arrays):
        assert array.dtype == np.float16
        assert array.shape == tuple(model.geometry.extents[axis] for axis in model.axes)
        assert (array.view(np.uint16) == model.view(flat(layout)[index]).view(np.uint16)[..., 0]).all()
        array[...] = index + 1
        assert (flat(layout)[index].view(np.float16) == index + 1).all()


@pytest.mark.parametrize(
    ("dtype", "shown"),
    [
        ("float16", "float16"),
        ("bfloat16", "uint16"),
        ("float32", "float32"),
        ("float64", "float64"),
        ("float8_e4m3fn", "uint8"),
        ("float8_e5m2", "uint8"),
        ("int8", "int8"),
        ("uint8", "uint8"),
        ("int16", "int16"),
        ("int32", "int32"),
        ("int64", "int64"),
    ],
)
def test_dtypes_in_numpy(dtype: str, shown: str) -> None:
    array = owned(Model(small(dtype=dtype), "fc")).numpy()
    assert array.dtype == np.dtype(shown)
    assert array.flags.writeable and array.flags.aligned


def test_views_keep_the_memory_alive() -> None:
    layout = owned(Model(small(), "lw"))
    layout.fill(7)
    array, region = layout.numpy()[2], layout.region(3, 1)
    del layout
    gc.collect()
    owned(Model(small(), "lw")).fill(9)
    assert (array.view(np.uint8) == 7).all()
    assert (np.asarray(region) == 7).all()
    array[...] = 1
    view = array[1:3]
    del array, region
    gc.collect()
    assert (view == 1).all()


@every_model
def test_region_is_where_the_part_lies(model: Model) -> None:
    layout = owned(model)
    layout.fill(GUARD)
    values = content(model.geometry)
    model.store(values, flat(layout))
    for block, layer, outer in [(0, 0, 0), (6, 2, 1), (3, 1, 0)]:
        if model.order == "universal":
            with pytest.raises(kf.LayoutError, match="not contiguous"):
                layout.region(block, layer, outer)
            continue
        region = layout.region(block, layer, outer)
        assert region.nbytes == layout.config.chunk_bytes
        part = values[block, layer, outer]
        if model.order == "HND":
            part = part.swapaxes(0, 1)
        assert (np.asarray(region) == part.ravel()).all()
        assert np.asarray(region).ctypes.data == region.addr


def test_region_defaults_and_limits() -> None:
    layout = owned(Model(small(), "fc"))
    assert layout.region(1, 2).addr == layout.region(1, 2, 0).addr == layout.region(block=1, layer=2).addr
    assert layout.region(1, 2, outer=1).addr == layout.region(1, 2).addr + layout.config.chunk_bytes
    for at in [
        (7, 0, 0),
        (0, 3, 0),
        (0, 0, 2),
        (-1, 0, 0),
        (0, -1, 0),
        (0, 0, -1),
        (1 << 64, 0, 0),
        (0, 1 << 200, 0),
    ]:
        with pytest.raises(kf.LayoutError, match=r"block|layer|outer"):
            layout.region(*at)
    bad: Any = 1.0
    with pytest.raises(TypeError, match="layer"):
        layout.region(0, bad)


def test_single_heads_make_universal_parts_contiguous() -> None:
    layout = owned(Model(small(heads=1), "fc", "universal"))
    assert layout.region(6, 2, 1).nbytes == layout.config.chunk_bytes


def test_layers_cannot_be_cut_from_universal_blocks() -> None:
    cfg = config(small())
    with pytest.raises(kf.LayoutError, match="universal"):
        kf.PhysicalLayout.layer_separate(cfg, kf.system(), order="universal")
    with pytest.raises(kf.LayoutError, match="universal"):
        kf.PhysicalLayout.split_kv(cfg, kf.system(), order="universal")


@pytest.mark.parametrize("word", ["nhd", "", "NHD ", "block", "universal\0"])
def test_words_are_checked(word: Any) -> None:
    cfg = config(small())
    with pytest.raises(kf.LayoutError, match="order"):
        kf.PhysicalLayout.fully_contiguous(cfg, kf.system(), order=word)
    with pytest.raises(kf.LayoutError, match="block_dim"):
        kf.PhysicalLayout.layer_separate(cfg, kf.system(), block_dim=word)


def test_arguments_have_types() -> None:
    cfg: Any = config(small())
    system: Any = kf.system()
    for arguments in [(cfg, "system"), (cfg, None), ("cfg", system), (cfg,)]:
        with pytest.raises(TypeError):
            kf.PhysicalLayout.fully_contiguous(*arguments)
    order: Any = 3
    with pytest.raises(TypeError):
        kf.PhysicalLayout.fully_contiguous(cfg, system, order=order)
    with pytest.raises(TypeError):
        kf.PhysicalLayout()


def test_fill() -> None:
    layout = owned(Model(small(), "fc", alignment=512))
    assert all((region == 0).all() for region in flat(layout)), "system memory starts zeroed"
    layout.fill(255)
    assert all((region == 255).all() for region in flat(layout))
    for value in (-1, 256, 1 << 80):
        with pytest.raises(kf.OptionError, match="value"):
            layout.fill(value)
    bad: Any = 1.5
    with pytest.raises(TypeError, match="value"):
        layout.fill(bad)


def test_finer_pages_share_the_memory() -> None:
    layout = owned(Model(small(page=12), "fc"))
    values = content(small(page=12))
    Model(small(page=12), "fc").store(values, flat(layout))
    fine = layout.with_page_size(4)
    assert (fine.num_blocks, fine.config.page_size) == (21, 4)
    for block in range(21):
        part = values[block // 3, 2, 1, 4 * (block % 3) : 4 * (block % 3) + 4]
        assert (np.asarray(fine.region(block, 2, 1)) == part.ravel()).all()
    assert layout.with_page_size(12).config == layout.config
    assert fine.with_page_size(2).num_blocks == 42
    with pytest.raises(kf.LayoutError, match="pages"):
        fine.numpy()
    for page in (5, 0, -4, 24, 1 << 64):
        with pytest.raises(kf.LayoutError, match="page_size"):
            layout.with_page_size(page)
    fine.fill(3)
    assert (flat(layout)[0] == 3).all()
    del layout
    gc.collect()
    fine.fill(4)
    assert (np.asarray(fine.region(20, 2, 1)) == 4).all()


def test_repr_says_what_it_is() -> None:
    text = repr(owned(Model(small(), "lw", "HND")))
    for part in (
        "LayerSeparate HND",
        "7 blocks",
        "3 layers",
        "2 outer",
        "4 tokens",
        "6 heads",
        "float16",
        "system",
    ):
        assert part in text
    region = owned(Model(small(), "fc")).region(0, 0)
    assert repr(region) == f"Region({region.nbytes} bytes at {region.addr:#x} in system memory)"
    assert [repr(kf.system()), repr(kf.pinned()), repr(kf.device(3))] == ["system()", "pinned()", "device(3)"]


def test_memory_kinds() -> None:
    assert (kf.system().kind, kf.pinned().kind, kf.device(1).kind) == ("system", "pinned", "device")
    assert (kf.system().ordinal, kf.device(1).ordinal) == (None, 1)
    assert kf.device(1) == kf.device(1) != kf.device(2) and kf.system() != kf.pinned()
    assert len({kf.system(), kf.system(), kf.device(0)}) == 2
    for ordinal in (-1, 1 << 31, 1 << 64):
        with pytest.raises(kf.OptionError, match="ordinal"):
            kf.device(ordinal)
    bad: Any = "cuda:0"
    with pytest.raises(TypeError, match="ordinal"):
        kf.device(bad)


def test_no_memory_is_an_error() -> None:
    huge = config(small()).replace(num_blocks=(1 << 32) - 1, page_size=1 << 20)
    with pytest.raises(kf.HostMemoryError) as caught:
        kf.PhysicalLayout.fully_contiguous(huge, kf.system())
    assert caught.value.errno == errno.ENOMEM
    with pytest.raises(kf.LayoutError, match=r"2\^63"):
        config(small()).replace(num_blocks=(1 << 32) - 1, page_size=1 << 40)


def test_region_is_no_cuda_array() -> None:
    region = owned(Model(small(), "fc")).region(0, 0)
    assert region.__array_interface__["data"] == (region.addr, False)
    with pytest.raises(AttributeError):
        _ = region.__cuda_array_interface__
    assert not hasattr(region, "__cuda_array_interface__")


def test_layouts_are_not_pickled() -> None:
    with pytest.raises(TypeError, match="pickle"):
        pickle.dumps(owned(Model(small(), "fc")))


def test_layouts_do_not_leak() -> None:
    def resident() -> int:
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    cfg = config(small()).replace(num_blocks=2000, page_size=16)
    before = resident()
    for _ in range(50):
        layout = kf.PhysicalLayout.fully_contiguous(cfg, kf.system())
        layout.fill(1)
        array = layout.numpy()
        del layout, array
    assert resident() - before < 10 * cfg.block_bytes * 2000 / 4
