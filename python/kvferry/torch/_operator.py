"""The exchange as an operator of torch: its numbers, its fake, its gradient, its effect."""

from typing import Any, Optional, Sequence, Union  # noqa: UP035 - torch reads the schema from them

import torch
from torch.library import custom_op

from kvferry.torch._options import check_communicator, check_layout, no_others, number
from kvferry.torch._registry import Communicator, find
from kvferry.torch._splits import (
    GATHER,
    SEND,
    TOKENS,
    Splits,
    flat,
    head_axis,
    heads_of,
    ranges_of,
    tensors_of,
    token_axis,
    tokens_of,
    unflat,
)

Tensors = Union[torch.Tensor, Sequence[torch.Tensor]]  # noqa: UP007


def exchange(
    comm: Communicator,
    tensors: Tensors,
    operation: str,
    *,
    rank_tokens: Any = None,
    layout: str = "BNHD",
    num_heads: Any = None,
    query_heads: int | None = None,
    head_splits: Any = None,
    num_sms: int | None = None,
    **unknown: Any,
) -> Any:
    """Says all that ranks must agree on in numbers, which compilers can keep, and calls the operator."""
    check_communicator(comm)
    single = isinstance(tensors, torch.Tensor)
    try:
        no_others(operation, unknown)
        given = tensors_of(tensors)
        check_layout(layout)
        num_sms = None if num_sms is None else number("num_sms", num_sms)
        world = comm.world_size
        tokens = tokens_of(given, operation, layout, world, rank_tokens)
        totals, splits = heads_of(given, operation, layout, world, num_heads, query_heads, head_splits)
    except Exception as error:
        # Whatever it is: the other ranks must not wait for this one.
        if not torch.compiler.is_compiling():
            comm._refuse(operation, str(error))
        raise
    record = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)
    # An empty list would be taken for one of tensors.
    numbers = tokens or None, totals or None, flat(splits) or None
    results = _op(given, comm._handle, operation, layout, *numbers, num_sms, record)
    return results[0] if single else tuple(results)


# Not one of its arguments is an object: a graph that was compiled keeps them as they are.
@custom_op("kvferry::exchange", mutates_args=())  # type: ignore[untyped-decorator]
def _op(  # noqa: PLR0917
    tensors: Sequence[torch.Tensor],
    comm: int,
    operation: str,
    layout: str,
    tokens: Optional[Sequence[int]],  # noqa: UP045
    totals: Optional[Sequence[int]],  # noqa: UP045
    splits: Optional[Sequence[int]],  # noqa: UP045
    num_sms: Optional[int],  # noqa: UP045
    copy: bool,
) -> list[torch.Tensor]:
    found = find(comm)
    options = {"layout": layout, "num_sms": num_sms, **_said(found.world_size, tokens, totals, splits)}
    inputs = tuple(_packed(tensor.detach()) for tensor in tensors)
    if operation in (SEND, GATHER):
        results = getattr(found, operation)(inputs, **options)
    else:
        axis: Any = operation.removeprefix("allgather_")
        results = found.allgather(inputs, axis, **options)
    if copy or any(each.is_cuda and torch.cuda.is_current_stream_capturing() for each in inputs[:1]):
        return [result.clone() for result in results]
    return list(results)


def _said(world: int, tokens: Any, totals: Any, splits: Any) -> dict[str, Any]:
    """The operator's numbers as the options of a call."""
    options: dict[str, Any] = {}
    if tokens:
        options["rank_tokens"] = [list(tokens[at : at + world]) for at in range(0, len(tokens), world)]
    if totals:
        options["num_heads"] = list(totals)
        options["head_splits"] = unflat(splits, world)
    return options


def _packed(tensor: torch.Tensor) -> torch.Tensor:
    """Gradients come expanded: with a step of zero along dim."""
    if tensor.dim() == 4 and tensor.shape[3] > 1 and tensor.stride(3) != 1:
        return tensor.contiguous()
    return tensor


@_op.register_fake  # type: ignore[untyped-decorator]
def _fake(  # noqa: PLR0917
    tensors: Any,
    comm: int,
    operation: str,
    layout: str,
    tokens: Any,
    totals: Any,
    splits: Any,
    num_sms: Any,  # noqa: ARG001
    copy: bool,  # noqa: ARG001
) -> list[torch.Tensor]:
    found = find(comm)
    world, rank = found.world_size, found.rank
    of_tokens, of_heads = token_axis(layout), head_axis(layout)
    mine = unflat(splits, world)
    results = []
    for index, tensor in enumerate(tensors):
        shape = list(tensor.shape)
        counts = (tokens or [])[index * world : (index + 1) * world]
        if operation in (SEND, TOKENS):
            shape[of_tokens] = sum(counts)
        elif operation == GATHER:
            shape[of_tokens] = counts[rank]
        if operation == SEND:
            shape[of_heads] = len(mine[index][rank])
        elif operation != TOKENS:
            shape[of_heads] = totals[index]
        results.append(tensor.new_empty(shape))
    return results


def _remember(ctx: Any, inputs: Any, output: Any) -> None:
    _, ctx.comm, ctx.operation, ctx.layout, ctx.tokens, ctx.totals, ctx.splits, ctx.num_sms, _ = inputs
    ctx.results = [(list(result.shape), result.dtype, result.device) for result in output]


def _backward(ctx: Any, grads: Any) -> Any:
    found = find(ctx.comm)
    world, rank = found.world_size, found.rank
    # Every rank takes part, whether or not its own results were used.
    full = [
        torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad
        for grad, (shape, dtype, device) in zip(grads, ctx.results, strict=True)
    ]
    of_heads, splits = head_axis(ctx.layout), unflat(ctx.splits, world)

    def call(operation: str, tensors: Any, tokens: Any, totals: Any, splits: Splits) -> Any:
        # Of sums over tokens the rows are made in this order.
        layout = "BNHD" if ctx.operation == TOKENS else ctx.layout
        return _op(tensors, ctx.comm, operation, layout, tokens, totals, flat(splits), ctx.num_sms, True)

    if ctx.operation == SEND:
        back = _summed_over_copies(call, ctx, full, splits, of_heads)
    elif ctx.operation == GATHER:
        back = call(SEND, full, ctx.tokens, ctx.totals, splits)
        back = [_own_only(one, split, rank, of_heads) for one, split in zip(back, splits, strict=True)]
    elif ctx.operation == TOKENS:
        back = _summed_over_tokens(call, ctx, full, world)
    else:
        back = _summed_over_heads(call, ctx, full, splits)
    return list(back), *[None] * 8


def _summed_over_copies(call: Any, ctx: Any, grads: Any, splits: Splits, axis: int) -> Any:
    """The inverse exchange; heads that went to several ranks come back from each and are added up."""
    widths = [sum(map(len, split)) for split in splits]
    if widths == list(ctx.totals):
        return call(GATHER, grads, ctx.tokens, ctx.totals, splits)
    apart = [ranges_of([len(split) for split in each]) for each in splits]
    found = call(GATHER, grads, ctx.tokens, widths, apart)
    sums = []
    for one, total, split, at in zip(found, ctx.totals, splits, apart, strict=True):
        shape = list(one.shape)
        shape[axis] = total
        added = one.new_zeros(shape)
        for place, part in zip(split, at, strict=True):
            added.narrow(axis, place.start, len(place)).add_(one.narrow(axis, part.start, len(part)))
        sums.append(added)
    return sums


def _own_only(grad: Any, split: list[range], rank: int, axis: int) -> Any:
    """Zero for heads that were not sent, as a lower rank holds them too."""
    lower = {head for each in split[:rank] for head in each}
    sent = [head not in lower for head in split[rank]]
    if all(sent):
        return grad
    shape = [1] * grad.dim()
    shape[axis] = len(sent)
    return grad * torch.tensor(sent, dtype=grad.dtype, device=grad.device).reshape(shape)


def _summed_over_tokens(call: Any, ctx: Any, grads: Any, world: int) -> Any:
    """Every rank sends each other one's tokens, as if they were heads of a single token per rank."""
    rows, totals, splits = [], [], []
    for index, grad in enumerate(grads):
        counts = ctx.tokens[index * world : (index + 1) * world]
        by_tokens = grad if ctx.layout == "BNHD" else grad.transpose(1, 2)
        rows.append(by_tokens.reshape(by_tokens.shape[0], 1, by_tokens.shape[1], -1))
        totals.append(sum(counts))
        splits.append(ranges_of(counts))
    found = call(SEND, rows, [1] * (world * len(rows)), totals, splits)
    sums = []
    for one, grad in zip(found, grads, strict=True):
        shape = list(grad.shape if ctx.layout == "BNHD" else grad.transpose(1, 2).shape)
        shape[1] = one.shape[2]
        added = one.sum(1).reshape(shape)
        sums.append(added if ctx.layout == "BNHD" else added.transpose(1, 2).contiguous())
    return sums


def _summed_over_heads(call: Any, ctx: Any, grads: Any, splits: Splits) -> Any:
    """Every rank sends each other one's heads of all tokens."""
    found = find(ctx.comm)
    world, rank = found.world_size, found.rank
    at, of_heads = token_axis(ctx.layout), head_axis(ctx.layout)
    tokens = [grad.shape[at] for grad in grads for _ in range(world)]
    apart = call(SEND, grads, tokens, ctx.totals, splits)
    sums = []
    for one, split in zip(apart, splits, strict=True):
        parts = one.unflatten(at, (world, one.shape[at] // world)).sum(at)
        sums.append(_own_only(parts, split, rank, of_heads))
    return sums


_op.register_autograd(_backward, setup_context=_remember)
_op.register_effect(torch._higher_order_ops.effects._EffectType.ORDERED)
