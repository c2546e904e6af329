"""What is measured: pairs of layouts, lengths of run and sizes of payload. Plain numbers, no memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ITEM = 2
"""Bytes of an element (bfloat16)."""
UNIT = 2 << 20
"""Payloads are counted in blocks of 2 MiB, Llama-3.1-8B's; smaller blocks are more in number."""
UNITS = (1, 8, 64, 256)
RUNS = (256, 4 << 10, 32 << 10, 2 << 20)

Selection = Literal["quick", "default", "full"]


@dataclass(frozen=True)
class Shape:
    """Extents of a block."""

    layers: int
    outer: int
    page: int
    heads: int
    dim: int

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one layer of one block."""
        return self.outer * self.page * self.heads * self.dim * ITEM

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.layers * self.chunk_bytes

    def extents(self, slots: int) -> dict[str, int]:
        """The extent of each axis in a cache of `slots` blocks."""
        return {
            "block": slots,
            "layer": self.layers,
            "outer": self.outer,
            "page": self.page,
            "head": self.heads,
            "dim": self.dim,
        }


@dataclass(frozen=True)
class Pair:
    """Two layouts, by the axes of their tensors: a tensor for each layer where "layer" is not among them."""

    name: str
    src: str
    dst: str
    shapes: tuple[Shape, ...]
    """One for each of RUNS, such that what lies together on both sides is that long."""


_NHD = "block layer outer page head dim"
_HND = "block layer outer head page dim"
_UNIVERSAL = "block head layer outer page dim"
_LAYER = "block outer page head dim"
_LAYER_OUTER_FIRST = "outer block page head dim"

_BLOCKS = (Shape(2, 2, 1, 1, 32), Shape(2, 2, 4, 2, 64), Shape(4, 2, 8, 4, 64), Shape(32, 2, 16, 8, 128))
_CHUNKS = (Shape(64, 2, 1, 1, 64), Shape(64, 2, 4, 4, 64), Shape(64, 2, 16, 4, 128), Shape(2, 2, 64, 64, 128))
_PLANES = (
    Shape(32, 2, 1, 1, 128),
    Shape(32, 2, 4, 4, 128),
    Shape(32, 2, 16, 8, 128),
    Shape(2, 2, 64, 128, 128),
)
_ROWS = (
    Shape(32, 2, 16, 8, 128),
    Shape(2, 2, 16, 8, 2048),
    Shape(2, 2, 4, 4, 16384),
    Shape(1, 1, 2, 2, 1 << 20),
)

PAIRS = (
    Pair("FC-FC", _NHD, _NHD, _BLOCKS),
    Pair("FC-LW", _NHD, _LAYER, _CHUNKS),
    Pair("LW-FC", _LAYER, _NHD, _CHUNKS),
    Pair("LW-LWouter", _LAYER, _LAYER_OUTER_FIRST, _PLANES),
    Pair("NHD-HND", _NHD, _HND, _ROWS),
    Pair("FC-universal", _NHD, _UNIVERSAL, _ROWS),
)
LEGEND = (
    "FC: all layers in one tensor (NHD unless said). LW: a tensor for each layer, block first;",
    "LWouter: outer first. HND, universal: contiguous too, heads before tokens, heads before layers.",
)


@dataclass(frozen=True)
class Cell:
    """One measurement."""

    pair: Pair
    run_bytes: int
    units: int

    @property
    def shape(self) -> Shape:
        """Extents of a block."""
        return self.pair.shapes[RUNS.index(self.run_bytes)]

    @property
    def ids(self) -> int:
        """Blocks moved."""
        return max(self.units * UNIT // self.shape.block_bytes, 1)

    @property
    def payload_bytes(self) -> int:
        """Bytes moved, counted once."""
        return self.ids * self.shape.block_bytes

    @property
    def name(self) -> str:
        """Such as "FC-LW, 4 KiB runs, 16 MiB"."""
        return f"{self.pair.name}, {size(self.run_bytes)} runs, {size(self.payload_bytes)}"


_SMALL, _LONG = (4 << 10, 32 << 10), (32 << 10, 2 << 20)
_DEFAULT: dict[str, tuple[int, ...]] = {
    "FC-FC": (4 << 10, 2 << 20),
    "FC-LW": _SMALL,
    "LW-FC": _SMALL,
    "LW-LWouter": (32 << 10,),
    "NHD-HND": (256,),
    "FC-universal": (256,),
}
"""Runs as real caches have them."""


def select(selection: Selection, *, max_payload: int, only: frozenset[str] = frozenset()) -> list[Cell]:
    """The cells of a selection whose payload fits, of the pairs in `only` if it names any."""
    units = {"quick": (8,), "default": (8, 256), "full": UNITS}[selection]
    cells = []
    for pair in PAIRS:
        if only and pair.name not in only:
            continue
        runs = RUNS if selection == "full" else _DEFAULT[pair.name]
        of_pair = [Cell(pair, run, count) for run in runs for count in units]
        cells += [cell for cell in of_pair if cell.payload_bytes <= max_payload]
    # Blocks larger than a unit make the smallest payloads of a pair equal.
    seen: set[tuple[str, int, int]] = set()
    kept = []
    for cell in cells:
        key = (cell.pair.name, cell.run_bytes, cell.payload_bytes)
        if key not in seen:
            seen.add(key)
            kept.append(cell)
    return kept


def size(count: int) -> str:
    """Such as "32 KiB"."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << power:
            return f"{count / (1 << power):.4g} {unit}"
    return f"{count} B"
