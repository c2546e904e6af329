"""What is measured on GPUs: plain numbers, no memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvferry.bench.cells import ITEM, UNIT, Shape, size

Direction = Literal["h2d", "d2h", "d2d", "p2p"]
DIRECTIONS: tuple[Direction, ...] = ("h2d", "d2h", "d2d", "p2p")
RUNS = (4 << 10, 16 << 10, 32 << 10, 64 << 10, 512 << 10, 2 << 20)
UNITS = (1, 8, 64, 256)

FC, HND = "block layer outer page head dim", "block layer outer head page dim"
LW = "outer block page head dim"
"""A tensor for each layer, outer first, as FlashAttention keeps it: K and V of a block are apart."""

_BLOCKS = {
    4 << 10: Shape(2, 2, 4, 2, 64),
    16 << 10: Shape(4, 2, 8, 2, 64),
    32 << 10: Shape(4, 2, 8, 4, 64),
    64 << 10: Shape(4, 2, 16, 4, 64),
    512 << 10: Shape(16, 2, 16, 8, 64),
    2 << 20: Shape(32, 2, 16, 8, 128),
}
"""Blocks as long as the run: contiguous on both sides."""
_CHUNKS = {
    4 << 10: Shape(256, 2, 16, 1, 128),
    16 << 10: Shape(64, 2, 16, 4, 128),
    32 << 10: Shape(32, 2, 16, 8, 128),
    64 << 10: Shape(16, 2, 32, 8, 128),
    512 << 10: Shape(2, 2, 256, 8, 128),
    2 << 20: Shape(2, 2, 1024, 8, 128),
}
"""Blocks of 2 MiB (the last: 8 MiB) whose K or V of one layer is as long as the run."""


@dataclass(frozen=True)
class Cell:
    """One measurement: so many bytes in runs of so many bytes, between two caches of a shape."""

    direction: Direction
    pair: str
    src: str
    dst: str
    shape: Shape
    run_bytes: int
    ids: int

    @property
    def payload_bytes(self) -> int:
        """Bytes moved, counted once."""
        return self.ids * self.shape.block_bytes

    @property
    def traffic(self) -> int:
        """How often a GPU's memory is touched for each byte: GB/s on one GPU count reads and writes."""
        return 2 if self.direction == "d2d" else 1

    @property
    def runs(self) -> int:
        """Copies the payload consists of."""
        return self.payload_bytes // self.run_bytes

    @property
    def name(self) -> str:
        """Such as "h2d FC-LW, 32 KiB runs, 16 MiB"."""
        return f"{self.direction} {self.pair}, {size(self.run_bytes)} runs, {size(self.payload_bytes)}"

    def gb_per_s(self, seconds: float) -> float:
        """Payload (twice on one GPU) over seconds, in 10^9 bytes/s."""
        return self.traffic * self.payload_bytes / seconds / 1e9


def fc_fc(direction: Direction, run: int, units: int) -> Cell:
    """Whole blocks as long as the run, as many as fill `units` of 2 MiB."""
    shape = _BLOCKS[run]
    return Cell(direction, "FC-FC", FC, FC, shape, run, max(units * UNIT // shape.block_bytes, 1))


def fc_lw(direction: Direction, run: int, units: int, shape: Shape | None = None) -> Cell:
    """Contiguous blocks to layers, or back where the host or the pool receives."""
    shape = shape or _CHUNKS[run]
    ids = max(units * UNIT // shape.block_bytes, 1)
    if direction == "d2h":
        return Cell(direction, "LW-FC", LW, FC, shape, run, ids)
    return Cell(direction, "FC-LW", FC, LW, shape, run, ids)


def reorder(direction: Direction, row: int, units: int) -> Cell:
    """NHD to HND, 16 tokens x 8 heads with rows of `row` bytes."""
    shape = Shape(32, 2, 16, 8, row // ITEM)
    return Cell(direction, "NHD-HND", FC, HND, shape, row, max(units * UNIT // shape.block_bytes, 1))


def core(directions: tuple[Direction, ...], *, max_payload: int, quick: bool = False) -> list[Cell]:
    """The core table, direction by direction, what does not fit in `max_payload` left out."""
    cells: list[Cell] = []
    for direction in directions:
        for make in (fc_fc, fc_lw):
            for run in RUNS:
                of_run = [make(direction, run, units) for units in (UNITS[:2] if quick else UNITS)]
                fitting = [cell for cell in of_run if cell.payload_bytes <= max_payload]
                # Blocks of more than a unit make small payloads equal.
                cells += list(dict.fromkeys(fitting))
    return cells
