"""Waits that end early: Ctrl-C in a call, in set-up and in reset; close() from another thread."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from exchange_bodies import error_of
from exchange_calls import contract, exchanged, given
from exchange_ranks import (
    _shared_memory,
    _sockets,
    _threads,
    fresh,
    join,
    nothing_left,
    outcomes,
    processes,
    together_outcomes,
)
from exchange_reference import Tensor

import kvferry as kf

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from exchange_ranks import Told

TENSOR = Tensor(1, (2, 3), 4, 2)
# What ending a wait may take on a machine with other things to do; the timeouts are far longer.
SOON = 2.0


@pytest.fixture(autouse=True)
def leaves_nothing() -> Iterator[None]:
    with nothing_left():
        yield


def send(comm: kf.All2All, rank: int) -> Any:
    return comm.send_recv_heads(
        given(TENSOR, "send_recv_heads", rank), **contract("send_recv_heads", [TENSOR])
    )


def output(comm: kf.All2All, rank: int) -> Any:
    return comm.empty_output((1, 5, 2, 2), "float32")


def reset(comm: kf.All2All, rank: int) -> Any:
    comm.reset()


WAITS: dict[str, Callable[[kf.All2All, int], Any]] = {"call": send, "output": output, "reset": reset}


def interrupted_rank(rank: int, world: int, told: Told, meet: str, at: str) -> Any:
    """Rank 0 waits in `at` and is interrupted; rank 1 is not there yet, and finds out."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    comm = join(rank, world, rendezvous=meet)
    exchanged(comm, rank, "send_recv_heads", [TENSOR])
    told.say("ready")
    start = time.monotonic()
    found: BaseException | None = None
    if rank == 1:
        while (found := error_of(comm.check)) is None and time.monotonic() - start < 10:
            time.sleep(0.01)
    else:
        try:
            WAITS[at](comm, rank)
        except KeyboardInterrupt as error:
            found = error
    took = time.monotonic() - start
    return type(found).__name__, took, error_of(lambda: send(comm, rank)), error_of(comm.close)


def interrupted_set_up(rank: int, world: int, told: Told, meet: str, me: int) -> Any:
    del rank, world
    signal.signal(signal.SIGINT, signal.default_int_handler)
    before = (_shared_memory(), _sockets(), _threads())
    told.say("ready")
    start = time.monotonic()
    try:
        join(me, 2, rendezvous=meet)
    except KeyboardInterrupt:
        took = time.monotonic() - start
        return took, before == (_shared_memory(), _sockets(), _threads())
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("at", WAITS)
def test_ctrl_c_ends_a_wait_and_breaks_the_communicator_for_all(tmp_path: Path, at: str) -> None:
    with processes(2, interrupted_rank, meet=f"file://{tmp_path}/meet", at=at) as ranks:
        for rank in ranks:
            rank.reaches("ready")
        time.sleep(0.3)
        ranks[0].signal(signal.SIGINT)
        kind, took, again, closed = ranks[0].outcome().value
        assert kind == "KeyboardInterrupt" and took < SOON
        assert isinstance(again, kf.Aborted) and again.rank == 0
        assert isinstance(closed, kf.Aborted)
        kind, _, again, closed = ranks[1].outcome().value
        assert kind == "Aborted"
        for raised in (again, closed):
            assert isinstance(raised, kf.Aborted) and raised.rank == 0, repr(raised)
            assert "interrupted" in raised.reason


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_ctrl_c_ends_set_up(tmp_path: Path, kind: str, rank: int) -> None:
    meet = f"file://{tmp_path}/meet" if kind == "file" else "tcp://127.0.0.1:29377"
    # Alone: rank 0 waits for rank 1, which waits for the server or the files of rank 0.
    with processes(1, interrupted_set_up, meet=meet, me=rank) as ranks:
        ranks[0].reaches("ready")
        time.sleep(0.3)
        ranks[0].signal(signal.SIGINT)
        took, clean = ranks[0].outcome().value
        assert took < SOON and clean
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_another_handler_s_exception_comes_out_as_it_is() -> None:
    class EnoughError(Exception):
        pass

    def handler(_number: int, _frame: Any) -> None:
        raise EnoughError("of this")

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        start = time.monotonic()
        with pytest.raises(EnoughError, match="of this"):
            join(0, 2, rendezvous=fresh())
        assert time.monotonic() - start < SOON
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_handler_that_returns_ends_nothing() -> None:
    calls: list[None] = []
    before = signal.signal(signal.SIGALRM, lambda *_: calls.append(None))
    meet = fresh()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
        other = threading.Timer(0.5, lambda: join(1, 2, rendezvous=meet).close())
        other.start()
        join(0, 2, rendezvous=meet).close()
        other.join()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(calls) >= 2


@pytest.mark.parametrize("at", WAITS)
def test_close_from_another_thread_ends_a_wait(at: str) -> None:
    def body(comm: kf.All2All, rank: int) -> Any:
        exchanged(comm, rank, "send_recv_heads", [TENSOR])
        start = time.monotonic()
        if rank == 1:
            while (error := error_of(comm.check)) is None and time.monotonic() - start < 10:
                time.sleep(0.01)
            return error, time.monotonic() - start
        closed: list[float] = []

        def close() -> None:
            comm.close()
            closed.append(time.monotonic() - start)

        closing = threading.Timer(0.2, close)
        closing.start()
        error = error_of(lambda: WAITS[at](comm, rank))
        took = time.monotonic() - start
        closing.join()
        assert closed[0] < SOON
        return error, took

    waiting, told = (outcome.value for outcome in together_outcomes(2, body))
    assert isinstance(waiting[0], kf.ClosedError) and waiting[1] < SOON, waiting
    assert isinstance(told[0], kf.PeerDied) and told[0].peer == 0 and told[1] < SOON, told


def test_a_thread_that_waits_at_exit_is_no_crash(tmp_path: Path) -> None:
    """Threads that wait when the interpreter ends are not attached to it any more."""
    with processes(1, waits_at_exit, meet=f"file://{tmp_path}/meet") as ranks:
        ranks.values()
        ranks[0].process.join(10)
        assert ranks[0].process.exitcode == 0


def waits_at_exit(rank: int, world: int, told: Told, meet: str) -> None:
    del told, world

    def wait() -> None:
        with contextlib.suppress(BaseException):
            join(rank, 2, rendezvous=meet)

    threading.Thread(target=wait, daemon=True).start()
    time.sleep(0.3)


def test_ranks_of_threads_are_not_interrupted_by_the_main_thread_s_signals() -> None:
    """Handlers run on the main thread only; a rank of another thread waits on."""
    meet = fresh()
    found = outcomes(2, lambda rank: error_of(lambda: join(rank, 3, rendezvous=meet, setup_timeout=0.4)))
    assert all(isinstance(outcome.value, kf.Error) for outcome in found)


@pytest.mark.parametrize(
    "wrong",
    [
        {"capacity_bytes": -1},
        {"buffers": 2.5},
        {"device": "gpu"},
        {"timeout": -1.0},
        {"setup_timeout": float("nan")},
        {"rank": 3},
        {"rank": 70, "world": 65},
    ],
    ids=str,
)
def test_a_rank_whose_arguments_are_refused_is_not_waited_for(wrong: dict[str, Any]) -> None:
    meet = fresh()

    def body(rank: int) -> Any:
        options = dict(wrong) if rank == 1 else {}
        me, world = options.pop("rank", rank), options.pop("world", 3)
        return error_of(lambda: join(me, world, rendezvous=meet, **options))

    found = outcomes(3, body)
    for rank, outcome in enumerate(found):
        assert outcome.seconds < 4, outcome
        if rank == 1:
            assert isinstance(outcome.value, kf.OptionError | TypeError), outcome
        else:
            who = wrong.get("rank", 1)
            assert isinstance(outcome.value, kf.ContractMismatch), outcome
            assert outcome.value.rank == who and str(found[1].value) in str(outcome.value), outcome


@pytest.mark.parametrize("rank", [0, 1])
def test_two_threads_that_call_themselves_one_rank_both_find_out(rank: int) -> None:
    meet = fresh()
    for outcome in outcomes(2, lambda _: error_of(lambda: join(rank, 3, rendezvous=meet))):
        assert isinstance(outcome.value, kf.ContractMismatch) and outcome.value.rank == rank, outcome
        assert f"rank {rank} too" in str(outcome.value)
        assert outcome.seconds < SOON
