"""What a call's options mean in numbers: tokens and heads of every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import kvferry as kf
from kvferry._core import head_ranges

if TYPE_CHECKING:
    from collections.abc import Sequence

Splits = list[list[range]]

SEND, GATHER, TOKENS, HEADS = "send_recv_heads", "gather_heads", "allgather_tokens", "allgather_heads"


def tokens_of(given: Any, operation: str, layout: str, world: int, rank_tokens: Any) -> list[int]:
    """Tokens of every rank, tensor after tensor; empty where all ranks have all tokens."""
    if operation == HEADS and rank_tokens is None:
        return []
    if rank_tokens is not None:
        each = list(rank_tokens)
        lists = [list(one) for one in each] if each and not isinstance(each[0], int) else [each] * len(given)
        if len(lists) != len(given) or any(len(one) != world for one in lists):
            raise kf.OptionError(f"rank_tokens must have {world} entries, in one list or one list per tensor")
        return [count for one in lists for count in one]
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
        totals = [num_heads] * len(given) if isinstance(num_heads, int) else [int(each) for each in num_heads]
    if head_splits is not None:
        lists = list(head_splits)
        if lists and isinstance(lists[0], (int, range)):
            lists = [lists] * len(given)
        return totals, [ranges_of(one) for one in lists]
    most = query_heads or max(totals, default=1)
    return totals, [_default_ranges(total, world, most) for total in totals]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _default_ranges(total: int, world: int, query_heads: int) -> list[range]:
    return head_ranges(total, world, query_heads)


def ranges_of(splits: Any) -> list[range]:
    """Ranges, some of which may be given as numbers of heads."""
    found: list[range] = []
    for split in splits:
        start = found[-1].stop if found else 0
        found.append(split if isinstance(split, range) else range(start, start + int(split)))
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
