"""Arrays out: DLPack and buffers of `Region`, read by NumPy and by a consumer written after `dlpack.h`."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import weakref
from pathlib import Path
from typing import Any, ClassVar

import dlpack
import numpy as np
import pytest

import kvferry as kf

VERSIONED, LEGACY = (1, 0), None
BITS = {"float8_e4m3fn": (10, 8), "float8_e5m2": (12, 8), "bfloat16": (4, 16), "uint8": (1, 8)}
BITS |= {f"float{bits}": (2, bits) for bits in (16, 32, 64)}
BITS |= {f"int{bits}": (0, bits) for bits in (8, 16, 32, 64)}
NUMPY = [name for name in BITS if hasattr(np, name)]
EXOTIC = {"bfloat16": "H", "float8_e4m3fn": "B", "float8_e5m2": "B"}
SHAPE = (7, 3, 2, 4, 6, 5)
USED = (b"used_dltensor", b"used_dltensor_versioned")
AXES = "block layer outer page head dim"

_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.argtypes = [ctypes.py_object, ctypes.c_char_p]
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype = ctypes.c_void_p
_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_rename = ctypes.pythonapi.PyCapsule_SetName
_rename.argtypes = [ctypes.py_object, ctypes.c_char_p]
# A CFUNCTYPE call releases the GIL.
_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


SIMPLE, WRITABLE, FORMAT, ND, STRIDES = 0, 1, 4, 8, 0x18
C_CONTIGUOUS, F_CONTIGUOUS, ANY_CONTIGUOUS = 0x38, 0x58, 0x98


class PyBuffer(ctypes.Structure):
    _fields_: ClassVar = [
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        *[(name, ctypes.c_void_p) for name in ("shape", "strides", "suboffsets", "internal")],
    ]


_get = ctypes.pythonapi.PyObject_GetBuffer
_get.argtypes = [ctypes.py_object, ctypes.c_void_p, ctypes.c_int]
_release = ctypes.pythonapi.PyBuffer_Release
_release.restype = None
_release.argtypes = [ctypes.c_void_p]


class Consumer:
    """Takes a capsule as `dlpack.h` says: reads it, renames it, calls the deleter once."""

    def __init__(self, capsule: Any) -> None:
        self.versioned = bool(_is_valid(capsule, b"dltensor_versioned"))
        name = b"dltensor_versioned" if self.versioned else b"dltensor"
        self.address = _pointer(capsule, name)
        kind: Any = dlpack.ManagedVersioned if self.versioned else dlpack.Managed
        self.managed = kind.from_address(self.address)
        tensor = self.managed.tensor
        self.device = (tensor.device.device_type, tensor.device.device_id)
        self.dtype = (tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes)
        self.shape = tuple(tensor.shape[: tensor.ndim])
        self.strides = tuple(tensor.strides[: tensor.ndim])
        self.addr = tensor.data + tensor.byte_offset
        # A capsule keeps the pointer to its name: these are never freed.
        _rename(capsule, USED[self.versioned])

    def delete(self) -> None:
        _Deleter(self.managed.deleter)(self.address)


def make(dtype: str = "float16", *, alignment: int = 1, blocks: int = 7) -> kf.PhysicalLayout:
    cfg = kf.LayoutConfig(
        num_blocks=blocks,
        num_layers=3,
        outer_dim=2,
        page_size=4,
        num_heads=6,
        head_dim=5,
        dtype=dtype,
        alignment=alignment,
    )
    return kf.PhysicalLayout.fully_contiguous(cfg, kf.system())


def borrow(array: Any) -> kf.PhysicalLayout:
    return kf.PhysicalLayout.from_tensors(array, axes="block page head dim")


def frozen() -> tuple[Any, kf.PhysicalLayout]:
    array = np.arange(840, dtype=np.int32).reshape(7, 4, 6, 5)
    array.setflags(write=False)
    return array, borrow(array)


def columns() -> kf.PhysicalLayout:
    """Element by element outermost, as Fortran has it."""
    return borrow(np.zeros((7, 4, 6, 5), np.int32, order="F"))


def mapped(addr: int) -> bool:
    ranges = (
        line.split(maxsplit=1)[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()
    )
    return any(int(start, 16) <= addr < int(end, 16) for start, end in ranges)


def watched() -> tuple[kf.Region, weakref.ref[Any]]:
    """A region of a layout that nobody else holds, over an array whose end can be seen."""
    array = np.arange(840, dtype=np.float32).reshape(7, 4, 6, 5)
    return borrow(array).regions[0], weakref.ref(array)


def gone(array: weakref.ref[Any]) -> bool:
    """Whether the array is no more; what was dropped without the GIL goes at the next call into kvferry."""
    kf.usable_cpus()
    gc.collect()
    return array() is None


class TestTensor:
    @pytest.mark.parametrize("max_version", [VERSIONED, (1, 7), (2, 0), LEGACY, (0, 8)])
    @pytest.mark.parametrize("dtype", BITS)
    def test_fields(self, dtype: Any, max_version: tuple[int, int] | None) -> None:
        layout = make(dtype, alignment=4096)
        region = layout.regions[0]
        assert region.__dlpack_device__() == (dlpack.CPU, 0)
        tensor = Consumer(region.__dlpack__(max_version=max_version))
        code, bits = BITS[dtype]
        assert tensor.versioned == (max_version is not None and max_version[0] >= 1)
        assert (tensor.dtype, tensor.device) == ((code, bits, 1), (dlpack.CPU, 0))
        assert (tensor.addr, tensor.shape) == (region.addr, SHAPE)
        steps = [layout.strides[axis] for axis in layout.region_axes]
        assert [step * bits // 8 for step in tensor.strides] == steps
        assert steps[0] == 4096 * -(-720 * bits // 8 // 4096)
        if tensor.versioned:
            # The 8-bit floats came with 1.1.
            assert (tensor.managed.major, tensor.managed.minor) == (1, int(dtype.startswith("float8")))
            assert tensor.managed.flags == 0
        tensor.delete()

    def test_a_region_of_bytes(self) -> None:
        layout = make()
        region = layout.region(2, 1, 1)
        tensor = Consumer(region.__dlpack__())
        assert (tensor.dtype, tensor.shape, tensor.strides) == ((1, 8, 1), (region.nbytes,), (1,))
        assert tensor.addr == region.addr
        tensor.delete()

    def test_strides_that_are_no_elements(self) -> None:
        rows = np.zeros((7, 4, 6), np.dtype([("row", np.float32, 5), ("odd", np.uint8)]))["row"]
        region = borrow(rows).regions[0]
        with pytest.raises(BufferError, match="126 bytes is no whole number of float32"):
            region.__dlpack__(max_version=VERSIONED)
        assert memoryview(region).strides == (504, 126, 21, 4)

    def test_options(self) -> None:
        region = make().regions[0]
        for options in ({"copy": False}, {"copy": None}, {"dl_device": (1, 0)}, {"stream": None}):
            assert Consumer(region.__dlpack__(**options)).shape == SHAPE
        with pytest.raises(BufferError, match="never a copy"):
            region.__dlpack__(copy=True)
        for device in [(2, 0), (1, 1), (3, 0)]:
            with pytest.raises(BufferError, match="does not copy it"):
                region.__dlpack__(dl_device=device)
        for stream in (-1, 0, 1, 2):
            with pytest.raises(BufferError, match="stream must be None"):
                region.__dlpack__(stream=stream)


class TestNumPy:
    @pytest.mark.parametrize("dtype", NUMPY)
    def test_from_dlpack(self, dtype: Any) -> None:
        layout = make(dtype, alignment=64)
        array = np.from_dlpack(layout.regions[0])
        assert (array.dtype, array.shape) == (np.dtype(dtype), SHAPE)
        array[...] = np.arange(array.size).reshape(SHAPE) % 100
        assert (layout.numpy() == array).all()
        assert (np.asarray(layout.regions[0]) == array).all()
        del layout
        gc.collect()
        assert array[6, 2, 1, 3, 5, 4] == (array.size - 1) % 100

    @pytest.mark.skipif(sys.version_info < (3, 12), reason="Python 3.12 made __buffer__ callable")
    def test_every_request_by_python(self) -> None:
        region: Any = make().regions[0]
        for flags in range(1 << 10):
            try:
                view = region.__buffer__(flags)
            except (BufferError, ValueError):
                continue
            assert view.nbytes == memoryview(region).nbytes

    def test_read_only(self) -> None:
        array, layout = frozen()
        region = layout.regions[0]
        exported = np.from_dlpack(region)
        assert not exported.flags.writeable
        assert (exported == array).all()
        tensor = Consumer(region.__dlpack__(max_version=VERSIONED))
        assert tensor.managed.flags == 1
        tensor.delete()
        for version in (LEGACY, (0, 9)):
            with pytest.raises(BufferError, match="read-only"):
                region.__dlpack__(max_version=version)

    @pytest.mark.parametrize("dtype", BITS)
    def test_into_kvferry_again(self, dtype: Any) -> None:
        layout = make(dtype, alignment=64)
        layout.fill_pattern(5)
        (region,) = layout.regions
        again = kf.PhysicalLayout.from_tensors(region, axes=AXES)
        assert again.config.dtype == dtype
        assert again.regions[0].addr == region.addr
        assert again.strides == layout.strides
        del layout, region
        gc.collect()
        again.verify_pattern(5)

    def test_read_only_into_kvferry_again(self) -> None:
        _, layout = frozen()
        again = borrow(layout.regions[0])
        with pytest.raises(kf.LayoutError, match="read-only"):
            again.fill(0)


class TestLifetime:
    @pytest.mark.parametrize("max_version", [VERSIONED, LEGACY])
    def test_a_tensor_keeps_the_layout_until_deleted(self, max_version: tuple[int, int] | None) -> None:
        region, array = watched()
        capsule = region.__dlpack__(max_version=max_version)
        tensor = Consumer(capsule)
        del region, capsule
        assert not gone(array)
        assert (ctypes.c_float * 840).from_address(tensor.addr)[:] == list(range(840))
        tensor.delete()
        assert gone(array)

    @pytest.mark.parametrize("max_version", [VERSIONED, LEGACY])
    def test_a_capsule_nobody_takes(self, max_version: tuple[int, int] | None) -> None:
        region, array = watched()
        capsule = region.__dlpack__(max_version=max_version)
        del region
        assert not gone(array)
        del capsule
        assert gone(array)

    @pytest.mark.parametrize("max_version", [VERSIONED, LEGACY])
    def test_deleted_on_a_thread_that_is_not_python_s(self, max_version: tuple[int, int] | None) -> None:
        layout = make("float32", blocks=20_000)
        addr = layout.regions[0].addr
        tensor = Consumer(layout.regions[0].__dlpack__(max_version=max_version))
        del layout
        gc.collect()
        assert mapped(addr)
        # A thread of the C library's, which runs the deleter itself: the interpreter never hears of it.
        libc = ctypes.CDLL(None)
        thread = ctypes.c_ulong()
        start, argument = ctypes.c_void_p(tensor.managed.deleter), ctypes.c_void_p(tensor.address)
        assert libc.pthread_create(ctypes.byref(thread), None, start, argument) == 0
        assert libc.pthread_join(thread, None) == 0
        assert not mapped(addr)

    def test_many_threads(self) -> None:
        region, array = watched()
        barrier = threading.Barrier(8)

        def work(region: kf.Region) -> None:
            barrier.wait()
            for _ in range(500):
                Consumer(region.__dlpack__(max_version=VERSIONED)).delete()
                region.__dlpack__()
                memoryview(region).release()

        threads = [threading.Thread(target=work, args=(region,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not gone(array)
        del region, threads, thread
        assert gone(array)

    def test_a_view_keeps_the_layout(self) -> None:
        region, array = watched()
        view = memoryview(region)
        del region
        assert not gone(array)
        assert view[6, 3, 5, 4] == 839
        view.release()
        assert gone(array)

    def test_refused_exports_leave_nothing(self) -> None:
        region, array = watched()
        for options in ({"copy": True}, {"stream": 1}, {"dl_device": (2, 0)}):
            with pytest.raises(BufferError):
                region.__dlpack__(**options)
        del region
        assert gone(array)


class TestBuffer:
    @pytest.mark.parametrize("dtype", BITS)
    def test_view(self, dtype: Any) -> None:
        layout = make(dtype, alignment=4096)
        view = memoryview(layout.regions[0])
        item = BITS[dtype][1] // 8
        assert view.format == (EXOTIC.get(dtype) or np.dtype(dtype).char)
        assert (view.shape, view.itemsize, view.readonly) == (SHAPE, item, False)
        assert view.strides == tuple(layout.strides[axis] for axis in layout.region_axes)
        assert view.nbytes == 7 * 720 * item
        assert not view.contiguous

    @pytest.mark.parametrize("dtype", ["int16", "float32", "bfloat16", "int64", "uint8"])
    def test_write_through(self, dtype: Any) -> None:
        layout = make(dtype)
        view = memoryview(layout.regions[0])
        assert view.c_contiguous and not view.f_contiguous
        view[3, 2, 1, 0, 5, 4] = 77
        assert layout.numpy()[3, 2, 1, 0, 5, 4] == 77
        layout.fill(0)
        assert view[3, 2, 1, 0, 5, 4] == 0
        assert bytes(view) == bytes(view.nbytes)

    def test_bytes_of_a_part(self) -> None:
        layout = make()
        region = layout.region(2, 1, 1)
        view = memoryview(region)
        assert (view.format, view.shape, view.strides) == ("B", (region.nbytes,), (1,))
        view[:] = bytes(index % 251 for index in range(region.nbytes))
        assert layout.numpy()[2, 1, 1].tobytes() == bytes(region)
        # What asks for plain writable bytes: a C reader.
        whole = (ctypes.c_uint8 * region.nbytes).from_buffer(region)
        whole[0] = 9
        assert view[0] == 9

    def test_requests(self) -> None:
        """What each kind of caller in C asks for, and gets or is refused."""
        packed, padded, column = make().regions[0], make(alignment=4096).regions[0], columns().regions[0]
        _, layout = frozen()
        for region, refused in [
            (packed, {F_CONTIGUOUS}),
            (padded, {SIMPLE, WRITABLE, ND, FORMAT, C_CONTIGUOUS, F_CONTIGUOUS, ANY_CONTIGUOUS}),
            (column, {SIMPLE, WRITABLE, ND, FORMAT, C_CONTIGUOUS}),
            (layout.regions[0], {WRITABLE, F_CONTIGUOUS}),
        ]:
            for flags in (SIMPLE, WRITABLE, ND, FORMAT, STRIDES, C_CONTIGUOUS, F_CONTIGUOUS, ANY_CONTIGUOUS):
                view = PyBuffer(obj=1)
                if flags in refused:
                    with pytest.raises(BufferError, match=r"contiguous|read-only"):
                        _get(region, ctypes.byref(view), flags)
                    assert view.obj is None
                    continue
                assert _get(region, ctypes.byref(view), flags) == 0
                assert view.obj == id(region)
                assert (view.buf, view.readonly) == (region.addr, int(memoryview(region).readonly))
                assert view.len == memoryview(region).nbytes
                assert bool(view.shape) == (flags & ND == ND)
                assert bool(view.strides) == (flags & STRIDES == STRIDES)
                if flags & ND == ND:
                    whole = memoryview(region)
                    assert (view.ndim, view.itemsize) == (whole.ndim, whole.itemsize)
                else:
                    # Plain bytes: memoryview reads the shape of several dimensions, asked for or not.
                    assert (view.ndim, view.itemsize) == (1, 1)
                assert view.format == (b"B" if flags == FORMAT else None)
                _release(ctypes.byref(view))

    def test_read_only(self) -> None:
        array, layout = frozen()
        view = memoryview(layout.regions[0])
        assert view.readonly
        assert view.tobytes() == array.tobytes()
        with pytest.raises(TypeError, match="read-only"):
            view[0, 0, 0, 0] = 1
