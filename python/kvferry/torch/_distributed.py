"""The same calls over torch.distributed, where ranks share no memory: across machines, for one."""

from __future__ import annotations

import logging
import math
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

import kvferry as kf
from kvferry.torch._options import check_axis, check_layout
from kvferry.torch._registry import register
from kvferry.torch._splits import (
    GATHER,
    HEADS,
    SEND,
    TOKENS,
    Splits,
    head_axis,
    heads_of,
    tensors_of,
    token_axis,
    tokens_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    # Tokens and heads of a part, counted in the tensor that holds it.
    Part = tuple[range, range]

_log = logging.getLogger("kvferry.torch")


class Distributed:
    """All2All's calls over a torch process group: the same results, with copies before and after.

    Tensors of the group's devices go in and new ones come out. There are no buffers, no `out`, and nothing is
    checked between the ranks; waiting, timeouts and lost ranks are the group's affair.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self.rank: int = dist.get_rank(group)
        self.world_size: int = dist.get_world_size(group)
        if self.rank < 0:
            raise kf.OptionError("this process is not in the group")
        self._handle = register(self)

    def send_recv_heads(self, tensors: Any, **options: Any) -> Any:
        """See All2All.send_recv_heads()."""
        return self._call(SEND, tensors, **options)

    def gather_heads(self, tensors: Any, **options: Any) -> Any:
        """See All2All.gather_heads()."""
        return self._call(GATHER, tensors, **options)

    def allgather(self, tensors: Any, axis: Literal["tokens", "heads"] = "tokens", **options: Any) -> Any:
        """See All2All.allgather()."""
        check_axis(axis)
        return self._call(TOKENS if axis == "tokens" else HEADS, tensors, **options)

    def close(self) -> None:
        """Nothing to do: the group is its maker's."""

    def check(self) -> None:
        """Nothing to find: the group raises for itself."""

    def _refuse(self, operation: str, reason: str) -> None:
        _log.error("%s refused on rank %d, for which the others will wait: %s", operation, self.rank, reason)

    def _call(
        self,
        operation: str,
        tensors: Any,
        *,
        rank_tokens: Any = None,
        layout: str = "BNHD",
        num_heads: Any = None,
        query_heads: int | None = None,
        head_splits: Any = None,
        num_sms: int | None = None,
    ) -> Any:
        if num_sms is not None:
            raise kf.Unsupported("num_sms: the group's backend chooses for itself")
        single = isinstance(tensors, torch.Tensor)
        given = tensors_of(tensors)
        check_layout(layout)
        tokens = tokens_of(given, operation, layout, self.world_size, rank_tokens)
        totals, splits = heads_of(
            given, operation, layout, self.world_size, num_heads, query_heads, head_splits
        )
        plan = _Plan(operation, layout, self.world_size, given, tokens, totals, splits)
        found = self._move(plan, given)
        return found[0] if single else tuple(found)

    def _move(self, plan: _Plan, given: list[Any]) -> list[Any]:
        """Packs what each rank gets, exchanges it, and puts what came where it belongs."""
        me, ranks = self.rank, range(self.world_size)
        sent = [plan.packed(given, me, rank) for rank in ranks]
        results = [given[index].new_empty(plan.shape(index, me)) for index in range(len(given))]
        counts = [sum(plan.nbytes(index, rank, me) for index in range(len(given))) for rank in ranks]
        outgoing = torch.cat(sent)
        incoming = outgoing.new_empty(sum(counts))
        lengths = [each.numel() for each in sent]
        dist.all_to_all_single(incoming, outgoing, counts, lengths, group=self._group)
        for rank, part in zip(ranks, incoming.split(counts), strict=True):
            plan.unpack(results, part, rank, me)
        return results


class _Plan:
    """Who sends what part of which tensor to whom."""

    def __init__(  # noqa: PLR0917
        self,
        operation: str,
        layout: str,
        world: int,
        given: list[Any],
        tokens: list[int],
        totals: list[int],
        splits: Splits,
    ) -> None:
        self._operation, self._layout, self._world = operation, layout, world
        self._given, self._totals, self._splits = given, totals, splits
        self._axes = token_axis(layout), head_axis(layout)
        self._tokens = [tokens[at : at + world] for at in range(0, len(tokens), world)]

    def shape(self, index: int, rank: int) -> list[int]:
        """Of a result."""
        at, of = self._axes
        shape = list(self._given[index].shape)
        if self._operation in (SEND, TOKENS):
            shape[at] = sum(self._tokens[index])
        elif self._operation == GATHER:
            shape[at] = self._tokens[index][rank]
        if self._operation == SEND:
            shape[of] = len(self._splits[index][rank])
        elif self._operation != TOKENS:
            shape[of] = self._totals[index]
        return shape

    def _span(self, index: int, rank: int) -> range:
        start = sum(self._tokens[index][:rank])
        return range(start, start + self._tokens[index][rank])

    def _parts(self, index: int, source: int, target: int) -> Iterator[tuple[Part, Part]]:
        """Parts that go from a rank to another: where they lie in its input, and where in the result."""
        at, of = self._axes
        shape = self._given[index].shape
        if self._operation in (SEND, TOKENS):
            span = self._span(index, source)
            heads = self._splits[index][target] if self._operation == SEND else range(shape[of])
            yield (range(len(span)), heads), (span, range(len(heads)))
            return
        own = self._splits[index][source]
        lower = {head for split in self._splits[index][:source] for head in split}
        span = self._span(index, target) if self._operation == GATHER else range(shape[at])
        # Of heads that several ranks hold the lowest rank sends: what is left need not be one range.
        for start in own:
            if start in lower:
                continue
            mine = range(start - own.start, start - own.start + 1)
            yield (span, mine), (range(len(span)), range(start, start + 1))

    def _cut(self, tensor: Any, part: Part) -> Any:
        for axis, which in zip(self._axes, part, strict=True):
            tensor = tensor.narrow(axis, which.start if len(which) else 0, len(which))
        return tensor

    def _count(self, index: int, part: Part) -> int:
        shape = list(self._given[index].shape)
        for axis, which in zip(self._axes, part, strict=True):
            shape[axis] = len(which)
        return int(math.prod(shape))

    def nbytes(self, index: int, source: int, target: int) -> int:
        """Of all parts from a rank to another."""
        size = int(self._given[index].element_size())
        return size * sum(self._count(index, cut) for cut, _ in self._parts(index, source, target))

    def packed(self, given: list[Any], source: int, target: int) -> Any:
        """The bytes of all parts of all tensors for a rank."""
        parts = [
            _bytes_of(self._cut(tensor, cut))
            for index, tensor in enumerate(given)
            for cut, _ in self._parts(index, source, target)
        ]
        return torch.cat(parts) if parts else given[0].new_empty(0, dtype=torch.uint8)

    def unpack(self, results: list[Any], data: Any, source: int, target: int) -> None:
        """Puts what a rank sent into the results."""
        start = 0
        for index, result in enumerate(results):
            for cut, place in self._parts(index, source, target):
                end = start + self._count(index, cut) * result.element_size()
                into = self._cut(result, place)
                # A clone starts where any type may.
                into.copy_(data[start:end].clone().view(result.dtype).reshape(into.shape))
                start = end


def _bytes_of(tensor: Any) -> Any:
    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)


def from_group(
    group: Any = None, *, fallback: Literal["raise", "distributed"] = "raise", **options: Any
) -> kf.All2All | Distributed:
    """All2All.from_group(), or, with fallback="distributed", torch.distributed where that cannot be.

    All ranks of the group call it together, and get the same kind: Distributed if any of them is on another
    machine or cannot share its GPU's memory. The reason is logged.
    """
    if fallback not in ("raise", "distributed"):
        raise kf.OptionError(f'fallback must be "raise" or "distributed", got {fallback!r}')
    if fallback == "raise":
        return kf.All2All.from_group(group, **options)
    reasons = _gathered(group, _machine())
    if len(set(reasons)) > 1:
        _log.warning("ranks are on different machines: the exchange goes over torch.distributed")
        return Distributed(group)
    comm: kf.All2All | None = None
    failure = ""
    try:
        comm = kf.All2All.from_group(group, **options)
    except (kf.Unsupported, kf.CudaError, kf.ContractMismatch, kf.PeerTimeout) as error:
        failure = str(error)
    failures = [each for each in _gathered(group, failure) if each]
    if comm is not None and not failures:
        return comm
    if comm is not None:
        comm.close()
    _log.warning("the exchange goes over torch.distributed: %s", failures[0])
    return Distributed(group)


def _gathered(group: Any, mine: str) -> list[str]:
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    return found


def _machine() -> str:
    """The same in all processes of one machine's run, in containers too."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
