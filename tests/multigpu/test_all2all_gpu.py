"""The head exchange between GPUs: thread ranks with one each, and process ranks, on streams."""

from __future__ import annotations

import gc
import os
import time
from typing import TYPE_CHECKING, Any

import exchange_gpu as gpu
import numpy as np
import pytest
from driver import (
    SIMULATED,
    Buffer,
    DefaultStream,
    Hold,
    Mark,
    Stream,
    TorchLike,
    read,
    synchronize,
    until,
    write,
)
from exchange_bodies import error_of
from exchange_calls import OPERATIONS, expected
from exchange_gpu import broken, on_gpus
from exchange_ranks import nothing_left, processes
from exchange_reference import STRIDES, WIDTHS, Tensor

import kvferry as kf

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from exchange_gpu import Rank
    from exchange_reference import Layout, Operation

pytestmark = [pytest.mark.gpu, pytest.mark.multigpu]

OPERATION = pytest.mark.parametrize("operation", OPERATIONS)
LARGE = 16 if SIMULATED else 1


@pytest.fixture
def meet(tmp_path: Path) -> str:
    return f"file://{tmp_path}/meet"


def scaled(tokens: int) -> int:
    return max(2, tokens // LARGE)


class TestCalls:
    @OPERATION
    @pytest.mark.parametrize("layout", ["BNHD", "BHND"])
    @pytest.mark.parametrize("dtype", WIDTHS)
    def test_every_dtype_in_both_layouts(self, operation: Operation, layout: Layout, dtype: str) -> None:
        """L9: bytes are bytes, whatever their type."""
        tensor = Tensor(2, (3, 4), 6, 8, dtype)
        on_gpus(2, lambda at: at.exchanged(operation, [tensor], layout))

    @OPERATION
    @pytest.mark.parametrize("how", STRIDES)
    def test_every_stride(self, operation: Operation, how: str) -> None:
        """L26."""
        tokens = (3, 4) if operation != "allgather_heads" else (7, 0)
        on_gpus(2, lambda at: at.exchanged(operation, [Tensor(2, tokens, 7, 6, "int16")], "BHND", how))

    @pytest.mark.parametrize(
        ("heads", "dim", "dtype"),
        [
            (96, 128, "bfloat16"),
            (128, 128, "bfloat16"),
            (40, 128, "bfloat16"),
            (24, 128, "bfloat16"),
            (30, 128, "float8_e4m3fn"),
            (7, 46, "bfloat16"),
            (5, 3, "uint8"),
            (2, 1, "bfloat16"),
        ],
    )
    def test_rows_of_every_width(self, heads: int, dim: int, dtype: str) -> None:
        """L5, L6, L7, L8, case 47."""
        tensor = Tensor(1, (scaled(70), scaled(33)), heads, dim, dtype)

        def body(at: Rank) -> None:
            at.exchanged("send_recv_heads", [tensor])
            at.exchanged("gather_heads", [tensor])

        on_gpus(2, body, capacity_bytes=4 << 20)

    @pytest.mark.parametrize("num_sms", [1, 2, 16, 132, None])
    def test_any_number_of_sms(self, num_sms: int | None) -> None:
        """L10: fewer than ranks, and different ones, leave nobody out."""
        tensor = Tensor(2, (scaled(300), scaled(211)), 8, 64, "float32")

        def body(at: Rank) -> None:
            for mine in (num_sms, (num_sms or 4) + at.rank):
                at.exchanged("send_recv_heads", [tensor], num_sms=mine)

        on_gpus(2, body)

    def test_fused_tensors_of_several_kinds(self) -> None:
        tensors = [
            Tensor(1, (scaled(64), scaled(37)), 8, 64, "float16"),
            Tensor(1, (scaled(64), scaled(37)), 4, 64, "float32", key=2),
            Tensor(2, (3, 0), 4, 24, "int64", key=3),
        ]
        on_gpus(2, lambda at: at.exchanged("send_recv_heads", tensors))

    def test_large_messages(self) -> None:
        """From 8 MB up the headers are waited for by a kernel of their own."""
        tensor = Tensor(1, (scaled(5000), scaled(4000)), 16, 128, "float32")

        def body(at: Rank) -> None:
            for _ in range(3):
                at.exchanged("send_recv_heads", [tensor])

        on_gpus(2, body, capacity_bytes=128 << 20)

    def test_empty_ranks(self) -> None:
        on_gpus(2, lambda at: at.exchanged("send_recv_heads", [Tensor(1, (0, 5), 6, 4)]))

    def test_busy(self) -> None:
        """Hazard 55: arrays of no library that could give memory are refused when all buffers are held."""
        tensor = Tensor(1, (3, 4), 6, 4)

        def body(at: Rank) -> None:
            held = [at.exchanged("send_recv_heads", [tensor]) for _ in range(4)]
            with pytest.raises(kf.Busy):
                at.put("send_recv_heads", [tensor], at.arrays("send_recv_heads", [tensor]))
            held.pop()
            gc.collect()
            held.append(at.exchanged("send_recv_heads", [tensor]))
            for results in held:
                at.check(results, "send_recv_heads", [tensor])

        on_gpus(2, body)


class TestResults:
    def test_held_across_ten_calls_and_after_close(self) -> None:
        """L1, L16, hazards 1 and 2."""
        first = [Tensor(1, (30, 17), 6, 16, key=99)]
        kept: list[Any] = [None, None]

        def body(at: Rank) -> None:
            kept[at.rank] = at, at.exchanged("send_recv_heads", first)
            for key in range(10):
                at.exchanged("send_recv_heads", [Tensor(1, (30, 17), 6, 16, key=key)])
            at.check(kept[at.rank][1], "send_recv_heads", first)

        on_gpus(2, body)
        for at, results in kept:
            at.check(results, "send_recv_heads", first)

    def test_three_calls_held_together(self) -> None:
        """L3, L4, hazard 2a: enqueued one after the other, read afterwards."""
        tensors = [Tensor(1, (30, 17), 6, 16, key=key) for key in range(3)]

        def body(at: Rank) -> None:
            arrays = [at.arrays("send_recv_heads", [tensor]) for tensor in tensors]
            for _ in range(5):
                results = [
                    at.put("send_recv_heads", [tensor], given)
                    for tensor, given in zip(tensors, arrays, strict=True)
                ]
                at.stream.synchronize()
                for tensor, found in zip(tensors, results, strict=True):
                    at.check(found, "send_recv_heads", [tensor])
                del results, found

        on_gpus(2, body)

    def test_a_result_as_input(self) -> None:
        """Hazard 6: it lies in the pool that peers write to."""

        def body(at: Rank) -> None:
            for key in range(20):
                tensor = Tensor(1, (5 + key % 3, 4), 6, 16, key=key)
                (array,) = at.arrays("send_recv_heads", [tensor])
                options: dict[str, Any] = {"rank_tokens": tensor.tokens, "stream": at.stream}
                there = at.comm.send_recv_heads(array.array, **options)
                back = at.comm.gather_heads(there, **options)
                del there
                at.stream.synchronize()
                at.check([back], "gather_heads", [tensor])

        on_gpus(2, body)

    def test_protocols(self) -> None:
        tensor = Tensor(1, (3, 4), 6, 4, "float32")

        def body(at: Rank) -> None:
            (result,) = at.exchanged("send_recv_heads", [tensor])
            assert isinstance(result, kf.ExchangeArray)
            want = expected(tensor, "send_recv_heads", at.rank)
            interface = result.__cuda_array_interface__
            assert interface["data"] == (result.addr, False) and interface["shape"] == want.shape
            assert interface["typestr"] == "<f4" and interface["strides"] == want.strides
            assert result.__dlpack_device__() == (2, at.ordinal)
            assert not hasattr(result, "__array_interface__")
            with pytest.raises(BufferError):
                memoryview(result)
            capsule = result.__dlpack__(stream=1, max_version=(1, 0))
            del result
            gc.collect()
            for key in range(6):
                at.exchanged("send_recv_heads", [Tensor(1, (3, 4), 6, 4, "float32", key=key)])
            assert (
                read(interface["data"][0], want.nbytes, at.ordinal) == want.view(np.uint8).reshape(-1)
            ).all()
            del capsule

        on_gpus(2, body)


class TestOutputs:
    @pytest.mark.parametrize("engine", ["auto", "push", "copy"])
    def test_every_engine(self, engine: Any) -> None:
        """Hazard 51: the copy engine writes where both hosts know; the others anywhere."""
        tensors = [Tensor(1, (scaled(300), scaled(200)), 6, 64, "float32", key=key) for key in range(4)]

        def body(at: Rank) -> None:
            shape = expected(tensors[0], "send_recv_heads", at.rank).shape
            out = at.comm.empty_output(shape, "float32")
            for tensor in tensors:
                write(out.addr, np.full(out.nbytes, 0xA5, np.uint8), at.ordinal)
                (result,) = at.exchanged("send_recv_heads", [tensor], out=(out,), engine=engine)
                assert result.addr == out.addr

        on_gpus(2, body, capacity_bytes=16 << 20)

    def test_the_copy_engine_needs_one(self) -> None:
        def body(at: Rank) -> Any:
            tensor = Tensor(1, (3, 4), 6, 4)
            arrays = at.arrays("send_recv_heads", [tensor])
            return error_of(lambda: at.put("send_recv_heads", [tensor], arrays, engine="copy"))

        for error in broken(2, body):
            assert isinstance(error, (kf.Unsupported, kf.ContractMismatch)), repr(error)


class TestStreams:
    def test_a_buffer_waits_for_a_consumer_on_an_announced_stream(self) -> None:
        """Hazard 54: dropped on the host is not free on the GPU. With one buffer, the next call must wait."""
        tensor, other = Tensor(1, (30, 17), 6, 16, "int16"), Tensor(1, (30, 17), 6, 16, "int16", key=2)

        def body(at: Rank) -> None:
            arrays = at.arrays("send_recv_heads", [tensor]), at.arrays("send_recv_heads", [other])
            (result,) = at.put("send_recv_heads", [tensor], arrays[0])
            at.stream.synchronize()
            want = expected(tensor, "send_recv_heads", at.rank)
            copy = Buffer(want.nbytes, at.ordinal, 0)
            with Stream(at.ordinal) as consumer, Hold(consumer) as hold:
                consumer.copy(copy.addr, result.addr, want.nbytes)
                at.comm.record_stream(result, consumer)
                del result
                gc.collect()
                (again,) = at.put("send_recv_heads", [other], arrays[1])
                mark = Mark(at.stream)
                time.sleep(0.05)
                assert not mark.reached, "the call did not wait for the consumer of its buffer"
                hold.release()
                consumer.synchronize()
                at.stream.synchronize()
            found = read(copy.addr, want.nbytes, at.ordinal)
            assert np.array_equal(found, want.view(np.uint8).reshape(-1)), "overwritten while read"
            at.check([again], "send_recv_heads", [other])

        on_gpus(2, body, buffers=1)

    def test_calls_on_changing_streams_follow_one_another(self) -> None:
        """Case 7, hazard 15."""
        tensors = [Tensor(1, (30, 17), 6, 16, key=key) for key in range(8)]

        def body(at: Rank) -> None:
            with Stream(at.ordinal) as other, Stream(at.ordinal) as third:
                streams = (at.stream, other, third)
                kept = []
                for number, tensor in enumerate(tensors):
                    stream = streams[(number * (at.rank + 1)) % 3]
                    arrays = at.arrays("send_recv_heads", [tensor])
                    kept.append((tensor, at.put("send_recv_heads", [tensor], arrays, stream=stream), arrays))
                    if len(kept) == 3:
                        for each in streams:
                            each.synchronize()
                        for one, found, _ in kept:
                            at.check(found, "send_recv_heads", [one])
                        kept.clear()
                        del found
                for each in streams:
                    each.synchronize()
                # Letting go of a result asks its stream, which has to be there.
                kept.clear()

        on_gpus(2, body)

    def test_inputs_written_on_the_stream_before_are_seen(self) -> None:
        tensor = Tensor(1, (30, 17), 6, 16, "int16")

        def body(at: Rank) -> None:
            (array,) = at.arrays("send_recv_heads", [Tensor(1, (30, 17), 6, 16, "int16", key=7)])
            (source,) = at.arrays("send_recv_heads", [tensor])
            with Hold(at.stream) as hold:
                at.stream.copy(array.array.addr, source.array.addr, array.nbytes)
                results = at.put("send_recv_heads", [tensor], [array])
                hold.release()
                at.stream.synchronize()
            at.check(results, "send_recv_heads", [tensor])

        on_gpus(2, body)

    @pytest.mark.parametrize("kind", ["none", "legacy", "per thread", "torch"])
    def test_streams_of_every_kind(self, kind: str) -> None:
        tensor = Tensor(1, (30, 17), 6, 16)

        def body(at: Rank) -> None:
            streams = {
                "none": None,
                "legacy": DefaultStream(1, at.ordinal),
                "per thread": DefaultStream(2, at.ordinal),
                "torch": TorchLike(at.stream),
            }
            arrays = at.arrays("send_recv_heads", [tensor])
            results = at.put("send_recv_heads", [tensor], arrays, stream=streams[kind])
            synchronize(at.ordinal)
            at.check(results, "send_recv_heads", [tensor])

        on_gpus(2, body)

    def test_skewed_calls_back_to_back(self) -> None:
        """L1, L2, case 3."""
        calls = 10_000 if os.environ.get("KVFERRY_SOAK") == "1" else 300
        tensors = [Tensor(1, (5 + key % 4, 3 + key % 3), 6, 16, key=key) for key in range(12)]

        def body(at: Rank) -> None:
            chosen = np.random.default_rng(at.rank)
            arrays = [at.arrays("send_recv_heads", [tensor]) for tensor in tensors]
            held: list[Any] = []
            for number in range(calls):
                which = number % len(tensors)
                held.append((which, at.put("send_recv_heads", [tensors[which]], arrays[which])))
                if chosen.random() < 0.05:
                    time.sleep(chosen.random() * 2e-3)
                if len(held) == 3:
                    then, found = held.pop(0)
                    if number % 10 == 0:
                        at.stream.synchronize()
                        at.check(found, "send_recv_heads", [tensors[then]])
                    del found
            at.stream.synchronize()
            at.comm.check()
            assert at.comm.stats()["calls"] == calls

        on_gpus(2, body)


class TestErrors:
    def test_ranks_that_disagree(self) -> None:
        """Hazard 7: found on the device before a byte moves; every host hears of it."""

        def body(at: Rank) -> Any:
            tensor = Tensor(1, (3, 4), 6, 4 + at.rank)
            arrays = at.arrays("send_recv_heads", [tensor])
            own = error_of(lambda: at.put("send_recv_heads", [tensor], arrays))
            at.stream.synchronize()
            until(lambda: error_of(at.comm.check) is not None, 10)
            return own or error_of(at.comm.check)

        for error in broken(2, body):
            assert isinstance(error, kf.ContractMismatch), repr(error)

    def test_one_ranks_own_error(self) -> None:
        """Hazard 12: the rank that is already waiting on its GPU is let go."""

        def body(at: Rank) -> Any:
            tensor = Tensor(1, (3, 4), 6, 4)
            arrays = at.arrays("send_recv_heads", [tensor])
            at.exchanged("send_recv_heads", [tensor])
            if at.rank == 1:
                time.sleep(0.1)
                with pytest.raises(kf.LayoutError):
                    at.comm.send_recv_heads(arrays[0].array, rank_tokens=(3, 5), stream=at.stream)
            else:
                error = error_of(lambda: at.put("send_recv_heads", [tensor], arrays))
                at.stream.synchronize()
                assert error is None or isinstance(error, kf.ContractMismatch)
            error = None
            end = time.monotonic() + 10
            while error is None and time.monotonic() < end:
                error = error_of(at.comm.check)
            at.comm.reset()
            at.exchanged("send_recv_heads", [tensor])
            return error

        for error in on_gpus(2, body):
            assert isinstance(error, kf.ContractMismatch) and error.rank == 1, repr(error)

    def test_memory_of_another_kind(self) -> None:
        def body(at: Rank) -> Any:
            if at.rank:
                return error_of(lambda: at.comm.send_recv_heads(np.zeros((1, 4, 6, 4)), stream=at.stream))
            (array,) = at.arrays("send_recv_heads", [Tensor(1, (4, 4), 6, 4, "float64")])
            return error_of(lambda: at.comm.send_recv_heads(array.array, stream=at.stream))

        errors = broken(2, body)
        assert isinstance(errors[1], (kf.Unsupported, kf.ContractMismatch)), repr(errors[1])

    def test_a_device_that_is_not_there(self) -> None:
        from exchange_ranks import fresh, join, outcomes  # noqa: PLC0415

        where = fresh()
        found = outcomes(2, lambda rank: join(rank, 2, rendezvous=where, device=99 if rank else 0), 60)
        assert all(isinstance(outcome.error, kf.Error) for outcome in found), found


class TestProcesses:
    def test_calls(self, meet: str) -> None:
        """L12: one GPU each, memory by file descriptors or CUDA IPC; nothing is left of it."""
        with nothing_left(), processes(2, gpu.gpu_calls, meet=meet) as ranks:
            for stats in ranks.values(gpu.DEADLINE):
                assert stats["transport"] in ("vmm", "ipc") and stats["why"]

    def test_graphs(self, meet: str) -> None:
        """Hazards 5, 14, 56, cases 29 and 31."""
        with processes(2, gpu.gpu_graphs, meet=meet) as ranks:
            ranks.values(gpu.DEADLINE)

    def test_a_timeout_in_a_replay(self, meet: str) -> None:
        """L18, hazards 8 and 9: the time is read where the kernel waits, not frozen into the graph."""
        with processes(2, gpu.gpu_graph_timeout, meet=meet) as ranks:
            error, seconds, filled, again = ranks[0].outcome(gpu.DEADLINE).value
            ranks[1].tell()
            other = ranks[1].outcome(gpu.DEADLINE).value
        assert isinstance(error, kf.PeerTimeout) and error.peer == 1, repr(error)
        assert 0.4 < seconds < 2.0 and filled and again < 1.0
        assert isinstance(other, kf.PeerTimeout), repr(other)

    @pytest.mark.parametrize("fork", [False, True])
    def test_a_rank_is_killed(self, meet: str, fork: bool) -> None:
        """Hazards 10 and 11: PeerDied within a second; the context and a new communicator work."""
        child = 0
        with processes(2, gpu.gpu_peer_lost, meet=meet, victim=1, fork=fork) as ranks:
            try:
                for rank in ranks:
                    rank.reaches("ready", gpu.DEADLINE)
                child = next(int(stage.split()[1]) for stage in ranks[1].stages if stage.startswith("child"))
                ranks[0].tell()
                ranks[0].reaches("waiting")
                time.sleep(0.1)
                pid, killed = ranks[1].pid, time.monotonic()
                ranks[1].kill()
                found = ranks[0].outcome(gpu.DEADLINE).value
            finally:
                if child > 1:
                    os.kill(child, 9)
        error = found["error"]
        assert isinstance(error, kf.PeerDied) and (error.peer, error.pid) == (1, pid), repr(error)
        assert found["when"] - killed < 1.0 and found["filled"]
        assert all(isinstance(later, kf.PeerDied) for later in found["later"]), found["later"]

    def test_a_rank_is_stopped(self, meet: str) -> None:
        with processes(2, gpu.gpu_peer_lost, meet=meet, victim=1, timeout=1.0) as ranks:
            for rank in ranks:
                rank.reaches("ready", gpu.DEADLINE)
            ranks[1].stop()
            ranks[0].tell()
            found = ranks[0].outcome(gpu.DEADLINE).value
        error = found["error"]
        assert isinstance(error, kf.PeerTimeout) and error.peer == 1, repr(error)
        assert 0.9 <= error.seconds <= 1.1
        assert 0.9 <= found["when"] - found["start"] <= 1.6 and found["filled"]


def test_nothing_is_left_of_thread_ranks() -> None:
    on_gpus(2, lambda at: at.exchanged("send_recv_heads", [Tensor(1, (3, 4), 6, 4)]))
    with nothing_left():
        on_gpus(2, lambda at: at.exchanged("send_recv_heads", [Tensor(1, (3, 4), 6, 4)]))


@pytest.fixture(autouse=True)
def nothing_is_held() -> Iterator[None]:
    yield
    gc.collect()
