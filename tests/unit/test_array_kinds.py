from __future__ import annotations

import array
import gc
from typing import Any

import numpy as np
import pytest
from foreign import AXES, cache, wrap
from support import config, optional, small

import kvferry as kf


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
