"""The head exchange between CPU ranks that are threads: operations, shapes, dtypes, strides, byte by byte.

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
from exchange_ranks import each, fresh, join, nothing_left, outcomes, together, together_outcomes
from exchange_reference import STRIDES, WIDTHS, Tensor, even, numpy_dtype, of_groups, raw, same

import kvferry as kf

if TYPE_CHECKING:
    from collections.abc import Iterator

    from exchange_reference import Layout, Operation

CALLS = 10_000 if os.environ.get("KVFERRY_SOAK") == "1" else 300

OPERATION = pytest.mark.parametrize("operation", OPERATIONS)
LAYOUT = pytest.mark.parametrize("layout", ["BNHD", "BHND"])


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


def usable(tensor: Tensor, operation: Operation) -> Tensor:
    """The same with equal tokens where ranks bring all of them."""
    if operation != "allgather_heads":
        return tensor
    return Tensor(tensor.batch, (5,) + (0,) * (tensor.world - 1), tensor.heads, tensor.dim, tensor.dtype)


def closing_broken(world: int, body: Any, **options: Any) -> list[Any]:
    """Values of ranks that leave a broken communicator behind."""
    ended = together_outcomes(world, body, **options)
    for outcome in ended:
        if outcome.error is not None:
            raise outcome.error
    return [outcome.value for outcome in ended]


# Shapes


@OPERATION
@pytest.mark.parametrize("world", [1, 2, 3, 4, 7, 8, 16])
def test_every_operation_at_every_world_size(operation: Operation, world: int) -> None:
    """L8, L11, L13: uneven tokens (one rank has none) and uneven heads at up to 16 ranks; W = 1 is a copy."""
    tensor = Tensor(2, tokens_of(world), 2 * world + 1, 5, "float32")
    together(world, lambda comm, rank: exchanged(comm, rank, operation, [tensor]))


@OPERATION
@LAYOUT
@pytest.mark.parametrize("dtype", WIDTHS)
def test_every_dtype_in_both_layouts(operation: Operation, layout: Layout, dtype: str) -> None:
    """L9: a byte mover knows no unsupported type; results have the dtype of the input, fp8 too."""
    tensor = Tensor(2, (3, 4), 6, 3, dtype)

    def body(comm: kf.All2All, rank: int) -> None:
        (result,) = exchanged(comm, rank, operation, [tensor], layout=layout)
        assert isinstance(result, np.ndarray) and result.dtype == numpy_dtype(dtype)
        assert result.flags.c_contiguous and result.flags.writeable

    together(2, body)


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64", "bool", "complex64"])
def test_types_that_only_numpy_has_a_name_for(dtype: str) -> None:
    whole = np.arange(2 * 6 * 4 * 3).reshape(2, 6, 4, 3).astype(dtype)

    def body(comm: kf.All2All, rank: int) -> None:
        result = comm.send_recv_heads(whole[:, 3 * rank : 3 * rank + 3])
        same(result, np.ascontiguousarray(whole[:, :, 2 * rank : 2 * rank + 2]))

    together(2, body)


@OPERATION
@LAYOUT
@pytest.mark.parametrize("how", STRIDES)
def test_every_stride(operation: Operation, layout: Layout, how: str) -> None:
    """L26: views of fused projections, transposed and reversed arrays go in; only dim is contiguous."""
    tensor = usable(Tensor(2, (3, 0, 4), 7, 6, "int16"), operation)
    together(3, lambda comm, rank: exchanged(comm, rank, operation, [tensor], layout=layout, how=how))


@pytest.mark.parametrize(
    ("heads", "dim", "world", "dtype"),
    [
        (40, 128, 1, "bfloat16"),
        (64, 128, 1, "bfloat16"),
        (96, 128, 2, "bfloat16"),
        (128, 128, 2, "bfloat16"),
        (56, 128, 4, "bfloat16"),
        (24, 20, 8, "bfloat16"),
        (8, 3, 8, "float8_e4m3fn"),
        (16, 1, 8, "bfloat16"),
        (30, 128, 4, "float16"),
        (46, 46, 2, "bfloat16"),
        (12, 46, 4, "bfloat16"),
    ],
)
def test_rows_of_every_width(heads: int, dim: int, world: int, dtype: str) -> None:
    """L5, L6, L7, L8, case 47: rows longer than a block, odd ones, short ones; heads that do not divide."""
    tensor = Tensor(1, even_tokens(13, world), heads, dim, dtype)
    for operation in ("send_recv_heads", "gather_heads"):
        together(
            world,
            lambda comm, rank, operation=operation: exchanged(comm, rank, operation, [tensor]),  # type: ignore[misc]
        )


def even_tokens(total: int, world: int) -> tuple[int, ...]:
    return tuple(len(share) for share in even(total, world))


@LAYOUT
@OPERATION
def test_three_axes_are_a_dim_of_one(operation: Operation, layout: Layout) -> None:
    tensor = usable(Tensor(3, (2, 5), 6, 1, "float32"), operation)

    def body(comm: kf.All2All, rank: int) -> None:
        flat = given(tensor, operation, rank, layout)[..., 0]
        said = contract(operation, [tensor], layout=layout)

        result = call(comm, operation, flat, **said)
        assert isinstance(result, np.ndarray)
        same(result, expected(tensor, operation, rank, layout)[..., 0])

    together(2, body)


def test_a_world_of_one_needs_no_rendezvous_and_still_owns_its_results() -> None:
    tensor = Tensor(1, (4,), 3, 2)
    with kf.All2All(0, 1, capacity_bytes=1 << 16, device="cpu") as comm:
        array = given(tensor, "send_recv_heads", 0)
        result = comm.send_recv_heads(array)
        assert not np.shares_memory(result, array)
        same(result, array)
        same(comm.gather_heads(result), array)


def test_zero_tokens_everywhere() -> None:
    tensor = Tensor(2, (0, 0), 4, 3)
    together(2, lambda comm, rank: exchanged(comm, rank, "send_recv_heads", [tensor]))


# Tokens and heads


def test_tokens_are_as_many_as_mine_by_default() -> None:
    tensor = Tensor(2, (5, 5, 5), 6, 4)

    def body(comm: kf.All2All, rank: int) -> None:
        (result,) = exchanged(comm, rank, "send_recv_heads", [tensor], plain=True)
        same(comm.gather_heads(result), given(tensor, "send_recv_heads", rank))

    together(3, body)


def test_video_tokens_that_do_not_divide() -> None:
    """Case 37: 21 x 60 x 45 = 56,700 tokens over 8 ranks."""
    tensor = Tensor(1, even_tokens(56_700, 8), 8, 1, "uint8")
    assert sum(tensor.tokens) == 56_700 and len(set(tensor.tokens)) == 2

    def body(comm: kf.All2All, rank: int) -> None:
        (result,) = exchanged(comm, rank, "send_recv_heads", [tensor])
        same(comm.gather_heads(result, rank_tokens=tensor.tokens), given(tensor, "send_recv_heads", rank))

    together(8, body)


def test_rank_tokens_may_change_from_call_to_call() -> None:
    """L15, L20: the counts belong to the call, not to the communicator."""
    tensors = [
        Tensor(1, tokens, 5, 3, key=key) for key, tokens in enumerate([(1, 7), (7, 1), (0, 4), (3, 3)])
    ]

    def body(comm: kf.All2All, rank: int) -> None:
        for tensor in tensors * 3:
            exchanged(comm, rank, "send_recv_heads", [tensor])
            exchanged(comm, rank, "gather_heads", [tensor])

    together(2, body)


def test_tokens_by_tensor() -> None:
    """Cross-attention: queries of one sequence, keys and values of another."""
    tensors = [
        Tensor(1, (4, 2), 6, 3),
        Tensor(1, (0, 9), 6, 3, key=2),
        Tensor(2, (5, 5), 6, 4, "uint8", key=3),
    ]
    together(2, lambda comm, rank: exchanged(comm, rank, "send_recv_heads", tensors))


@pytest.mark.parametrize(
    ("queries", "kv", "world"),
    [(32, 8, 2), (32, 8, 8), (32, 4, 8), (16, 2, 8), (16, 2, 16), (40, 8, 8), (8, 1, 4), (6, 3, 3)],
)
def test_kv_heads_follow_their_query_heads(queries: int, kv: int, world: int) -> None:
    """L8: fewer KV heads than ranks go to every rank whose query heads need them, and come back once."""
    tokens = even_tokens(2 * world + 1, world)
    needed = tuple(of_groups(kv, queries, world))
    q = Tensor(1, tokens, queries, 4, "float16")
    k = Tensor(1, tokens, kv, 4, "float16", needed, key=2)
    v = Tensor(1, tokens, kv, 3, "float32", needed, key=3)

    def body(comm: kf.All2All, rank: int) -> None:
        arrays = tuple(given(tensor, "send_recv_heads", rank) for tensor in (q, k, v))
        results = comm.send_recv_heads(arrays, rank_tokens=tokens)
        verify(results, rank, "send_recv_heads", [q, k, v])
        alone = comm.send_recv_heads(arrays[1], rank_tokens=tokens, query_heads=queries)
        verify([alone], rank, "send_recv_heads", [k])
        heads = [queries, kv, kv]
        back = comm.gather_heads(results, rank_tokens=tokens, num_heads=heads, query_heads=queries)
        verify(back, rank, "gather_heads", [q, k, v])

    together(world, body)


@pytest.mark.parametrize("world", [10, 16])
def test_more_ranks_than_kv_heads_divide(world: int) -> None:
    """Case 43: 40 query and 8 KV heads on more than 8 ranks: refused by name, possible with splits."""
    tokens = even_tokens(2 * world + 1, world)
    q, k = Tensor(1, tokens, 40, 2), Tensor(1, tokens, 8, 2, key=2)

    def refused(comm: kf.All2All, rank: int) -> None:
        arrays = tuple(given(tensor, "send_recv_heads", rank) for tensor in (q, k))
        with pytest.raises((kf.LayoutError, kf.ContractMismatch), match=r"head_splits|refused"):
            comm.send_recv_heads(arrays, rank_tokens=tokens)

    closing_broken(world, refused)
    whole = Tensor(1, tokens, 40, 2, splits=tuple(even(40, world)))
    needed = Tensor(1, tokens, 8, 2, splits=tuple(of_groups(8, 40, world)), key=2)
    together(world, lambda comm, rank: exchanged(comm, rank, "send_recv_heads", [whole, needed]))


def test_a_group_that_straddles_ranks_is_refused_unless_splits_are_given() -> None:
    """Case 39: 28 query and 7 KV heads over 2 ranks must not be padded; the user says who gets which."""
    q, k = Tensor(1, (3, 3), 28, 2), Tensor(1, (3, 3), 7, 2, key=2)

    def refused(comm: kf.All2All, rank: int) -> None:
        arrays = tuple(given(tensor, "send_recv_heads", rank) for tensor in (q, k))
        with pytest.raises((kf.LayoutError, kf.ContractMismatch)) as info:
            comm.send_recv_heads(arrays)
        if isinstance(info.value, kf.LayoutError):
            assert "head_splits" in str(info.value)

    closing_broken(2, refused)
    splits = (range(16), range(16, 28)), (range(4), range(4, 7))
    tensors = [Tensor(1, (3, 3), 28, 2, splits=splits[0]), Tensor(1, (3, 3), 7, 2, splits=splits[1], key=2)]
    together(2, lambda comm, rank: exchanged(comm, rank, "send_recv_heads", tensors))
    replicated = [Tensor(1, (3, 3), 28, 2), Tensor(1, (3, 3), 7, 2, splits=(range(4), range(3, 7)), key=2)]
    together(2, lambda comm, rank: exchanged(comm, rank, "send_recv_heads", replicated))


def test_head_counts_are_the_communicators_own() -> None:
    """Case 41: another model in the process changes nothing."""
    here, there = fresh(), fresh()
    one, other = Tensor(1, (2,) * 4, 12, 2), Tensor(1, (2,) * 4, 7, 2, key=2)

    def body(rank: int) -> None:
        with join(rank, 4, rendezvous=here) as a, join(rank, 4, rendezvous=there) as b:
            for _ in range(3):
                exchanged(a, rank, "send_recv_heads", [one])
                exchanged(b, rank, "send_recv_heads", [other])
            assert [a.head_range(12), b.head_range(7)] == [even(12, 4)[rank], even(7, 4)[rank]]

    for outcome in outcomes(4, body):
        if outcome.error is not None:
            raise outcome.error


def test_splits_of_ones_own_choice() -> None:
    """Ranks without heads, and heads given out in another order."""
    splits = (range(4, 7), range(0), range(4))
    tensor = Tensor(2, (2, 3, 4), 7, 3, splits=splits)
    for operation in ("send_recv_heads", "gather_heads", "allgather_heads"):
        use = tensor if operation != "allgather_heads" else Tensor(2, (4, 0, 0), 7, 3, splits=splits)
        together(3, lambda comm, rank, o=operation, t=use: exchanged(comm, rank, o, [t]))  # type: ignore[misc]


def test_head_range() -> None:
    def body(comm: kf.All2All, rank: int) -> None:
        assert comm.head_range(30) == even(30, 4)[rank]
        assert comm.head_range(2, query_heads=8) == of_groups(2, 8, 4)[rank]
        assert (comm.rank, comm.world_size) == (rank, 4)

    together(4, body)


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
