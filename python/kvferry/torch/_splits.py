"""What a call's options mean in numbers: tokens and heads of every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import kvferry as kf
from kvferry._core import head_ranges
from kvferry.torch._options import is_number, listed, number, numbers

if TYPE_CHECKING:
    from collections.abc import Sequence

Splits = list[list[range]]

SEND, GATHER, TOKENS, HEADS = "send_recv_heads", "gather_heads", "allgather_tokens", "allgather_heads"


# Of one call; the library's limit.
_MOST_TENSORS = 16


def tensors_of(tensors: Any) -> list[torch.Tensor]:
    """The tensors of a call, each of which has tokens and heads."""
    if isinstance(tensors, torch.Tensor):
        given = [tensors]
    else:
        if isinstance(tensors, (list, tuple)) and not 0 < len(tensors) <= _MOST_TENSORS:
            message = f"a call takes between 1 and {_MOST_TENSORS} tensors, got {len(tensors)}"
            raise kf.LayoutError(message)
        given = listed("tensors", tensors)
    for index, tensor in enumerate(given):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"tensor {index} must be a torch tensor, got {type(tensor).__name__}")
        if tensor.dim() not in (3, 4):
            message = f"tensor {index} must have four axes, or three without dim, got {tensor.dim()}"
            raise kf.LayoutError(message)
    return given


def tokens_of(given: Any, operation: str, layout: str, world: int, rank_tokens: Any) -> list[int]:
    """Tokens of every rank, tensor after tensor; empty where all ranks have all tokens."""
    if operation == HEADS and rank_tokens is None:
        return []
    if rank_tokens is not None:
        each = listed("rank_tokens", rank_tokens)
        nested = len(each) > 0 and not is_number(each[0])
        lists = [listed("rank_tokens", one) for one in each] if nested else [each] * len(given)
        if len(lists) != len(given) or any(len(one) != world for one in lists):
            raise kf.OptionError(f"rank_tokens must have {world} entries, in one list or one list per tensor")
        return [number("rank_tokens", count) for one in lists for count in one]
    found = []
    for index, tensor in enumerate(given):
        own = tensor.shape[token_axis(layout)]
        if operation == GATHER:
            if own % world:
                message = f"tensor {index}: {own} tokens do not divide among {world} ranks: give rank_tokens"
                raise kf.LayoutError(message)
            own = own // world
        found += [own] * world
    return found


def heads_of(  # noqa: PLR0917
    given: Any,
    operation: str,
    layout: str,
    world: int,
    num_heads: Any,
    query_heads: int | None,
    head_splits: Any,
) -> tuple[list[int], Splits]:
    """Heads of all ranks together, and those of each, by tensor; empty where heads stay together."""
    if operation == TOKENS:
        return [], []
    own = [int(tensor.shape[head_axis(layout)]) for tensor in given]
    brings = 1 if operation == SEND else world
    if num_heads is None:
        totals = [heads * brings for heads in own]
    else:
        one = is_number(num_heads)
        totals = [number("num_heads", num_heads)] * len(given) if one else numbers("num_heads", num_heads)
    if head_splits is not None:
        lists = listed("head_splits", head_splits)
        if lists and (isinstance(lists[0], range) or is_number(lists[0])):
            lists = [lists] * len(given)
        return totals, [ranges_of(listed("head_splits", one)) for one in lists]
    most = max(totals, default=1) if query_heads is None else number("query_heads", query_heads)
    return totals, [_default_ranges(total, world, most) for total in totals]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _default_ranges(total: int, world: int, query_heads: int) -> list[range]:
    return head_ranges(total, world, query_heads)


def ranges_of(splits: Any) -> list[range]:
    """Ranges, some of which may be given as numbers of heads."""
    found: list[range] = []
    for split in splits:
        start = found[-1].stop if found else 0
        if not isinstance(split, range):
            found.append(range(start, start + number("head_splits", split)))
            continue
        if split.step != 1 or split.start < 0 or split.stop < 0:
            raise kf.OptionError(f"head_splits must be a range with step 1 and start >= 0, got {split}")
        found.append(split)
    return found


def flat(splits: Splits) -> list[int]:
    return [border for each in splits for split in each for border in (split.start, split.stop)]


def unflat(borders: Sequence[int] | None, world: int) -> Splits:
    borders = borders or []
    pairs = [range(borders[at], borders[at + 1]) for at in range(0, len(borders), 2)]
    return [pairs[at : at + world] for at in range(0, len(pairs), world)]


def token_axis(layout: str) -> int:
    return 1 if layout == "BNHD" else 2


def head_axis(layout: str) -> int:
    return 2 if layout == "BNHD" else 1
