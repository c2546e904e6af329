"""The ground truth: every element's value follows from its coordinates; nothing here asks kvferry."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvferry.cli._report import Difference, Findings

if TYPE_CHECKING:
    from kvferry.cli._geometries import Placement

U16 = NDArray[np.uint16]
U64 = NDArray[np.uint64]

POISON = 0xA5A5
"""What memory holds before anything is written to it."""
KEPT_DIFFERENCES = 5

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_LANES = 4


@dataclass(frozen=True)
class Store:
    """Memory by coordinates: planes[layer][outer] views [slot, token, head, dim] as 16-bit elements."""

    name: str
    planes: list[list[U16]]
    first_head: int

    def heads(self, wanted: range) -> slice:
        """Where the global heads `wanted` lie in a plane."""
        return slice(wanted.start - self.first_head, wanted.stop - self.first_head)


class Pattern:
    """A keyed hash of (block, layer, outer, token, global head, dim), 16 bits of it to an element.

    Element `dim` is lane `dim % 4` of splitmix64 at a number unique to its coordinates with `dim // 4`.
    """

    def __init__(
        self, key: str, *, layers: int, outer: int, page: int, total_heads: int, heads: range, head_dim: int
    ) -> None:
        words = -(-head_dim // _LANES)
        self.heads = heads
        self.shape = (outer, page, len(heads), head_dim)
        self._layers = layers
        self._chunk_words = outer * page * total_heads * words
        self._key = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")
        index = np.arange(self._chunk_words, dtype=np.uint64).reshape(outer, page, total_heads, words)
        self._steps: U64 = index[:, :, heads.start : heads.stop] * np.uint64(_GOLDEN)
        self._word: U64 = np.empty_like(self._steps)
        self._spare: U64 = np.empty_like(self._steps)

    def chunk(self, block: int, layer: int) -> U16:
        """Values [outer, token, head, dim] of one layer of one block, good until the next call."""
        first = (block * self._layers + layer) * self._chunk_words
        word, spare = self._word, self._spare
        np.add(self._steps, np.uint64((self._key + first * _GOLDEN) & _MASK), out=word)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, None)):
            np.right_shift(word, np.uint64(shift), out=spare)
            np.bitwise_xor(word, spare, out=word)
            if factor is not None:
                np.multiply(word, np.uint64(factor), out=word)
        return word.view(np.uint16)[..., : self.shape[3]]


def fill(cache: Store, truth: Pattern, slots: list[int]) -> None:
    """Writes each block's values at its slot; a block is named by the slot it starts in."""
    for layer, planes in enumerate(cache.planes):
        for slot in slots:
            values = truth.chunk(slot, layer)
            for outer, plane in enumerate(planes):
                plane[slot] = values[outer]


def poison(store: Store, slots: list[int]) -> None:
    """Overwrites whole slots."""
    for planes in store.planes:
        for plane in planes:
            plane[slots] = POISON


@dataclass(frozen=True)
class _Place:
    """Where a compared piece [token, head, dim] lies."""

    where: str
    slot: int
    block: int | None
    layer: int
    outer: int
    first_head: int


class Verifier:
    """Compares caches and pools with the truth and collects what differs."""

    def __init__(self, geometry: str, truth: Pattern) -> None:
        self.findings = Findings()
        self._geometry = geometry
        self._truth = truth

    def verify(self, cache: Store, pool: Store, placement: Placement) -> Findings:
        """Compares every byte of the blocks, in all three places, and of the guards."""
        self._blocks(cache, pool, placement)
        for store, guards in ((cache, placement.cache_guards), (pool, placement.pool_guards)):
            self._guards(store, f"{store.name} guard", guards, slice(None))
        # In a pool of whole blocks, the heads of the other ranks are guards too.
        own = pool.heads(self._truth.heads)
        for others in (slice(0, own.start), slice(own.stop, None)):
            self._guards(pool, "pool, another rank's heads", placement.pool, others)
        return self.findings

    def _blocks(self, cache: Store, pool: Store, placement: Placement) -> None:
        for layer in range(len(cache.planes)):
            for block, pool_slot, back in zip(placement.source, placement.pool, placement.back, strict=True):
                values = self._truth.chunk(block, layer)
                self._block(cache, "cache, source", block, values, (block, layer))
                self._block(pool, "pool", pool_slot, values, (block, layer))
                self._block(cache, "cache, brought back", back, values, (block, layer))

    def _block(self, store: Store, where: str, slot: int, values: U16, of: tuple[int, int]) -> None:
        block, layer = of
        heads = store.heads(self._truth.heads)
        for outer, plane in enumerate(store.planes[layer]):
            found, expected = plane[slot, :, heads], values[outer]
            self.findings.checked_bytes += found.nbytes
            if not np.array_equal(found, expected):
                place = _Place(where, slot, block, layer, outer, self._truth.heads.start)
                self.findings.wrong_elements += self._note(found, expected, place)

    def _guards(self, store: Store, where: str, slots: list[int], heads: slice) -> None:
        for layer, planes in enumerate(store.planes):
            for outer, plane in enumerate(planes):
                found = plane[slots, :, heads]
                self.findings.guard_bytes += found.nbytes
                if (found == POISON).all():
                    continue
                for slot, part in zip(slots, found, strict=True):
                    place = _Place(where, slot, None, layer, outer, store.first_head + (heads.start or 0))
                    clean = np.full_like(part, POISON)
                    self.findings.wrong_guard_elements += self._note(part, clean, place)

    def _note(self, found: U16, expected: U16, place: _Place) -> int:
        """Counts the elements that differ and keeps the first few."""
        wrong = np.argwhere(found != expected)
        for token, head, dim in wrong[: KEPT_DIFFERENCES - len(self.findings.differences)].tolist():
            self.findings.differences.append(
                Difference(
                    geometry=self._geometry,
                    where=place.where,
                    slot=place.slot,
                    block=place.block,
                    layer=place.layer,
                    outer=place.outer,
                    token=token,
                    head=place.first_head + head,
                    dim=dim,
                    expected=int(expected[token, head, dim]),
                    found=int(found[token, head, dim]),
                )
            )
        return len(wrong)
