"""What process ranks do. Functions of a module, so that a fresh process finds them by name."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from typing import TYPE_CHECKING, Any

import numpy as np
from exchange_calls import call, contract, exchanged, expected, given, verify
from exchange_ranks import join
from exchange_reference import Tensor, raw

import kvferry as kf

if TYPE_CHECKING:
    from collections.abc import Callable

    from exchange_ranks import Told

HOUR = 3600.0


def tensor_for(world: int, key: int = 1, dim: int = 4) -> Tensor:
    """Uneven in tokens and heads."""
    return Tensor(1, tuple(2 + rank % 3 for rank in range(world)), 2 * world + 1, dim, key=key)


class Files:
    """A rendezvous in a directory: `get` returns None for what is not there. Nothing of kvferry's."""

    def __init__(self, directory: str, harm: Callable[[], None] | None = None, after: int = -1) -> None:
        self._directory, self._harm, self._after, self._count = directory, harm, after, 0

    def _path(self, key: str) -> str:
        return os.path.join(self._directory, key.encode().hex())

    def _step(self) -> None:
        self._count += 1
        if self._count == self._after and self._harm is not None:
            self._harm()

    def set(self, key: str, value: bytes) -> None:
        self._step()
        draft = f"{self._path(key)}.{os.getpid()}"
        with open(draft, "wb") as file:
            file.write(value)
        os.rename(draft, self._path(key))

    def get(self, key: str) -> bytes | None:
        self._step()
        try:
            with open(self._path(key), "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None


def error_of(action: Callable[[], Any]) -> BaseException | None:
    """What an action raises."""
    try:
        action()
    except Exception as error:  # noqa: BLE001 - told to the test
        return error
    return None


def several_calls(rank: int, world: int, told: Told, *, meet: str, calls: int = 20, **options: Any) -> Any:
    """A communicator as users have one: calls of every kind, results kept, closed at the end."""
    chosen = random.Random(rank)
    with join(rank, world, rendezvous=meet, **options) as comm:
        first = tensor_for(world, 100)
        held = exchanged(comm, rank, "send_recv_heads", [first])
        for key in range(calls):
            exchanged(comm, rank, "send_recv_heads", [tensor_for(world, key)])
            exchanged(comm, rank, "gather_heads", [tensor_for(world, key)])
            exchanged(comm, rank, "allgather_tokens", [tensor_for(world, key)])
            time.sleep(chosen.random() * 1e-3)
        verify(held, rank, "send_recv_heads", [first])
        stats = comm.stats()
    verify(held, rank, "send_recv_heads", [first])
    return stats


def harm(how: str) -> None:
    """Ends or stops this process."""
    if how == "exit":
        os._exit(3)
    os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)


def setting_up(
    rank: int, world: int, told: Told, *, directory: str, victim: int, how: str, after: int, patience: float
) -> Any:
    """Sets up; the victim is harmed in its `after`-th use of the rendezvous. What others are told."""
    told.say("started")
    hurt = (lambda: harm(how)) if rank == victim else None
    store = Files(directory, hurt, after)
    error = error_of(lambda: join(rank, world, rendezvous=store, setup_timeout=patience).close())
    return error, time.monotonic()


def broken_by_a_peer(
    rank: int,
    world: int,
    told: Told,
    *,
    meet: str,
    victim: int,
    at: str,
    timeout: float = 20.0,
    again: str = "",
    fork: bool = False,
    **options: Any,
) -> Any:
    """Calls until a peer has broken the communicator; then says what is known, and sets up anew without it.

    The victim is harmed by the test: `at` "idle" (it calls no more while the others do), "call" (it waits in
    a call that the others have not made) or "calls" (everybody calls as fast as they can).
    """
    comm = join(rank, world, rendezvous=meet, timeout=timeout, setup_timeout=max(timeout, 2.0), **options)
    tensor = tensor_for(world)
    out = comm.empty_output(expected(tensor, "send_recv_heads", rank).shape, tensor.dtype)
    array, said = given(tensor, "send_recv_heads", rank), contract("send_recv_heads", [tensor])

    def calls(count: int) -> None:
        for _ in range(count):
            comm.send_recv_heads(array, out=out, **said)

    kept = exchanged(comm, rank, "send_recv_heads", [tensor])
    calls(2)
    if rank == victim:
        child = os.fork() if fork else -1
        if child == 0:
            time.sleep(HOUR)
        told.say(f"child {child}")
    told.say("ready")
    if (rank == victim) == (at == "idle") and at != "calls":
        told.hear(HOUR)
    told.say("calling")
    error = error_of(lambda: calls(1 << 40))
    when = time.monotonic()
    # A call refused before it began leaves what the one before it had brought. Where the victim had taken
    # part in the call that failed, a slow rank may write its bytes over the fill. All calls bring the same.
    left, brought = raw(np.asarray(out)), raw(expected(tensor, "send_recv_heads", rank))
    filled = bool(((left == 0xFF) | ((left == brought) & (at != "idle"))).all())
    told.say("broken")
    later = [error_of(comm.check), error_of(lambda: calls(1)), error_of(comm.close)]
    verify(kept, rank, "send_recv_heads", [tensor])
    fresh_start = None
    if again:
        ranks = [each for each in range(world) if each != victim]
        mine = ranks.index(rank)
        others = tensor_for(len(ranks), 7)
        with join(mine, len(ranks), rendezvous=again) as comm:
            for _ in range(10):
                exchanged(comm, mine, "send_recv_heads", [others])
            told.say("anew")
            fresh_start = comm.stats()["calls"]
    return {"error": error, "when": when, "filled": filled, "later": later, "anew": fresh_start}


def closing(rank: int, world: int, told: Told, *, meet: str, victim: int) -> Any:
    """Closes while the victim does not; it is harmed meanwhile."""
    comm = join(rank, world, rendezvous=meet)
    kept = exchanged(comm, rank, "send_recv_heads", [tensor_for(world)])
    told.say("ready")
    if rank == victim:
        told.hear(HOUR)
    start = time.monotonic()
    error = error_of(comm.close)
    seconds = time.monotonic() - start
    verify(kept, rank, "send_recv_heads", [tensor_for(world)])
    return error, seconds


def victim_closes(rank: int, world: int, told: Told, *, meet: str, victim: int) -> Any:
    """The victim waits in close() for the others, and is harmed there."""
    comm = join(rank, world, rendezvous=meet)
    exchanged(comm, rank, "send_recv_heads", [tensor_for(world)])
    told.say("ready")
    if rank != victim:
        told.hear()
    return error_of(comm.close)


def forks(rank: int, world: int, told: Told, *, meet: str) -> Any:
    """A forked child uses the communicator of its parent, which goes on."""
    comm = join(rank, world, rendezvous=meet)
    tensor = tensor_for(world)
    array, said = given(tensor, "send_recv_heads", rank), contract("send_recv_heads", [tensor])
    (kept,) = exchanged(comm, rank, "send_recv_heads", [tensor])
    child = os.fork()
    if child == 0:
        wrong: Any = comm
        tries = [
            lambda: comm.send_recv_heads(array, **said),
            lambda: comm.gather_heads(array),
            lambda: comm.allgather(array),
            lambda: comm.empty_output((1, 2, 3, 4), "float16"),
            comm.check,
            comm.abort,
            comm.reset,
            comm.close,
            lambda: comm.set_timeout(1),
            wrong.empty_output,
            lambda: wrong.gather_heads(layout=5),
            comm.stats,
            lambda: comm.record_stream(kept, 0),
        ]
        errors = [error_of(one) for one in tries]
        good = all(isinstance(error, kf.ForkError) for error in errors)
        good &= (comm.rank, comm.world_size, comm.closed) == (rank, world, False)
        good &= comm.head_range(world) == range(rank, rank + 1) and "All2All" in repr(comm)
        fits = bool(np.array_equal(raw(kept), raw(expected(tensor, "send_recv_heads", rank))))
        del comm, kept
        os._exit(0 if good and fits else 1)
    _, status = os.waitpid(child, 0)
    for key in range(20):
        exchanged(comm, rank, "send_recv_heads", [tensor_for(world, key)])
    comm.close()
    return os.waitstatus_to_exitcode(status)


def stops_and_comes_back(
    rank: int, world: int, told: Told, *, meet: str, again: str, victim: int, timeout: float
) -> Any:
    """The victim is stopped beyond the timeout; the others set up anew, and are not disturbed by it."""
    comm = join(rank, world, rendezvous=meet, timeout=timeout)
    tensor = tensor_for(world)
    exchanged(comm, rank, "send_recv_heads", [tensor])
    told.say("ready")
    array, said = given(tensor, "send_recv_heads", rank), contract("send_recv_heads", [tensor])

    def calls() -> None:
        while True:
            call(comm, "send_recv_heads", array, **said)

    error = error_of(calls)
    when = time.monotonic()
    told.say("broken")
    if rank == victim:
        return error, when
    mine = [each for each in range(world) if each != victim].index(rank)
    with join(mine, world - 1, rendezvous=again) as fresh:
        told.say("anew")
        told.hear()
        for key in range(200):
            exchanged(fresh, mine, "send_recv_heads", [tensor_for(world - 1, key)])
    with contextlib.suppress(kf.Error):
        comm.close()
    return error, when


def moves_much(rank: int, world: int, told: Told, *, meet: str, calls: int = 1 << 40) -> Any:
    """Large messages one after the other, so that a signal finds a rank in the middle of one."""
    comm = join(rank, world, rendezvous=meet, capacity_bytes=32 << 20)
    tensor = Tensor(1, (1024,) * world, 4 * world, 256, "float32")
    array, said = given(tensor, "send_recv_heads", rank), contract("send_recv_heads", [tensor])
    told.say("ready")

    def loop() -> None:
        for _ in range(calls):
            comm.send_recv_heads(array, **said)

    error = error_of(loop)
    return error, time.monotonic()
