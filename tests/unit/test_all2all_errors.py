"""Ranks that disagree, refuse, abort or are late, as threads: who is told what, what still works."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from exchange_bodies import error_of
from exchange_calls import exchanged, expected, given, verify
from exchange_ranks import (
    CAPACITY,
    each,
    fresh,
    join,
    nothing_left,
    together,
)
from exchange_ranks import together_outcomes as ended
from exchange_reference import Tensor, raw, same

import kvferry as kf

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TENSOR = Tensor(2, (3, 4, 2), 6, 4, "float32")


@pytest.fixture(autouse=True)
def leaves_nothing() -> Iterator[None]:
    with nothing_left():
        yield


def send(comm: kf.All2All, rank: int, tensor: Tensor = TENSOR, **options: Any) -> Any:
    tokens = options.pop("rank_tokens", tensor.tokens)
    return comm.send_recv_heads(given(tensor, "send_recv_heads", rank), rank_tokens=tokens, **options)


# Disagreement


def other_shape(comm: kf.All2All, rank: int) -> Any:
    return send(comm, rank, Tensor(1, TENSOR.tokens, 6, 4, "float32"))


def other_dim(comm: kf.All2All, rank: int) -> Any:
    return send(comm, rank, Tensor(2, TENSOR.tokens, 6, 5, "float32"))


def other_dtype(comm: kf.All2All, rank: int) -> Any:
    return send(comm, rank, Tensor(2, TENSOR.tokens, 6, 4, "int32"))


def other_heads(comm: kf.All2All, rank: int) -> Any:
    return send(comm, rank, Tensor(2, TENSOR.tokens, 7, 4, "float32"))


def other_tokens(comm: kf.All2All, rank: int) -> Any:
    tokens = list(TENSOR.tokens)
    tokens[0 if rank else 1] += 1
    return send(comm, rank, rank_tokens=tokens)


def other_layout(comm: kf.All2All, rank: int) -> Any:
    array = given(TENSOR, "send_recv_heads", rank, "BHND")
    return comm.send_recv_heads(array, rank_tokens=TENSOR.tokens, layout="BHND")


def other_splits(comm: kf.All2All, rank: int) -> Any:
    return send(comm, rank, head_splits=[1, 2, 3])


def other_number(comm: kf.All2All, rank: int) -> Any:
    array = given(TENSOR, "send_recv_heads", rank)
    return comm.send_recv_heads((array, array), rank_tokens=TENSOR.tokens)


def other_operation(comm: kf.All2All, rank: int) -> Any:
    return comm.allgather(given(TENSOR, "send_recv_heads", rank), rank_tokens=TENSOR.tokens)


def other_place(comm: kf.All2All, rank: int) -> Any:
    return send(comm, rank, out=comm.test_out)  # type: ignore[attr-defined]


DISAGREEMENTS = (
    other_shape,
    other_dim,
    other_dtype,
    other_heads,
    other_tokens,
    other_layout,
    other_splits,
    other_number,
    other_operation,
)


@pytest.mark.parametrize("odd", [0, 2])
@pytest.mark.parametrize("differently", DISAGREEMENTS)
def test_ranks_that_disagree_all_raise(differently: Callable[..., Any], odd: int) -> None:
    """Hazards 7 and 52: every one of three ranks reads all headers before it writes, so all decide alike."""
    places: list[Any] = [None] * 3

    def body(comm: kf.All2All, rank: int) -> Any:
        out = comm.empty_output(expected(TENSOR, "send_recv_heads", rank).shape, "float32")
        places[rank] = out
        np.asarray(out).view(np.uint8)[...] = 0xA5
        exchanged(comm, rank, "send_recv_heads", [TENSOR])
        if rank == odd:
            return error_of(lambda: differently(comm, rank))
        return error_of(lambda: send(comm, rank))

    found = ended(3, body)
    for rank, outcome in enumerate(found):
        assert outcome.error is None, outcome.error
        error = outcome.value
        assert isinstance(error, kf.ContractMismatch) and isinstance(error, ValueError), (rank, error)
        assert error.rank in range(3) and error.reason
        assert outcome.seconds < 10
        assert (raw(np.asarray(places[rank])) == 0xA5).all(), "a byte moved"


@pytest.mark.parametrize("types", [("<u4", ">i4"), (">f4", "<u4"), ("bool", "uint8")])
def test_types_without_a_name_are_told_apart(types: tuple[str, str]) -> None:
    """As bytes they are alike, which is all that the names of kvferry would say."""

    def body(comm: kf.All2All, rank: int) -> Any:
        x = np.ones((1, 2, 4, 4), types[rank])
        return error_of(lambda: comm.send_recv_heads(x, rank_tokens=[2, 2]))

    for outcome in ended(2, body):
        assert isinstance(outcome.value, kf.ContractMismatch), outcome


def test_two_ranks_name_each_other() -> None:
    def body(comm: kf.All2All, rank: int) -> Any:
        return error_of(lambda: send(comm, rank, Tensor(1 + rank, (2, 2), 4, 4)))

    errors = [outcome.value for outcome in ended(2, body)]
    assert all(isinstance(error, kf.ContractMismatch) for error in errors)
    assert {error.rank for error in errors} <= {0, 1}


def test_an_output_only_some_pass() -> None:
    """`out=` is part of the contract, and so is which."""

    def body(comm: kf.All2All, rank: int) -> Any:
        shape = expected(TENSOR, "send_recv_heads", rank).shape
        outs = [comm.empty_output(shape, "float32") for _ in range(2)]
        return error_of(lambda: send(comm, rank, out=outs[rank == 1]))

    for outcome in ended(3, body):
        assert isinstance(outcome.value, kf.ContractMismatch), outcome


def test_calls_in_another_order() -> None:
    """Rank 1 leaves one call out: shapes are equal, operations are not."""

    def body(comm: kf.All2All, rank: int) -> Any:
        def calls() -> None:
            for _ in range(3):
                send(comm, rank)
                if rank != 1:
                    comm.allgather(given(TENSOR, "send_recv_heads", rank), rank_tokens=TENSOR.tokens)

        return error_of(calls)

    for outcome in ended(3, body):
        assert isinstance(outcome.value, kf.ContractMismatch), outcome


# A rank's own errors


def own_errors() -> list[tuple[str, type[Exception], Callable[[kf.All2All, Any], Any]]]:
    tokens = TENSOR.tokens
    return [
        ("no array", TypeError, lambda comm, x: comm.send_recv_heads("q", rank_tokens=tokens)),
        ("no tensors", kf.LayoutError, lambda comm, x: comm.send_recv_heads((), rank_tokens=tokens)),
        ("17 tensors", kf.LayoutError, lambda comm, x: comm.send_recv_heads((x,) * 17, rank_tokens=tokens)),
        ("two axes", kf.LayoutError, lambda comm, x: comm.send_recv_heads(x[0, 0], rank_tokens=tokens)),
        (
            "objects",
            kf.LayoutError,
            lambda comm, x: comm.send_recv_heads(x.astype(object), rank_tokens=tokens),
        ),
        (
            "dim not contiguous",
            kf.LayoutError,
            lambda comm, x: comm.send_recv_heads(x[..., ::2], rank_tokens=tokens),
        ),
        (
            "tokens not as declared",
            kf.LayoutError,
            lambda comm, x: comm.send_recv_heads(x[:, 1:], rank_tokens=tokens),
        ),
        ("too few rank_tokens", kf.OptionError, lambda comm, x: comm.send_recv_heads(x, rank_tokens=[1, 2])),
        ("negative tokens", kf.OptionError, lambda comm, x: comm.send_recv_heads(x, rank_tokens=[-1, 4, 2])),
        ("tokens as text", TypeError, lambda comm, x: comm.send_recv_heads(x, rank_tokens="342")),
        (
            "unknown layout",
            kf.OptionError,
            lambda comm, x: comm.send_recv_heads(x, rank_tokens=tokens, layout="NHD"),
        ),
        (
            "unknown engine",
            kf.OptionError,
            lambda comm, x: comm.send_recv_heads(x, rank_tokens=tokens, engine="tma"),
        ),
        (
            "negative num_sms",
            kf.OptionError,
            lambda comm, x: comm.send_recv_heads(x, rank_tokens=tokens, num_sms=-1),
        ),
        ("a stream", kf.Unsupported, lambda comm, x: comm.send_recv_heads(x, rank_tokens=tokens, stream=0)),
        (
            "no stream",
            kf.OptionError,
            lambda comm, x: comm.send_recv_heads(x, rank_tokens=tokens, stream="main"),
        ),
        (
            "splits beyond the heads",
            kf.LayoutError,
            lambda comm, x: comm.send_recv_heads(
                x, rank_tokens=tokens, head_splits=[range(4), range(4, 9), 0]
            ),
        ),
        (
            "splits with a gap",
            kf.LayoutError,
            lambda comm, x: comm.send_recv_heads(
                x, rank_tokens=tokens, head_splits=[range(2), range(3, 5), range(5, 6)]
            ),
        ),
        ("no splits", TypeError, lambda comm, x: comm.send_recv_heads(x, rank_tokens=tokens, head_splits=3)),
        (
            "another num_heads",
            kf.LayoutError,
            lambda comm, x: comm.send_recv_heads(x, rank_tokens=tokens, num_heads=8),
        ),
        (
            "16-byte elements",
            kf.LayoutError,
            lambda comm, x: comm.send_recv_heads(x.astype(np.complex128), rank_tokens=tokens),
        ),
        (
            "another width declared",
            kf.LayoutError,
            lambda comm, x: comm.send_recv_heads(x, rank_tokens=tokens, dtype="float16"),
        ),
        (
            "no output",
            kf.OptionError,
            lambda comm, x: comm.send_recv_heads(x, rank_tokens=tokens, out=np.zeros_like(x)),
        ),
        ("unknown axis", kf.OptionError, lambda comm, x: comm.allgather(x, axis="dim", rank_tokens=tokens)),
        (
            "heads that are not its share",
            kf.LayoutError,
            lambda comm, x: comm.gather_heads(x, rank_tokens=[3, 4, 2], num_heads=6),
        ),
    ]


@pytest.mark.parametrize(
    ("kind", "call"), [case[1:] for case in own_errors()], ids=[c[0] for c in own_errors()]
)
def test_one_ranks_own_error_reaches_all(kind: type[Exception], call: Callable[..., Any]) -> None:
    """L7, L13, hazard 12: the rank at fault gets its error, the others hear of it at once, none waits."""

    def body(comm: kf.All2All, rank: int) -> Any:
        exchanged(comm, rank, "send_recv_heads", [TENSOR])
        array = given(TENSOR, "send_recv_heads", rank)
        if rank == 1:
            time.sleep(0.05)
            own = error_of(lambda: call(comm, array))
            return own, error_of(lambda: send(comm, rank))
        return error_of(lambda: send(comm, rank)), error_of(comm.check)

    found = ended(3, body)
    for rank, outcome in enumerate(found):
        assert outcome.error is None, outcome.error
        first, later = outcome.value
        assert outcome.seconds < 10
        if rank == 1:
            assert type(first) is kind, repr(first)
        else:
            assert isinstance(first, kf.ContractMismatch) and first.rank == 1, repr(first)
        # Hazard 53: a retry cannot be taken for another rank's next call.
        assert isinstance(later, kf.ContractMismatch) and later.rank == 1, repr(later)


def test_a_lone_rank_is_not_broken_by_its_errors() -> None:
    with kf.All2All(0, 1, capacity_bytes=CAPACITY) as comm:
        for _, kind, call in own_errors()[:3]:
            with pytest.raises(kind):
                call(comm, np.zeros((1, 2, 3, 4)))
        x = np.ones((1, 2, 3, 4))
        same(comm.send_recv_heads(x), x)


def test_a_retry_after_a_refusal_is_refused_until_reset() -> None:
    """Hazard 53: rank 0 is a call ahead; equal shapes must not be matched with each other."""
    layers = [Tensor(2, (2, 3), 4, 4, key=key) for key in range(3)]

    def body(comm: kf.All2All, rank: int) -> None:
        exchanged(comm, rank, "send_recv_heads", [layers[0]])
        if rank == 1:
            with pytest.raises(kf.LayoutError):
                comm.send_recv_heads(np.zeros((2, 2, 4, 4)), rank_tokens=(2, 3))
        for tensor in layers[1:]:
            with pytest.raises(kf.ContractMismatch):
                send(comm, rank, tensor)
        comm.reset()
        assert comm.stats()["epoch"] == 0 and comm.stats()["resets"] == 1
        for tensor in layers:
            exchanged(comm, rank, "send_recv_heads", [tensor])

    together(2, body)


# Time


def test_a_late_rank_times_out_the_others_at_the_set_time() -> None:
    """L18, L19, hazard 8: an exception on every rank that names whom it waited for; nobody is lost."""
    arrived = threading.Event()

    def body(comm: kf.All2All, rank: int) -> Any:
        exchanged(comm, rank, "send_recv_heads", [TENSOR])
        if rank == 2:
            arrived.wait(10)
            return error_of(lambda: send(comm, rank)), 0.0
        start = time.monotonic()
        error = error_of(lambda: send(comm, rank))
        seconds = time.monotonic() - start
        arrived.set()
        return error, seconds

    found = ended(3, body, timeout=0.6)
    for rank, outcome in enumerate(found):
        error, seconds = outcome.value
        assert isinstance(error, kf.PeerTimeout) and isinstance(error, TimeoutError), repr(error)
        assert error.peer == 2 and error.op == "send_recv_heads" and error.epoch == 2
        if rank != 2:
            assert 0.5 < seconds < 1.2
    assert any(0.54 <= outcome.value[0].seconds <= 0.66 for outcome in found)


def test_the_timeout_can_be_changed_while_a_call_waits() -> None:
    """L18: it is read where the wait is, not when the call began."""

    def body(comm: kf.All2All, rank: int) -> Any:
        exchanged(comm, rank, "send_recv_heads", [TENSOR])
        if rank == 1:
            time.sleep(0.8)
            return None
        timer = threading.Timer(0.1, comm.set_timeout, (0.2,))
        if rank == 0:
            timer.start()
        start = time.monotonic()
        error = error_of(lambda: send(comm, rank))
        timer.cancel()
        return error, time.monotonic() - start

    found = ended(3, body, timeout=20.0)
    for rank in (0, 2):
        error, seconds = found[rank].value
        assert isinstance(error, kf.PeerTimeout), repr(error)
        assert seconds < 1.5


def test_the_default_timeout_survives_a_warm_up() -> None:
    """Cases 9 and 11: ranks may be late by much more than a step; the default is a minute."""
    seen: list[int] = []

    def body(rank: int) -> None:
        with kf.All2All(rank, 2, capacity_bytes=CAPACITY, rendezvous=meet) as comm:
            if rank:
                time.sleep(1.0)
            exchanged(comm, rank, "send_recv_heads", [Tensor(1, (1, 1), 2, 1)])
            seen.append(rank)

    meet = fresh()
    each(2, body)
    assert sorted(seen) == [0, 1]


def test_everything_works_again_after_reset() -> None:
    """Hazard 10: the epoch starts anew, results held are still good, outputs of before are refused."""
    kept: list[Any] = [None] * 3

    def body(comm: kf.All2All, rank: int) -> None:
        kept[rank] = exchanged(comm, rank, "send_recv_heads", [TENSOR])
        out = comm.empty_output(expected(TENSOR, "send_recv_heads", rank).shape, "float32")
        for round_ in range(3):
            if rank != round_:
                with pytest.raises(kf.Error):
                    send(comm, rank)
                with pytest.raises(kf.Error):
                    comm.check()
            else:
                time.sleep(0.4)
            comm.reset()
            comm.check()
            for key in range(5):
                exchanged(comm, rank, "send_recv_heads", [Tensor(1, (1, 2, 3), 5, 3, key=key)])
            verify(kept[rank], rank, "send_recv_heads", [TENSOR])
        # A rank that hears of another's refusal before its own call gets that.
        with pytest.raises((kf.OptionError, kf.ContractMismatch), match="out"):
            send(comm, rank, out=out)

    found = ended(3, body, timeout=0.2)
    for outcome in found:
        if outcome.error is not None:
            raise outcome.error


# Giving up


def test_abort_ends_calls_everywhere_at_once() -> None:
    def body(comm: kf.All2All, rank: int) -> Any:
        exchanged(comm, rank, "send_recv_heads", [TENSOR])
        if rank == 2:
            time.sleep(0.1)
            comm.abort("out of memory upstairs")
            return error_of(comm.check), 0.0
        start = time.monotonic()
        return error_of(lambda: send(comm, rank)), time.monotonic() - start

    for outcome in ended(3, body):
        error, seconds = outcome.value
        assert isinstance(error, kf.Aborted) and isinstance(error, RuntimeError), repr(error)
        assert error.rank == 2
        assert seconds < 1.5


def test_abort_from_another_thread_frees_the_own_call() -> None:
    def body(comm: kf.All2All, rank: int) -> Any:
        if rank == 1:
            time.sleep(0.5)
            return error_of(comm.check)
        threading.Timer(0.1, comm.abort, ("enough",)).start()
        error = error_of(lambda: send(comm, rank, Tensor(1, (1, 1), 2, 1)))
        assert isinstance(error, kf.Aborted) and error.reason
        return error

    assert all(isinstance(outcome.value, kf.Aborted) for outcome in ended(2, body))


def test_an_aborted_communicator_can_be_reset() -> None:
    def body(comm: kf.All2All, rank: int) -> None:
        comm.abort()
        with pytest.raises(kf.Aborted):
            send(comm, rank)
        comm.reset()
        exchanged(comm, rank, "send_recv_heads", [TENSOR])

    together(3, body)


def test_two_communicators_break_apart() -> None:
    here, there = fresh(), fresh()
    done = threading.Barrier(3)

    def body(rank: int) -> None:
        one, other = join(rank, 3, rendezvous=here), join(rank, 3, rendezvous=there)
        exchanged(one, rank, "send_recv_heads", [TENSOR])
        # An abort ends the calls of all, this one too where a rank is still in it.
        done.wait(20)
        one.abort()
        for key in range(5):
            exchanged(other, rank, "send_recv_heads", [Tensor(1, (1, 2, 3), 5, 3, key=key)])
        with pytest.raises(kf.Aborted):
            one.close()
        other.close()

    each(3, body)


# Closing


def test_nothing_works_after_close_but_closing() -> None:
    def body(comm: kf.All2All, rank: int) -> None:
        (kept,) = exchanged(comm, rank, "send_recv_heads", [TENSOR])
        comm.close()
        comm.close()
        assert comm.closed and "closed" in repr(comm)
        tries: list[Callable[[], Any]] = [
            lambda: send(comm, rank),
            lambda: comm.send_recv_heads("nonsense"),
            lambda: comm.allgather("nonsense"),
            lambda: comm.empty_output((1, 2, 3, 4), "float16"),
            comm.check,
            comm.abort,
            comm.reset,
            comm.__enter__,
        ]
        errors = [error_of(one) for one in tries]
        assert all(isinstance(error, kf.ClosedError) for error in errors[:-1]), errors
        verify([kept], rank, "send_recv_heads", [TENSOR])
        assert comm.stats()["calls"] == 1 and comm.rank == rank

    together(3, body)


def test_calling_on_when_a_peer_has_closed() -> None:
    def body(comm: kf.All2All, rank: int) -> Any:
        exchanged(comm, rank, "send_recv_heads", [TENSOR])
        if rank == 1:
            return error_of(comm.close)
        return error_of(lambda: send(comm, rank))

    for rank, outcome in enumerate(ended(3, body)):
        if rank != 1:
            assert isinstance(outcome.value, kf.PeerDied) and "closed" in str(outcome.value)


def test_a_communicator_that_is_only_dropped() -> None:
    """L21: no close(), no goodbye to wait for; results live on."""

    def body(rank: int) -> Any:
        comm = join(rank, 2, rendezvous=meet)
        (kept,) = exchanged(comm, rank, "send_recv_heads", [Tensor(1, (2, 2), 4, 4)])
        gone = weakref.ref(comm)
        del comm
        gc.collect()
        assert gone() is None
        return kept

    meet = fresh()
    for rank, kept in enumerate(each(2, body)):
        verify([kept], rank, "send_recv_heads", [Tensor(1, (2, 2), 4, 4)])


def test_leaving_the_block_by_an_exception_raises_that_one() -> None:
    def body(rank: int) -> None:
        comm = join(rank, 2, rendezvous=meet)

        def fails() -> None:
            with comm:
                comm.abort()
                raise ZeroDivisionError

        assert isinstance(error_of(fails), ZeroDivisionError)
        assert comm.closed

    meet = fresh()
    each(2, body)


def test_it_cannot_be_pickled_or_copied() -> None:
    with kf.All2All(0, 1, capacity_bytes=CAPACITY) as comm:
        for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="pickled"):
                attempt(comm)
