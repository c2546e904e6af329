"""Results of the exchange between CPU ranks that are threads: how long they are good, where they may lie.

Rows named L are the reference's weaknesses (field/all2all.md §1.8), numbered cases those of its §4, hazards
those of field/hazards.md.
"""

from __future__ import annotations

import gc
import os
import random
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from exchange_calls import OPERATIONS, call, contract, exchanged, expected, given, verify
from exchange_ranks import closing_broken, each, nothing_left, together
from exchange_reference import Tensor, raw, same

import kvferry as kf

if TYPE_CHECKING:
    from collections.abc import Iterator


CALLS = 10_000 if os.environ.get("KVFERRY_SOAK") == "1" else 300


@pytest.fixture(autouse=True)
def leaves_nothing() -> Iterator[None]:
    with nothing_left():
        yield


def tokens_of(world: int, seed: int = 0) -> tuple[int, ...]:
    """Uneven tokens, one rank without any where there are enough ranks."""
    chosen = random.Random(seed + world)
    counts = [chosen.randint(1, 9) for _ in range(world)]
    if world > 2:
        counts[chosen.randrange(world)] = 0
    return tuple(counts)


# Results


def test_three_calls_are_held_together() -> None:
    """L3, L4, hazard 2a: q, k and v exchanged one by one, all read afterwards."""
    tensors = [Tensor(2, (5, 3), 6, 4, key=key) for key in range(3)]

    def body(comm: kf.All2All, rank: int) -> None:
        for _ in range(20):
            results: list[Any] = []
            for tensor in tensors:
                results += exchanged(comm, rank, "send_recv_heads", [tensor])
            verify(results, rank, "send_recv_heads", tensors)

    together(2, body)


@pytest.mark.parametrize("world", [2, 3])
def test_a_result_is_good_for_ten_calls_and_after_close(world: int) -> None:
    """L1, L16, hazards 1 and 2e: nothing overwrites or unmaps what is held."""
    first = Tensor(1, tokens_of(world), 4, 8, key=99)
    kept: list[Any] = [None] * world

    def body(comm: kf.All2All, rank: int) -> None:
        held = exchanged(comm, rank, "send_recv_heads", [first])
        chosen = random.Random(rank)
        for key in range(10):
            exchanged(comm, rank, OPERATIONS[key % 3], [Tensor(1, tokens_of(world, key), 5, 7, key=key)])
            time.sleep(chosen.random() * 2e-3)
            verify(held, rank, "send_recv_heads", [first])
        kept[rank] = held

    together(world, body)
    gc.collect()
    for rank in range(world):
        verify(kept[rank], rank, "send_recv_heads", [first])
        kept[rank][0][...] = 0  # mapped and writable


def test_views_keep_the_buffer_too() -> None:
    tensor = Tensor(1, (4, 4), 6, 4, key=5)

    def body(comm: kf.All2All, rank: int) -> None:
        (result,) = exchanged(comm, rank, "send_recv_heads", [tensor])
        part = result[:, 2:5, 1]
        del result
        gc.collect()
        for key in range(8):
            exchanged(comm, rank, "send_recv_heads", [Tensor(1, (4, 4), 6, 4, key=key)])
        same(part, expected(tensor, "send_recv_heads", rank)[:, 2:5, 1])

    together(2, body)


def test_one_result_of_a_call_keeps_the_others_place() -> None:
    """Case 51: the results of a call share a buffer; each is its own array in it."""
    tensors = [
        Tensor(1, (3, 2), 6, 5, dtype, key=key) for key, dtype in enumerate(["uint8", "float64", "int16"])
    ]

    def body(comm: kf.All2All, rank: int) -> None:
        results = list(exchanged(comm, rank, "send_recv_heads", tensors))
        assert all(result.ctypes.data % 256 == results[0].ctypes.data % 256 for result in results)
        last = results.pop()
        del results
        for key in range(8):
            exchanged(comm, rank, "send_recv_heads", [Tensor(1, (9, 2), 6, 5, key=key)])
        verify([last], rank, "send_recv_heads", tensors[2:])

    together(2, body)


def test_a_result_is_an_input_like_any_other() -> None:
    """Hazard 6: the input lies in the own pool, and the next call reuses what it can."""

    def body(comm: kf.All2All, rank: int) -> None:
        for key in range(12):
            tensor = Tensor(1, tokens_of(3, key), 5, 3, key=key)
            array = given(tensor, "send_recv_heads", rank)
            here = comm.send_recv_heads(array, rank_tokens=tensor.tokens)
            back = comm.gather_heads(here, rank_tokens=tensor.tokens, num_heads=5)
            del here
            same(back, array)
            everything = comm.allgather(back, axis="tokens", rank_tokens=tensor.tokens)
            same(everything, expected(tensor, "allgather_tokens", rank))

    together(3, body)


def test_all_to_all_then_all_gather() -> None:
    """Case 1: nothing between the two but their order."""
    tensor = Tensor(1, (6, 6), 4, 8)

    def body(comm: kf.All2All, rank: int) -> None:
        for _ in range(50):
            exchanged(comm, rank, "send_recv_heads", [tensor])
            exchanged(comm, rank, "allgather_tokens", [tensor])

    together(2, body)


def test_busy_when_every_buffer_is_held() -> None:
    """Hazard 55: held results are never overwritten; one dropped, the same call goes through."""
    tensor = Tensor(1, (2, 2), 4, 4)

    def body(comm: kf.All2All, rank: int) -> None:
        held = [exchanged(comm, rank, "send_recv_heads", [tensor]) for _ in range(3)]
        assert comm.stats()["buffers_free"] == 0
        with pytest.raises(kf.Busy, match="3"):
            comm.send_recv_heads(given(tensor, "send_recv_heads", rank))
        held.pop()
        gc.collect()
        held.append(exchanged(comm, rank, "send_recv_heads", [tensor]))
        for results in held:
            verify(results, rank, "send_recv_heads", [tensor])

    together(2, body, buffers=3)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.timeout(120 + CALLS / 20)
def test_skewed_calls_back_to_back(world: int) -> None:
    """L1, L2, case 3: ranks out of step, held results, changing shapes; 10,000 calls under `make soak`."""
    skewed(world, CALLS)


def skewed(world: int, calls: int) -> None:
    plans = []
    chosen = random.Random(7)
    for key in range(40):
        tensor = Tensor(
            1, tokens_of(world, key), chosen.choice([world, 5, 7]), chosen.choice([1, 3, 16]), key=key
        )
        operation = chosen.choice(OPERATIONS[:3])
        plans.append((operation, tensor, contract(operation, [tensor])))

    def body(comm: kf.All2All, rank: int) -> None:
        mine = random.Random(rank)
        inputs = [given(tensor, operation, rank) for operation, tensor, _ in plans]
        wanted = [raw(expected(tensor, operation, rank)) for operation, tensor, _ in plans]
        held: list[tuple[int, Any]] = []

        for number in range(calls):
            at = number % len(plans)
            operation, _, said = plans[at]
            result = call(comm, operation, inputs[at], **said)
            held.append((at, result))
            if mine.random() < 0.1:
                time.sleep(mine.random() * 1e-3)
            if len(held) > mine.randrange(3):
                then, result = held.pop(0)
                assert np.array_equal(raw(result), wanted[then]), f"call {number}"
            del result
        assert comm.stats()["epoch"] == calls

    together(world, body, deadline=10 + calls / 20)


# Places of one's own


def test_out_is_written_and_returned() -> None:
    """Hazard 3: the place is known to all, and a peer writes there only once this rank has called."""
    tensors = [Tensor(1, (3, 4), 6, 5, "float32", key=key) for key in range(6)]

    def body(comm: kf.All2All, rank: int) -> None:
        shape = expected(tensors[0], "send_recv_heads", rank).shape
        out = comm.empty_output(shape, "float32")
        assert isinstance(out, kf.ExchangeArray) and out.shape == shape and out.dtype == "float32"
        seen = np.asarray(out)
        for tensor in tensors:
            seen.view(np.uint8)[...] = 0xA5
            result = comm.send_recv_heads(
                given(tensor, "send_recv_heads", rank), rank_tokens=tensor.tokens, out=out
            )
            assert result.ctypes.data == out.addr
            same(seen, expected(tensor, "send_recv_heads", rank))
            time.sleep(rank * 1e-3)
            same(seen, expected(tensor, "send_recv_heads", rank))

    together(2, body)


def test_outputs_for_several_tensors_and_beside_other_calls() -> None:
    tensors = [Tensor(1, (3, 4), 6, 5, "float32"), Tensor(2, (3, 4), 6, 2, "bfloat16", key=2)]

    def body(comm: kf.All2All, rank: int) -> None:
        shapes = [expected(tensor, "send_recv_heads", rank).shape for tensor in tensors]
        outs = comm.empty_output(shapes, ["float32", "bfloat16"])
        assert isinstance(outs, tuple) and [out.shape for out in outs] == shapes
        free = comm.stats()["buffers_free"]
        results = exchanged(comm, rank, "send_recv_heads", tensors, out=outs)
        for key in range(6):
            exchanged(comm, rank, "send_recv_heads", [Tensor(1, (9, 2), 6, 5, key=key)])
        verify(results, rank, "send_recv_heads", tensors)
        del outs, results
        gc.collect()
        assert comm.stats()["buffers_free"] == free + 1

    together(2, body)


def test_an_output_of_another_shape_is_refused() -> None:
    tensor = Tensor(1, (3, 4), 6, 5)

    def body(comm: kf.All2All, rank: int) -> kf.Error:
        out = comm.empty_output((1, 7, 3, 6), "float16")
        with pytest.raises(kf.Error) as info:
            exchanged(comm, rank, "send_recv_heads", [tensor], out=out)
        return info.value

    errors = closing_broken(2, body)
    assert any(isinstance(error, kf.OptionError) and "out" in str(error) for error in errors)


# Capacity


def test_capacity_for_is_what_a_call_needs() -> None:
    tokens, heads = (300, 100, 0), 7
    needed = kf.All2All.capacity_for((2, 400, heads, 3), "float32", 3, rank_tokens=tokens)
    assert needed == 2 * 400 * 3 * 3 * 4
    tensor = Tensor(2, tokens, heads, 3, "float32")
    together(3, lambda comm, rank: exchanged(comm, rank, "send_recv_heads", [tensor]), capacity_bytes=needed)
    back = kf.All2All.capacity_for(
        (2, 400, heads, 3), "float32", 3, rank_tokens=tokens, operation="gather_heads"
    )
    assert back == 2 * 300 * heads * 3 * 4
    everything = kf.All2All.capacity_for((2, 400, 7, 3), "float32", 3, operation="allgather_tokens")
    assert everything == 2 * 400 * 7 * 3 * 4
    several = kf.All2All.capacity_for([(1, 64, 32, 64), (1, 64, 8, 64), (1, 64, 8, 64)], "bfloat16", 4)
    assert several == 64 * (8 + 2 + 2) * 64 * 2


def test_an_odd_capacity() -> None:
    """L25: sizes that are no multiple of anything."""
    tensor = Tensor(1, (3, 4), 3, 1, "float8_e4m3fn")
    needed = kf.All2All.capacity_for((1, 7, 3, 1), "float8_e4m3fn", 2, rank_tokens=(3, 4))
    together(2, lambda comm, rank: exchanged(comm, rank, "send_recv_heads", [tensor]), capacity_bytes=needed)


def test_the_largest_result_of_any_rank_counts() -> None:
    """L14: tokens {1, 7}: rank 0 knows that rank 1's rows do not fit, and nobody writes them."""
    tensor = Tensor(1, (1, 7), 4, 8, "float32")

    def body(comm: kf.All2All, rank: int) -> Exception:
        with pytest.raises((kf.CapacityError, kf.ContractMismatch), match="capacity") as info:
            exchanged(comm, rank, "gather_heads", [tensor])
        return info.value

    # Both refuse for themselves, unless the other was first to be heard.
    errors = closing_broken(2, body, capacity_bytes=400)
    own = [error for error in errors if isinstance(error, kf.CapacityError)]
    assert own and all(isinstance(error, ValueError) for error in errors)
    assert (own[0].needed, own[0].capacity) == (7 * 4 * 8 * 4, 400)
    assert str(7 * 4 * 8 * 4) in str(own[0]) and "400" in str(own[0])


# Protocols


class OnlyDlpack:
    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


class OnlyInterface:
    def __init__(self, array: Any) -> None:
        self.__array_interface__ = array.__array_interface__
        self._array = array


@pytest.mark.parametrize("wrap", [OnlyDlpack, OnlyInterface, memoryview])
def test_other_arrays_give_arrays_of_kvferrys(wrap: Any) -> None:
    tensor = Tensor(1, (3, 4), 6, 5, "float32")

    def body(comm: kf.All2All, rank: int) -> None:
        array = given(tensor, "send_recv_heads", rank)
        result = comm.send_recv_heads(wrap(array), rank_tokens=tensor.tokens)
        assert isinstance(result, kf.ExchangeArray)
        assert "float32" in repr(result) and len(result) == 1
        want = expected(tensor, "send_recv_heads", rank)
        assert result.nbytes == want.nbytes and result.strides == want.strides
        same(np.asarray(result), want)
        same(np.from_dlpack(result), want)
        assert np.asarray(result).ctypes.data == result.addr
        back = comm.gather_heads(result, rank_tokens=tensor.tokens, num_heads=6)
        same(np.asarray(back), array)

    together(2, body)


def test_raw_bytes_may_be_declared() -> None:
    tensor = Tensor(1, (3, 4), 6, 5, "bfloat16")

    def body(comm: kf.All2All, rank: int) -> None:
        array = given(tensor, "send_recv_heads", rank).view(np.uint16)
        result = comm.send_recv_heads(memoryview(array), rank_tokens=tensor.tokens, dtype="bfloat16")
        assert result.dtype == "bfloat16"
        same(np.asarray(result), expected(tensor, "send_recv_heads", rank).view(np.uint16))

    together(2, body)


def test_a_list_gives_a_tuple_and_one_array_gives_one() -> None:
    tensor = Tensor(1, (2, 2), 4, 4)

    def body(comm: kf.All2All, rank: int) -> None:
        array = given(tensor, "send_recv_heads", rank)
        assert isinstance(comm.send_recv_heads(array), np.ndarray)
        for arrays in ([array], (array,)):
            results = comm.send_recv_heads(arrays)
            assert isinstance(results, tuple) and len(results) == 1

    together(2, body)


# The object


def test_stats_and_repr() -> None:
    tensor = Tensor(1, (3, 4), 6, 5, "float32")

    def body(comm: kf.All2All, rank: int) -> None:
        before = comm.stats()
        assert before["calls"] == before["bytes_sent"] == before["epoch"] == 0
        exchanged(comm, rank, "send_recv_heads", [tensor])
        after = comm.stats()
        mine, other = tensor.tokens[rank], tensor.tokens[1 - rank]
        assert after["bytes_sent"] == mine * 3 * 5 * 4
        assert after["bytes_received"] == other * 3 * 5 * 4
        assert (after["calls"], after["epoch"], after["copied_out"]) == (1, 1, 0)
        assert after["buffers"] == after["buffers_free"] == 4
        assert after["transport"] == "shared memory" and after["why"]
        assert f"rank {rank} of 2" in repr(comm) and "cpu" in repr(comm)

    together(2, body)


def test_one_call_at_a_time() -> None:
    """Case 7: two threads of a rank queue up; nothing is mixed."""

    tensor = Tensor(1, (3, 3), 4, 4)

    def body(comm: kf.All2All, rank: int) -> None:
        def calls(_: int) -> None:
            for _ in range(50):
                exchanged(comm, rank, "send_recv_heads", [tensor])

        each(2, calls)

    together(2, body)


def test_the_interpreter_is_free_while_a_call_waits() -> None:
    """Threads of one process could not meet otherwise; and others run meanwhile."""
    seen = []

    def body(comm: kf.All2All, rank: int) -> None:
        tensor = Tensor(1, (1, 1), 2, 1)
        if rank == 1:
            time.sleep(0.2)
            seen.append("other")
        exchanged(comm, rank, "send_recv_heads", [tensor])
        seen.append("done")

    together(2, body)
    assert seen[0] == "other"
