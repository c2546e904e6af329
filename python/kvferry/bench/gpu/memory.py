"""Memory that every contender shares: arenas of each kind, cut into caches anew for each cell."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

import kvferry as kf
from kvferry.bench.cells import ITEM
from kvferry.bench.gpu.arrays import WORD, CudaArray

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvferry.bench.buffers import U8, Ids
    from kvferry.bench.cells import Shape
    from kvferry.bench.gpu.arrays import Math
    from kvferry.bench.gpu.cells import Cell

POISON = 0xA5
POISON_WORD = int(np.frombuffer(bytes([POISON] * 8), np.int64)[0])
_PAGE = 4096
_CANONICAL = ("block", "layer", "outer", "page", "head", "dim")


class Arena:
    """One piece of memory as kvferry allocates it."""

    def __init__(self, nbytes: int, memory: kf.Memory) -> None:
        pages = -(-nbytes // _PAGE)
        config = kf.LayoutConfig(
            num_blocks=pages, num_layers=1, outer_dim=1, page_size=1, inner_dim=_PAGE, dtype="uint8"
        )
        self.layout = kf.PhysicalLayout.fully_contiguous(config, memory)
        (region,) = self.layout.regions
        self.kind: str = memory.kind
        self.ordinal = memory.ordinal or 0
        self.addr, self.nbytes = region.addr, region.nbytes
        self._host: U8 | None = None
        if memory.ordinal is None:
            self._host = np.asarray(region).reshape(-1).view(np.uint8)

    @property
    def on_device(self) -> bool:
        """Whether a GPU's memory."""
        return self._host is None

    @property
    def bytes(self) -> U8:
        """Host memory as NumPy sees it."""
        if self._host is None:
            raise TypeError("device memory has no NumPy view")
        return self._host

    def array(self, start: int, dims: tuple[int, ...]) -> Any:
        """16-bit elements from byte `start` on, for `PhysicalLayout.from_tensors`."""
        if self._host is None:
            return CudaArray(self.addr + start, dims, "<u2", self.layout)
        nbytes = int(np.prod(dims, dtype=np.int64)) * ITEM
        return self._host[start : start + nbytes].view(np.uint16).reshape(dims)


@dataclass
class Store:
    """A cache in an arena: what kvferry makes of it, and where everything lies."""

    arena: Arena
    axes: str
    shape: Shape
    slots: int
    pitch: int = field(init=False)
    """Bytes from one layer's tensor to the next, where there are several."""
    layout: kf.PhysicalLayout = field(init=False)

    def __post_init__(self) -> None:
        extents = self.shape.extents(self.slots)
        dims = tuple(extents[name] for name in self.axes.split())
        nbytes = int(np.prod(dims, dtype=np.int64)) * ITEM
        self.pitch = (-(-nbytes // _PAGE) + 1) * _PAGE
        tensors = [self.arena.array(layer * self.pitch, dims) for layer in range(self.tensors)]
        config = kf.LayoutConfig(
            num_blocks=self.slots,
            num_layers=self.shape.layers,
            outer_dim=self.shape.outer,
            page_size=self.shape.page,
            num_heads=self.shape.heads,
            head_dim=self.shape.dim,
            dtype="bfloat16",
        )
        given: Any = tensors[0] if self.contiguous else tensors
        self.layout = kf.PhysicalLayout.from_tensors(given, axes=self.axes, config=config)

    @property
    def contiguous(self) -> bool:
        """One tensor for all layers."""
        return "layer" in self.axes.split()

    @property
    def tensors(self) -> int:
        """How many there are."""
        return 1 if self.contiguous else self.shape.layers

    def tensor_bytes(self) -> int:
        """Bytes of one tensor."""
        return self.slots * self.shape.block_bytes // self.tensors

    def view(self, words: Any, math: Math) -> Any:
        """Words of the arena as [block, layer, outer, page, head, words of a row], not copied."""
        names = self.axes.split()
        extents = self.shape.extents(self.slots) | {"dim": self.shape.dim * ITEM // WORD}
        dims = [extents[name] for name in names]
        if self.contiguous:
            whole = words[: self.tensor_bytes() // WORD].reshape(dims)
        else:
            names = ["layer", *names]
            rows = words[: self.tensors * self.pitch // WORD].reshape((self.tensors, self.pitch // WORD))
            whole = rows[:, : self.tensor_bytes() // WORD].reshape([self.tensors, *dims])
        return math.order(whole, tuple(names.index(axis) for axis in _CANONICAL))

    def run_pointers(self, ids: Ids, run_bytes: int) -> NDArray[np.uint64]:
        """Where the runs of the blocks begin, block by block: whole blocks, or K or V of a layer."""
        shape = self.shape
        if run_bytes == shape.block_bytes and self.contiguous:
            return (self.addr + ids * shape.block_bytes).astype(np.uint64)
        if run_bytes * shape.layers * shape.outer != shape.block_bytes:
            raise ValueError(f"no table of runs of {run_bytes} bytes in {self.axes}")
        layer, outer = np.arange(shape.layers)[:, None], np.arange(shape.outer)[None, :]
        if self.axes.startswith("block layer outer"):
            inside = (layer * shape.outer + outer) * run_bytes
            at = ids[:, None, None] * shape.block_bytes + inside
        elif self.axes.startswith("outer block"):
            at = layer * self.pitch + (outer * self.slots + ids[:, None, None]) * run_bytes
        else:
            raise ValueError(f"no table of runs in {self.axes}")
        return (self.addr + at).reshape(-1).astype(np.uint64)

    @property
    def addr(self) -> int:
        """Where it begins."""
        return self.arena.addr


@dataclass(frozen=True)
class Ground:
    """A cell's two caches and the blocks to move, call by call: block by block nowhere near one another."""

    cell: Cell
    src: Store
    dst: Store
    src_slices: list[Ids]
    dst_slices: list[Ids]

    @classmethod
    def lay(cls, cell: Cell, source: Arena, target: Arena, seed: int) -> Ground:
        """Cuts the arenas and shuffles the slots; at least one slot of the target is never named."""
        shape = cell.shape
        usable = min(source.nbytes, target.nbytes) - shape.layers * 2 * _PAGE
        slots = usable // shape.block_bytes
        if slots <= cell.ids:
            raise ValueError(f"{cell.name}: buffers hold {slots} blocks, more than {cell.ids} are needed")
        rng = np.random.default_rng(seed)
        calls = (slots - 1) // cell.ids
        slices = [
            np.split(rng.permutation(slots)[: calls * cell.ids].astype(np.int64), calls) for _ in range(2)
        ]
        return cls(
            cell,
            Store(source, cell.src, shape, slots),
            Store(target, cell.dst, shape, slots),
            slices[0],
            slices[1],
        )

    @property
    def calls(self) -> int:
        """Calls until the same blocks are moved again."""
        return len(self.src_slices)

    def ids(self, call: int) -> tuple[Ids, Ids]:
        """Source and destination blocks of a call."""
        number = call % self.calls
        return self.src_slices[number], self.dst_slices[number]
