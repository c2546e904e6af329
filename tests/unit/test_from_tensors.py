from __future__ import annotations

import gc
import sys
import types
import weakref
from collections import OrderedDict, defaultdict
from typing import Any

import numpy as np
import pytest
from foreign import AXES, cache, wrap
from numpy.lib.stride_tricks import as_strided
from reference import GUARD, Geometry, Model, content
from support import Cache, config, small

import kvferry as kf


class TestStructure:
    def test_one_array_with_every_axis(self) -> None:
        source = cache(shape=(7, 3, 2, 4, 6, 5))
        layout = wrap(source, axes="block layer outer page head dim", config=config(small()))
        assert layout.config == config(small())
        assert layout.region_axes == ["block", "layer", "outer", "page", "head", "dim"]
        assert layout.strides == dict(zip(layout.region_axes, source.strides, strict=True))

    def test_commas_separate_too(self) -> None:
        assert wrap(cache(), axes="block, page,head dim").config == wrap(cache(), axes=AXES).config

    @pytest.mark.parametrize("container", [list, tuple])
    def test_one_array_per_layer(self, container: Any) -> None:
        arrays = [cache(shape=(2, 7, 4, 6, 5)) for _ in range(3)]
        layout = wrap(container(arrays), axes="outer block page head dim", config=config(small()))
        assert [region.addr for region in layout.regions] == [array.ctypes.data for array in arrays]
        assert layout.config == config(small())

    @pytest.mark.parametrize("pair", [list, tuple])
    def test_pairs_of_k_and_v(self, pair: Any) -> None:
        pairs = [pair([cache(), cache()]) for _ in range(3)]
        layout = wrap(pairs, axes=AXES, config=config(small()))
        assert (layout.num_regions, layout.config.outer_dim) == (6, 2)
        assert [region.addr for region in layout.regions] == [
            part.ctypes.data for k_v in pairs for part in k_v
        ]

    def test_k_and_v_interleaved_in_one_array(self) -> None:
        kv = cache(shape=(7, 2, 4, 6, 5))
        layout = wrap([(kv[:, 0], kv[:, 1])], axes=AXES)
        assert (layout.config.num_layers, layout.config.outer_dim) == (1, 2)
        assert layout.regions[1].addr - layout.regions[0].addr == kv.strides[1]

    def test_mappings_in_their_order(self) -> None:
        arrays = {f"model.layers.{index}": cache() for index in (2, 0, 1)}
        kinds: list[Any] = [
            arrays,
            OrderedDict(arrays),
            defaultdict(list, arrays),
            types.MappingProxyType(arrays),
        ]
        for kind in kinds:
            layout = wrap(kind, axes=AXES)
            assert [region.addr for region in layout.regions] == [
                each.ctypes.data for each in arrays.values()
            ]
        pairs = {"a": (cache(), cache()), "b": (cache(), cache())}
        assert wrap(pairs, axes=AXES).num_regions == 4

    def test_errors_name_the_array(self) -> None:
        arrays = {"layers.0": cache(), "layers.1": cache(shape=(8, 4, 6, 5))}
        with pytest.raises(kf.LayoutError, match=r"tensors\['layers.1'\].*block is 8, expected 7"):
            wrap(arrays, axes=AXES)
        with pytest.raises(kf.LayoutError, match=r"tensors\[1\] V differs from tensors\[0\] K"):
            wrap([(cache(), cache()), (cache(), cache(shape=(7, 4, 3, 5)))], axes=AXES)
        with pytest.raises(kf.LayoutError, match=r"tensors\[1\]: dtype is float32, expected float16"):
            wrap([cache(), cache(np.float32)], axes=AXES)
        with pytest.raises(kf.LayoutError, match=r"tensors\[1\].*the stride of block"):
            wrap([cache(), cache(shape=(7, 5, 6, 5))[:, :4]], axes=AXES)
        with pytest.raises(kf.LayoutError, match=r"tensors\[1\] has 3 dimensions, but 4 axes"):
            wrap([cache(), cache(shape=(7, 4, 30))], axes=AXES)

    def test_a_key_whose_repr_changes_the_dict(self) -> None:
        class Key:
            def __repr__(self) -> str:
                arrays.clear()
                return "Key()"

        arrays: dict[Any, Any] = {Key(): cache(), Key(): cache()}
        assert wrap(arrays, axes=AXES).num_regions == 2

    def test_ambiguity_is_an_error(self) -> None:
        with pytest.raises(kf.LayoutError, match="empty"):
            wrap([], axes=AXES)
        with pytest.raises(kf.LayoutError, match="empty"):
            wrap({}, axes=AXES)
        with pytest.raises(kf.LayoutError, match="mixes"):
            wrap([cache(), (cache(), cache())], axes=AXES)
        with pytest.raises(kf.LayoutError, match=r"tensors\[0\] must be a \(K, V\) pair, got 3"):
            wrap([(cache(), cache(), cache())], axes=AXES)
        with pytest.raises(kf.LayoutError, match="layer"):
            wrap([cache(), cache()], axes="layer block page dim")
        with pytest.raises(kf.LayoutError, match="outer"):
            wrap([(cache(), cache())], axes="block outer page dim")
        with pytest.raises(kf.LayoutError, match="twice"):
            wrap(cache(), axes="block page page dim")
        with pytest.raises(kf.LayoutError, match='unknown axis "tokens"'):
            wrap(cache(), axes="block tokens head dim")
        for axes in ("", "page head dim", "block page head"):
            with pytest.raises(kf.LayoutError, match=r"axes must name|dimensions"):
                wrap(cache(), axes=axes)
        bad: Any = wrap
        with pytest.raises(TypeError, match="axes"):
            bad(cache())
        with pytest.raises(TypeError):
            bad(cache(), AXES)
        with pytest.raises(TypeError):
            bad(cache(), axes=["block", "page", "head", "dim"])

    @pytest.mark.parametrize(
        "change",
        [
            {"num_blocks": 8},
            {"num_layers": 2},
            {"outer_dim": 1},
            {"page_size": 2},
            {"num_heads": 3},
            {"head_dim": 10},
            {"dtype": "bfloat16"},
            {"dtype": "float32"},
        ],
    )
    def test_a_config_must_agree(self, change: dict[str, Any]) -> None:
        arrays = [cache(shape=(2, 7, 4, 6, 5)) for _ in range(3)]
        with pytest.raises(kf.LayoutError, match=r"tensors\[0\].*expected"):
            wrap(arrays, axes="outer block page head dim", config=config(small()).replace(**change))

    def test_a_config_brings_the_shard(self) -> None:
        shard = config(small(heads=12)).shard_heads(1, 2)
        layout = wrap(
            [cache(shape=(2, 7, 4, 6, 5)) for _ in range(3)], axes="outer block page head dim", config=shard
        )
        assert layout.config == shard

    def test_dtype_and_config_that_disagree(self) -> None:
        arrays = [cache(np.uint16, (2, 7, 4, 6, 5)) for _ in range(3)]
        with pytest.raises(kf.LayoutError, match="dtype is bfloat16, expected float16"):
            wrap(arrays, axes="outer block page head dim", config=config(small()), dtype="bfloat16")

    def test_declared_alignment_is_checked(self) -> None:
        raw = np.zeros(7 * 256 + 4096, np.uint8)
        start = -raw.ctypes.data % 4096
        aligned = raw[start : start + 7 * 256].reshape(7, 256)
        cfg = kf.LayoutConfig(
            num_blocks=7, num_layers=1, outer_dim=1, page_size=1, inner_dim=256, dtype="uint8", alignment=256
        )
        wrap(aligned, axes="block dim", config=cfg)
        with pytest.raises(kf.LayoutError, match="aligns them to 512"):
            wrap(aligned, axes="block dim", config=cfg.replace(alignment=512))
        shifted = raw[start + 1 : start + 1 + 7 * 256].reshape(7, 256)
        with pytest.raises(kf.LayoutError, match="aligns them to 256"):
            wrap(shifted, axes="block dim", config=cfg)


class TestStrides:
    @pytest.mark.parametrize(
        ("view", "axes"),
        [
            (lambda a: a.transpose(0, 2, 1, 3), "block head page dim"),
            (lambda a: a.transpose(3, 2, 1, 0), "dim head page block"),
            (lambda a: a[::2], AXES),
            (lambda a: a[:, :3, 1:5], AXES),
            (lambda a: a[..., 1:4], AXES),
            (lambda a: a[..., ::2], AXES),
            (lambda a: a[:, :, :1], AXES),
        ],
    )
    def test_views_of_arrays(self, view: Any, axes: str, ctx: kf.TransferContext) -> None:
        base = np.arange(7 * 4 * 6 * 5, dtype=np.float32).reshape(7, 4, 6, 5)
        expected = view(base).copy()
        layout = wrap(view(base), axes=axes)
        assert (layout.numpy() == expected).all() and layout.numpy().strides == view(base).strides
        # Moves through the strides into plain memory.
        plain = np.zeros_like(expected)
        blocks = list(range(layout.num_blocks))
        ctx.transfer(layout, wrap(plain, axes=axes), blocks, blocks).wait()
        assert (plain == expected).all()

    def test_padding_between_rows_is_not_written(self, ctx: kf.TransferContext) -> None:
        geometry = small(blocks=5)
        source = Cache(Model(geometry, "fc"))
        padded = Cache(Model(geometry, "lw", pad={"page": 6, "head": 2, "block": 30}), own=False)
        values = source.fill(1)
        padded.poison()
        ctx.transfer(source.layout, padded.layout, range(5), range(5)).wait()
        padded.check(values)

    def test_negative_strides(self) -> None:
        for view in (cache()[::-1], cache()[:, ::-1], cache()[..., ::-1]):
            with pytest.raises(kf.LayoutError, match="negative stride"):
                wrap(view, axes=AXES)
        # Of one element, a stride is never used.
        assert wrap(cache()[:, :1][:, ::-1], axes=AXES).config.page_size == 1

    def test_broadcast_elements_share_bytes(self) -> None:
        for source in (
            np.broadcast_to(np.float16(0), (7, 4, 6, 5)),
            as_strided(cache(), (3, 4, 6, 5), (2, 60, 10, 2)),
        ):
            with pytest.raises(kf.LayoutError, match="overlap"):
                wrap(source, axes=AXES)

    @pytest.mark.parametrize("shape", [(0, 4, 6, 5), (7, 0, 6, 5), (7, 4, 6, 0)])
    def test_empty_dimensions(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(kf.LayoutError, match=f"^tensors: dimension {shape.index(0)} is empty"):
            wrap(cache(shape=shape), axes=AXES)

    @pytest.mark.parametrize("offset", [0, 1, 2, 4, 8])
    @pytest.mark.parametrize("dtype", ["uint8", "float16", "float64"])
    def test_misaligned_bases(self, offset: int, dtype: str, ctx: kf.TransferContext) -> None:
        geometry = small(dtype=dtype)
        source = Cache(Model(geometry, "lw"), own=False, offset=offset)
        target = Cache(Model(geometry, "fc", "universal"), own=False, offset=3)
        values = source.fill(1)
        target.poison()
        ctx.transfer(source.layout, target.layout, range(7), range(7)).wait()
        target.check(values)
        source.check(values)


class TestAccess:
    def test_read_only_memory_is_a_source_only(self, ctx: kf.TransferContext) -> None:
        values = np.arange(24, dtype=np.uint8).reshape(4, 6)
        values.flags.writeable = False
        sources: list[Any] = [values, memoryview(bytes(values)).cast("B", (4, 6))]
        for source in sources:
            layout = wrap(source, axes="block dim")
            assert not layout.numpy().flags.writeable
            target = np.zeros((4, 6), np.uint8)
            ctx.transfer(layout, wrap(target, axes="block dim"), [0, 2], [2, 1]).wait()
            assert (target[[2, 1]] == values[[0, 2]]).all()
            with pytest.raises(kf.LayoutError, match="read-only"):
                ctx.transfer(wrap(target, axes="block dim"), layout, [0], [0])
            with pytest.raises(kf.LayoutError, match="read-only"):
                ctx.route(wrap(target, axes="block dim"), layout)
            with pytest.raises(kf.LayoutError, match="read-only"):
                layout.fill(0)
        assert (values == np.arange(24).reshape(4, 6)).all()

    def test_one_read_only_array_of_several(self, ctx: kf.TransferContext) -> None:
        arrays = [cache(), cache()]
        arrays[1].flags.writeable = False
        layout = wrap(arrays, axes=AXES)
        with pytest.raises(kf.LayoutError, match="region 1"):
            ctx.transfer(layout, layout, [0], [1])

    def test_a_layout_keeps_its_arrays(self) -> None:
        source = cache()
        gone = weakref.ref(source)
        layout = wrap([source], axes=AXES)
        view = layout.numpy()
        del source
        gc.collect()
        assert gone() is not None
        del layout
        gc.collect()
        assert gone() is not None
        del view
        gc.collect()
        assert gone() is None

    def test_owners_cannot_shrink_meanwhile(self) -> None:
        owner = bytearray(24)
        layout = wrap(memoryview(owner).cast("B", (4, 6)), axes="block dim")
        with pytest.raises(BufferError):
            owner.extend(b"x")
        del layout
        gc.collect()
        owner.extend(b"x")

    def test_a_failed_wrap_lets_go(self) -> None:
        source = cache()
        before = sys.getrefcount(source)
        for _ in range(5):
            with pytest.raises(kf.LayoutError):
                wrap([source, cache(np.float32)], axes=AXES)
        kf.usable_cpus()
        assert sys.getrefcount(source) == before


def test_every_kind_of_cache_round_trips_through_numpy(ctx: kf.TransferContext) -> None:
    geometry = Geometry(blocks=4, layers=2, outer=2, page=4, heads=2, dim=8, dtype="float8_e4m3fn")
    for kind in ("fc", "lw", "split"):
        source = Cache(Model(geometry, kind, "HND", pad={"block": 5}), own=False)
        target = Cache(Model(geometry, "fc", "universal"))
        values = source.fill(3)
        target.poison()
        ctx.transfer(source.layout, target.layout, [3, 1, 0, 2], [3, 1, 0, 2]).wait()
        target.check(values)
        assert (values == content(geometry, 3)).all()
        assert all((whole[:64] == GUARD).all() for whole in source.guarded)
