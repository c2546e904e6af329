"""All memory of a run, and the check of what was moved in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import kvferry as kf
from kvferry.bench.buffers import SLACK
from kvferry.bench.gpu import driver
from kvferry.bench.gpu.memory import POISON, POISON_WORD, Arena

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvferry.bench.buffers import Ids
    from kvferry.bench.gpu.arrays import Math
    from kvferry.bench.gpu.cells import Cell
    from kvferry.bench.gpu.memory import Ground

    Reread = Callable[[Any], Any]

_CHECKED_BYTES = 256 << 20


@dataclass(frozen=True)
class Check:
    """What was wrong, in 8-byte words, after one call into poisoned memory."""

    checked_bytes: int
    wrong_words: int
    stray_words: int
    """Written though no block of theirs was named: the guard."""
    digest: int
    """Sum of the moved words modulo 2^64."""

    @property
    def good(self) -> bool:
        """Whether nothing was."""
        return self.wrong_words == self.stray_words == 0


class Place:
    """All arenas of a run. Host and device sources hold the same bytes, so one checks the other."""

    def __init__(self, math: Math, ordinal: int, peer: int | None, payload: int, seed: int) -> None:
        self.math, self.ordinal, self.peer = math, ordinal, peer
        nbytes = payload + payload // 16 + SLACK
        driver.use(ordinal)
        self.stream = driver.Stream(ordinal)
        self.peer_stream = None if peer is None else driver.Stream(peer)
        driver.use(ordinal)
        self.device_src = Arena(nbytes, kf.device(ordinal))
        self.device_dst = Arena(nbytes, kf.device(ordinal))
        self.host_src = Arena(nbytes, kf.pinned())
        self.host_dst = Arena(nbytes, kf.pinned())
        self.peer_dst = None if peer is None else Arena(nbytes, kf.device(peer))
        self.delay = Arena(min(payload, 128 << 20), kf.device(ordinal))
        self._peer_delay = None if peer is None else Arena(min(payload, 128 << 20), kf.device(peer))
        math.randomise(self.device_src.addr, self.device_src.nbytes, ordinal, seed)
        math.settle(ordinal)
        self.copy(self.host_src, self.device_src)
        self._words_src = math.words(self.device_src.addr, self.device_src.nbytes, ordinal)

    @property
    def nbytes(self) -> int:
        """Bytes of each arena."""
        return self.device_src.nbytes

    def pair(self, cell: Cell) -> tuple[Arena, Arena]:
        """Source and target of a cell's direction."""
        if cell.direction == "h2d":
            return self.host_src, self.device_dst
        if cell.direction == "d2h":
            return self.device_src, self.host_dst
        if cell.direction == "d2d":
            return self.device_src, self.device_dst
        if self.peer_dst is None:
            raise ValueError("there is no second GPU")
        return self.device_src, self.peer_dst

    def stream_of(self, cell: Cell) -> driver.Stream:
        """The bench's own stream on the GPU that does the work: the destination's between GPUs."""
        if cell.direction == "p2p" and self.peer_stream is not None:
            return self.peer_stream
        return self.stream

    def delay_on(self, stream: driver.Stream) -> Arena:
        """Memory whose filling keeps the stream busy."""
        other = stream is self.peer_stream and self._peer_delay is not None
        return self._peer_delay if other and self._peer_delay is not None else self.delay

    def copy(self, dst: Arena, src: Arena) -> None:
        """Copies a whole arena and waits."""
        driver.use(self.ordinal)
        self.stream.copy(dst.addr, src.addr, min(dst.nbytes, src.nbytes))
        self.stream.synchronize()

    def poison(self, arena: Arena) -> None:
        """Overwrites every byte of a target."""
        driver.use(self.ordinal)
        self.stream.fill(self.device_dst.addr, POISON, self.device_dst.nbytes)
        if arena is not self.device_dst:
            self.stream.copy(arena.addr, self.device_dst.addr, arena.nbytes)
        self.stream.synchronize()

    def check(
        self,
        ground: Ground,
        ids: tuple[Ids, Ids],
        reread: Reread | None = None,
        heads: range | None = None,
    ) -> Check:
        """Compares the moved blocks with the source and everything else in the target with the poison.

        `reread` turns blocks of the contiguous side into what a contender with an order of its own means.
        `heads`: only these were to move.
        """
        math, target = self.math, ground.dst.arena
        if target is not self.device_dst:
            self.copy(self.device_dst, target)
        found_words = math.words(self.device_dst.addr, self.device_dst.nbytes, self.ordinal)
        expected = ground.src.view(self._words_src, math)
        found = ground.dst.view(found_words, math)
        wrong = checked = digest = stray = 0
        step = len(ids[0]) if reread else max(_CHECKED_BYTES // ground.cell.shape.block_bytes, 1)
        for start in range(0, len(ids[0]), step):
            wants, places = (math.index(side[start : start + step], self.ordinal) for side in ids)
            want, got = expected[wants], found[places]
            if heads is not None:
                left = got + 0
                want, got = (side[..., heads.start : heads.stop, :] for side in (want, got))
                left[..., heads.start : heads.stop, :] = POISON_WORD
                stray += int((left != POISON_WORD).sum())
            digest += int(got.sum())
            checked += len(ids[0][start : start + step]) * ground.cell.shape.block_bytes
            if reread and ground.src.contiguous:
                want = reread(want)
            elif reread:
                got = reread(got)
            wrong += int((got != want).sum())
            found[places] = POISON_WORD
        stray += int((found_words != POISON_WORD).sum())
        return Check(checked, wrong, stray, digest % (1 << 64))
