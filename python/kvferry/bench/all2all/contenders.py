"""The ways to exchange a cell: `call()` puts one exchange on the current stream and returns its results."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvferry.bench.all2all import kernels
from kvferry.bench.all2all.cells import DTYPES, spans
from kvferry.bench.all2all.device import Gpu

if TYPE_CHECKING:
    from kvferry.bench.all2all.cells import Cell
    from kvferry.bench.all2all.data import Ground
    from kvferry.bench.all2all.device import Device

POOL_BUFFERS = 4


class NotHereError(Exception):
    """A way that does not exist for a cell or on this machine; no failure."""


class Contender(Protocol):
    """One way to exchange a cell."""

    checked: bool
    """Whether its results are an exchange's, and can be compared."""

    def call(self) -> Any:
        """Enqueues one exchange; its results, which may be dropped."""

    def poison(self) -> None:
        """Makes the memory of its results wrong, so that what is not written shows."""

    def verify(self) -> None:
        """Raises what has gone wrong on the device."""


def tensors(results: Any) -> list[Any]:
    """What a call returned, as a list."""
    return list(results) if isinstance(results, (tuple, list)) else [results]


class Kvferry:
    """kvferry, results owned or into `out=`."""

    checked = True

    def __init__(self, comm: Any, ground: Ground, *, out: bool = False, **options: Any) -> None:
        cell = ground.cell
        self._comm, self._ground = comm, ground
        self._input = tuple(ground.inputs) if len(ground.inputs) > 1 else ground.inputs[0]
        self._options = dict(options)
        if len(set(cell.tokens)) > 1:
            self._options["rank_tokens"] = list(cell.tokens)
        if cell.splits:
            self._options["head_splits"] = spans(cell.splits)
        self._out: Any = None
        if out:
            if len(cell.heads) > 1:
                raise NotHereError("into out=: one tensor a call")
            shape = cell.result_shape(ground.rank, 0)
            self._out = self._options["out"] = comm.empty_output(shape, ground.inputs[0].dtype)

    def call(self) -> Any:
        """One exchange."""
        return self._comm.send_recv_heads(self._input, **self._options)

    def poison(self) -> None:
        """`out` itself, or every buffer of the pool by way of results."""
        if self._out is not None:
            self._ground.poison([self._out])
            return
        held = []
        for _ in range(POOL_BUFFERS):
            held.append(tensors(self.call()))
            self._ground.poison(held[-1])

    def verify(self) -> None:
        """Raises what has gone wrong on the device."""
        self._comm.check()


class InTurn:
    """A cell's tensors one call after the other."""

    checked = True

    def __init__(self, comm: Any, ground: Ground) -> None:
        self._comm, self._ground = comm, ground

    def call(self) -> Any:
        """As many exchanges as tensors."""
        return [self._comm.send_recv_heads(tensor) for tensor in self._ground.inputs]

    def poison(self) -> None:
        """One call's."""
        self._ground.poison(self.call())

    def verify(self) -> None:
        """Raises what has gone wrong on the device."""
        self._comm.check()


class Nccl:
    """Permute, one all-to-all of all tensors, permute; buffers made beforehand."""

    checked = True

    def __init__(self, device: Device, ground: Ground, *, bare: bool = False) -> None:
        torch, cell, rank = device.torch, ground.cell, ground.rank
        self._dist: Any = importlib.import_module("torch.distributed")
        if not self._dist.is_initialized():
            raise NotHereError("no process group")
        self._torch, self._bare = torch, bare
        # Bytes are bytes; not every release of NCCL knows 8-bit floats.
        self._inputs = [self._plain(tensor) for tensor in ground.inputs]
        dtype = self._inputs[0].dtype
        world, each = range(cell.world), range(len(cell.heads))
        self._ranges = [cell.head_ranges(tensor) for tensor in each]
        shapes = [cell.result_shape(rank, tensor) for tensor in each]
        self._out = [torch.empty(shape, dtype=dtype, device=device.name) for shape in shapes]
        self._results = self._out
        if cell.item == 1:
            self._results = [out.view(getattr(torch, DTYPES[cell.dtype][0])) for out in self._out]
        self._send_sizes = [cell.sent(rank, other) // cell.item for other in world]
        self._recv_sizes = [cell.sent(other, rank) // cell.item for other in world]
        self._send = torch.empty(sum(self._send_sizes), dtype=dtype, device=device.name)
        self._recv = torch.empty(sum(self._recv_sizes), dtype=dtype, device=device.name)
        self._even = len(set(cell.tokens)) == 1 and not cell.splits
        self._even &= all(heads % cell.world == 0 for heads in cell.heads)
        self._pack, self._unpack = self._by_tensor(cell) if self._even else self._by_rank(cell)

    def _plain(self, tensor: Any) -> Any:
        return tensor.view(self._torch.uint8) if tensor.element_size() == 1 else tensor

    def _by_tensor(self, cell: Cell) -> tuple[list[Any], list[Any]]:
        """Pairs of target and source, before and after: one copy of each tensor, as equal shares allow."""
        world, pack, unpack, at = cell.world, [], [], 0
        send, recv = self._send.view(world, -1), self._recv.view(world, -1)
        for x, out in zip(self._inputs, self._out, strict=True):
            batch, tokens, heads, dim = x.shape
            share = (world, batch, tokens, heads // world, dim)
            end = at + x.numel() // world
            by_target = x.view(batch, tokens, world, heads // world, dim).permute(2, 0, 1, 3, 4)
            pack.append((send[:, at:end].view(share), by_target))
            by_source = recv[:, at:end].view(share).permute(1, 0, 2, 3, 4)
            unpack.append((out.view(batch, world, tokens, heads // world, dim), by_source))
            at = end
        return pack, unpack

    def _by_rank(self, cell: Cell) -> tuple[list[Any], list[Any]]:
        """The same, one copy of each tensor for each rank."""
        pack, unpack, sent, came = [], [], 0, 0
        for other, rows in enumerate(spans(cell.tokens)):
            for x, out, ranges in zip(self._inputs, self._out, self._ranges, strict=True):
                part = x[:, :, ranges[other].start : ranges[other].stop]
                pack.append((self._send[sent : sent + part.numel()].view(part.shape), part))
                sent += part.numel()
                place = out[:, rows.start : rows.stop]
                unpack.append((place, self._recv[came : came + place.numel()].view(place.shape)))
                came += place.numel()
        return pack, unpack

    def call(self) -> Any:
        """One exchange."""
        if not self._bare:
            for target, source in self._pack:
                target.copy_(source)
        if self._even:
            self._dist.all_to_all_single(self._recv, self._send)
        else:
            self._dist.all_to_all_single(self._recv, self._send, self._recv_sizes, self._send_sizes)
        if not self._bare:
            for target, source in self._unpack:
                target.copy_(source)
        return self._results

    def poison(self) -> None:
        """Results and both buffers."""
        for buffer in (*self._out, self._send, self._recv):
            buffer.view(-1).view(self._torch.uint8).fill_(0x6B)

    def verify(self) -> None:
        """NCCL says it elsewhere."""


class BareNccl(Nccl):
    """The all-to-all alone, of as many bytes."""

    checked = False

    def __init__(self, device: Device, ground: Ground) -> None:
        super().__init__(device, ground, bare=True)


class Memcpy:
    """As many bytes into mappings of the peers' memory by the copy engine. One way: from rank 0 only."""

    checked = False

    def __init__(self, device: Device, ground: Ground, *, both: bool) -> None:
        if not isinstance(device, Gpu) or not device.mapped:
            raise NotHereError("no peer memory")
        cell, rank = ground.cell, ground.rank
        self._device, self._keep = device, ground
        source = int(ground.inputs[0].data_ptr())
        self._copies = []
        for other in range(cell.world):
            if other != rank and (both or rank == 0):
                place = sum(cell.sent(before, other) for before in range(rank))
                nbytes = min(cell.sent(rank, other), ground.inputs[0].nbytes)
                self._copies.append((device.bases[other] + kernels.POOL_AT + place, source, nbytes))

    def call(self) -> Any:
        """One copy to every peer."""
        for target, source, nbytes in self._copies:
            self._device.copy(target, source, nbytes)

    def poison(self) -> None:
        """Nothing is looked at."""

    def verify(self) -> None:
        """Nothing is looked at."""


class Reference:
    """The reference's method (kernels.py), its result copied out of the shared memory."""

    checked = True

    def __init__(self, device: Device, ground: Ground, ctas: int) -> None:
        if not isinstance(device, Gpu) or not device.mapped:
            raise NotHereError("no peer memory")
        cell, rank = ground.cell, ground.rank
        if len(cell.heads) > 1 or cell.splits or cell.heads[0] % cell.world:
            raise NotHereError("it takes one tensor whose heads divide by the ranks")
        self._device, self._ground = device, ground
        row = cell.heads[0] // cell.world * cell.dim * cell.item
        if not kernels.rows_at_once(row):
            raise NotHereError(f"it cannot move rows of {row} bytes")
        tokens = spans(cell.tokens)
        shape = cell.result_shape(rank, 0)
        self._typed = getattr(device.torch, DTYPES[cell.dtype][0])
        self._pool = device.pool((*shape[:3], shape[3] * cell.item))
        self._ctas = ctas
        self._arguments = (
            np.uint64(ground.inputs[0].data_ptr()),
            np.uint64(device.table),
            np.int32(cell.world),
            np.int32(rank),
            np.int32(cell.batch),
            np.int64(cell.tokens[rank]),
            np.int64(tokens[rank].start),
            np.int64(sum(cell.tokens)),
            np.int32(row),
            np.uint64(kernels.WAIT_NS),
        )

    def call(self) -> Any:
        """One exchange and the copy."""
        self._device.launch("exchange", self._ctas, kernels.THREADS, *self._arguments)
        return [self._pool.clone().view(self._typed)]

    def poison(self) -> None:
        """The shared memory."""
        self._pool.fill_(0x6B)

    def verify(self) -> None:
        """Its waits are bounded."""
        if fault := self._device.fault():
            raise RuntimeError(fault)
