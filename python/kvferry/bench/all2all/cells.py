"""What is exchanged: a cell is one call, as all ranks see it. Plain numbers, no memory."""

from __future__ import annotations

from dataclasses import dataclass

DTYPES = {
    "bf16": ("bfloat16", 2),
    "fp16": ("float16", 2),
    "e4m3": ("float8_e4m3fn", 1),
    "fp32": ("float32", 4),
}
"""torch's name and the bytes of an element."""
RESULT_ALIGN = 256


def equal(count: int, world: int) -> tuple[int, ...]:
    """`count` over ranks, as equal as possible, the larger shares first."""
    least, more = divmod(count, world)
    return tuple(least + (rank < more) for rank in range(world))


def spans(counts: tuple[int, ...]) -> list[range]:
    """Consecutive ranges of so many."""
    ends, end = [], 0
    for count in counts:
        ends.append(range(end, end + count))
        end += count
    return ends


@dataclass(frozen=True)
class Cell:
    """Tensors of one call: [batch, tokens of the rank, heads of the tensor, dim] each."""

    batch: int
    tokens: tuple[int, ...]
    """Of each rank."""
    heads: tuple[int, ...]
    """Of each tensor; the first is the query."""
    dim: int
    dtype: str = "bf16"
    splits: tuple[int, ...] = ()
    """Heads of each rank where they are given; for cells of one tensor."""

    @property
    def world(self) -> int:
        """How many ranks."""
        return len(self.tokens)

    @property
    def item(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype][1]

    @property
    def name(self) -> str:
        """As people write the shape: B, tokens per rank, H, D."""
        even = len(set(self.tokens)) == 1
        tokens = str(self.tokens[0]) if even else "+".join(map(str, self.tokens))
        heads = "/".join(map(str, dict.fromkeys(self.heads)) if len(self.heads) > 1 else map(str, self.heads))
        if len(self.heads) > 1:
            heads = f"{'qkv'[: len(self.heads)]} {heads}"
        split = f" split {'/'.join(map(str, self.splits))}" if self.splits else ""
        return f"{self.batch},{tokens},{heads},{self.dim} {self.dtype}{split}"

    @property
    def even(self) -> bool:
        """Whether no option is needed: as many tokens on every rank, the default split."""
        return len(set(self.tokens)) == 1 and not self.splits

    def head_ranges(self, tensor: int) -> list[range]:
        """Which heads of a tensor each rank gets: equal shares, KV heads by their group of query heads."""
        if self.splits:
            return spans(self.splits)
        most = max(self.heads)
        queries = spans(equal(most, self.world))
        group = most // self.heads[tensor]
        return [range(part.start // group, (part.stop - 1) // group + 1) for part in queries]

    def input_shape(self, rank: int, tensor: int) -> tuple[int, int, int, int]:
        """What a rank gives."""
        return self.batch, self.tokens[rank], self.heads[tensor], self.dim

    def result_shape(self, rank: int, tensor: int) -> tuple[int, int, int, int]:
        """What a rank gets."""
        return self.batch, sum(self.tokens), len(self.head_ranges(tensor)[rank]), self.dim

    def input_bytes(self, rank: int) -> int:
        """Of all tensors."""
        return self.batch * self.tokens[rank] * sum(self.heads) * self.dim * self.item

    @property
    def rank_bytes(self) -> int:
        """The largest input of a rank: what a report calls its size."""
        return max(map(self.input_bytes, range(self.world)))

    def result_bytes(self, rank: int) -> int:
        """Of all tensors, each aligned."""
        total = 0
        for tensor in range(len(self.heads)):
            batch, tokens, heads, dim = self.result_shape(rank, tensor)
            total += -(-batch * tokens * heads * dim * self.item // RESULT_ALIGN) * RESULT_ALIGN
        return total

    @property
    def largest_result(self) -> int:
        """Over all ranks: what the pool must hold."""
        return max(map(self.result_bytes, range(self.world)))

    def sent(self, source: int, target: int) -> int:
        """Bytes from one rank to another."""
        heads = sum(len(self.head_ranges(tensor)[target]) for tensor in range(len(self.heads)))
        return self.batch * self.tokens[source] * heads * self.dim * self.item

    @property
    def wire(self) -> int:
        """Bytes that leave or enter the busiest rank."""
        ranks = range(self.world)
        return max(
            max(
                sum(self.sent(rank, other) for other in ranks if other != rank),
                sum(self.sent(other, rank) for other in ranks if other != rank),
            )
            for rank in ranks
        )


def one(world: int, batch: int, tokens: int, heads: int, dim: int, dtype: str = "bf16") -> Cell:  # noqa: PLR0917
    """One tensor, `tokens` on every rank."""
    return Cell(batch, (tokens,) * world, (heads,), dim, dtype)


def whole(world: int, tokens: int, heads: int, dim: int) -> Cell:
    """One tensor, `tokens` in all."""
    return Cell(1, equal(tokens, world), (heads,), dim)


def fused(world: int, tokens: int, queries: int, kv: int, dim: int) -> Cell:
    """Query, key and value in one call."""
    return Cell(1, (tokens,) * world, (queries, kv, kv), dim)


def alone(cell: Cell, tensor: int) -> Cell:
    """One of a cell's tensors. Only where it is split as it is in the cell."""
    return Cell(cell.batch, cell.tokens, (cell.heads[tensor],), cell.dim, cell.dtype, cell.splits)
