"""The head exchange as torch operators: with gradients, and under torch.compile.

    import kvferry as kf
    import kvferry.torch as kft

    comm = kf.All2All.from_group(capacity_bytes=1 << 28)
    q, k, v = kft.send_recv_heads(comm, (q, k, v), rank_tokens=[128, 96])
    o = kft.gather_heads(comm, attention(q, k, v), rank_tokens=[128, 96])

The functions take what the methods of kf.All2All take, but for `out`, `stream` and `dtype`. The gradient of
an exchange is another exchange: all ranks run the backward passes of the same calls, in the same order. Where
a gradient is recorded, and in a CUDA graph, results are copied out of the communicator's buffers, which an
autograd graph would hold for long. Compilers keep the calls and their order.

Nothing else in kvferry imports torch.
"""

from typing import Any, Optional, Sequence, Union  # noqa: UP035 - torch reads the schema from them

import torch
from torch.library import custom_op

import kvferry as kf
from kvferry._core import communicator, head_ranges

__all__ = ["allgather", "gather_heads", "send_recv_heads"]

Tensors = Union[torch.Tensor, Sequence[torch.Tensor]]  # noqa: UP007
Splits = list[list[range]]

_SEND, _GATHER, _TOKENS, _HEADS = "send_recv_heads", "gather_heads", "allgather_tokens", "allgather_heads"


def send_recv_heads(comm: kf.All2All, tensors: Tensors, **options: Any) -> Any:
    """All2All.send_recv_heads() with a gradient: one tensor gives one, several give a tuple."""
    return _exchange(comm, tensors, _SEND, **options)


def gather_heads(comm: kf.All2All, tensors: Tensors, **options: Any) -> Any:
    """All2All.gather_heads() with a gradient.

    Of heads that several ranks hold only the first one's are sent; the others get a gradient of zero.
    """
    return _exchange(comm, tensors, _GATHER, **options)


def allgather(comm: kf.All2All, tensors: Tensors, axis: str = "tokens", **options: Any) -> Any:
    """All2All.allgather() with a gradient: the sum of all ranks'."""
    if axis not in ("tokens", "heads"):
        comm._refuse(_TOKENS, "unknown axis")
        raise kf.OptionError(f'axis must be "tokens" or "heads", got {axis!r}')
    return _exchange(comm, tensors, _TOKENS if axis == "tokens" else _HEADS, **options)


def _exchange(
    comm: kf.All2All,
    tensors: Tensors,
    operation: str,
    *,
    rank_tokens: Any = None,
    layout: str = "BNHD",
    num_heads: Any = None,
    query_heads: int | None = None,
    head_splits: Any = None,
    num_sms: int | None = None,
) -> Any:
    """Says all that ranks must agree on in numbers, which compilers can keep, and calls the operator."""
    single = isinstance(tensors, torch.Tensor)
    given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    try:
        if layout not in ("BNHD", "BHND"):
            raise kf.OptionError(f'layout must be "BNHD" or "BHND", got {layout!r}')
        world = comm.world_size
        tokens = _tokens_of(given, operation, layout, world, rank_tokens)
        totals, splits = _heads_of(given, operation, layout, world, num_heads, query_heads, head_splits)
    except kf.Error as error:
        if not torch.compiler.is_compiling():
            comm._refuse(operation, str(error))
        raise
    record = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)
    # An empty list would be taken for one of tensors.
    numbers = tokens or None, totals or None, _flat(splits) or None
    results = _op(given, comm._handle, operation, layout, *numbers, num_sms, record)
    return results[0] if single else tuple(results)


def _tokens_of(given: Any, operation: str, layout: str, world: int, rank_tokens: Any) -> list[int]:
    """Tokens of every rank, tensor after tensor; empty where all ranks have all tokens."""
    if operation == _HEADS and rank_tokens is None:
        return []
    if rank_tokens is not None:
        each = list(rank_tokens)
        lists = [list(one) for one in each] if each and not isinstance(each[0], int) else [each] * len(given)
        if len(lists) != len(given) or any(len(one) != world for one in lists):
            raise kf.OptionError(f"rank_tokens must have {world} entries, in one list or one list per tensor")
        return [count for one in lists for count in one]
    found = []
    for index, tensor in enumerate(given):
        own = tensor.shape[_token_axis(layout)]
        if operation == _GATHER:
            if own % world:
                message = f"tensor {index}: {own} tokens do not divide among {world} ranks: give rank_tokens"
                raise kf.LayoutError(message)
            own = own // world
        found += [own] * world
    return found


def _heads_of(  # noqa: PLR0917
    given: Any,
    operation: str,
    layout: str,
    world: int,
    num_heads: Any,
    query_heads: int | None,
    head_splits: Any,
) -> tuple[list[int], Splits]:
    """Heads of all ranks together, and those of each, by tensor; empty where heads stay together."""
    if operation == _TOKENS:
        return [], []
    own = [int(tensor.shape[_head_axis(layout)]) for tensor in given]
    brings = 1 if operation == _SEND else world
    if num_heads is None:
        totals = [heads * brings for heads in own]
    else:
        totals = [num_heads] * len(given) if isinstance(num_heads, int) else [int(each) for each in num_heads]
    if head_splits is not None:
        lists = list(head_splits)
        if lists and isinstance(lists[0], (int, range)):
            lists = [lists] * len(given)
        return totals, [_ranges(one) for one in lists]
    most = query_heads or max(totals, default=1)
    return totals, [_default_ranges(total, world, most) for total in totals]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _default_ranges(total: int, world: int, query_heads: int) -> list[range]:
    return head_ranges(total, world, query_heads)


def _ranges(splits: Any) -> list[range]:
    """Ranges, some of which may be given as numbers of heads."""
    found: list[range] = []
    for split in splits:
        start = found[-1].stop if found else 0
        found.append(split if isinstance(split, range) else range(start, start + int(split)))
    return found


def _flat(splits: Splits) -> list[int]:
    return [border for each in splits for split in each for border in (split.start, split.stop)]


def _unflat(borders: Sequence[int] | None, world: int) -> Splits:
    borders = borders or []
    pairs = [range(borders[at], borders[at + 1]) for at in range(0, len(borders), 2)]
    return [pairs[at : at + world] for at in range(0, len(pairs), world)]


def _token_axis(layout: str) -> int:
    return 1 if layout == "BNHD" else 2


def _head_axis(layout: str) -> int:
    return 2 if layout == "BNHD" else 1


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
    found = communicator(comm)
    options = _said(found.world_size, tokens, totals, splits)
    inputs = tuple(_packed(tensor.detach()) for tensor in tensors)
    if operation in (_SEND, _GATHER):
        results = getattr(found, operation)(inputs, layout=layout, num_sms=num_sms, **options)
    else:
        axis: Any = operation.removeprefix("allgather_")
        results = found.allgather(inputs, axis, layout=layout, num_sms=num_sms, **options)
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
        options["head_splits"] = _unflat(splits, world)
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
    found = communicator(comm)
    world, rank = found.world_size, found.rank
    of_tokens, of_heads = _token_axis(layout), _head_axis(layout)
    mine = _unflat(splits, world)
    results = []
    for index, tensor in enumerate(tensors):
        shape = list(tensor.shape)
        counts = (tokens or [])[index * world : (index + 1) * world]
        if operation in (_SEND, _TOKENS):
            shape[of_tokens] = sum(counts)
        elif operation == _GATHER:
            shape[of_tokens] = counts[rank]
        if operation == _SEND:
            shape[of_heads] = len(mine[index][rank])
        elif operation != _TOKENS:
            shape[of_heads] = totals[index]
        results.append(tensor.new_empty(shape))
    return results


def _remember(ctx: Any, inputs: Any, output: Any) -> None:
    _, ctx.comm, ctx.operation, ctx.layout, ctx.tokens, ctx.totals, ctx.splits, ctx.num_sms, _ = inputs
    ctx.results = [(list(result.shape), result.dtype, result.device) for result in output]


def _backward(ctx: Any, grads: Any) -> Any:
    found = communicator(ctx.comm)
    world, rank = found.world_size, found.rank
    # Every rank takes part, whether or not its own results were used.
    full = [
        torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad
        for grad, (shape, dtype, device) in zip(grads, ctx.results, strict=True)
    ]
    of_heads, splits = _head_axis(ctx.layout), _unflat(ctx.splits, world)

    def call(operation: str, tensors: Any, tokens: Any, totals: Any, splits: Splits) -> Any:
        # Of sums over tokens the rows are made in this order.
        layout = "BNHD" if ctx.operation == _TOKENS else ctx.layout
        return _op(tensors, ctx.comm, operation, layout, tokens, totals, _flat(splits), ctx.num_sms, True)

    if ctx.operation == _SEND:
        back = _summed_over_copies(call, ctx, full, splits, of_heads)
    elif ctx.operation == _GATHER:
        back = call(_SEND, full, ctx.tokens, ctx.totals, splits)
        back = [_own_only(one, split, rank, of_heads) for one, split in zip(back, splits, strict=True)]
    elif ctx.operation == _TOKENS:
        back = _summed_over_tokens(call, ctx, full, world)
    else:
        back = _summed_over_heads(call, ctx, full, splits)
    return list(back), *[None] * 8


def _summed_over_copies(call: Any, ctx: Any, grads: Any, splits: Splits, axis: int) -> Any:
    """The inverse exchange; heads that went to several ranks come back from each and are added up."""
    widths = [sum(map(len, split)) for split in splits]
    if widths == list(ctx.totals):
        return call(_GATHER, grads, ctx.tokens, ctx.totals, splits)
    apart = [_ranges([len(split) for split in each]) for each in splits]
    found = call(_GATHER, grads, ctx.tokens, widths, apart)
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
        splits.append(_ranges(counts))
    found = call(_SEND, rows, [1] * (world * len(rows)), totals, splits)
    sums = []
    for one, grad in zip(found, grads, strict=True):
        shape = list(grad.shape if ctx.layout == "BNHD" else grad.transpose(1, 2).shape)
        shape[1] = one.shape[2]
        added = one.sum(1).reshape(shape)
        sums.append(added if ctx.layout == "BNHD" else added.transpose(1, 2).contiguous())
    return sums


def _summed_over_heads(call: Any, ctx: Any, grads: Any, splits: Splits) -> Any:
    """Every rank sends each other one's heads of all tokens."""
    found = communicator(ctx.comm)
    world, rank = found.world_size, found.rank
    at, of_heads = _token_axis(ctx.layout), _head_axis(ctx.layout)
    tokens = [grad.shape[at] for grad in grads for _ in range(world)]
    apart = call(_SEND, grads, tokens, ctx.totals, splits)
    sums = []
    for one, split in zip(apart, splits, strict=True):
        parts = one.unflatten(at, (world, one.shape[at] // world)).sum(at)
        sums.append(_own_only(parts, split, rank, of_heads))
    return sums


_op.register_autograd(_backward, setup_context=_remember)
_op.register_effect(torch._higher_order_ops.effects._EffectType.ORDERED)
