"""What an exchange must give, by slicing one whole array in NumPy; nothing here knows kvferry.

A tensor exists once, as `whole` [B, tokens of all ranks, H, D]. Before `send_recv_heads` a rank holds the
slice of its tokens, after it that of its heads; the other operations are other pairs of such slices.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

Layout = Literal["BNHD", "BHND"]
Operation = Literal["send_recv_heads", "gather_heads", "allgather_tokens", "allgather_heads"]

WIDTHS = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
}
FROM_ML_DTYPES = ("bfloat16", "float8_e4m3fn", "float8_e5m2")


def numpy_dtype(name: str) -> np.dtype[Any]:
    """NumPy's type of a name, with ml_dtypes for what NumPy has not."""
    if name in FROM_ML_DTYPES:
        import ml_dtypes  # noqa: PLC0415 - most tests need none

        found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return found
    return np.dtype(name)


def mixed(numbers: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """Numbers with every bit of each depending on every bit of the number and the key."""
    with np.errstate(over="ignore"):
        state = numbers * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key * 0xD1B54A32D192ED03 % (1 << 64))
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def whole_array(shape: tuple[int, int, int, int], dtype: str, key: int) -> NDArray[Any]:
    """[B, N, H, D] with an element for each coordinate that says which it is (as far as its bits go)."""
    count = int(np.prod(shape))
    words = mixed(np.arange(count, dtype=np.uint64), key)
    width = WIDTHS[dtype]
    raw = words.view(np.uint8).reshape(count, 8)[:, :width]
    return np.ascontiguousarray(raw).view(numpy_dtype(dtype)).reshape(shape)


def raw(array: Any) -> NDArray[np.uint8]:
    """The bytes of an array's elements: NaNs compare too, and -0.0 is not 0.0."""
    array = np.ascontiguousarray(array)
    return array.view(np.uint8).reshape(*array.shape, -1) if array.size else np.zeros(array.shape, np.uint8)


def same(found: Any, expected: Any, note: object = "") -> None:
    """Asserts that two arrays are of one shape and type and have the same bytes; says where they do not."""
    found = np.asarray(found)
    assert found.dtype == expected.dtype, f"{note} dtype is {found.dtype}, expected {expected.dtype}"
    assert found.shape == expected.shape, f"{note} shape is {found.shape}, expected {expected.shape}"
    wrong = np.argwhere((raw(found) != raw(expected)).any(axis=-1)) if found.size else np.empty((0, 1))
    assert not len(wrong), (
        f"{note} {len(wrong)} of {found.size} elements are wrong, first at {tuple(int(i) for i in wrong[0])}"
    )


def even(count: int, world: int) -> list[range]:
    """`count` things over `world` ranks, as equal as possible, the first ranks having one more."""
    each, more = divmod(count, world)
    borders = [0]
    for rank in range(world):
        borders.append(borders[-1] + each + (rank < more))
    return [range(borders[rank], borders[rank + 1]) for rank in range(world)]


def of_groups(kv_heads: int, query_heads: int, world: int) -> list[range]:
    """The KV heads that each rank's query heads need: every group of query heads shares one."""
    group = query_heads // kv_heads
    return [
        range(split.start // group, (split.stop - 1) // group + 1) if len(split) else range(0)
        for split in even(query_heads, world)
    ]


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a call: its extents, and who has what of it."""

    batch: int
    tokens: tuple[int, ...]
    heads: int
    dim: int
    dtype: str = "float16"
    splits: tuple[range, ...] = ()
    key: int = 1

    @property
    def world(self) -> int:
        return len(self.tokens)

    @property
    def ranges(self) -> Sequence[range]:
        """Heads of each rank."""
        return self.splits or even(self.heads, self.world)

    def span(self, rank: int) -> slice:
        """Tokens of a rank."""
        start = sum(self.tokens[:rank])
        return slice(start, start + self.tokens[rank])

    def whole(self) -> NDArray[Any]:
        return whole_array((self.batch, sum(self.tokens), self.heads, self.dim), self.dtype, self.key)

    def by_tokens(self, rank: int) -> NDArray[Any]:
        """The rank's tokens, all heads."""
        return self.whole()[:, self.span(rank)]

    def by_heads(self, rank: int) -> NDArray[Any]:
        """All tokens, the rank's heads."""
        mine = self.ranges[rank]
        return self.whole()[:, :, mine.start : mine.stop]

    def before(self, operation: Operation, rank: int) -> NDArray[Any]:
        """What a rank gives."""
        by_tokens = operation in ("send_recv_heads", "allgather_tokens")
        return self.by_tokens(rank) if by_tokens else self.by_heads(rank)

    def after(self, operation: Operation, rank: int) -> NDArray[Any]:
        """What it gets."""
        if operation == "send_recv_heads":
            return self.by_heads(rank)
        return self.by_tokens(rank) if operation == "gather_heads" else self.whole()


def laid_out(array: NDArray[Any], layout: Layout) -> NDArray[Any]:
    """[B, N, H, D] with its axes in the order of `layout`, contiguous."""
    return np.ascontiguousarray(array if layout == "BNHD" else array.transpose(0, 2, 1, 3))


STRIDES = ("packed", "padded heads", "padded tokens", "fused", "transposed", "reversed")


def strided(array: NDArray[Any], how: str) -> NDArray[Any]:
    """The same elements with other strides of the first three axes; the last one stays contiguous."""
    first, second, third, dim = array.shape
    if how == "packed":
        return np.ascontiguousarray(array)
    if how == "padded heads":
        room = _poisoned((first, second, third + 3, dim + 5), array.dtype)[:, :, 1 : third + 1, 2 : dim + 2]
    elif how == "padded tokens":
        room = _poisoned((first + 1, second * 2 + 1, third, dim), array.dtype)[1:, 1 : 2 * second + 1 : 2]
    elif how == "fused":
        # A slice of a projection's output [B, N, (q | k | v)].
        rows = _poisoned((first, second, 3 * third * dim + 7), array.dtype)
        room = rows[:, :, third * dim : 2 * third * dim].reshape(first, second, third, dim)
        assert not room.size or np.shares_memory(room, rows)
    elif how == "transposed":
        room = _poisoned((third, first, second, dim), array.dtype).transpose(1, 2, 0, 3)
    elif how == "reversed":
        room = _poisoned((first, second, third, dim), array.dtype)[::-1, ::-1, ::-1]
    else:
        raise ValueError(how)
    room[...] = array
    return room


def _poisoned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    count = int(np.prod(shape)) * dtype.itemsize
    return np.full(count, 0xA5, np.uint8).view(dtype).reshape(shape)
