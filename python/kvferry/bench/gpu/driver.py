"""libcuda through ctypes: streams, events and copies that owe nothing to kvferry or to any contender."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_char, c_int, c_size_t, c_uint8, c_uint32, c_uint64, c_void_p
from functools import cache
from typing import Any

_PEER_ALREADY = 704
_NON_BLOCKING = 1
_RELEASE_THRESHOLD = 4
_POOL_BYTES = 64 << 20

_PROTOTYPES: dict[str, list[Any]] = {
    "cuInit": [c_uint32],
    "cuDriverGetVersion": [c_void_p],
    "cuDeviceGet": [c_void_p, c_int],
    "cuDeviceCanAccessPeer": [c_void_p, c_int, c_int],
    "cuDevicePrimaryCtxRetain": [c_void_p, c_int],
    "cuCtxSetCurrent": [c_void_p],
    "cuCtxSynchronize": [],
    "cuCtxEnablePeerAccess": [c_void_p, c_uint32],
    "cuMemGetInfo_v2": [c_void_p, c_void_p],
    "cuStreamCreate": [c_void_p, c_uint32],
    "cuStreamDestroy_v2": [c_void_p],
    "cuStreamSynchronize": [c_void_p],
    "cuStreamWaitEvent": [c_void_p, c_void_p, c_uint32],
    "cuEventCreate": [c_void_p, c_uint32],
    "cuEventDestroy_v2": [c_void_p],
    "cuEventRecord": [c_void_p, c_void_p],
    "cuEventQuery": [c_void_p],
    "cuEventSynchronize": [c_void_p],
    "cuEventElapsedTime": [c_void_p, c_void_p, c_void_p],
    "cuMemcpyAsync": [c_uint64, c_uint64, c_size_t, c_void_p],
    "cuMemcpyHtoD_v2": [c_uint64, c_void_p, c_size_t],
    "cuMemcpyDtoH_v2": [c_void_p, c_uint64, c_size_t],
    "cuMemcpyHtoDAsync_v2": [c_uint64, c_void_p, c_size_t, c_void_p],
    "cuMemsetD8Async": [c_uint64, c_uint8, c_size_t, c_void_p],
    "cuModuleLoadData": [c_void_p, ctypes.c_char_p],
    "cuModuleGetFunction": [c_void_p, c_void_p, ctypes.c_char_p],
    "cuLaunchKernel": [c_void_p, *[c_uint32] * 7, c_void_p, c_void_p, c_void_p],
    "cuMemPoolCreate": [c_void_p, c_void_p],
    "cuMemPoolSetAttribute": [c_void_p, c_int, c_void_p],
    "cuMemAllocAsync": [c_void_p, c_size_t, c_void_p],
    "cuMemAllocFromPoolAsync": [c_void_p, c_size_t, c_void_p, c_void_p],
    "cuMemFreeAsync": [c_uint64, c_void_p],
}


class DriverError(RuntimeError):
    """A driver call that did not return 0, or that this driver does not have."""


@cache
def function(name: str, *, keep_gil: bool = False) -> Any:
    """The raw call, returning its status. `keep_gil` is for calls in tight loops that never wait."""
    try:
        library = ctypes.PyDLL("libcuda.so.1") if keep_gil else ctypes.CDLL("libcuda.so.1")
        # A private pointer to it: two prototypes for one library object would be one.
        found = library[name]
    except (OSError, AttributeError) as error:
        raise DriverError(f"{name}: {error}") from None
    found.argtypes, found.restype = _PROTOTYPES[name], c_int
    return found


def call(name: str, *arguments: Any) -> None:
    """Calls a driver function; DriverError unless it returns 0."""
    status = function(name)(*arguments)
    if status != 0:
        raise DriverError(f"{name} returned {status}")


def _made(kind: Any, name: str, *arguments: Any) -> int:
    out = kind()
    call(name, byref(out), *arguments)
    return int(out.value or 0)


@cache
def _context(ordinal: int) -> int:
    call("cuInit", 0)
    return _made(c_void_p, "cuDevicePrimaryCtxRetain", _made(c_int, "cuDeviceGet", ordinal))


def use(ordinal: int) -> None:
    """Makes a GPU's primary context the thread's current one."""
    call("cuCtxSetCurrent", _context(ordinal))


def version() -> str:
    """The driver's CUDA version, such as "13.0"."""
    call("cuInit", 0)
    number = _made(c_int, "cuDriverGetVersion")
    return f"{number // 1000}.{number % 1000 // 10}"


def join_peers(first: int, second: int) -> bool:
    """Lets two GPUs reach each other's memory; whether they can."""
    call("cuInit", 0)
    for here, there in ((first, second), (second, first)):
        devices = (_made(c_int, "cuDeviceGet", here), _made(c_int, "cuDeviceGet", there))
        if not _made(c_int, "cuDeviceCanAccessPeer", *devices):
            return False
        use(here)
        status = function("cuCtxEnablePeerAccess")(_context(there), 0)
        if status not in (0, _PEER_ALREADY):
            raise DriverError(f"cuCtxEnablePeerAccess returned {status}")
    use(first)
    return True


def free_bytes() -> int:
    """Free memory of the current GPU."""
    free, total = c_size_t(), c_size_t()
    call("cuMemGetInfo_v2", byref(free), byref(total))
    return free.value


class Stream:
    """A non-blocking stream of the context current when it was made."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        use(ordinal)
        self.handle = _made(c_void_p, "cuStreamCreate", _NON_BLOCKING)

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle

    def synchronize(self) -> None:
        """Waits for all work on it."""
        call("cuStreamSynchronize", self.handle)

    def wait(self, event: Event) -> None:
        """Later work waits for the event."""
        call("cuStreamWaitEvent", self.handle, event.handle, 0)

    def copy(self, dst: int, src: int, nbytes: int) -> None:
        """Enqueues a copy between any two addresses."""
        call("cuMemcpyAsync", dst, src, nbytes, self.handle)

    def fill(self, dst: int, value: int, nbytes: int) -> None:
        """Enqueues setting bytes of device memory."""
        call("cuMemsetD8Async", dst, value, nbytes, self.handle)


class Event:
    """A timing event of the current context."""

    def __init__(self) -> None:
        self.handle = _made(c_void_p, "cuEventCreate", 0)

    def record(self, stream: Stream) -> None:
        """Records it on a stream."""
        call("cuEventRecord", self.handle, stream.handle)

    def done(self) -> bool:
        """Whether what it was recorded after is."""
        return bool(function("cuEventQuery", keep_gil=True)(self.handle) == 0)

    def synchronize(self) -> None:
        """Waits for it."""
        call("cuEventSynchronize", self.handle)

    def seconds_since(self, earlier: Event) -> float:
        """Seconds on the device between the two."""
        out = ctypes.c_float()
        call("cuEventElapsedTime", byref(out), earlier.handle, self.handle)
        return out.value / 1e3


class _PoolProps(ctypes.Structure):
    _fields_ = (
        ("alloc_type", c_int),
        ("handle_types", c_int),
        ("location_type", c_int),
        ("location_id", c_int),
        ("security", c_void_p),
        ("max_size", c_size_t),
        ("usage", ctypes.c_ushort),
        ("reserved", c_char * 54),
    )


class Pool:
    """Stream-ordered allocations that keep 64 MiB between uses, or the device's default pool."""

    def __init__(self, stream: Stream, *, kept: bool) -> None:
        self._stream = stream
        self._pool = 0
        if kept:
            # CU_MEM_ALLOCATION_TYPE_PINNED on CU_MEM_LOCATION_TYPE_DEVICE: plain device memory.
            props = _PoolProps(alloc_type=1, location_type=1, location_id=stream.ordinal)
            self._pool = _made(c_void_p, "cuMemPoolCreate", byref(props))
            call("cuMemPoolSetAttribute", self._pool, _RELEASE_THRESHOLD, byref(c_uint64(_POOL_BYTES)))
            self.free(self.take(_POOL_BYTES))
            stream.synchronize()

    def take(self, nbytes: int) -> int:
        """Allocates in stream order."""
        if self._pool:
            return _made(c_uint64, "cuMemAllocFromPoolAsync", nbytes, self._pool, self._stream.handle)
        return _made(c_uint64, "cuMemAllocAsync", nbytes, self._stream.handle)

    def free(self, addr: int) -> None:
        """Frees in stream order."""
        call("cuMemFreeAsync", addr, self._stream.handle)
