"""Where a rank of the bench works: a GPU with its streams, events and memory that peers see."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import time
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvferry.bench.all2all import kernels
from kvferry.bench.gpu.arrays import CudaArray

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvferry.bench.all2all.meeting import Meeting

NAME = "cuda:{}"
_MEMCPY_DEFAULT = 4
SAFE = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
"""Multicast can put a shared host's GPUs out of service."""


class Watched(Protocol):
    """What a clock needs of it."""

    ordinal: int | None
    """What kvferry calls it; None for host memory."""

    def on(self, stream: Any = None, /) -> contextlib.AbstractContextManager[Any]:
        """Work goes to a stream: the bench's own if none is given."""

    def settle(self) -> None:
        """Waits for everything."""

    def marks(self, count: int, /) -> list[Any]:
        """Events."""

    def mark(self, mark: Any, /) -> None:
        """Records one on the current stream."""

    def between(self, first: Any, last: Any, /) -> float:
        """Seconds between two."""

    def passed(self, mark: Any, /) -> bool:
        """Whether the device has come past it."""

    def hold(self, seconds: float, /) -> None:
        """Keeps the current stream busy."""

    def meet(self) -> None:
        """All ranks' current streams come here before any goes on."""


class Device(Watched, Protocol):
    """What the measurements need of it."""

    torch: Any
    name: str
    """torch's, such as cuda:0."""
    sms: int

    def side(self) -> Any:
        """Another stream."""

    def graph(self, call: Callable[[], Any], count: int, /) -> tuple[Callable[[], None], Any]:
        """So many calls as one graph: how to replay it, and the last call's result."""

    def fault(self) -> str:
        """Which of the bench's own waits have timed out since the counters were set up."""

    def realign(self) -> str:
        """After a failure: counters start again. What had timed out, if anything."""


class Gpu:
    """A GPU: torch for tensors, CuPy for the bench's kernels and for memory that peers map."""

    def __init__(self, meeting: Meeting, pool_bytes: int) -> None:
        rank, world = meeting.rank, meeting.world
        os.environ.update(SAFE)
        self.torch: Any = importlib.import_module("torch")
        self._cupy: Any = importlib.import_module("cupy")
        self.ordinal: int | None = rank
        self.name = NAME.format(rank)
        self.torch.cuda.set_device(rank)
        self._cupy.cuda.Device(rank).use()
        self.sms = int(self.torch.cuda.get_device_properties(rank).multi_processor_count)
        self._stream = self.torch.cuda.Stream(rank)
        self._meeting, self._pool_bytes = meeting, pool_bytes
        self._rank, self._world = rank, world
        self._epoch = 0
        self._tiny = self.torch.zeros(1, device=self.name)
        self._module: Any = self._cupy.RawModule(code=kernels.SOURCE, options=("-std=c++17",))
        self._kernels = {name: self._module.get_function(name) for name in ("spin", "meet", "exchange")}
        self.bases: list[int] = []
        self.mapped = False
        """Whether all ranks have mapped all others' memory."""
        self._mine = 0

    def join(self) -> None:
        """Allocates what peers may write and maps theirs."""
        runtime = self._cupy.cuda.runtime
        # One allocation: handles are of whole ones.
        self._mine = int(runtime.malloc(kernels.POOL_AT + self._pool_bytes))
        runtime.memset(self._mine, 0, kernels.POOL_AT)
        runtime.deviceSynchronize()
        handles = self._meeting.gather("handles", bytes(runtime.ipcGetMemHandle(self._mine)).hex())
        self.bases = [
            self._mine if rank == self._rank else int(runtime.ipcOpenMemHandle(bytes.fromhex(each)))
            for rank, each in enumerate(handles)
        ]
        self._table = self.torch.tensor(self.bases, dtype=self.torch.int64, device=self.name)

    @property
    def table(self) -> int:
        """Where the device finds all ranks' addresses."""
        return int(self._table.data_ptr())

    def pool(self, shape: tuple[int, ...]) -> Any:
        """Bytes of this rank's part that peers write."""
        return self.torch.as_tensor(
            CudaArray(self._mine + kernels.POOL_AT, shape, "|u1", None), device=self.name
        )

    def launch(self, kernel: str, grid: int, block: int, *arguments: Any) -> None:
        """A kernel on torch's current stream."""
        # CuPy 14 has a second name for it and may drop the first.
        older = getattr(self._cupy.cuda, "ExternalStream", None)
        current = older(self.stream) if older else self._cupy.cuda.Stream.from_external(_Stream(self.stream))
        with current:
            self._kernels[kernel]((grid,), (block,), arguments)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """A copy on torch's current stream."""
        self._cupy.cuda.runtime.memcpyAsync(target, source, nbytes, _MEMCPY_DEFAULT, self.stream)

    @property
    def stream(self) -> int:
        """The current one of torch."""
        return int(self.torch.cuda.current_stream().cuda_stream)

    def on(self, stream: Any = None, /) -> contextlib.AbstractContextManager[Any]:
        """Work goes to a stream."""
        return self.torch.cuda.stream(stream or self._stream)  # type: ignore[no-any-return]

    def side(self) -> Any:
        """Another stream."""
        return self.torch.cuda.Stream(self.ordinal)

    def settle(self) -> None:
        """Waits for everything."""
        self.torch.cuda.synchronize()

    def marks(self, count: int, /) -> list[Any]:
        """Events."""
        return [self.torch.cuda.Event(enable_timing=True) for _ in range(count)]

    def mark(self, mark: Any, /) -> None:
        """Records one."""
        mark.record()

    def between(self, first: Any, last: Any, /) -> float:
        """Seconds between two."""
        return float(first.elapsed_time(last)) / 1e3

    def passed(self, mark: Any, /) -> bool:
        """Whether the device has come past it."""
        return bool(mark.query())

    def hold(self, seconds: float, /) -> None:
        """Keeps the current stream busy."""
        self.launch("spin", 1, 1, np.uint64(int(seconds * 1e9)))

    def meet(self) -> None:
        """All ranks' current streams come here before any goes on."""
        if not self.mapped:
            self.torch.distributed.all_reduce(self._tiny)
            return
        self._epoch += 1
        self.launch(
            "meet",
            1,
            kernels.MOST_RANKS,
            np.uint64(self.table),
            np.int32(self._world),
            np.int32(self._rank),
            np.uint32(self._epoch),
            np.uint64(kernels.WAIT_NS),
        )

    def graph(self, call: Callable[[], Any], count: int, /) -> tuple[Callable[[], None], Any]:
        """Captured, as one graph."""
        graph = self.torch.cuda.CUDAGraph()
        result = None
        # Other threads (kvferry's and NCCL's watchers) may call the driver meanwhile.
        with self.torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            for _ in range(count):
                result = None
                result = call()
        return graph.replay, result

    def fault(self) -> str:
        """Which of the bench's own waits have timed out since the counters were set up."""
        if not self.mapped:
            return ""
        word = np.zeros(1, np.uint32)
        self._cupy.cuda.runtime.memcpy(word.ctypes.data, self._mine + kernels.FAULT_AT, 4, _MEMCPY_DEFAULT)
        return {0: "", 1: "the meeting of streams timed out", 2: "the reference timed out"}.get(
            int(word[0]), "the meeting and the reference timed out"
        )

    def realign(self) -> str:
        """Counters start again, when everyone is quiet."""
        self.settle()
        self._meeting.gather("quiet")
        found = self.fault()
        if self.mapped:
            self._cupy.cuda.runtime.memset(self._mine, 0, kernels.POOL_AT)
            self.settle()
        self._epoch = 0
        self._meeting.gather("aligned")
        return found


class _Stream:
    """A stream by its address."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


class Host:
    """torch on CPUs in a GPU's place: the same measurements without a GPU. Its numbers say nothing."""

    def __init__(self, meeting: Meeting) -> None:
        self.torch: Any = importlib.import_module("torch")
        self.name, self.sms = "cpu", 4
        self.ordinal: int | None = None
        self._meeting = meeting

    def on(self, stream: Any = None, /) -> contextlib.AbstractContextManager[Any]:  # noqa: ARG002 - no streams
        """There are no streams."""
        return contextlib.nullcontext()

    def side(self) -> Any:
        """There are no streams."""
        return None

    def settle(self) -> None:
        """Nothing waits."""

    def marks(self, count: int, /) -> list[Any]:
        """Times to be."""
        return [[0.0] for _ in range(count)]

    def mark(self, mark: Any, /) -> None:
        """The time."""
        mark[0] = time.perf_counter()

    def between(self, first: Any, last: Any, /) -> float:
        """Seconds between two."""
        return float(last[0] - first[0])

    def passed(self, mark: Any, /) -> bool:
        """Whether it was recorded."""
        return bool(mark[0])

    def hold(self, seconds: float, /) -> None:
        """Waits."""
        time.sleep(seconds)

    def meet(self) -> None:
        """Waits for the others."""
        self._meeting.gather("meet")

    def graph(self, call: Callable[[], Any], count: int, /) -> tuple[Callable[[], None], Any]:
        """A loop, whose result is the first run's."""
        result = None
        for _ in range(count):
            result = None
            result = call()

        def replay() -> None:
            for _ in range(count):
                call()

        return replay, result

    def fault(self) -> str:
        """Nothing waits."""
        return ""

    def realign(self) -> str:
        """Nothing to do but meet."""
        self._meeting.gather("quiet")
        return ""


def free(device: Device) -> None:
    """Gives back what torch keeps of dropped tensors."""
    gc.collect()
    if device.ordinal is not None:
        device.torch.cuda.empty_cache()
