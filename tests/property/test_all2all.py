"""Random exchanges between CPU ranks against a NumPy permutation: tokens, heads, strides, dtypes."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
from exchange_calls import OPERATIONS, call, contract, expected, given, verify
from exchange_ranks import fresh, join, nothing_left, outcomes
from exchange_reference import STRIDES, WIDTHS, Tensor, even, of_groups, same
from hypothesis import given as vary
from hypothesis import strategies as st

import kvferry as kf

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from exchange_reference import Layout, Operation


@pytest.fixture(autouse=True, scope="module")
def leaves_nothing() -> Iterator[None]:
    with nothing_left():
        yield
        Group.made.cache_clear()


# The slow profile takes minutes a test.
pytestmark = pytest.mark.timeout(3600)


class Group:
    """Ranks in threads with one communicator, kept from example to example; broken ones are reset."""

    def __init__(self, world: int) -> None:
        meet = fresh()
        joined = outcomes(world, lambda rank: join(rank, world, rendezvous=meet, capacity_bytes=1 << 18))
        self.comms: list[kf.All2All] = [outcome.value for outcome in joined]

    @staticmethod
    @functools.cache
    def made(world: int) -> Group:
        return Group(world)

    def run(self, body: Callable[[kf.All2All, int], Any]) -> None:
        ended = outcomes(len(self.comms), lambda rank: body(self.comms[rank], rank))
        errors = [outcome.error for outcome in ended if outcome.error is not None]
        if errors:
            outcomes(len(self.comms), lambda rank: self.comms[rank].reset())
            raise errors[0]


@st.composite
def splits_of(draw: st.DrawFn, heads: int, world: int) -> tuple[range, ...]:
    """None: the default. Else ranges that leave no head out; they may overlap and be empty."""
    borders = [
        0,
        *sorted(draw(st.lists(st.integers(0, heads), min_size=world - 1, max_size=world - 1))),
        heads,
    ]
    parts = [range(borders[rank], borders[rank + 1]) for rank in range(world)]
    if draw(st.booleans()):
        grown = draw(st.integers(0, world - 1))
        parts[grown] = range(max(0, parts[grown].start - 1), min(heads, parts[grown].stop + 2))
    return tuple(draw(st.permutations(parts)))


@st.composite
def exchanges(draw: st.DrawFn) -> tuple[int, Operation, list[Tensor], Layout, list[str]]:
    world = draw(st.sampled_from([1, 2, 2, 3, 3, 4, 5, 8]))
    operation: Operation = draw(st.sampled_from(OPERATIONS))
    layout: Layout = draw(st.sampled_from(["BNHD", "BHND"]))
    tokens = tuple(draw(st.lists(st.integers(0, 6), min_size=world, max_size=world)))
    queries = draw(st.integers(world, 3 * world))
    tensors, hows = [], []
    for index in range(draw(st.integers(1, 3))):
        heads = queries
        splits: tuple[range, ...] = ()
        if index:
            divisors = [
                kv
                for kv in range(1, queries + 1)
                if queries % kv == 0 and whole(queries // kv, queries, world)
            ]
            heads = draw(st.sampled_from(divisors))
            if heads < queries:
                splits = tuple(of_groups(heads, queries, world))
        elif draw(st.integers(0, 3)) == 0:
            splits = draw(splits_of(heads, world))
        if operation == "allgather_tokens":
            splits = ()
        own = draw(st.permutations(tokens)) if draw(st.booleans()) else tokens
        if operation == "allgather_heads":
            own = (sum(own),) + (0,) * (world - 1)
        dtype = draw(st.sampled_from(sorted(WIDTHS)))
        dim = draw(st.sampled_from([1, 2, 3, 5, 8, 17]))
        tensors.append(
            Tensor(draw(st.integers(1, 2)), tuple(own), heads, dim, dtype, splits, draw(st.integers(0, 99)))
        )
        hows.append(draw(st.sampled_from(STRIDES)))
    if any(tensor.splits for tensor in tensors):
        # Splits are given for all tensors or for none.
        tensors = [
            Tensor(t.batch, t.tokens, t.heads, t.dim, t.dtype, tuple(t.ranges), t.key) for t in tensors
        ]
    return world, operation, tensors, layout, hows


def whole(group: int, queries: int, world: int) -> bool:
    """Whether every rank's query heads lie in one group or are whole groups."""
    return all(
        split.start // group == (split.stop - 1) // group
        or (split.start % group == 0 and split.stop % group == 0)
        for split in even(queries, world)
    )


@vary(exchanges())
def test_an_exchange_is_a_permutation(
    case: tuple[int, Operation, list[Tensor], Layout, list[str]],
) -> None:
    world, operation, tensors, layout, hows = case

    def body(comm: kf.All2All, rank: int) -> None:
        arrays = [
            given(tensor, operation, rank, layout, how) for tensor, how in zip(tensors, hows, strict=True)
        ]
        results = call(comm, operation, arrays, **contract(operation, tensors, layout=layout))
        verify(results, rank, operation, tensors, layout)

    Group.made(world).run(body)


@vary(exchanges())
def test_there_and_back(case: tuple[int, Operation, list[Tensor], Layout, list[str]]) -> None:
    """Beside the ground truth above: the inverse of the results is what went in."""
    world, _, tensors, layout, _ = case
    if any(sum(tensor.tokens[1:]) == 0 for tensor in tensors):
        return

    def body(comm: kf.All2All, rank: int) -> None:
        arrays = [given(tensor, "send_recv_heads", rank, layout) for tensor in tensors]
        there = comm.send_recv_heads(arrays, **contract("send_recv_heads", tensors, layout=layout))
        back = comm.gather_heads(there, **contract("gather_heads", tensors, layout=layout))
        for array, result in zip(arrays, back, strict=True):
            same(result, array)

    Group.made(world).run(body)


@vary(exchanges())
def test_capacity_for_is_exact(case: tuple[int, Operation, list[Tensor], Layout, list[str]]) -> None:
    """It is the sum of a rank's results, each at a multiple of 256 bytes, of the rank with the largest."""
    world, operation, tensors, _, _ = case
    sizes = []
    for rank in range(world):
        end = 0
        for tensor in tensors:
            end = -(-end // 256) * 256 + expected(tensor, operation, rank).nbytes
        sizes.append(end)
    said = contract(operation, tensors)
    said.pop("num_heads", None)
    shapes = [(t.batch, sum(t.tokens), t.heads, t.dim) for t in tensors]
    found = kf.All2All.capacity_for(shapes, [t.dtype for t in tensors], world, operation=operation, **said)
    assert found == max(sizes)
