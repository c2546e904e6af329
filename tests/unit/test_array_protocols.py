from __future__ import annotations

import sys
from typing import Any

import dlpack
import numpy as np
import pytest
from foreign import AXES, cache, wrap
from support import config, gpu_reason, optional, small

import kvferry as kf


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
            (dlpack.Producer(source, shape=(7, 4, -6, 5)), kf.ProtocolError, "negative"),
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
