"""Calls of a communicator on tensors of the oracle, every byte compared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from exchange_reference import laid_out, raw, same, strided

if TYPE_CHECKING:
    from collections.abc import Sequence

    from exchange_reference import Layout, Operation, Tensor

    import kvferry as kf

OPERATIONS: tuple[Operation, ...] = (
    "send_recv_heads",
    "gather_heads",
    "allgather_tokens",
    "allgather_heads",
)


def in_layout(array: Any, layout: Layout) -> Any:
    """[B, N, H, D] seen in the order of `layout`, wherever it lies."""
    return array if layout == "BNHD" else array.transpose(0, 2, 1, 3)


def given(
    tensor: Tensor, operation: Operation, rank: int, layout: Layout = "BNHD", how: str = "packed"
) -> Any:
    """What a rank passes: the oracle's slice, its axes in the order of `layout`, with strides as asked."""
    return strided(laid_out(tensor.before(operation, rank), layout), how)


def expected(tensor: Tensor, operation: Operation, rank: int, layout: Layout = "BNHD") -> Any:
    """What it must get."""
    return laid_out(tensor.after(operation, rank), layout)


def contract(
    operation: Operation, tensors: Sequence[Tensor], *, plain: bool = False, **options: Any
) -> dict[str, Any]:
    """The options that say what the oracle knows. `plain`: leave out what the library can find out."""
    said: dict[str, Any] = {}
    if not plain and operation != "allgather_heads":
        tokens = [list(tensor.tokens) for tensor in tensors]
        said["rank_tokens"] = tokens[0] if all(each == tokens[0] for each in tokens) else tokens
    if operation in ("gather_heads", "allgather_heads") and not plain:
        said["num_heads"] = [tensor.heads for tensor in tensors]
    if any(tensor.splits for tensor in tensors) and operation != "allgather_tokens":
        said["head_splits"] = [list(tensor.ranges) for tensor in tensors]
    return {**said, **options}


def call(comm: kf.All2All, operation: Operation, arrays: Any, **options: Any) -> Any:
    """One of the four operations."""
    if operation == "send_recv_heads":
        return comm.send_recv_heads(arrays, **options)
    if operation == "gather_heads":
        return comm.gather_heads(arrays, **options)
    axis: Any = operation.removeprefix("allgather_")
    return comm.allgather(arrays, axis=axis, **options)


def exchanged(
    comm: kf.All2All,
    rank: int,
    operation: Operation,
    tensors: Sequence[Tensor],
    *,
    layout: Layout = "BNHD",
    how: str = "packed",
    plain: bool = False,
    **options: Any,
) -> tuple[Any, ...]:
    """Calls with the oracle's inputs; compares every byte of the results, and that the inputs are intact."""
    arrays = tuple(given(tensor, operation, rank, layout, how) for tensor in tensors)
    before = [raw(array).copy() for array in arrays]
    said = contract(operation, tensors, plain=plain, layout=layout, **options)
    results = call(comm, operation, arrays, **said)
    assert isinstance(results, tuple) and len(results) == len(tensors)
    for tensor, result in zip(tensors, results, strict=True):
        same(result, expected(tensor, operation, rank, layout), f"{operation} on rank {rank}:")
    for array, was in zip(arrays, before, strict=True):
        assert np.array_equal(raw(array), was), "an input was written"
    return results


def verify(
    results: Sequence[Any],
    rank: int,
    operation: Operation,
    tensors: Sequence[Tensor],
    layout: Layout = "BNHD",
) -> None:
    """Compares results again, such as those held for long."""
    for tensor, result in zip(tensors, results, strict=True):
        same(result, expected(tensor, operation, rank, layout), f"{operation} on rank {rank}, later:")
