"""Memory that every contender shares: one source and one destination, cut anew for each pair of layouts."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import kvferry as kf
from kvferry.bench.cells import ITEM

if TYPE_CHECKING:
    from kvferry.bench.cells import Cell, Shape

U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]
U64 = NDArray[np.uint64]
Ids = NDArray[np.int64]

POISON = 0xA5
SLACK = 16 << 20
"""More than two of the largest blocks, so that there is always one that nobody names."""
_PAGE = 4096
_STEP = 8 << 20
_CANONICAL = ("block", "outer", "page", "head", "dim")


class Arena:
    """One piece of host memory as kvferry allocates it, seen as bytes."""

    def __init__(self, nbytes: int) -> None:
        pages = -(-nbytes // _PAGE)
        config = kf.LayoutConfig(
            num_blocks=pages, num_layers=1, outer_dim=1, page_size=1, inner_dim=_PAGE, dtype="uint8"
        )
        (region,) = kf.PhysicalLayout.fully_contiguous(config, kf.system()).regions
        self.bytes: U8 = np.asarray(region).reshape(-1).view(np.uint8)
        """Keeps the memory alive."""

    def randomise(self, seed: int) -> None:
        """First touch, with data that nothing can guess."""
        rng = np.random.default_rng(seed)
        words = self.bytes.view(np.uint64)
        for start in range(0, len(words), _STEP):
            part = words[start : start + _STEP]
            part[:] = rng.integers(0, 1 << 64, len(part), dtype=np.uint64)

    def poison(self) -> None:
        """Overwrites every byte."""
        self.bytes[:] = POISON

    def unpoisoned(self) -> int:
        """How many 8-byte words are no longer poison."""
        words, clean = self.bytes.view(np.uint64), np.frombuffer(bytes([POISON] * 8), np.uint64)[0]
        steps = range(0, len(words), _STEP)
        return sum(int(np.count_nonzero(words[start : start + _STEP] != clean)) for start in steps)

    def digest(self) -> bytes:
        """Changes with any byte."""
        return hashlib.blake2b(self.bytes.data, digest_size=16).digest()


@dataclass
class Store:
    """A cache in an arena: the arrays an engine would have, and what NumPy and kvferry make of them."""

    axes: str
    shape: Shape
    slots: int
    tensors: list[U16]
    layout: kf.PhysicalLayout
    planes: list[U16] = field(init=False)
    """For each layer a view [block, outer, page, head, dim]."""

    def __post_init__(self) -> None:
        names = self.axes.split()
        whole = self.tensors
        if "layer" in names:
            whole = list(np.moveaxis(self.tensors[0], names.index("layer"), 0))
            names.remove("layer")
        self.planes = [array.transpose([names.index(axis) for axis in _CANONICAL]) for array in whole]

    @classmethod
    def cut(cls, arena: Arena, axes: str, shape: Shape, slots: int) -> Store:
        """A cache of `slots` blocks over the arena, a page between layers."""
        names = axes.split()
        extents = shape.extents(slots)
        dims = [extents[name] for name in names]
        count = 1 if "layer" in names else shape.layers
        nbytes = int(np.prod(dims, dtype=np.int64)) * ITEM
        pitch = _pitch(nbytes)
        tensors = [
            arena.bytes[start : start + nbytes].view(np.uint16).reshape(dims)
            for start in range(0, count * pitch, pitch)
        ]
        given: Any = tensors[0] if count == 1 and "layer" in names else tensors
        config = kf.LayoutConfig(
            num_blocks=slots,
            num_layers=shape.layers,
            outer_dim=shape.outer,
            page_size=shape.page,
            num_heads=shape.heads,
            head_dim=shape.dim,
            dtype="bfloat16",
        )
        return cls(
            axes, shape, slots, tensors, kf.PhysicalLayout.from_tensors(given, axes=axes, config=config)
        )


@dataclass(frozen=True)
class Ground:
    """A cell's two caches and the blocks to move, call by call: block by block nowhere near one another."""

    src: Store
    dst: Store
    src_slices: list[Ids]
    dst_slices: list[Ids]

    @classmethod
    def lay(cls, cell: Cell, source: Arena, target: Arena, seed: int) -> Ground:
        """Cuts the arenas and shuffles the slots; at least one slot of the target is never named."""
        shape = cell.shape
        # Every layer may lie in memory of its own.
        usable = min(len(source.bytes), len(target.bytes)) - shape.layers * 2 * _PAGE
        slots = usable // shape.block_bytes
        if slots <= cell.ids:
            raise ValueError(f"{cell.name}: buffers hold {slots} blocks, more than {cell.ids} are needed")
        rng = np.random.default_rng(seed)
        calls = (slots - 1) // cell.ids
        slices = [
            np.split(rng.permutation(slots)[: calls * cell.ids].astype(np.int64), calls) for _ in range(2)
        ]
        return cls(
            Store.cut(source, cell.pair.src, shape, slots),
            Store.cut(target, cell.pair.dst, shape, slots),
            slices[0],
            slices[1],
        )

    @property
    def calls(self) -> int:
        """Calls until the same blocks are moved again."""
        return len(self.src_slices)


def _pitch(nbytes: int) -> int:
    return (-(-nbytes // _PAGE) + 1) * _PAGE
