"""GPU arrays and ranks for the tests of the exchange, through the driver alone; and what process ranks do."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from typing import TYPE_CHECKING, Any

import numpy as np
from driver import SIMULATED, Buffer, CudaArray, Graph, Stream, capture, current, read, write
from exchange_bodies import HOUR, error_of, tensor_for
from exchange_calls import call, contract, expected, given
from exchange_ranks import each, fresh, join
from exchange_reference import FROM_ML_DTYPES, WIDTHS, Tensor, raw, same

import kvferry as kf

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from exchange_ranks import Told
    from exchange_reference import Layout, Operation

GUARD = 0x5A
MARGIN = 256
DEADLINE = 60.0 if SIMULATED else 120.0


class OnGpu:
    """An array's copy on a GPU, with its strides, between guard bytes."""

    def __init__(self, array: Any, dtype: str, ordinal: int) -> None:
        low, high = np.lib.array_utils.byte_bounds(array) if array.size else (0, 0)
        self.ordinal, self.nbytes = ordinal, high - low
        image = np.full(2 * MARGIN + self.nbytes, GUARD, np.uint8)
        if self.nbytes:
            image[MARGIN : MARGIN + self.nbytes] = np.frombuffer(ctypes.string_at(low, self.nbytes), np.uint8)
        self._before = image
        self.buffer = Buffer.of(image, ordinal)
        typestr = {1: "|u1", 2: "<u2", 4: "<f4", 8: "<f8"}[WIDTHS[dtype]]
        if dtype not in FROM_ML_DTYPES:
            typestr = np.dtype(dtype).str
        first = array.ctypes.data - low if array.size else 0
        self.array = CudaArray(
            self.buffer, array.shape, typestr, offset=MARGIN + first, strides=array.strides
        )

    def put(self, array: Any) -> None:
        """Other content, of the same packed shape."""
        self._before[MARGIN : MARGIN + self.nbytes] = raw(array).reshape(-1)
        write(self.buffer.addr, self._before, self.ordinal)

    def check_intact(self) -> None:
        assert np.array_equal(read(self.buffer.addr, self._before.size, self.ordinal), self._before), (
            "written"
        )


def fetched(result: Any, like: Any, ordinal: int) -> Any:
    """A result's bytes as an array of the type of `like`. Synchronize its stream before."""
    assert result.shape == like.shape
    if not like.size:
        return np.empty_like(like)
    return read(result.addr, result.nbytes, ordinal).view(like.dtype).reshape(like.shape)


class Rank:
    """A rank on a GPU: its communicator, and a stream that its calls run on."""

    def __init__(self, comm: kf.All2All, stream: Stream) -> None:
        self.comm, self.stream = comm, stream
        assert comm.device is not None
        self.rank, self.ordinal = comm.rank, comm.device
        # A free waits for the GPU, and so for kernels that wait for a peer: nothing is freed before the end.
        self.kept: list[OnGpu] = []

    def arrays(
        self, operation: Operation, tensors: Sequence[Tensor], layout: Layout = "BNHD", how: str = "packed"
    ) -> list[OnGpu]:
        made = [
            OnGpu(given(tensor, operation, self.rank, layout, how), tensor.dtype, self.ordinal)
            for tensor in tensors
        ]
        self.kept += made
        return made

    def put(
        self,
        operation: Operation,
        tensors: Sequence[Tensor],
        arrays: Sequence[OnGpu],
        layout: Layout = "BNHD",
        **options: Any,
    ) -> Any:
        """Enqueues a call."""
        said = contract(operation, tensors, layout=layout, **{"stream": self.stream, **options})
        if any(tensor.dtype in FROM_ML_DTYPES for tensor in tensors):
            assert len({tensor.dtype for tensor in tensors}) == 1
            said["dtype"] = tensors[0].dtype
        return call(self.comm, operation, tuple(each.array for each in arrays), **said)

    def check(
        self, results: Any, operation: Operation, tensors: Sequence[Tensor], layout: Layout = "BNHD"
    ) -> None:
        """Every byte of results that are there."""
        for tensor, result in zip(tensors, results, strict=True):
            want = expected(tensor, operation, self.rank, layout)
            assert result.dtype == tensor.dtype
            same(fetched(result, want, self.ordinal), want, f"{operation} on rank {self.rank}:")

    def exchanged(
        self,
        operation: Operation,
        tensors: Sequence[Tensor],
        layout: Layout = "BNHD",
        how: str = "packed",
        **options: Any,
    ) -> Any:
        """A call, waited for, every byte compared; the inputs are intact."""
        arrays = self.arrays(operation, tensors, layout, how)
        results = self.put(operation, tensors, arrays, layout, **options)
        self.stream.synchronize()
        self.comm.check()
        self.check(results, operation, tensors, layout)
        for array in arrays:
            array.check_intact()
        return results

    def capture(self, body: Callable[[], Any]) -> Graph:
        return capture(self.stream, body)


class Member:
    """Sets a rank up on a GPU, and takes it down."""

    def __init__(self, rank: int, world: int, ordinal: int, **options: Any) -> None:
        self._given = rank, world, {"device": ordinal, "timeout": 30.0, **options}
        self._ordinal = ordinal

    def __enter__(self) -> Rank:
        rank, world, options = self._given
        with current(self._ordinal):
            self._comm = join(rank, world, **options)
        self._stream = Stream(self._ordinal)
        return Rank(self._comm, self._stream)

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is None:
            self._stream.synchronize()
            self._comm.close()
        else:
            with contextlib.suppress(kf.Error):
                self._comm.close()
        self._stream.close()


def on_gpus(world: int, body: Callable[[Rank], Any], **options: Any) -> list[Any]:
    """Runs `body` in a thread per rank, each on a GPU of its own; their values, or the first error."""
    meet = options.pop("rendezvous", None) or fresh()

    def run(rank: int) -> Any:
        with Member(rank, world, rank, rendezvous=meet, **options) as member:
            return body(member)

    return each(world, run, DEADLINE)


def broken(world: int, body: Callable[[Rank], Any], **options: Any) -> list[Any]:
    """As `on_gpus`, for bodies that break their communicator and say so by what they return."""
    meet = fresh()

    def run(rank: int) -> Any:
        member = Member(rank, world, rank, rendezvous=meet, **options)
        at = member.__enter__()
        try:
            return body(at)
        finally:
            with contextlib.suppress(kf.Error):
                at.comm.close()
            at.stream.close()

    return each(world, run, DEADLINE)


def device_of(rank: int, shared: bool) -> int:
    return 0 if shared else rank


# What process ranks do


def gpu_calls(
    rank: int, world: int, told: Told, *, meet: str, shared: bool = False, calls: int = 10, **options: Any
) -> Any:
    """Calls of every kind between processes."""
    with Member(rank, world, device_of(rank, shared), rendezvous=meet, **options) as at:
        first = [tensor_for(world, 100)]
        held = at.exchanged("send_recv_heads", first)
        for key in range(calls):
            tensors = [tensor_for(world, key), tensor_for(world, key + 50, dim=3)]
            for operation in ("send_recv_heads", "gather_heads", "allgather_tokens"):
                at.exchanged(operation, tensors)
        at.check(held, "send_recv_heads", first)
        stats = at.comm.stats()
    at.check(held, "send_recv_heads", first)
    return stats


def gpu_graphs(rank: int, world: int, told: Told, *, meet: str) -> Any:
    """Replays with changed inputs, an odd number of exchanges, eager calls between, one rank eager."""
    with Member(rank, world, rank, rendezvous=meet, buffers=10) as at:
        tensors = [tensor_for(world, 0)]
        arrays = at.arrays("send_recv_heads", tensors)
        results: list[Any] = []

        def three() -> None:
            results.clear()
            results.extend(at.put("send_recv_heads", tensors, arrays) for _ in range(3))

        # Kernels and buffers are there before the first call.
        graph = at.capture(three)
        told.say("captured")
        for key in range(1, 6):
            changed = [tensor_for(world, key)]
            arrays[0].put(given(changed[0], "send_recv_heads", rank))
            if key == 4 and rank == 0:
                # One rank replays while the other calls.
                eager = [at.put("send_recv_heads", changed, arrays) for _ in range(3)]
                at.stream.synchronize()
                for found in eager:
                    at.check(found, "send_recv_heads", changed)
                del eager, found
            else:
                graph.replay(at.stream)
                for found in results:
                    at.check(found, "send_recv_heads", changed)
            at.comm.check()
            for eager_key in range(key % 3):
                at.exchanged("gather_heads", [tensor_for(world, eager_key)])
        second = at.capture(three)
        for key, one in enumerate((second, graph, second, graph), 10):
            arrays[0].put(given(tensor_for(world, key), "send_recv_heads", rank))
            one.replay(at.stream)
        free = at.comm.stats()["buffers_free"]
        results.clear()
        graph.close()
        second.close()
        return free


def gpu_graph_timeout(rank: int, world: int, told: Told, *, meet: str) -> Any:
    """A replay whose peer does not come ends at the time set after the capture, and says so."""
    member = Member(rank, world, rank, rendezvous=meet, timeout=60.0)
    at = member.__enter__()
    tensors = [tensor_for(world, 0)]
    arrays = at.arrays("send_recv_heads", tensors)
    kept: list[Any] = []
    graph = at.capture(lambda: kept.append(at.put("send_recv_heads", tensors, arrays)))
    graph.replay(at.stream)
    told.say("replayed")
    if rank == 1:
        told.hear()
        return error_of(at.comm.check)
    at.comm.set_timeout(0.5)
    start = time.monotonic()
    graph.replay(at.stream)
    seconds = time.monotonic() - start
    error = error_of(at.comm.check)
    filled = bool((read(kept[0][0].addr, kept[0][0].nbytes, rank) == 0xFF).all())
    # Later replays fill too, at once.
    start = time.monotonic()
    graph.replay(at.stream)
    return error, seconds, filled, time.monotonic() - start


def gpu_peer_lost(
    rank: int, world: int, told: Told, *, meet: str, victim: int, timeout: float = 30.0, fork: bool = False
) -> Any:
    """Waits in a kernel for a peer that the test kills or stops; then uses the GPU, and sets up anew."""
    member = Member(rank, world, rank, rendezvous=meet, timeout=timeout)
    at = member.__enter__()
    tensors = [tensor_for(world, 0)]
    arrays = at.arrays("send_recv_heads", tensors)
    kept = at.exchanged("send_recv_heads", tensors)
    if rank == victim:
        child = os.fork() if fork else -1
        if child == 0:
            time.sleep(HOUR)
        told.say(f"child {child}")
        told.say("ready")
        told.hear(HOUR)
    told.say("ready")
    told.hear()
    start = time.monotonic()
    lost = at.put("send_recv_heads", tensors, arrays)
    told.say("waiting")
    at.stream.synchronize()
    error = error_of(at.comm.check)
    while error is None and time.monotonic() < start + 20:
        time.sleep(1e-3)
        error = error_of(at.comm.check)
    when = time.monotonic()
    filled = all(bool((read(one.addr, one.nbytes, rank) == 0xFF).all()) for one in lost)
    later = [
        error_of(lambda: at.put("send_recv_heads", tensors, arrays)),
        error_of(at.comm.check),
        error_of(at.comm.close),
    ]
    at.check(kept, "send_recv_heads", tensors)
    with Member(0, 1, rank) as alone:
        alone.exchanged("send_recv_heads", [tensor_for(1, 5)])
    return {"error": error, "start": start, "when": when, "filled": filled, "later": later}
