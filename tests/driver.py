"""libcuda through ctypes: streams, events, memory and graphs that owe nothing to kvferry, torch or CuPy.

Every helper makes its device's primary context current for the call and restores the thread's own afterwards.
Copies run on a private non-blocking stream, so that a held stream never holds a check up.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from contextlib import contextmanager
from ctypes import byref, c_int, c_size_t, c_uint32, c_uint64, c_void_p
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from kvferry.testing import settle_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

# A libcuda that runs on the CPU stands in for GPUs: sizes are kept small.
SIMULATED = bool(os.environ.get("KVFERRY_FAKE_DEVICES"))

# Modes of a capture.
GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2

_OUT = c_void_p
_PROTOTYPES: dict[str, list[Any]] = {
    "cuInit": [c_uint32],
    "cuDeviceGet": [_OUT, c_int],
    "cuDevicePrimaryCtxRetain": [_OUT, c_int],
    "cuCtxGetCurrent": [_OUT],
    "cuCtxSetCurrent": [c_void_p],
    "cuCtxPushCurrent_v2": [c_void_p],
    "cuCtxPopCurrent_v2": [_OUT],
    "cuCtxSynchronize": [],
    "cuMemAlloc_v2": [_OUT, c_size_t],
    "cuMemFree_v2": [c_uint64],
    "cuMemHostAlloc": [_OUT, c_size_t, c_uint32],
    "cuMemHostGetDevicePointer_v2": [_OUT, c_void_p, c_uint32],
    "cuMemGetInfo_v2": [_OUT, _OUT],
    "cuMemcpyAsync": [c_uint64, c_uint64, c_size_t, c_void_p],
    "cuMemsetD8Async": [c_uint64, ctypes.c_uint8, c_size_t, c_void_p],
    "cuStreamCreate": [_OUT, c_uint32],
    "cuStreamDestroy_v2": [c_void_p],
    "cuStreamSynchronize": [c_void_p],
    "cuStreamQuery": [c_void_p],
    "cuStreamWaitEvent": [c_void_p, c_void_p, c_uint32],
    "cuStreamWaitValue32_v2": [c_void_p, c_uint64, c_uint32, c_uint32],
    "cuStreamWriteValue32_v2": [c_void_p, c_uint64, c_uint32, c_uint32],
    "cuStreamBeginCapture_v2": [c_void_p, c_int],
    "cuStreamEndCapture": [c_void_p, _OUT],
    "cuThreadExchangeStreamCaptureMode": [_OUT],
    "cuEventCreate": [_OUT, c_uint32],
    "cuEventDestroy_v2": [c_void_p],
    "cuEventRecord": [c_void_p, c_void_p],
    "cuGraphInstantiateWithFlags": [_OUT, c_void_p, c_uint64],
    "cuGraphLaunch": [c_void_p, c_void_p],
    "cuGraphExecDestroy": [c_void_p],
    "cuGraphDestroy": [c_void_p],
}


class DriverError(RuntimeError):
    def __init__(self, call: str, status: int) -> None:
        super().__init__(f"{call} returned {status}")
        self.status = status


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@cache
def _function(name: str) -> Any:
    function = getattr(_library(), name)
    function.argtypes, function.restype = _PROTOTYPES[name], c_int
    return function


def cu(name: str, *arguments: Any) -> None:
    """Calls a driver function; DriverError unless it returns 0."""
    status = _function(name)(*arguments)
    if status != 0:
        raise DriverError(name, status)


def _made(kind: Any, name: str, *arguments: Any) -> int:
    out = kind()
    cu(name, byref(out), *arguments)
    return int(out.value or 0)


@cache
def primary(ordinal: int) -> int:
    """The primary context of a GPU, retained for the life of the process."""
    cu("cuInit", 0)
    return _made(c_void_p, "cuDevicePrimaryCtxRetain", _made(c_int, "cuDeviceGet", ordinal))


def current_context() -> int:
    """Handle of the thread's current context; 0 for none."""
    cu("cuInit", 0)
    return _made(c_void_p, "cuCtxGetCurrent")


@contextmanager
def current(ordinal: int = 0) -> Iterator[None]:
    """Makes a GPU's primary context current inside the block."""
    context = primary(ordinal)
    cu("cuCtxPushCurrent_v2", context)
    try:
        yield
    finally:
        cu("cuCtxPopCurrent_v2", byref(c_void_p()))


def synchronize(ordinal: int = 0) -> None:
    with current(ordinal):
        cu("cuCtxSynchronize")


def free_bytes(ordinal: int = 0) -> int:
    """Free memory of a GPU."""
    free, total = c_size_t(), c_size_t()
    with current(ordinal):
        cu("cuMemGetInfo_v2", byref(free), byref(total))
    return free.value


class Stream:
    """A stream of its own; kvferry is given it as any of the three kinds of object it knows."""

    def __init__(self, ordinal: int = 0, *, blocking: bool = False) -> None:
        self.ordinal = ordinal
        with current(ordinal):
            self.handle = _made(c_void_p, "cuStreamCreate", 0 if blocking else 1)

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle

    def copy(self, dst: int, src: int, nbytes: int) -> None:
        """Enqueues a copy. Host to host would run at once: one side must be a GPU's, the other pinned."""
        with current(self.ordinal):
            cu("cuMemcpyAsync", dst, src, nbytes, self.handle)

    def wait(self, event: Event) -> None:
        with current(self.ordinal):
            cu("cuStreamWaitEvent", self.handle, event.handle, 0)

    def synchronize(self) -> None:
        with current(self.ordinal):
            cu("cuStreamSynchronize", self.handle)

    def close(self) -> None:
        if self.handle > 2:
            with current(self.ordinal):
                cu("cuStreamDestroy_v2", self.handle)
        self.handle = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class DefaultStream(Stream):
    """The legacy (1, also 0) or the per-thread (2) default stream."""

    def __init__(self, handle: int, ordinal: int = 0) -> None:
        self.ordinal, self.handle = ordinal, handle

    def close(self) -> None:
        pass


class TorchLike:
    """A stream as torch shows one."""

    def __init__(self, stream: Stream) -> None:
        self.cuda_stream = stream.handle


class CupyLike:
    """A stream as CuPy shows one."""

    def __init__(self, stream: Stream) -> None:
        self.ptr = stream.handle


class Event:
    """An event, shown as torch shows one."""

    def __init__(self, ordinal: int = 0) -> None:
        self.ordinal = ordinal
        with current(ordinal):
            self.handle = _made(c_void_p, "cuEventCreate", 2)

    @property
    def cuda_event(self) -> int:
        return self.handle

    def record(self, stream: Stream) -> Event:
        with current(stream.ordinal):
            cu("cuEventRecord", self.handle, stream.handle)
        return self


class _Words:
    """A page of mapped, portable, pinned words that streams wait for and write."""

    def __init__(self) -> None:
        with current(0):
            self.address = _made(c_void_p, "cuMemHostAlloc", 4096, 3)
            self.on_device = _made(c_uint64, "cuMemHostGetDevicePointer_v2", self.address, 0)
        self.values = np.ctypeslib.as_array((ctypes.c_uint32 * 1024).from_address(self.address))
        self.next = 0

    def take(self) -> int:
        index, self.next = self.next, (self.next + 1) % 1024
        self.values[index] = 0
        return index


_words = cache(_Words)


class Mark:
    """A word that a stream writes when it gets there."""

    def __init__(self, stream: Stream) -> None:
        self._words, self._at = _words(), _words().take()
        with current(stream.ordinal):
            cu("cuStreamWriteValue32_v2", stream.handle, self._words.on_device + 4 * self._at, 1, 0)

    @property
    def reached(self) -> bool:
        return bool(self._words.values[self._at] == 1)


class Hold:
    """Holds a stream until released; lets go after `limit` seconds, so that a bug fails and does not hang."""

    _held: ClassVar[int] = 0

    def __init__(self, stream: Stream, limit: float = 20) -> None:
        # What earlier tests left would be freed while this holds. A driver that waits in a free, for
        # this stream among others, lets no thread launch: free before, unless a stream is held already.
        if Hold._held == 0:
            gc.collect()
            settle_memory()
        Hold._held += 1
        self._ended = False
        self._words, self._at = _words(), _words().take()
        self.expired = False
        self._timer = threading.Timer(limit, self._expire)
        self._timer.daemon = True
        self._timer.start()
        with current(stream.ordinal):
            cu("cuStreamWaitValue32_v2", stream.handle, self._words.on_device + 4 * self._at, 1, 0)

    def _expire(self) -> None:
        self.expired = True
        self._words.values[self._at] = 1

    def _end(self) -> None:
        self._timer.cancel()
        self._words.values[self._at] = 1
        if not self._ended:
            self._ended = True
            Hold._held -= 1

    def release(self) -> None:
        expired = self.expired
        self._end()
        assert not expired, "the hold ran out: something waited for the held stream"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()


@cache
def _copies(ordinal: int, _thread: int) -> Stream:
    return Stream(ordinal)


def _private(ordinal: int) -> Stream:
    return _copies(ordinal, threading.get_ident())


def read(address: int, nbytes: int, ordinal: int = 0) -> NDArray[np.uint8]:
    """The bytes at any address that the driver knows."""
    out = np.empty(nbytes, np.uint8)
    stream = _private(ordinal)
    stream.copy(out.ctypes.data, address, nbytes)
    stream.synchronize()
    return out


def write(address: int, data: NDArray[Any], ordinal: int = 0) -> None:
    """Puts bytes at any address that the driver knows."""
    data = np.ascontiguousarray(data)
    stream = _private(ordinal)
    stream.copy(address, data.ctypes.data, data.nbytes)
    stream.synchronize()


class Buffer:
    """Device memory from the driver, freed with its last reference."""

    def __init__(self, nbytes: int, ordinal: int = 0, fill: int | None = None) -> None:
        self.nbytes, self.ordinal = nbytes, ordinal
        with current(ordinal):
            self.addr = _made(c_uint64, "cuMemAlloc_v2", nbytes)
        if fill is not None:
            stream = _private(ordinal)
            with current(ordinal):
                cu("cuMemsetD8Async", self.addr, fill, nbytes, stream.handle)
            stream.synchronize()

    @classmethod
    def of(cls, data: NDArray[Any], ordinal: int = 0) -> Buffer:
        """A copy of an array."""
        made = cls(max(data.nbytes, 1), ordinal)
        if data.nbytes:
            write(made.addr, data, ordinal)
        return made

    def __del__(self) -> None:
        # The interpreter may be ending, and the driver with it. Whoever lets go may be capturing a graph.
        relaxed = c_int(RELAXED)
        try:
            with current(self.ordinal):
                cu("cuThreadExchangeStreamCaptureMode", byref(relaxed))
                cu("cuMemFree_v2", self.addr)
                cu("cuThreadExchangeStreamCaptureMode", byref(relaxed))
        except Exception:  # noqa: BLE001
            pass


class CudaArray:
    """`__cuda_array_interface__` over device memory, and nothing else."""

    def __init__(
        self,
        buffer: Buffer,
        shape: tuple[int, ...],
        typestr: str,
        *,
        offset: int = 0,
        strides: tuple[int, ...] | None = None,
        read_only: bool = False,
    ) -> None:
        self.buffer = buffer
        self.addr = buffer.addr + offset
        self.__cuda_array_interface__ = {
            "version": 3,
            "data": (self.addr, read_only),
            "shape": shape,
            "typestr": typestr,
            "strides": strides,
            "stream": None,
        }


def device_array(values: Any, dtype: Any = np.int64, ordinal: int = 0) -> CudaArray:
    """A NumPy array's copy on a GPU."""
    array = np.asarray(values, dtype)
    return CudaArray(Buffer.of(array, ordinal), array.shape, array.dtype.str)


class Graph:
    """A captured graph, instantiated."""

    def __init__(self, graph: int, ordinal: int) -> None:
        self._graph, self._ordinal = graph, ordinal
        with current(ordinal):
            self._exec = _made(c_void_p, "cuGraphInstantiateWithFlags", graph, 0)

    def launch(self, stream: Stream) -> None:
        with current(self._ordinal):
            cu("cuGraphLaunch", self._exec, stream.handle)

    def replay(self, stream: Stream) -> None:
        """Launches it and waits."""
        self.launch(stream)
        stream.synchronize()

    def close(self) -> None:
        """Destroys the graph and whatever it holds."""
        with current(self._ordinal):
            cu("cuGraphExecDestroy", self._exec)
            cu("cuGraphDestroy", self._graph)


def capture(stream: Stream, body: Callable[[], Any], mode: int = THREAD_LOCAL) -> Graph:
    """Captures what `body` puts on the stream."""
    with current(stream.ordinal):
        cu("cuStreamBeginCapture_v2", stream.handle, mode)
        try:
            body()
        except BaseException:
            # The capture must end, or the stream stays unusable. It may have been invalidated.
            graph = c_void_p()
            if _function("cuStreamEndCapture")(stream.handle, byref(graph)) == 0 and graph.value:
                cu("cuGraphDestroy", graph.value)
            raise
        graph = c_void_p()
        cu("cuStreamEndCapture", stream.handle, byref(graph))
    return Graph(graph.value or 0, stream.ordinal)


def until(condition: Callable[[], bool], seconds: float = 20) -> bool:
    """Polls a condition; whether it came true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.0005)
    return True
