"""Caches anywhere: a model with memory of any kind, filled, poisoned and checked through the driver."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from driver import SIMULATED, Buffer, CudaArray, read, until, write
from reference import GUARD, Model, content, poisoned, transferred
from support import borrowed, config, owned

import kvferry as kf

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reference import Bytes, Geometry

MARGIN = 512  # guard bytes around wrapped arrays
HOST = ("system", "pinned", "registered")

# Every kind of layout in every order it can have: (kind, order, block_dim).
KINDS = [
    ("fc", "NHD", "block_first"),
    ("fc", "HND", "block_first"),
    ("fc", "universal", "block_first"),
    ("lw", "NHD", "block_first"),
    ("lw", "HND", "block_first"),
    ("lw", "NHD", "outer_first"),
    ("lw", "HND", "outer_first"),
    ("split", "NHD", "block_first"),
    ("split", "HND", "block_first"),
    ("pool", "NHD", "block_first"),
    ("pool", "HND", "block_first"),
    ("pool", "universal", "block_first"),
]

# What each engine can do, by the kind of memory on the host side; "device" is device to device.
ENGINES: dict[str, tuple[Any, ...]] = {
    "system": ("auto", "bounce"),
    "pinned": ("auto", "kernel", "batch", "staged"),
    "registered": ("auto", "kernel", "batch", "staged"),
    "device": ("auto", "kernel", "batch"),
}
# The engines that run on a caller's stream.
STREAMED: tuple[Any, ...] = ("auto", "kernel", "batch", "staged")


def aligned_bytes(nbytes: int, alignment: int = 4096) -> Bytes:
    """Host memory at a multiple of `alignment`, so that two registrations never share a page."""
    whole = np.empty(-(-nbytes // 4096) * 4096 + alignment, np.uint8)
    start = -whole.ctypes.data % alignment
    return whole[start : start + nbytes]


class Cache:
    """A model with memory: `where` is system, pinned, registered, device or wrapped (a foreign device array).

    Registered and wrapped regions lie between guard bytes, `offset` bytes off a multiple of 512.
    """

    def __init__(self, model: Model, where: str = "device", ordinal: int = 0, *, offset: int = 0) -> None:
        self.model, self.where, self.ordinal = model, where, ordinal
        self._guarded: list[tuple[int, int, int]] = []  # address, bytes before the region, total
        self._keep: list[Any] = []
        if where == "registered":
            self._register(offset)
        elif where == "wrapped":
            self._wrap(offset)
        else:
            host = {"system": kf.system(), "pinned": kf.pinned()}
            memory = host.get(where) or kf.device(ordinal)
            self.layout = owned(model, memory)
            self.spans = [(region.addr, region.nbytes) for region in self.layout.regions]
        assert self.layout.memory.kind == {"registered": "pinned", "wrapped": "device"}.get(where, where)

    def _register(self, offset: int) -> None:
        size = self.model.region_bytes + 2 * MARGIN + offset
        stride = -(-size // MARGIN) * MARGIN
        whole = aligned_bytes(stride * self.model.num_regions)
        whole[:] = GUARD
        self._keep.append(whole)
        self.registration = kf.register_host(whole)
        starts = [at * stride + MARGIN + offset for at in range(self.model.num_regions)]
        regions = [whole[start : start + self.model.region_bytes] for start in starts]
        self.layout = borrowed(self.model, regions)
        self.spans = [(region.ctypes.data, region.nbytes) for region in regions]
        self._guarded = [
            (whole.ctypes.data + at * stride, MARGIN + offset, size) for at in range(len(starts))
        ]

    def _wrap(self, offset: int) -> None:
        geometry, model = self.model.geometry, self.model
        typestr = {1: "|u1", 2: "<u2", 4: "<u4", 8: "<u8"}[geometry.item]
        shape = tuple(geometry.extents[axis] for axis in model.axes)
        strides = tuple(model.strides[axis] for axis in model.axes)
        size = model.region_bytes + 2 * MARGIN + offset
        arrays = []
        for _ in range(model.num_regions):
            buffer = Buffer(size, self.ordinal, GUARD)
            arrays.append(CudaArray(buffer, shape, typestr, offset=MARGIN + offset, strides=strides))
            self._guarded.append((buffer.addr, MARGIN + offset, size))
        self.spans = [(array.addr, model.region_bytes) for array in arrays]
        self.layout = wrap(model, arrays)

    def _live(self) -> list[Bytes] | None:
        """Views of the regions where the CPU has any."""
        if self.where in ("device", "wrapped"):
            return None
        return [
            np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(addr)) for addr, nbytes in self.spans
        ]

    def regions(self) -> list[Bytes]:
        """The regions' bytes now."""
        return self._live() or [read(addr, nbytes, self.ordinal) for addr, nbytes in self.spans]

    def put(self, values: Bytes) -> None:
        """Makes the cache hold `values`, and guard bytes wherever no element lies."""
        live = self._live()
        images = live or [np.empty(nbytes, np.uint8) for _, nbytes in self.spans]
        for image in images:
            image[:] = GUARD
        self.model.store(values, images)
        if live is None:
            for (addr, _), image in zip(self.spans, images, strict=True):
                write(addr, image, self.ordinal)

    def fill(self, key: int = 1) -> Bytes:
        """Fills the cache with the oracle's content; returns it."""
        values = content(self.model.geometry, key)
        self.put(values)
        return values

    def poison(self) -> Bytes:
        values = poisoned(self.model.geometry)
        self.put(values)
        return values

    def values(self) -> Bytes:
        """What it holds, as a canonical cache."""
        return self.model.load(self.regions())

    def check(self, expected: Bytes, note: object = "") -> None:
        """Every element is as expected; nothing else was written."""
        regions = self.regions()
        found = self.model.load(regions)
        if (found != expected).any():
            wrong = np.argwhere(found != expected)
            at = tuple(int(index) for index in wrong[0])
            pytest.fail(
                f"{note} {len(wrong)} wrong bytes of {found.size}, first at {at}: {found[at]:#x}, "
                f"expected {expected[at]:#x}"
            )
        assert self.model.padding_untouched(regions), f"{note} padding was written"
        for addr, before, total in self._guarded:
            whole = read(addr, total, self.ordinal)
            after = before + self.model.region_bytes
            assert (whole[:before] == GUARD).all(), f"{note} bytes before an array were written"
            assert (whole[after:] == GUARD).all(), f"{note} bytes after an array were written"


def wrap(model: Model, arrays: Sequence[Any]) -> kf.PhysicalLayout:
    """A layout over device arrays that lie as the model says; not for block pools."""
    tensors: Any = arrays[0] if model.kind == "fc" else list(arrays)
    if model.kind == "split" and model.geometry.outer == 2:
        tensors = list(zip(arrays[::2], arrays[1::2], strict=True))
    axes = " ".join(model.axes)
    return kf.PhysicalLayout.from_tensors(tensors, axes=axes, config=config(model.geometry))


class Pair:
    """A filled source and a poisoned destination, and what a transfer must make of it."""

    def __init__(self, source: Cache, target: Cache, key: int = 1) -> None:
        self.source, self.target = source, target
        self.values, self.before = source.fill(key), target.poison()

    @property
    def src(self) -> kf.PhysicalLayout:
        return self.source.layout

    @property
    def dst(self) -> kf.PhysicalLayout:
        return self.target.layout

    def expected(self, src: Sequence[int], dst: Sequence[int], **options: Any) -> Bytes:
        geometries = self.source.model.geometry, self.target.model.geometry
        return transferred((geometries[0], self.values), (geometries[1], self.before), src, dst, **options)

    def check(self, src: Sequence[int], dst: Sequence[int], note: object = "", **options: Any) -> None:
        """The destination holds what it must; the source what it held."""
        self.target.check(self.expected(src, dst, **options), note)
        self.source.check(self.values, note)


def pair(
    geometry: Geometry,
    src: str,
    dst: str,
    src_kind: tuple[str, str, str] = KINDS[3],
    dst_kind: tuple[str, str, str] = KINDS[0],
    *,
    key: int = 1,
) -> Pair:
    """Layer by layer into blocks, by default."""
    return Pair(Cache(Model(geometry, *src_kind), src), Cache(Model(geometry, *dst_kind), dst), key)


def reported(ctx: kf.TransferContext, count: int, seconds: float = 30) -> list[Any]:
    """What completed() gives, asked again and again until it has told of `count` jobs."""
    ended: list[Any] = []

    def all_there() -> bool:
        ended.extend(ctx.completed())
        return len(ended) >= count

    assert until(all_there, seconds), f"{len(ended)} of {count} jobs were reported"
    return ended


def shuffled(count: int, of: int, seed: int = 1) -> list[int]:
    """Distinct ids in no order."""
    return [int(at) for at in np.random.default_rng(seed).permutation(of)[:count]]


def scaled(real: int, simulated: int) -> int:
    """A size for real GPUs, and one for simulated ones."""
    return simulated if SIMULATED else real
