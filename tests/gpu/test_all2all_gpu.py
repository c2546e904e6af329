"""The head exchange with one GPU: a lone rank, whose calls are copies, and two processes that share it."""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING, Any

import exchange_gpu as gpu
import numpy as np
import pytest
from driver import SIMULATED, Buffer, DefaultStream, Hold, Mark, Stream, read, synchronize
from exchange_bodies import error_of
from exchange_calls import OPERATIONS, expected
from exchange_gpu import Member
from exchange_ranks import nothing_left, processes
from exchange_reference import STRIDES, WIDTHS, Tensor

import kvferry as kf

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from exchange_gpu import Rank
    from exchange_reference import Layout, Operation

pytestmark = pytest.mark.gpu


@pytest.fixture
def alone() -> Iterator[Rank]:
    with Member(0, 1, 0, capacity_bytes=8 << 20) as member:
        yield member
    gc.collect()


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("layout", ["BNHD", "BHND"])
@pytest.mark.parametrize("how", STRIDES)
def test_a_lone_rank_copies(alone: Rank, operation: Operation, layout: Layout, how: str) -> None:
    """W = 1 is legal, and its results are owned as any."""
    for dtype in WIDTHS:
        alone.exchanged(operation, [Tensor(2, (7,), 6, 8, dtype)], layout, how)


def test_results_are_held(alone: Rank) -> None:
    first = [Tensor(1, (30,), 6, 16, key=99)]
    held = alone.exchanged("send_recv_heads", first)
    for key in range(10):
        alone.exchanged("send_recv_heads", [Tensor(1, (30,), 6, 16, key=key)])
    alone.check(held, "send_recv_heads", first)
    alone.comm.close()
    alone.check(held, "send_recv_heads", first)


def test_a_buffer_waits_for_its_consumer() -> None:
    """Hazard 54."""
    tensor, other = Tensor(1, (30,), 6, 16, "int16"), Tensor(1, (30,), 6, 16, "int16", key=2)
    with Member(0, 1, 0, buffers=1) as at, Stream(0) as consumer:
        arrays = at.arrays("send_recv_heads", [tensor]), at.arrays("send_recv_heads", [other])
        (result,) = at.put("send_recv_heads", [tensor], arrays[0])
        at.stream.synchronize()
        want = expected(tensor, "send_recv_heads", 0)
        copy = Buffer(want.nbytes, 0, 0)
        with Hold(consumer) as hold:
            consumer.copy(copy.addr, result.addr, want.nbytes)
            at.comm.record_stream(result, consumer)
            del result
            gc.collect()
            (again,) = at.put("send_recv_heads", [other], arrays[1])
            mark = Mark(at.stream)
            time.sleep(0.05)
            assert not mark.reached
            hold.release()
            consumer.synchronize()
        at.stream.synchronize()
        assert np.array_equal(read(copy.addr, want.nbytes), want.view(np.uint8).reshape(-1))
        at.check([again], "send_recv_heads", [other])


def test_a_lone_rank_can_be_captured(alone: Rank) -> None:
    tensors = [Tensor(1, (30,), 6, 16)]
    arrays = alone.arrays("send_recv_heads", tensors)
    kept: list[Any] = []
    graph = alone.capture(lambda: kept.append(alone.put("send_recv_heads", tensors, arrays)))
    for key in range(1, 4):
        changed = [Tensor(1, (30,), 6, 16, key=key)]
        arrays[0].put(expected(changed[0], "gather_heads", 0))
        graph.replay(alone.stream)
        alone.check(kept[0], "send_recv_heads", changed)
        alone.exchanged("send_recv_heads", [Tensor(1, (9,), 6, 16, key=key)])
    kept.clear()
    graph.close()


@pytest.mark.parametrize("handle", [1, 2])
def test_default_streams(alone: Rank, handle: int) -> None:
    tensor = [Tensor(1, (30,), 6, 16)]
    results = alone.put(
        "send_recv_heads", tensor, alone.arrays("send_recv_heads", tensor), stream=DefaultStream(handle)
    )
    synchronize()
    alone.check(results, "send_recv_heads", tensor)


def test_what_is_refused(alone: Rank) -> None:
    """A lone rank is not broken by its own errors."""
    (array,) = alone.arrays("send_recv_heads", [Tensor(1, (5,), 6, 4)])
    tries = {
        "host memory": lambda: alone.comm.send_recv_heads(np.zeros((1, 5, 6, 4), np.float16)),
        "copy without out": lambda: alone.comm.send_recv_heads(array.array, engine="copy"),
        "tokens": lambda: alone.comm.send_recv_heads(array.array, rank_tokens=[4]),
        "not ours": lambda: alone.comm.record_stream(array.array, alone.stream),
    }
    for name, one in tries.items():
        assert isinstance(error_of(one), kf.Error), name
    alone.exchanged("send_recv_heads", [Tensor(1, (5,), 6, 4)])


def test_two_processes_share_the_gpu(tmp_path: Path) -> None:
    """Hazard 13: for correctness only, and few calls."""
    options: dict[str, Any] = {"shared": True, "calls": 3, "timeout": 100.0}
    with nothing_left(), processes(2, gpu.gpu_calls, meet=f"file://{tmp_path}/meet", **options) as ranks:
        for stats in ranks.values(gpu.DEADLINE if SIMULATED else 110):
            assert stats["transport"] in ("vmm", "ipc")
