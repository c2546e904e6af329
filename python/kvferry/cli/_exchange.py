"""The demo's second part: four processes exchange attention heads, compute with them, and lose one."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from types import TracebackType

WORLD, VICTIM = 4, 2
TOKENS = (500, 301, 0, 223)
HEADS, SHAPE_DIM = 30, 64
ATTENTION = (100, 12, 4, 32)
"""Tokens, query heads, KV heads, dim."""
CAPACITY = 16 << 20
PATIENCE = 30.0
"""Seconds after which the demo gives up on its ranks."""


@dataclass(frozen=True)
class Death:
    """What a rank was told of the one that was killed."""

    rank: int
    error: str
    message: str
    peer: int | None
    pid: int | None
    milliseconds: float


@dataclass
class Exchange:
    """What the ranks found."""

    tokens: list[int] = field(default_factory=lambda: list(TOKENS))
    heads: list[int] = field(default_factory=list)
    checked_bytes: int = 0
    wrong_elements: int = 0
    microseconds: float = 0.0
    """Of the fused call, on the slowest rank."""
    attention_difference: float = 0.0
    """The largest from the result of one process."""
    victim: int = VICTIM
    pid: int = 0
    deaths: list[Death] = field(default_factory=list)
    trouble: str = ""
    """Why it could not be carried out."""

    @property
    def good(self) -> bool:
        """Whether every byte was right, attention equal, and the death told to all by name."""
        return (
            not self.trouble
            and self.wrong_elements == 0
            and self.attention_difference <= 1e-6
            and len(self.deaths) == WORLD - 1
            and all(
                (death.error, death.peer, death.pid) == ("PeerDied", VICTIM, self.pid)
                for death in self.deaths
            )
        )


class _Rank:
    """A process, and the lines it says."""

    def __init__(self, rank: int, rendezvous: str, seed: int) -> None:
        self.number = rank
        module = f"{__package__}._exchange_rank"
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, str(rank), rendezvous, str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
        )
        self._unread = b""

    def says(self, deadline: float) -> dict[str, Any]:
        """The next line. RuntimeError with what went wrong if none comes."""
        assert self.process.stdout is not None and self.process.stderr is not None  # noqa: PT018 - pipes
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise RuntimeError(f"rank {self.number} said nothing within {PATIENCE:.0f} s")
                more = os.read(self.process.stdout.fileno(), 1 << 16)
                if not more:
                    self.process.wait(5)
                    last = self.process.stderr.read().decode(errors="replace").strip().splitlines()[-1:]
                    raise RuntimeError(
                        f"rank {self.number} ended: {''.join(last) or self.process.returncode}"
                    )
                self._unread += more
        line, _, self._unread = self._unread.partition(b"\n")
        said: dict[str, Any] = json.loads(line)
        return said

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


class _Ranks(list[_Rank]):
    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for rank in self:
            rank.end()


def run(seed: int) -> Exchange:
    """Starts the ranks, collects what they find, kills one. Never raises for what they do."""
    found = Exchange()
    try:
        with tempfile.TemporaryDirectory() as place, _Ranks() as ranks:
            ranks.extend(_Rank(rank, f"file://{place}/meet", seed) for rank in range(WORLD))
            _collect(found, ranks, time.monotonic() + PATIENCE)
    except (OSError, RuntimeError, ValueError) as error:
        found.trouble = str(error)
    return found


def _collect(found: Exchange, ranks: _Ranks, deadline: float) -> None:
    for rank in ranks:
        said = rank.says(deadline)
        exchange = said["exchange"]
        found.heads.append(exchange["heads"])
        found.checked_bytes += exchange["checked_bytes"]
        found.wrong_elements += exchange["wrong_elements"]
        found.microseconds = max(found.microseconds, exchange["seconds"] * 1e6)
        found.attention_difference = max(found.attention_difference, said["difference"])
    left = [rank for rank in ranks if rank.number != VICTIM]
    for rank in left:
        rank.says(deadline)
    # Long enough for them to wait in the call, not only to be about to.
    time.sleep(0.05)
    victim = ranks[VICTIM].process
    found.pid = victim.pid
    killed = time.monotonic()
    victim.kill()
    for rank in left:
        told = rank.says(deadline)["death"]
        milliseconds = (told["at"] - killed) * 1e3
        found.deaths.append(
            Death(rank.number, told["error"], told["message"], told["peer"], told["pid"], milliseconds)
        )
