"""The bench's GPU worker without a GPU: torch's CPU tensors, memory that peers map as files, kernels by g++.

Run as `python fake_all2all_gpu.py FOLDER RANK [ROLE]`. What it is for: every line of the worker that only a GPU
would reach, the bench's own kernels among them. A CUDA graph is what its capture did; its replays do nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

import fake_all2all
import torch
import torch.distributed

import kvferry as kf
from kvferry.bench.all2all import device, extra, kernels, recovery

PRELUDE = r"""
#include <atomic>
#include <cstdint>
#include <cstring>
#include <ctime>
typedef unsigned long long u64;
struct Dim { unsigned x; };
static Dim threadIdx, blockIdx, blockDim, gridDim;
#define __device__ static
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(x)
#define __syncthreads()
#define __threadfence_system() std::atomic_thread_fence(std::memory_order_seq_cst)
static u64 now_ns() { timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec * 1000000000ull + t.tv_nsec; }
static unsigned load_acquire(const unsigned* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
static void add_release(unsigned* word) { __atomic_fetch_add(word, 1u, __ATOMIC_RELEASE); }
static void copy_word(char* to, const char* from) {
  if ((uintptr_t)to % 16 || (uintptr_t)from % 16) __builtin_trap();
  memcpy(to, from, 16);
}
static void atomicOr(unsigned* word, unsigned v) { __atomic_fetch_or(word, v, __ATOMIC_RELAXED); }
static void atomicAdd_system(unsigned* word, unsigned v) { __atomic_fetch_add(word, v, __ATOMIC_SEQ_CST); }
static void atomicSub_system(unsigned* word, unsigned v) { __atomic_fetch_sub(word, v, __ATOMIC_SEQ_CST); }
"""
# The last CTA and the last thread first: the first of both is the one that waits, with all others behind it.
LAUNCH = r"""
template <class F> static void each(unsigned grid, unsigned block, F f) {
  gridDim.x = grid; blockDim.x = block;
  for (unsigned b = grid; b--;) for (unsigned t = block; t--;) { blockIdx.x = b; threadIdx.x = t; f(); }
}
extern "C" void run_spin(unsigned g, unsigned b, u64 ns) { each(g, b, [&] { spin(ns); }); }
extern "C" void run_meet(unsigned g, unsigned b, const u64* a, int w, int r, unsigned e, u64 n) {
  each(g, b, [&] { meet(a, w, r, e, n); });
}
extern "C" void run_exchange(unsigned g, unsigned b, const char* x, const u64* a, int w, int r, int batch,
                             long long rows, long long first, long long total, int row, u64 n) {
  each(g, b, [&] { exchange(x, a, w, r, batch, rows, first, total, row, n); });
}
"""
_U64, _I32, _U32, _I64 = ctypes.c_uint64, ctypes.c_int32, ctypes.c_uint32, ctypes.c_int64
SIGNATURES = {
    "spin": [_U64],
    "meet": [_U64, _I32, _I32, _U32, _U64],
    "exchange": [_U64, _U64, _I32, _I32, _I32, _I64, _I64, _I64, _I32, _U64],
}


def compiled(folder: Path) -> Any:
    """The kernels as host code."""
    source, library = folder / "kernels.cpp", folder / "kernels.so"
    source.write_text(PRELUDE + kernels.BODY + LAUNCH)
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-w", "-o", str(library), str(source)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


class Runtime:
    """CUDA's, as far as the bench calls it through CuPy."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._maps = folder, []  # type: ignore[var-annotated]

    def _mapped(self, path: Path) -> int:
        with path.open("r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        self._maps.append(memory)
        return ctypes.addressof(ctypes.c_char.from_buffer(memory))

    def malloc(self, nbytes: int) -> int:
        self._path = self._folder / f"memory-{os.getpid()}"
        with self._path.open("wb") as file:
            file.truncate(nbytes)
        return self._mapped(self._path)

    def ipcGetMemHandle(self, _: int) -> bytes:  # noqa: N802 - CuPy's name
        return str(self._path).encode()

    def ipcOpenMemHandle(self, handle: bytes) -> int:  # noqa: N802 - CuPy's name
        return self._mapped(Path(handle.decode()))

    def memset(self, addr: int, value: int, nbytes: int) -> None:
        ctypes.memset(addr, value, nbytes)

    def memcpy(self, dst: int, src: int, nbytes: int, _kind: int) -> None:
        ctypes.memmove(dst, src, nbytes)

    def memcpyAsync(self, dst: int, src: int, nbytes: int, kind: int, _stream: int) -> None:  # noqa: N802
        self.memcpy(dst, src, nbytes, kind)

    def deviceSynchronize(self) -> None:  # noqa: N802 - CuPy's name
        pass


class Module:
    """A module compiled from source."""

    def __init__(self, *, code: str, options: tuple[str, ...]) -> None:
        assert code == kernels.SOURCE
        with tempfile.TemporaryDirectory() as folder:
            self._library = compiled(Path(folder))

    def get_function(self, name: str) -> Any:
        function = getattr(self._library, f"run_{name}")
        kinds = SIGNATURES[name]
        function.argtypes, function.restype = [_U32, _U32, *kinds], None
        widths = {_U64: "uint64", _I32: "int32", _U32: "uint32", _I64: "int64"}

        def launch(grid: tuple[int], block: tuple[int], arguments: tuple[Any, ...]) -> None:
            # A launch takes bytes: a type that is not the kernel's would shift all that follows.
            assert [value.dtype.name for value in arguments] == [widths[kind] for kind in kinds]
            function(*grid, *block, *(int(value) for value in arguments))

        return launch


class Event:
    def __init__(self, *, enable_timing: bool) -> None:
        self._at = 0.0

    def record(self) -> None:
        self._at = time.perf_counter()

    def query(self) -> bool:
        return self._at > 0

    def elapsed_time(self, later: Event) -> float:
        return (later._at - self._at) * 1e3


class Stream:
    cuda_stream = 0

    def __init__(self, _: int = 0) -> None:
        pass

    def wait_event(self, event: Event) -> None:
        pass


class Graph:
    def replay(self) -> None:
        time.sleep(1e-3)


@contextlib.contextmanager
def capture(graph: Graph, *, stream: Stream, capture_error_mode: str) -> Any:
    yield


def install(folder: Path) -> None:
    """Puts the stand-ins in place."""
    cuda: Any = types.SimpleNamespace(
        set_device=lambda _: None,
        get_device_properties=lambda _: types.SimpleNamespace(multi_processor_count=5),
        Stream=Stream,
        Event=Event,
        CUDAGraph=Graph,
        graph=capture,
        stream=lambda _: contextlib.nullcontext(),
        current_stream=Stream,
        synchronize=lambda *_: None,
        empty_cache=lambda: None,
        nccl=types.SimpleNamespace(version=lambda: (0, 0, 0)),
    )
    torch.cuda = cuda
    device.NAME = recovery.NAME = "cpu"
    extra.SIDE = 64
    group = torch.distributed.init_process_group

    def init(backend: str, **options: Any) -> None:
        assert backend == "nccl" and options.pop("device_id") == torch.device("cpu")
        group("gloo", **options)

    torch.distributed.init_process_group = init

    def pool(self: device.Gpu, shape: tuple[int, ...]) -> Any:
        nbytes = 1
        for extent in shape:
            nbytes *= extent
        raw = (ctypes.c_uint8 * nbytes).from_address(self._mine + kernels.POOL_AT)
        return torch.frombuffer(raw, dtype=torch.uint8).view(shape)

    device.Gpu.pool = pool  # type: ignore[method-assign]
    cupy: Any = types.ModuleType("cupy")
    cupy.cuda = types.SimpleNamespace(
        Device=lambda _: types.SimpleNamespace(use=lambda: None),
        runtime=Runtime(folder),
        ExternalStream=lambda _: contextlib.nullcontext(),
    )
    cupy.RawModule = Module
    sys.modules["cupy"] = cupy
    kf.All2All = fake_all2all.All2All  # type: ignore[attr-defined]


if __name__ == "__main__":
    install(Path(sys.argv[1]))
    from kvferry.bench.all2all import worker

    code = worker.main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)
