"""torch and LMCache as contenders, where they can be imported."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvferry.bench.gpu.arrays import CudaArray
from kvferry.bench.gpu.cells import LW
from kvferry.bench.gpu.contenders import OnStream

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvferry.bench.buffers import Ids
    from kvferry.bench.gpu.driver import Stream
    from kvferry.bench.gpu.memory import Arena, Ground, Store

_CHUNK_BLOCKS = 16
_OBJECTS = 4


class _Tensors(OnStream):
    """Caches as the bfloat16 tensors an engine would have. Host blocks are neighbours, which is easier."""

    name = ""

    def __init__(self, ground: Ground, stream: Stream) -> None:
        self._torch: Any = importlib.import_module("torch")
        super().__init__(stream)
        self._ground = ground
        self._direction = ground.cell.direction
        self._count = ground.cell.ids
        self._ids: dict[int, tuple[Ids, Ids, Any, Any]] = {}
        self.use_stream()

    def use_stream(self) -> None:
        """Torch works on the bench's stream in this thread."""
        cuda = self._torch.cuda
        cuda.set_stream(cuda.ExternalStream(self._stream.handle, device=self._stream.ordinal))

    def ids(self, call: int, /) -> tuple[Ids, Ids]:
        src, dst, _, _ = self.places(call)
        return src, dst

    def places(self, call: int) -> tuple[Ids, Ids, Any, Any]:
        """Ids of a call, on the host and on the device; neighbours on the host's side."""
        number = call % self._ground.calls
        if number not in self._ids:
            src, dst = self._ground.ids(number)
            beside = np.arange(number * self._count, (number + 1) * self._count, dtype=np.int64)
            src = beside if self._direction == "h2d" else src
            dst = beside if self._direction == "d2h" else dst
            self._ids[number] = (
                src,
                dst,
                self.on_device(src, self._ground.src.arena),
                self.on_device(dst, self._ground.dst.arena),
            )
        return self._ids[number]

    def prepare(self, call: int) -> None:
        """Puts the ids of a call where index operations want them, untimed."""
        self.places(call)

    def on_device(self, ids: Ids, arena: Arena) -> Any:
        """Ids where an index operation wants them."""
        return self._torch.as_tensor(ids, device=self.device(arena))

    def device(self, arena: Arena) -> str:
        """Torch's name of where an arena lies."""
        return f"cuda:{arena.ordinal}" if arena.on_device else "cpu"

    def elements(self, arena: Arena) -> Any:
        """An arena as bfloat16."""
        if arena.on_device:
            array: Any = CudaArray(arena.addr, (arena.nbytes // 2,), "<i2", arena.layout)
            found = self._torch.as_tensor(array, device=self.device(arena))
        else:
            found = self._torch.from_numpy(arena.bytes.view(np.int16))
        return found.view(self._torch.bfloat16)

    def blocks(self, store: Store) -> Any:
        """A contiguous cache as [block, layer, outer, elements]."""
        shape = store.shape
        size = shape.chunk_bytes // shape.outer // 2
        flat = self.elements(store.arena)[: store.tensor_bytes() // 2]
        return flat.view(store.slots, shape.layers, shape.outer, size)

    def layers(self, store: Store) -> list[Any]:
        """A layered cache as one [outer, block, elements] for each layer."""
        shape = store.shape
        size = shape.chunk_bytes // shape.outer // 2
        flat = self.elements(store.arena)
        starts = range(0, store.tensors * store.pitch // 2, store.pitch // 2)
        return [
            flat[start : start + store.tensor_bytes() // 2].view(shape.outer, store.slots, size)
            for start in starts
        ]


class TorchIndex(_Tensors):
    """index_select into a buffer and a copy out of it; a copy into a buffer and index_copy_ out of it."""

    name = "torch index"

    def __init__(self, ground: Ground, stream: Stream) -> None:
        super().__init__(ground, stream)
        src, dst, shape = ground.src, ground.dst, ground.cell.shape
        torch, count = self._torch, self._count
        size = shape.chunk_bytes // shape.outer // 2
        self._from = self.layers(src) if src.axes == LW else [self.blocks(src)]
        self._to = self.layers(dst) if dst.axes == LW else [self.blocks(dst)]

        def buffer(arena: Arena, *dims: int) -> Any:
            return torch.empty(*dims, dtype=torch.bfloat16, device=self.device(arena))

        # Gathered and scattered where the GPU is; between two, one buffer on each.
        near = src.arena if src.arena.on_device else dst.arena
        far = dst.arena if dst.arena.on_device else src.arena
        block = (count, shape.layers, shape.outer, size)
        self._gathered = buffer(near, *block)
        self._arrived = self._gathered if near.ordinal == far.ordinal else buffer(far, *block)
        self._by_layer = buffer(near, shape.layers, shape.outer, count, size) if src.axes == LW else None

    def submit(self, call: int) -> None:
        """Puts the work on the stream."""
        src_ids, dst_ids, src_at, dst_at = self.places(call)
        src, dst = self._ground.src, self._ground.dst
        if not src.arena.on_device:
            first = int(src_ids[0])
            self._gathered.copy_(self._from[0][first : first + self._count], non_blocking=True)
        elif self._by_layer is not None:
            for number, layer in enumerate(self._from):
                self._torch.index_select(layer, 1, src_at, out=self._by_layer[number])
            self._gathered.copy_(self._by_layer.permute(2, 0, 1, 3))
        else:
            self._torch.index_select(self._from[0], 0, src_at, out=self._gathered)
        if self._arrived is not self._gathered:
            self._arrived.copy_(self._gathered, non_blocking=True)
        if not dst.arena.on_device:
            first = int(dst_ids[0])
            self._to[0][first : first + self._count].copy_(self._arrived, non_blocking=True)
        elif dst.axes == LW:
            for number, layer in enumerate(self._to):
                layer.index_copy_(1, dst_at, self._arrived[:, number].transpose(0, 1))
        else:
            self._to[0].index_copy_(0, dst_at, self._arrived)

    def start(self, call: int, /) -> Callable[[], object]:
        """Submits; what it returns waits."""
        self.submit(call)
        return self.settle

    def settle(self) -> None:
        """Between two GPUs torch works on streams of both."""
        if self._ground.cell.direction == "p2p":
            self._torch.cuda.synchronize(self._ground.src.arena.ordinal)
            self._torch.cuda.synchronize(self._ground.dst.arena.ordinal)
        self._stream.synchronize()

    def enqueue(self, call: int, /) -> Callable[[], object] | None:
        """Submits on the bench's stream."""
        if self._ground.cell.direction == "p2p":
            return None
        return super().enqueue(call)


class LmCache(_Tensors):
    """LMCache's multi_layer_block_kv_transfer, between its own chunks and a layered cache.

    A chunk is [2, layer, tokens, width] of at most 16 blocks, as it keeps them; up to four in a call.
    """

    name = "LMCache"

    def __init__(self, ground: Ground, stream: Stream) -> None:
        if ground.cell.pair == "FC-FC" or ground.cell.direction == "p2p":
            raise ValueError("it moves between its chunks and layers on one GPU")
        self._ops = lmcache_ops()
        super().__init__(ground, stream)
        shape, ops = ground.cell.shape, self._ops
        self._layered, self._chunked = (
            (ground.src, ground.dst) if ground.src.axes == LW else (ground.dst, ground.src)
        )
        self._towards = ops.TransferDirection.D2H if ground.src.axes == LW else ops.TransferDirection.H2D
        describe = ops.PageBufferShapeDesc()
        describe.kv_size, describe.nl, describe.nb = shape.outer, shape.layers, self._layered.slots
        describe.bs, describe.nh, describe.hs = shape.page, shape.heads, shape.dim
        describe.element_size = 2
        self._describe = describe
        formats = getattr(ops, "EngineKVFormat", None) or ops.GPUKVFormat
        self._format = formats.NL_X_TWO_NB_BS_NH_HS
        self._device = self._torch.device(f"cuda:{stream.ordinal}")
        bases = [layer.data_ptr() for layer in self.layers(self._layered)]
        self._bases = self._torch.tensor(bases, dtype=self._torch.int64, device=self._device)
        self._blocks = min(self._count, _CHUNK_BLOCKS)

    def submit(self, call: int) -> None:
        """Puts the work on the stream."""
        src_ids, dst_ids, src_at, dst_at = self.places(call)
        layered, chunked = (src_at, dst_ids) if self._layered is self._ground.src else (dst_at, src_ids)
        size = self._blocks * self._ground.cell.shape.block_bytes
        first = self._chunked.addr + int(chunked[0]) * self._ground.cell.shape.block_bytes
        chunks = self._count // self._blocks
        for start in range(0, chunks, _OBJECTS):
            few = min(_OBJECTS, chunks - start)
            self._ops.multi_layer_block_kv_transfer(
                self._bases,
                [first + (start + number) * size for number in range(few)],
                layered[start * self._blocks : (start + few) * self._blocks],
                self._device,
                self._towards,
                self._describe,
                self._blocks * self._ground.cell.shape.page,
                self._format,
                0,
            )

    def places(self, call: int) -> tuple[Ids, Ids, Any, Any]:
        """As for torch, and on one GPU too the chunks lie side by side."""
        number = call % self._ground.calls
        if number not in self._ids and self._direction == "d2d":
            src, dst = self._ground.ids(number)
            beside = np.arange(number * self._count, (number + 1) * self._count, dtype=np.int64)
            src, dst = (src, beside) if self._layered is self._ground.src else (beside, dst)
            self._ids[number] = (
                src,
                dst,
                self.on_device(src, self._ground.src.arena),
                self.on_device(dst, self._ground.dst.arena),
            )
        return super().places(call)

    def reread(self, blocks: Any) -> Any:
        """Chunks read as blocks: [chunk, outer, layer, block, token, head, word] to [block, layer, ...]."""
        shape = self._ground.cell.shape
        chunks, words = self._count // self._blocks, shape.dim // 4
        whole = blocks.reshape(
            chunks, shape.outer, shape.layers, self._blocks, shape.page, shape.heads, words
        )
        axes = (0, 3, 2, 1, 4, 5, 6)
        order = whole.permute(axes) if hasattr(whole, "permute") else whole.transpose(axes)
        return order.reshape(self._count, shape.layers, shape.outer, shape.page, shape.heads, words)


def lmcache_ops() -> Any:
    """The compiled operations alone: the package around them imports a server."""
    importlib.import_module("torch")
    loaded = sys.modules.get("lmcache.c_ops")
    if loaded is not None:
        return loaded
    spec = importlib.util.find_spec("lmcache")
    folders = list(spec.submodule_search_locations or []) if spec else []
    for path in (found for folder in folders for found in sorted(Path(folder).glob("c_ops*.so"))):
        extension = importlib.util.spec_from_file_location("lmcache.c_ops", path)
        if extension and extension.loader:
            module = importlib.util.module_from_spec(extension)
            extension.loader.exec_module(module)
            sys.modules["lmcache.c_ops"] = module
            return module
    raise ImportError("no lmcache with compiled operations")


def contenders() -> list[Any]:
    """The foreign ones."""
    return [TorchIndex, LmCache]
