"""A hand-written DLPack producer over a NumPy array, as `dlpack.h` has it, with every field to play with."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Device(ctypes.Structure):
    _fields_: ClassVar = [("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)]


class DataType(ctypes.Structure):
    _fields_: ClassVar = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class Tensor(ctypes.Structure):
    _fields_: ClassVar = [
        ("data", ctypes.c_void_p),
        ("device", Device),
        ("ndim", ctypes.c_int32),
        ("dtype", DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class Managed(ctypes.Structure):
    _fields_: ClassVar = [("tensor", Tensor), ("manager_ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class ManagedVersioned(ctypes.Structure):
    _fields_: ClassVar = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    ]


_new = ctypes.pythonapi.PyCapsule_New
_new.restype = ctypes.py_object
_new.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_name = ctypes.pythonapi.PyCapsule_GetName
_name.restype = ctypes.c_char_p
_name.argtypes = [ctypes.py_object]

CPU = 1
CUDA = 2


class Producer:
    """Exports `array` (element strides) with the given type; keywords change what is told."""

    def __init__(
        self,
        array: NDArray[Any] | np.ndarray,
        dtype: tuple[int, int, int] = (4, 16, 1),
        *,
        version: tuple[int, int] | None = (1, 0),
        knows_versions: bool = True,
        device: int = CPU,
        read_only: bool = False,
        strides: bool = True,
        null: bool = False,
        offset: int = 0,
        name: bytes | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> None:
        self.array = array
        self.version = version
        self.knows_versions = knows_versions
        self.device = device
        self.calls: list[dict[str, Any]] = []
        self.capsule: Any = None
        shape = array.shape if shape is None else shape
        self._shape = (ctypes.c_int64 * len(shape))(*shape)
        self._strides = (ctypes.c_int64 * array.ndim)(*[step // array.itemsize for step in array.strides])
        tensor = Tensor(
            data=None if null else array.ctypes.data - offset,
            device=Device(device, 0),
            ndim=len(shape),
            dtype=DataType(*dtype),
            shape=self._shape,
            strides=self._strides if strides else None,
            byte_offset=offset,
        )
        self._managed: ctypes.Structure
        if version is None:
            self._managed, self._name = Managed(tensor=tensor), b"dltensor"
        else:
            flags = 1 if read_only else 0
            self._managed = ManagedVersioned(major=version[0], minor=version[1], flags=flags, tensor=tensor)
            self._name = b"dltensor_versioned"
        if name is not None:
            self._name = name

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device, 0

    def __dlpack__(self, **options: Any) -> Any:
        self.calls.append(options)
        if not self.knows_versions and "max_version" in options:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        self.capsule = _new(ctypes.addressof(self._managed), self._name, None)
        return self.capsule

    def capsule_name(self) -> bytes:
        name: bytes = _name(self.capsule)
        return name
