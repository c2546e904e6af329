from __future__ import annotations

import array
import gc
import sys
import types
import weakref
from collections import OrderedDict, defaultdict
from typing import Any

import dlpack
import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided
from reference import GUARD, Geometry, Model, content
from support import Cache, config, gpu_reason, optional, small

import kvferry as kf

AXES = "block page head dim"
wrap = kf.PhysicalLayout.from_tensors


def cache(dtype: Any = np.float16, shape: tuple[int, ...] = (7, 4, 6, 5)) -> Any:
    return np.zeros(shape, dtype)


class TestKinds:
    @pytest.mark.parametrize(
        ("dtype", "name"),
        [
            (np.float16, "float16"),
            (np.float32, "float32"),
            (np.float64, "float64"),
            (np.int8, "int8"),
            (np.uint8, "uint8"),
            (np.int16, "int16"),
            (np.int32, "int32"),
            (np.int64, "int64"),
            (np.longlong, "int64"),
            (np.dtype("<f4"), "float32"),
        ],
    )
    def test_numpy_dtypes(self, dtype: Any, name: str) -> None:
        source = cache(dtype)
        layout = wrap(source, axes=AXES)
        assert layout.config.dtype == name
        assert (layout.kind, layout.order, layout.num_regions) == ("Strided", None, 1)
        assert layout.regions[0].addr == source.ctypes.data
        assert layout.nbytes == source.nbytes
        assert layout.numpy().dtype == source.dtype

    @pytest.mark.parametrize(
        "dtype", [np.uint16, np.uint32, np.uint64, np.bool_, np.complex64, "S2", "U1", "V4"]
    )
    def test_dtypes_that_need_a_declaration(self, dtype: Any) -> None:
        with pytest.raises(kf.LayoutError, match=r"^tensors: element type \(.*dtype="):
            wrap(cache(dtype), axes=AXES)

    @pytest.mark.parametrize(
        ("dtype", "declared"),
        [
            (np.uint8, "float8_e4m3fn"),
            (np.uint8, "float8_e5m2"),
            (np.int8, "float8_e4m3fn"),
            (np.bool_, "uint8"),
            (np.uint16, "bfloat16"),
            (np.int16, "bfloat16"),
            (np.uint16, "float16"),
            (np.uint32, "float32"),
            (np.int64, "float64"),
        ],
    )
    def test_declared_over_raw_bytes(self, dtype: Any, declared: str) -> None:
        layout = wrap(cache(dtype), axes=AXES, dtype=declared)
        assert layout.config.dtype == declared
        cfg = layout.config
        assert wrap(cache(dtype), axes=AXES, config=cfg).config == cfg

    @pytest.mark.parametrize(
        ("dtype", "declared"),
        [
            (np.uint8, "bfloat16"),
            (np.uint16, "float8_e4m3fn"),
            (np.float16, "bfloat16"),
            (np.float32, "int32"),
            (np.float64, "int64"),
            (np.complex64, "float64"),
            (np.dtype(">i2"), "bfloat16"),
            (np.dtype(">f4"), "float32"),
            (np.object_, "int64"),
            (np.dtype([("a", "O")]), "int64"),
            (np.dtype("S1"), "uint8"),
        ],
    )
    def test_declared_over_something_else(self, dtype: Any, declared: str) -> None:
        with pytest.raises(kf.LayoutError, match=r"^tensors: "):
            wrap(cache(dtype), axes=AXES, dtype=declared)

    def test_objects_are_never_bytes(self) -> None:
        for dtype in (None, "int64", "float64"):
            with pytest.raises(kf.LayoutError, match=r"'?O"):
                wrap(cache(object), axes=AXES, dtype=dtype)

    def test_declared_dtypes_are_objects_too(self) -> None:
        assert wrap(cache(np.uint16), axes=AXES, dtype=np.dtype("float16")).config.dtype == "float16"
        assert wrap(cache(), axes=AXES, dtype=np.float16).config.dtype == "float16"
        with pytest.raises(kf.LayoutError, match="unknown dtype"):
            wrap(cache(), axes=AXES, dtype="half")

    def test_ml_dtypes(self) -> None:
        ml = optional("ml_dtypes")
        for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
            source = cache(getattr(ml, name))
            layout = wrap(source, axes=AXES)
            assert layout.config.dtype == name
            assert layout.regions[0].addr == source.ctypes.data
        with pytest.raises(kf.LayoutError, match="bfloat16"):
            wrap(cache(ml.bfloat16), axes=AXES, dtype="float16")
        with pytest.raises(kf.LayoutError, match=r"float8_e8m0fnu|V1"):
            wrap(cache(ml.float8_e8m0fnu), axes=AXES)

    @pytest.mark.parametrize(
        "make",
        [
            lambda: bytearray(24),
            lambda: memoryview(bytearray(24)),
            lambda: array.array("B", bytes(24)),
            lambda: np.zeros(24, np.uint8),
        ],
    )
    def test_flat_bytes(self, make: Any) -> None:
        owner = make()
        view = memoryview(owner).cast("B").cast("B", (4, 6))
        layout = wrap(view, axes="block dim")
        assert (layout.num_blocks, layout.config.head_dim, layout.config.dtype) == (4, 6, "uint8")
        layout.fill(7)
        assert bytes(memoryview(owner).cast("B")) == bytes([7] * 24)

    def test_one_dimensional_arrays_have_no_blocks_and_rows(self) -> None:
        with pytest.raises(kf.LayoutError, match="dim"):
            wrap(bytearray(8), axes="block")
        with pytest.raises(kf.LayoutError, match="1 dimensions"):
            wrap(bytearray(8), axes="block dim")
        with pytest.raises(kf.LayoutError, match="tensors: a scalar"):
            wrap(np.array(1.0), axes="block dim")

    @pytest.mark.parametrize("code", "bhilqfd")
    def test_array_array(self, code: Any) -> None:
        owner: Any = array.array(code, [0] * 24)
        layout = wrap(memoryview(owner).cast("B").cast(code, (4, 6)), axes="block dim")
        assert layout.config.chunk_bytes == 6 * owner.itemsize

    def test_what_is_no_array(self) -> None:
        bad: list[Any] = [3, "kv", None, object(), iter([]), {1, 2}, range(3), kf.system()]
        for value in bad:
            with pytest.raises(TypeError, match=r"^tensors: "):
                wrap(value, axes=AXES)
            with pytest.raises(TypeError, match=r"^tensors\[1\]: "):
                wrap([cache(), value], axes=AXES)

    def test_a_released_memoryview(self) -> None:
        view = memoryview(bytearray(8))
        view.release()
        with pytest.raises(ValueError, match="released") as caught:
            wrap([view], axes="block dim")
        assert caught.value.__notes__ == ["kvferry was reading tensors[0]"]

    def test_datetimes_have_no_buffer(self) -> None:
        with pytest.raises((kf.LayoutError, BufferError)):
            wrap(cache("M8[s]"), axes=AXES)

    def test_a_region_of_another_layout(self) -> None:
        layout = kf.PhysicalLayout.fully_contiguous(config(small()), kf.system())
        again = wrap(layout.regions[0], axes=" ".join(layout.region_axes))
        assert again.config == layout.config and again.regions[0].addr == layout.regions[0].addr
        del layout
        gc.collect()
        again.fill(3)


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


class TestDlpack:
    def test_versioned_and_legacy(self) -> None:
        for version, knows in [((1, 0), True), ((1, 3), True), (None, True), (None, False)]:
            source = cache(np.uint16)
            producer = dlpack.Producer(source, version=version, knows_versions=knows)
            layout = wrap(producer, axes=AXES)
            assert (layout.config.dtype, layout.regions[0].addr) == ("bfloat16", source.ctypes.data)
            assert "stream" not in producer.calls[0]
            assert producer.calls[0]["max_version"] == (1, 0)
            # Read and kept, never consumed: whoever made it frees it.
            assert not producer.capsule_name().startswith(b"used")
            kept = sys.getrefcount(producer.capsule)
            del layout
            kf.usable_cpus()
            left = sys.getrefcount(producer.capsule)
            assert left == kept - 1

    @pytest.mark.parametrize(
        ("code", "dtype"),
        [
            ((0, 8, 1), "int8"),
            ((0, 16, 1), "int16"),
            ((0, 32, 1), "int32"),
            ((0, 64, 1), "int64"),
            ((1, 8, 1), "uint8"),
            ((2, 16, 1), "float16"),
            ((2, 32, 1), "float32"),
            ((2, 64, 1), "float64"),
            ((4, 16, 1), "bfloat16"),
            ((10, 8, 1), "float8_e4m3fn"),
            ((12, 8, 1), "float8_e5m2"),
        ],
    )
    def test_type_codes(self, code: tuple[int, int, int], dtype: str) -> None:
        source = cache({8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}[code[1]])
        assert wrap(dlpack.Producer(source, code), axes=AXES).config.dtype == dtype
        assert wrap(dlpack.Producer(source, code), axes=AXES, dtype=dtype).config.dtype == dtype

    def test_raw_codes_can_be_declared(self) -> None:
        source = cache(np.uint8)
        for code in ((1, 8, 1), (0, 8, 1), (6, 8, 1)):
            producer = dlpack.Producer(source, code)
            assert wrap(producer, axes=AXES, dtype="float8_e4m3fn").config.dtype == "float8_e4m3fn"
        with pytest.raises(kf.LayoutError, match="float8_e5m2, expected float8_e4m3fn"):
            wrap(dlpack.Producer(source, (12, 8, 1)), axes=AXES, dtype="float8_e4m3fn")

    @pytest.mark.parametrize(
        "code", [(17, 4, 1), (1, 4, 1), (2, 16, 2), (5, 64, 1), (4, 32, 1), (1, 8, 4), (9, 8, 1)]
    )
    @pytest.mark.parametrize("declared", [None, "uint8", "bfloat16"])
    def test_codes_that_are_refused(self, code: tuple[int, int, int], declared: str | None) -> None:
        with pytest.raises(kf.LayoutError, match=f"DLPack type code {code[0]}, {code[1]} bits"):
            wrap(dlpack.Producer(cache(np.uint8), code), axes=AXES, dtype=declared)

    def test_read_only_flag(self, ctx: kf.TransferContext) -> None:
        layout = wrap(dlpack.Producer(cache(np.uint16), read_only=True), axes=AXES)
        assert not layout.numpy().flags.writeable
        with pytest.raises(kf.LayoutError, match="read-only"):
            ctx.transfer(layout, layout, [0], [1])

    def test_strides_and_offset(self) -> None:
        source = cache(np.uint16)
        layout = wrap(dlpack.Producer(source, strides=False), axes=AXES)
        assert layout.strides["page"] == 6 * 5 * 2
        layout = wrap(dlpack.Producer(source, offset=64), axes=AXES)
        assert layout.regions[0].addr == source.ctypes.data
        layout = wrap(dlpack.Producer(source.transpose(0, 2, 1, 3)), axes="block head page dim")
        assert layout.strides["page"] == 6 * 5 * 2

    def test_what_is_refused(self) -> None:
        source = cache(np.uint16)
        refused: list[tuple[Any, type[Exception], str]] = [
            (dlpack.Producer(source, null=True), kf.LayoutError, "null"),
            (dlpack.Producer(source, null=True, offset=16), kf.LayoutError, "null"),
            (dlpack.Producer(source, version=(2, 0)), kf.Unsupported, "DLPack version 2"),
            (dlpack.Producer(source, device=13), kf.Unsupported, "device type 13"),
            (dlpack.Producer(source, device=7), kf.Unsupported, "device type 7"),
            (dlpack.Producer(source, shape=(7, 4, 6, 0)), kf.LayoutError, "empty"),
            (dlpack.Producer(source, shape=(7, 4, -6, 5)), kf.LayoutError, "empty"),
            (dlpack.Producer(source, shape=(7, 4)), kf.LayoutError, "dimensions"),
            (dlpack.Producer(source, name=b"used_dltensor"), ValueError, "incorrect name"),
            (dlpack.Producer(source[::-1]), kf.LayoutError, "negative"),
            (dlpack.Producer(source, shape=(1 << 62, 4, 6, 5)), kf.LayoutError, "exceed"),
        ]
        for producer, error, words in refused:
            with pytest.raises(error, match=words):
                wrap([producer], axes=AXES)

    def test_device_memory_without_a_driver(self) -> None:
        error = kf.LayoutError if gpu_reason() is None else kf.CudaError
        producer = dlpack.Producer(cache(np.uint16), device=dlpack.CUDA)
        with pytest.raises(error):
            wrap(producer, axes=AXES)
        assert producer.calls[0]["stream"] == -1

        class CudaArray:
            def __init__(self, source: Any) -> None:
                self.__cuda_array_interface__ = {**source.__array_interface__, "version": 3}

        with pytest.raises(error):
            wrap(CudaArray(cache()), axes=AXES)

    def test_producers_that_raise(self) -> None:
        class Grad:
            def __dlpack_device__(self) -> tuple[int, int]:
                return 1, 0

            def __dlpack__(self, **options: Any) -> Any:
                raise BufferError("requires grad")

        class Nonsense(Grad):
            def __dlpack__(self, **options: Any) -> Any:
                return 3

        with pytest.raises(BufferError, match="grad") as caught:
            wrap({"k": cache(), "v": Grad()}, axes=AXES)
        assert caught.value.__notes__ == ["kvferry was reading tensors['v']"]
        with pytest.raises(TypeError):
            wrap(Nonsense(), axes=AXES)

    def test_numpy_s_own_producer(self) -> None:
        class Only:
            def __init__(self, source: Any) -> None:
                self.__dlpack__ = source.__dlpack__
                self.__dlpack_device__ = source.__dlpack_device__

        source = cache(np.float32)
        assert wrap(Only(source), axes=AXES).regions[0].addr == source.ctypes.data


class TestArrayInterface:
    class Array:
        def __init__(self, source: Any, **changes: Any) -> None:
            self.source = source
            self.__array_interface__ = {**source.__array_interface__, **changes}

    def test_arrays(self) -> None:
        source = cache()
        layout = wrap(self.Array(source), axes=AXES)
        assert layout.regions[0].addr == source.ctypes.data
        view = source.transpose(0, 2, 1, 3)
        assert wrap(self.Array(view), axes="block head page dim").strides == wrap(source, axes=AXES).strides

    @pytest.mark.parametrize(
        "change",
        [
            {"typestr": ">f2"},
            {"typestr": "|O8"},
            {"typestr": "<f"},
            {"typestr": ""},
            {"typestr": "é€"},
            {"shape": (7, 4, 6, -5)},
            {"shape": (7, 4)},
            {"data": (0, False)},
            {"mask": [1]},
            {"strides": (2, 2, 2, 2)},
            {"strides": (1 << 62, 60, 10, 2)},
        ],
    )
    def test_lies(self, change: dict[str, Any]) -> None:
        with pytest.raises(kf.LayoutError):
            wrap(self.Array(cache(), **change), axes=AXES)

    @pytest.mark.parametrize("change", [{"data": None}, {"shape": None}, {"typestr": 3}, {"data": (1, 2, 3)}])
    def test_nonsense(self, change: dict[str, Any]) -> None:
        with pytest.raises((TypeError, ValueError)):
            wrap(self.Array(cache(), **change), axes=AXES)


def test_torch_cpu_tensors(ctx: kf.TransferContext) -> None:
    torch = optional("torch")
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float16", "int64"):
        tensors = [torch.zeros((2, 7, 4, 6, 5), dtype=getattr(torch, name)) for _ in range(3)]
        layout = wrap(tensors, axes="outer block page head dim")
        assert layout.config == config(small(dtype=name))
        assert [region.addr for region in layout.regions] == [tensor.data_ptr() for tensor in tensors]


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
