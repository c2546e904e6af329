"""The bench's GPU worker without a GPU: torch's CPU tensors, memory that peers map as files, kernels by g++.

Run as `python fake_all2all_gpu.py FOLDER RANK [ROLE]`. It is for every line of the worker that only a GPU
would reach, the bench's own kernels among them. A CUDA graph is what its capture did; replays do nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

import fake_all2all
import torch
import torch.distributed
from fake_all2all_kernels import SIGNATURES, Kind, compiled

import kvferry as kf
from kvferry.bench.all2all import device, extra, kernels, recovery


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
        function, kinds = getattr(self._library, f"run_{name}"), SIGNATURES[name]

        def launch(grid: tuple[int], block: tuple[int], arguments: tuple[Any, ...]) -> None:
            # A launch takes bytes: a type that is not the kernel's would shift all that follows.
            assert [value.dtype.name for value in arguments] == [Kind[kind] for kind in kinds]
            function(*grid, *block, *(int(value) for value in arguments))

        return launch


class Event:
    def __init__(self, *, enable_timing: bool) -> None:
        self._at = 0.0

    def record(self, stream: Stream | None = None) -> None:
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


def cuda() -> Any:
    """In place of torch.cuda."""
    found: Any = types.SimpleNamespace(
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
        device_count=lambda: int(os.environ.get("FAKE_GPUS", "8")),
        can_device_access_peer=lambda first, second: first != second,
        _sleep=lambda cycles: time.sleep(cycles / 2e9),
        nccl=types.SimpleNamespace(version=lambda: (0, 0, 0)),
    )
    return found


def install(folder: Path) -> None:
    """Puts the stand-ins in place."""
    torch.cuda = cuda()
    device.NAME = vars(recovery)["NAME"] = "cpu"
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
    vars(kf)["All2All"] = fake_all2all.All2All


if __name__ == "__main__":
    install(Path(sys.argv[1]))
    from kvferry.bench.all2all import worker

    code = worker.main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)
