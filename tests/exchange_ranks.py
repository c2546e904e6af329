"""Ranks of an exchange: threads, or processes that can be stopped and killed; and what they may leave.

Every wait has a deadline, every process is ended at the end of its test, whatever happened.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import multiprocessing as mp
import os
import signal
import threading
import time
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import kvferry as kf

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

DEADLINE = 30.0
CAPACITY = 1 << 20

_numbers = itertools.count()


def fresh(kind: str = "memory") -> str:
    """A rendezvous that no other test uses; only `memory` is for threads."""
    return f"{kind}://kvferry-test-{os.getpid()}-{next(_numbers)}"


def join(rank: int, world: int, **options: Any) -> kf.All2All:
    """A communicator of the CPU with the defaults of the tests."""
    given: dict[str, Any] = {"capacity_bytes": CAPACITY, "device": "cpu", "timeout": 20.0, **options}
    return kf.All2All(rank, world, **given)


# Threads


@dataclass
class Outcome:
    """How a rank ended."""

    value: Any = None
    error: BaseException | None = None
    seconds: float = 0.0


def outcomes(world: int, body: Callable[[int], Any], deadline: float = DEADLINE) -> list[Outcome]:
    """Runs `body(rank)` in a thread per rank; how each ended. A thread that does not end fails the test."""
    ended = [Outcome() for _ in range(world)]

    def run(rank: int) -> None:
        start = time.monotonic()
        try:
            ended[rank].value = body(rank)
        except BaseException as error:  # noqa: BLE001 - told to the test
            ended[rank].error = error
        ended[rank].seconds = time.monotonic() - start

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank-{rank}", daemon=True) for rank in range(world)
    ]
    for thread in threads:
        thread.start()
    end = time.monotonic() + deadline
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    stuck = [thread.name for thread in threads if thread.is_alive()]
    assert not stuck, f"{stuck} did not end within {deadline} s"
    return ended


def each(world: int, body: Callable[[int], Any], deadline: float = DEADLINE) -> list[Any]:
    """Runs `body(rank)` in a thread per rank; their values. The first error of any is raised."""
    ended = outcomes(world, body, deadline)
    for outcome in ended:
        if outcome.error is not None:
            raise outcome.error
    return [outcome.value for outcome in ended]


def together(
    world: int, body: Callable[[kf.All2All, int], Any], deadline: float = DEADLINE, **options: Any
) -> list[Any]:
    """Runs `body(comm, rank)` in a thread per rank of one communicator; their values, or the first error."""
    options.setdefault("rendezvous", fresh())

    def with_comm(rank: int) -> Any:
        with join(rank, world, **options) as comm:
            return body(comm, rank)

    return each(world, with_comm, deadline)


def together_outcomes(
    world: int, body: Callable[[kf.All2All, int], Any], deadline: float = DEADLINE, **options: Any
) -> list[Outcome]:
    """As `together`, but says how each rank ended. Communicators are left open until all have ended."""
    options.setdefault("rendezvous", fresh())
    comms: list[kf.All2All | None] = [None] * world

    def with_comm(rank: int) -> Any:
        comm = comms[rank] = join(rank, world, **options)
        return body(comm, rank)

    ended = outcomes(world, with_comm, deadline)
    for comm in comms:
        if comm is not None:
            with contextlib.suppress(kf.Error):
                comm.close()
    return ended


def closing_broken(world: int, body: Callable[[kf.All2All, int], Any], **options: Any) -> list[Any]:
    """Values of ranks that leave a broken communicator behind."""
    ended = together_outcomes(world, body, **options)
    for outcome in ended:
        if outcome.error is not None:
            raise outcome.error
    return [outcome.value for outcome in ended]


# Processes


@functools.cache
def _context() -> Any:
    """Processes come from a server that has imported what they need, so that one starts in milliseconds."""
    here = os.path.dirname(os.path.abspath(__file__))
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, before]))
    try:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["numpy", "kvferry", "exchange_bodies", "exchange_ranks"])
        first = context.Process(target=_nothing)
        first.start()
        first.join()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return context


def _nothing() -> None:
    pass


class Told:
    """What a process rank says to its test, and hears from it."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def say(self, stage: str) -> None:
        """Tells the test how far this rank is."""
        self._pipe.send(("stage", stage))

    def hear(self, seconds: float = DEADLINE) -> Any:
        """Waits for what the test sends."""
        if not self._pipe.poll(seconds):
            raise TimeoutError("the test said nothing")
        return self._pipe.recv()


def _child(body: Callable[..., Any], rank: int, world: int, pipe: Connection, arguments: Any) -> None:
    told = Told(pipe)
    try:
        value = body(rank, world, told, **arguments)
    except BaseException as error:  # noqa: BLE001 - told to the test
        pipe.send(("error", error, traceback.format_exc()))
    else:
        pipe.send(("value", value, ""))


@dataclass
class Rank:
    """A process that is a rank."""

    process: BaseProcess
    pipe: Connection
    stages: list[str] = field(default_factory=list)

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def _next(self, end: float) -> tuple[Any, ...]:
        if not self.pipe.poll(max(0.0, end - time.monotonic())):
            raise AssertionError(f"rank said nothing in time; it was at {self.stages}")
        message: tuple[Any, ...] = self.pipe.recv()
        return message

    def reaches(self, stage: str, seconds: float = DEADLINE) -> None:
        """Waits until the rank has said that it is at `stage`."""
        end = time.monotonic() + seconds
        while stage not in self.stages:
            kind, *rest = self._next(end)
            if kind == "error":
                raise AssertionError(f"rank failed before {stage}:\n{rest[1]}")
            assert kind == "stage", f"rank ended before {stage}"
            self.stages.append(rest[0])

    def tell(self, what: Any = None) -> None:
        """Sends what the rank hears."""
        self.pipe.send(what)

    def outcome(self, seconds: float = DEADLINE) -> Outcome:
        """How the rank ended. AssertionError if it does not, or dies without a word."""
        end = time.monotonic() + seconds
        while True:
            try:
                kind, *rest = self._next(end)
            except EOFError:
                self.process.join(5)
                raise AssertionError(f"rank died with {self.process.exitcode} at {self.stages}") from None
            if kind == "stage":
                self.stages.append(rest[0])
            elif kind == "error":
                return Outcome(error=rest[0], value=rest[1])
            else:
                return Outcome(value=rest[0])

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Ends the process without a word to anybody."""
        self.signal(signal.SIGKILL)

    def stop(self) -> None:
        self.signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.signal(signal.SIGCONT)


class Ranks(list[Rank]):
    """Process ranks; as a context manager, all are gone at its end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for rank in self:
            if rank.process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    rank.kill()
                    rank.go_on()
        for rank in self:
            rank.process.join(10)
            assert rank.process.exitcode is not None, "a killed rank is still there"
            rank.process.close()
            rank.pipe.close()

    def values(self, seconds: float = DEADLINE) -> list[Any]:
        """Their values; the first error of any is raised with its traceback."""
        ended = [rank.outcome(seconds) for rank in self]
        for number, outcome in enumerate(ended):
            assert outcome.error is None, f"rank {number}:\n{outcome.value}"
        return [outcome.value for outcome in ended]


def processes(world: int, body: Callable[..., Any], **arguments: Any) -> Ranks:
    """Starts processes that run `body(rank, world, told, **arguments)`, a function of `exchange_bodies`."""
    ranks = Ranks()
    context = _context()
    for rank in range(world):
        ours, theirs = context.Pipe()
        process = context.Process(target=_child, args=(body, rank, world, theirs, arguments), daemon=True)
        process.start()
        theirs.close()
        ranks.append(Rank(process, ours))
    return ranks


# What must not be left


def _shared_memory() -> set[str]:
    names = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    return {name for name in names if "kvf" in name}


def _sockets() -> set[str]:
    """Bound Unix sockets of kvferry's in this process. Those of others go with them."""
    own = {target[len("socket:[") : -1] for target in _open() if target.startswith("socket:[")}
    with open("/proc/net/unix") as file:
        rows = [line.split() for line in file if "kvferry" in line]
    return {row[-1] for row in rows if row[-2] in own}


def _threads() -> list[str]:
    """Native threads of this process that are kvferry's communicators'."""
    found = []
    for task in os.listdir("/proc/self/task"):
        with (
            contextlib.suppress(FileNotFoundError, ProcessLookupError),
            open(f"/proc/self/task/{task}/comm") as file,
        ):
            name = file.read().strip()
            if name.startswith("kvf-"):
                found.append(name)
    return found


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _until(holds: Callable[[], bool], seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        gc.collect()
        time.sleep(0.01)
    return True


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """Asserts that the block leaves no shared memory, socket, thread or descriptor behind."""
    _context()
    gc.collect()
    shared, sockets, threads, descriptors = _shared_memory(), _sockets(), _threads(), _descriptors()
    yield
    assert _until(lambda: _shared_memory() <= shared), f"in /dev/shm: {_shared_memory() - shared}"
    assert _until(lambda: _sockets() <= sockets), f"sockets: {_sockets() - sockets}"
    assert _until(lambda: len(_threads()) <= len(threads)), f"threads: {_threads()}"
    assert _until(lambda: _descriptors() <= descriptors), f"descriptors: {_open()}"


def _open() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return found
