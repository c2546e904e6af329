"""Who is measured: kvferry, plain memcpy as the ceiling, and NumPy as people use it today."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol, Self

import numpy as np

if TYPE_CHECKING:
    from types import TracebackType

    import kvferry as kf
    from kvferry.bench.buffers import U8, Arena, Ground

PIECE = 1 << 20


class Contender(Protocol):
    """Moves one call's payload."""

    @property
    def name(self) -> str:
        """Its name in tables."""

    def move(self, call: int, /) -> float | None:
        """Moves payload number `call`; seconds until the caller had control again, where that is sooner."""


class Copiers:
    """Threads that copy bytes: the calling one and the rest of a pool. NumPy lets go of the GIL."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._pool = ThreadPoolExecutor(max(threads - 1, 1), thread_name_prefix="memcpy")
        for future in [self._pool.submit(time.sleep, 0.001) for _ in range(threads)]:
            future.result()

    def copy(self, src: U8, dst: U8, *, threads: int, piece: int | None) -> None:
        """Copies all bytes: a contiguous part for each thread, or pieces dealt out in turn."""
        if threads == 1:
            np.copyto(dst, src)
            return
        part = piece or -(-len(src) // threads)
        waiting = [self._pool.submit(_copy, src, dst, part, first, threads) for first in range(1, threads)]
        _copy(src, dst, part, 0, threads)
        for future in waiting:
            future.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown()


class Memcpy:
    """As many bytes from one contiguous place to another: what no rearranging copy can beat for long."""

    def __init__(
        self,
        copiers: Copiers,
        arenas: tuple[Arena, Arena],
        payload: int,
        *,
        threads: int,
        piece: int | None = None,
    ) -> None:
        self.name = f"memcpy x{threads}" + (" pieces" if piece else "")
        self._copiers = copiers
        self._src, self._dst = (arena.bytes for arena in arenas)
        self._payload = payload
        self._calls = len(self._src) // payload
        self._threads = threads
        self._piece = piece

    def move(self, call: int, /) -> float | None:
        """Copies the next part of the arena."""
        start = call % self._calls * self._payload
        part = slice(start, start + self._payload)
        self._copiers.copy(self._src[part], self._dst[part], threads=self._threads, piece=self._piece)
        return None


class Kvferry:
    """A transfer, and waiting for it."""

    name = "kvferry"

    def __init__(self, context: kf.TransferContext, ground: Ground) -> None:
        self._context = context
        self._ground = ground

    def move(self, call: int, /) -> float | None:
        """Transfers the next blocks."""
        ground = self._ground
        number = call % ground.calls
        start = time.perf_counter()
        job = self._context.transfer(
            ground.src.layout, ground.dst.layout, ground.src_slices[number], ground.dst_slices[number]
        )
        submitted = time.perf_counter() - start
        job.wait()
        return submitted


class Numpy:
    """Fancy indexing on both sides: whole blocks where they lie alike, layer by layer where not."""

    name = "numpy"

    def __init__(self, ground: Ground) -> None:
        src, dst = ground.src, ground.dst
        whole = src.axes == dst.axes and src.axes.startswith("block layer")
        self._pairs = (
            [(src.tensors[0], dst.tensors[0])] if whole else list(zip(src.planes, dst.planes, strict=True))
        )
        self._ground = ground

    def move(self, call: int, /) -> float | None:
        """Gathers and scatters the next blocks."""
        number = call % self._ground.calls
        src_ids, dst_ids = self._ground.src_slices[number], self._ground.dst_slices[number]
        for src, dst in self._pairs:
            dst[dst_ids] = src[src_ids]
        return None


def ceilings(copiers: Copiers, arenas: tuple[Arena, Arena], payload: int) -> list[Contender]:
    """The ways to copy plainly; the fastest is the ceiling."""
    ways: list[Contender] = [Memcpy(copiers, arenas, payload, threads=1)]
    if copiers.threads > 1:
        ways.append(Memcpy(copiers, arenas, payload, threads=copiers.threads))
        ways.append(Memcpy(copiers, arenas, payload, threads=copiers.threads, piece=PIECE))
    return ways


def _copy(src: U8, dst: U8, part: int, first: int, threads: int) -> None:
    for start in range(first * part, len(src), threads * part):
        np.copyto(dst[start : start + part], src[start : start + part])
