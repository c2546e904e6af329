"""What is in the tensors: every word tells its place in the whole, so every rank knows all results."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kvferry.bench.all2all.cells import DTYPES, spans

if TYPE_CHECKING:
    from kvferry.bench.all2all.cells import Cell

GUARD_WORDS = 64
GUARD = 0x5AA5C33C
POISON = 0x6B6B6B6B
_WORD = 4
_ODD = 0x9E3779B1
_NUMPY = {1: np.uint8, 2: np.int16, 4: np.float32}


class Torch:
    """torch on one device."""

    def __init__(self, torch: Any, device: str) -> None:
        self.torch, self.device = torch, device

    def index(self, part: range, step: int) -> Any:
        """Multiples of a step, kept to 32 bits."""
        whole = self.torch.arange(part.start, part.stop, device=self.device, dtype=self.torch.int64) * step
        return whole.to(self.torch.int32)

    def words(self, count: int, value: int) -> Any:
        """So many words of one value."""
        return self.torch.full((count,), value, device=self.device, dtype=self.torch.int32)

    def mixed(self, words: Any) -> Any:
        """One word to one word, to look random. In place."""
        words.mul_(_ODD - (1 << 32))
        return words.bitwise_xor_(words >> 15)

    def typed(self, words: Any, dtype: str) -> Any:
        """Words as elements of a type."""
        return words.view(getattr(self.torch, DTYPES[dtype][0]))

    def as_words(self, tensor: Any) -> Any:
        """A result of any type, of torch's or not, as words."""
        own = tensor if self.torch.is_tensor(tensor) else self.torch.from_dlpack(tensor)
        return own.view(self.torch.int32)

    def differing(self, first: Any, second: Any) -> int:
        """How many words differ."""
        return int((first != second).sum())

    def copy(self, target: Any, source: Any) -> None:
        """Into existing memory."""
        target.copy_(source)

    def fill(self, words: Any, value: int) -> None:
        """Sets every word."""
        words.fill_(value)


class Numpy:
    """NumPy. Elements of two bytes travel as int16, of one as uint8."""

    def index(self, part: range, step: int) -> Any:
        """Multiples of a step, kept to 32 bits."""
        return (np.arange(part.start, part.stop, dtype=np.int64) * step).astype(np.int32)

    def words(self, count: int, value: int) -> Any:
        """So many words of one value."""
        return np.full(count, value, np.int32)

    def mixed(self, words: Any) -> Any:
        """One word to one word, to look random. In place."""
        words *= np.int32(_ODD - (1 << 32))
        words ^= words >> 15
        return words

    def typed(self, words: Any, dtype: str) -> Any:
        """Words as elements of as many bytes."""
        return words.view(_NUMPY[DTYPES[dtype][1]])

    def as_words(self, tensor: Any) -> Any:
        """A result of any type as words."""
        return np.asarray(tensor).view(np.int32)

    def differing(self, first: Any, second: Any) -> int:
        """How many words differ."""
        return int((first != second).sum())

    def copy(self, target: Any, source: Any) -> None:
        """Into existing memory."""
        target[...] = source

    def fill(self, words: Any, value: int) -> None:
        """Sets every word."""
        words[...] = np.int32(value)


Maths = Torch | Numpy


@dataclass
class Ground:
    """One rank's inputs of a cell, between guard words, and what it must get."""

    maths: Maths
    cell: Cell
    rank: int
    seed: int
    inputs: list[Any] = field(init=False)
    """Elements, [batch, tokens, heads, dim] each."""
    _around: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.inputs, self._around = [], []
        for tensor in range(len(self.cell.heads)):
            mine = self.given(tensor)
            whole = self.maths.words(math.prod(mine.shape) + 2 * GUARD_WORDS, GUARD)
            inside = whole[GUARD_WORDS:-GUARD_WORDS].reshape(mine.shape)
            self.maths.copy(inside, mine)
            self._around.append(whole)
            self.inputs.append(self.maths.typed(inside, self.cell.dtype))

    def part(self, tensor: int, tokens: range, heads: range) -> Any:
        """Words of a part of the whole tensor."""
        cell, maths = self.cell, self.maths
        words = cell.dim * cell.item // _WORD
        row = cell.heads[tensor] * words
        batch = maths.index(range(cell.batch), sum(cell.tokens) * row).reshape(-1, 1, 1, 1)
        token = maths.index(tokens, row).reshape(1, -1, 1, 1)
        head = maths.index(heads, words).reshape(1, 1, -1, 1)
        # Tensors and seeds are odd multiples apart.
        first = (self.seed * 64 + tensor) * 0x2545F & 0x3FFFFFFF
        word = maths.index(range(first, first + words), 1).reshape(1, 1, 1, -1)
        return maths.mixed(batch + token + head + word)

    def given(self, tensor: int) -> Any:
        """Words that this rank gives."""
        tokens = spans(self.cell.tokens)[self.rank]
        return self.part(tensor, tokens, range(self.cell.heads[tensor]))

    def expected(self, tensor: int) -> Any:
        """Words that this rank must get."""
        return self.part(tensor, range(sum(self.cell.tokens)), self.cell.head_ranges(tensor)[self.rank])

    def check(self, results: list[Any]) -> str:
        """What is wrong with the results; empty if nothing."""
        for tensor, result in enumerate(results):
            want, found = self.expected(tensor), self.maths.as_words(result)
            if tuple(found.shape) != tuple(want.shape):
                wanted = self.cell.result_shape(self.rank, tensor)
                return f"tensor {tensor} is {tuple(result.shape)}, not {wanted}"
            differ = self.maths.differing(found, want)
            if differ:
                return f"{differ} wrong words in tensor {tensor}"
        if len(results) != len(self.cell.heads):
            return f"{len(results)} results for {len(self.cell.heads)} tensors"
        return ""

    def intact(self) -> str:
        """What has happened to the inputs and to the words around them; empty if nothing."""
        for tensor, whole in enumerate(self._around):
            for side in (whole[:GUARD_WORDS], whole[-GUARD_WORDS:]):
                if self.maths.differing(side, self.maths.words(GUARD_WORDS, GUARD)):
                    return f"guard words beside input {tensor} were written"
            inside = whole[GUARD_WORDS:-GUARD_WORDS]
            if self.maths.differing(inside, self.given(tensor).reshape(-1)):
                return f"input {tensor} was written"
        return ""

    def poison(self, results: list[Any]) -> None:
        """Makes results wrong everywhere."""
        for result in results:
            self.maths.fill(self.maths.as_words(result), POISON)
