"""The head exchange between CPU ranks that are threads: operations, shapes, dtypes, strides, byte by byte.

Rows named L are the reference's weaknesses (field/all2all.md §1.8), numbered cases those of its §4, hazards
those of field/hazards.md.
"""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING

import numpy as np
import pytest
from exchange_calls import OPERATIONS, call, contract, exchanged, expected, given, verify
from exchange_ranks import closing_broken, fresh, join, nothing_left, outcomes, together
from exchange_reference import STRIDES, WIDTHS, Tensor, even, numpy_dtype, of_groups, same

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
