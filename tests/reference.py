"""NumPy oracle: what caches hold and what transfers do, written from the tables of the documentation.

Nothing here imports kvferry. A `Model` says how a cache lies in memory; `content` what each element holds;
`transferred` what a destination must hold afterwards. All of it works on bytes: a logical cache is a uint8
array [block, layer, outer, page, head, dim, byte].
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

AXES = ("block", "layer", "outer", "page", "head", "dim")
ITEM_BYTES = {
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
    "float16": 2,
    "bfloat16": 2,
    "int16": 2,
    "float32": 4,
    "int32": 4,
    "float64": 8,
    "int64": 8,
}
INSIDE = {
    "NHD": ("layer", "outer", "page", "head", "dim"),
    "HND": ("layer", "outer", "head", "page", "dim"),
    "universal": ("head", "layer", "outer", "page", "dim"),
}
POISON = 0xEE
GUARD = 0x5C


@dataclass(frozen=True)
class Geometry:
    """Logical shape of a cache, or of the shard of one that holds heads from `first_head` on."""

    blocks: int
    layers: int
    outer: int
    page: int
    heads: int
    dim: int
    dtype: str = "float16"
    first_head: int = 0
    total_heads: int | None = None

    @property
    def item(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def extents(self) -> dict[str, int]:
        return dict(
            zip(AXES, (self.blocks, self.layers, self.outer, self.page, self.heads, self.dim), strict=True)
        )

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.extents.values(), self.item)

    @property
    def nbytes(self) -> int:
        return prod(self.shape)

    def shard(self, rank: int, world: int) -> Geometry:
        heads = self.heads // world
        return replace(self, heads=heads, first_head=rank * heads, total_heads=self.heads)


@dataclass(frozen=True)
class Model:
    """How a cache lies in memory: kind "fc", "lw", "split" or "pool", order inside a block, padding."""

    geometry: Geometry
    kind: str
    order: str = "NHD"
    block_dim: str = "block_first"
    alignment: int = 1
    pad: dict[str, int] = field(default_factory=dict, hash=False)

    @cached_property
    def region_axes(self) -> tuple[str, ...]:
        return {"fc": (), "lw": ("layer",), "split": ("layer", "outer"), "pool": ("block",)}[self.kind]

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """Axes inside a region, outermost first."""
        inside = [axis for axis in INSIDE[self.order] if axis not in self.region_axes]
        if self.kind == "pool":
            return tuple(inside)
        if self.kind == "lw" and self.block_dim == "outer_first":
            inside.remove("outer")
            return ("outer", "block", *inside)
        return ("block", *inside)

    @cached_property
    def strides(self) -> dict[str, int]:
        """Byte strides of the axes inside a region. `pad` adds bytes to the stride of an axis."""
        step, strides = self.geometry.item, {}
        for axis in reversed(self.axes):
            if axis == "block":
                step = -(-step // self.alignment) * self.alignment
            step += self.pad.get(axis, 0)
            strides[axis] = step
            step *= self.geometry.extents[axis]
        return strides

    @cached_property
    def num_regions(self) -> int:
        return prod(self.geometry.extents[axis] for axis in self.region_axes)

    @cached_property
    def region_bytes(self) -> int:
        extents = self.geometry.extents
        return sum((extents[axis] - 1) * self.strides[axis] for axis in self.axes) + self.geometry.item

    def view(self, region: Bytes) -> Bytes:
        """One region's flat bytes as its elements: axes as in `axes`, then bytes."""
        shape = tuple(self.geometry.extents[axis] for axis in self.axes)
        strides = tuple(self.strides[axis] for axis in self.axes)
        return np.ndarray((*shape, self.geometry.item), np.uint8, region, 0, (*strides, 1))

    def _selection(self, region: int) -> tuple[int | slice, ...]:
        """Which part of a canonical array a region holds."""
        extents = [self.geometry.extents[axis] for axis in self.region_axes]
        at = dict(zip(self.region_axes, np.unravel_index(region, extents) if extents else (), strict=True))
        return tuple(int(at[axis]) if axis in at else slice(None) for axis in AXES)

    def _canonical(self, region: Bytes) -> Bytes:
        """One region's elements with its axes in canonical order."""
        order = [self.axes.index(axis) for axis in AXES if axis in self.axes]
        return self.view(region).transpose(*order, len(order))

    def store(self, content: Bytes, regions: Sequence[Bytes]) -> None:
        """Writes a canonical cache into flat regions; padding stays as it is."""
        for index, region in enumerate(regions):
            self._canonical(region)[...] = content[self._selection(index)]

    def load(self, regions: Sequence[Bytes]) -> Bytes:
        """Reads flat regions as a canonical cache."""
        out = np.empty(self.geometry.shape, np.uint8)
        for index, region in enumerate(regions):
            out[self._selection(index)] = self._canonical(region)
        return out

    def padding_untouched(self, regions: Sequence[Bytes], value: int = GUARD) -> bool:
        """Whether every byte that belongs to no element is still `value`."""
        for region in regions:
            payload = np.zeros(len(region), np.uint8)
            self.view(payload)[...] = 1
            if (region[payload == 0] != value).any():
                return False
        return True

    def allocate(self, value: int = GUARD) -> list[Bytes]:
        return [np.full(self.region_bytes, value, np.uint8) for _ in range(self.num_regions)]


def mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64: every input bit reaches every output bit."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def content(geometry: Geometry, key: int = 1) -> Bytes:
    """Pseudo-random elements, each a function of `key` and its coordinates, heads by their global number."""
    with np.errstate(over="ignore"):
        words = mixed(np.full((1,) * 6, key, np.uint64))
        for position, (axis, extent) in enumerate(geometry.extents.items()):
            first = geometry.first_head if axis == "head" else 0
            index = np.arange(first, first + extent, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
            shape = [1] * 6
            shape[position] = extent
            words = mixed(words + index.reshape(shape) + np.uint64(position + 1))
    words = np.ascontiguousarray(np.broadcast_to(words, geometry.shape[:-1]))
    return words.view(np.uint8).reshape(*geometry.shape[:-1], 8)[..., : geometry.item].copy()


def poisoned(geometry: Geometry) -> Bytes:
    return np.full(geometry.shape, POISON, np.uint8)


def transferred(
    source: tuple[Geometry, Bytes],
    destination: tuple[Geometry, Bytes],
    src_blocks: Sequence[int],
    dst_blocks: Sequence[int],
    *,
    layers: range | None = None,
    heads: range | None = None,
) -> Bytes:
    """What the destination holds afterwards: token by token in order, heads met by their global number."""
    (src, values), (dst, before) = source, destination
    after = before.copy()
    page = min(src.page, dst.page)

    def pages(blocks: Sequence[int], of: Geometry) -> list[tuple[int, slice]]:
        return [(block, slice(at, at + page)) for block in blocks for at in range(0, of.page, page)]

    moved = layers if layers is not None else range(src.layers)
    first = max(src.first_head, dst.first_head, heads.start if heads is not None else 0)
    end = min(src.first_head + src.heads, dst.first_head + dst.heads)
    if heads is not None:
        end = min(end, heads.stop)
    a = slice(first - src.first_head, end - src.first_head)
    b = slice(first - dst.first_head, end - dst.first_head)
    for (s, tokens_s), (d, tokens_d) in zip(pages(src_blocks, src), pages(dst_blocks, dst), strict=True):
        for layer in moved:
            after[d, layer, :, tokens_d, b] = values[s, layer, :, tokens_s, a]
    return after
