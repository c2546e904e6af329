"""Setting a communicator up: arguments, ranks that do not fit, rendezvous of every kind within a process."""

from __future__ import annotations

import errno
import math
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from exchange_bodies import error_of
from exchange_calls import exchanged
from exchange_ranks import (
    CAPACITY,
    each,
    fresh,
    join,
    nothing_left,
    outcomes,
    together,
)
from exchange_ranks import together_outcomes as ended
from exchange_reference import Tensor

import kvferry as kf

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TENSOR = Tensor(2, (3, 4, 2), 6, 4, "float32")


@pytest.fixture(autouse=True)
def leaves_nothing() -> Iterator[None]:
    with nothing_left():
        yield


# Set-up


def test_arguments_are_checked_before_anybody_is_met() -> None:
    """L11, case 49: more ranks than there is room for is an error, not an overrun."""
    url = fresh()
    wrong: list[tuple[tuple[Any, Any], dict[str, Any]]] = [
        ((2, 2), {}),
        ((-1, 2), {}),
        ((0, 0), {}),
        ((0, 65), {}),
        ((0, 10**30), {}),
        ((0, 2), {"rendezvous": None}),
        ((0, 2), {"rendezvous": "nowhere"}),
        ((0, 2), {"rendezvous": "ftp://host/path"}),
        ((0, 2), {"rendezvous": "tcp://localhost"}),
        ((0, 2), {"rendezvous": "file://relative"}),
        ((0, 2), {"timeout": -1}),
        ((0, 2), {"timeout": math.nan}),
        ((0, 2), {"capacity_bytes": -1}),
        ((0, 2), {"buffers": -1}),
        ((0, 2), {"device": "gpu"}),
        ((0, 2), {"device": 1.5}),
    ]
    for place, options in wrong:
        given_ = {"capacity_bytes": CAPACITY, "rendezvous": url, "setup_timeout": 0.2, **options}
        with pytest.raises(kf.OptionError):
            kf.All2All(*place, **given_)
    for options in ({"capacity_bytes": 0}, {"buffers": 0}, {"timeout": 0}):
        with pytest.raises(kf.OptionError):
            join(0, 1, **options)
    with pytest.raises(TypeError, match="set"):
        kf.All2All(0, 2, capacity_bytes=CAPACITY, rendezvous=object())
    with pytest.raises(TypeError):
        kf.All2All("0", 2, capacity_bytes=CAPACITY, rendezvous=url)  # type: ignore[arg-type]


def test_arguments_are_refused_by_name() -> None:
    url = "tcp://127.0.0.1:1"
    wrong: list[tuple[tuple[Any, Any], dict[str, Any], type[Exception], str]] = [
        ((0, 0), {}, kf.OptionError, "^world_size must be 1 to 64"),
        ((0, 0), {"rendezvous": None}, kf.OptionError, "^world_size must be 1 to 64"),
        ((1, 65), {}, kf.OptionError, "^world_size must be 1 to 64"),
        ((1, 2), {"timeout": "1"}, TypeError, "^timeout must be a number of seconds, got str"),
        ((1, 2), {"timeout": None}, TypeError, "^timeout must be a number of seconds"),
        ((1, 2), {"setup_timeout": -1}, kf.OptionError, "^setup_timeout must be at least 0 seconds, got -1"),
        ((1, 2), {"setup_timeout": 0}, kf.OptionError, "^setup_timeout must be longer than nothing"),
        ((1, 2), {"setup_timeout": True}, TypeError, "^setup_timeout"),
        ((True, 2), {}, TypeError, "^rank must be an integer, got bool"),
        ((0, True), {}, TypeError, "^world_size must be an integer, got bool"),
        ((1, 2), {"capacity_bytes": True}, TypeError, "^capacity_bytes"),
        ((1, 2), {"buffers": True}, TypeError, "^buffers"),
        ((1, 2), {"device": True}, kf.OptionError, "^device"),
        # Before rank 0 is waited for.
        ((1, 2), {"name": "\0"}, kf.OptionError, "^name must be without a zero byte"),
        ((1, 2), {"name": 5}, TypeError, "^name must be a string, got int"),
        ((1, 2), {"name": "\ud800"}, kf.OptionError, "^name"),
        ((1, 2), {"rendezvous": "\ud800"}, kf.OptionError, "^rendezvous"),
        ((1, 2), {"rendezvous": b"memory://x"}, TypeError, "^rendezvous must be a URL"),
    ]
    for place, options, kind, words in wrong:
        start = time.monotonic()
        with pytest.raises(kind, match=words):
            kf.All2All(*place, **{"capacity_bytes": CAPACITY, "rendezvous": url, **options})
        assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    "url",
    [
        *("", "x", "tcp://", "tcp://localhost", "tcp://:4000", "tcp://localhost:", "tcp://localhost:x"),
        *("tcp://localhost:0", "tcp://localhost:99999", "file://relative", "file://", "ftp://host/path"),
        *("memory://", "file:///tmp/a\0b", "TCP://localhost:4000"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_urls_that_cannot_be(url: str, rank: int) -> None:
    with pytest.raises(kf.OptionError, match=r"^rendezvous \"") as caught:
        join(rank, 2, rendezvous=url, setup_timeout=0.3)
    assert url.replace("\0", r"\0") in str(caught.value)


@pytest.mark.parametrize(
    ("url", "rank"),
    [
        *(("file:///nonexist/dir", rank) for rank in (0, 1)),
        *(("file:///dev/null", rank) for rank in (0, 1)),
        *(("tcp://no.such.host.invalid:4000", rank) for rank in (0, 1)),
        # An address of documentation: not this machine's. A port where nobody is.
        ("tcp://192.0.2.1:4000", 0),
        ("tcp://127.0.0.1:1", 1),
    ],
)
def test_places_that_cannot_be_used(url: str, rank: int) -> None:
    with pytest.raises(kf.RendezvousError, match=rf"^rendezvous {url}: ") as caught:
        join(rank, 2, rendezvous=url, setup_timeout=0.3)
    assert isinstance(caught.value, ConnectionError)
    assert caught.value.errno == errno.ENOENT or "nonexist" not in url


@pytest.mark.parametrize(
    "different", [{"capacity_bytes": 2 * CAPACITY}, {"buffers": 3}, {"capacity_bytes": 0}], ids=str
)
def test_ranks_that_are_set_up_differently_all_raise(different: dict[str, Any]) -> None:
    meet = fresh()

    def body(rank: int) -> Any:
        return error_of(lambda: join(rank, 3, rendezvous=meet, **(different if rank == 1 else {})))

    for outcome in outcomes(3, body):
        assert isinstance(outcome.value, (kf.ContractMismatch, kf.OptionError)), outcome
        assert outcome.seconds < 10


def test_worlds_of_different_sizes() -> None:
    meet = fresh()

    def body(rank: int) -> Any:
        world = 3 if rank == 1 else 2
        return error_of(lambda: join(rank, world, rendezvous=meet, setup_timeout=1.0))

    for outcome in outcomes(2, body):
        assert isinstance(outcome.value, kf.Error), outcome


def test_a_missing_rank_is_named() -> None:
    meet = fresh()

    def body(rank: int) -> Any:
        return error_of(lambda: join(rank, 3, rendezvous=meet, setup_timeout=0.5))

    for outcome in outcomes(2, body):
        error = outcome.value
        if isinstance(error, kf.PeerTimeout):
            assert error.peer == 2 and error.epoch == 0
        else:
            # The other one was first to give up.
            assert isinstance(error, kf.ContractMismatch), repr(error)
        assert "rank 2" in str(error)
        assert 0.4 < outcome.seconds < 5


def test_the_same_rank_twice() -> None:
    meet = fresh()
    found = outcomes(2, lambda _: error_of(lambda: join(0, 2, rendezvous=meet, setup_timeout=0.5)))
    assert all(isinstance(outcome.value, kf.Error) for outcome in found)


def test_names_separate_communicators_at_one_rendezvous() -> None:
    meet = fresh()

    def body(number: int) -> None:
        rank, name = number % 2, "ab"[number // 2]
        tensor = Tensor(1, (2, 3), 4, 2, key=ord(name))
        with join(rank, 2, rendezvous=meet, name=name) as comm:
            for _ in range(20):
                exchanged(comm, rank, "send_recv_heads", [tensor])

    each(4, body)


def test_a_subgroup_of_the_ranks() -> None:
    """L12: rank, device and process have nothing to do with one another."""
    whole, part = fresh(), fresh()

    def body(number: int) -> None:
        with join(number, 4, rendezvous=whole) as comm:
            exchanged(comm, number, "send_recv_heads", [Tensor(1, (1, 2, 3, 4), 6, 2)])
            if number in (1, 3):
                rank = number // 2
                with join(rank, 2, rendezvous=part) as sub:
                    for key in range(10):
                        exchanged(sub, rank, "send_recv_heads", [Tensor(1, (2, 3), 5, 2, key=key)])
            exchanged(comm, number, "gather_heads", [Tensor(1, (1, 2, 3, 4), 6, 2)])

    each(4, body)


def test_outputs_are_made_together() -> None:
    """Case 27: a rank that makes another number of them is told, not waited for."""

    def body(comm: kf.All2All, rank: int) -> Any:
        comm.empty_output((1, 2, 3, 4), "float16")
        if rank == 1:
            return error_of(comm.close)
        return error_of(lambda: comm.empty_output((1, 2, 3, 4), "float16"))

    found = ended(2, body, setup_timeout=2.0)
    assert isinstance(found[0].value, kf.Error), found[0]


def test_an_output_beyond_the_capacity() -> None:
    def body(comm: kf.All2All, rank: int) -> None:
        with pytest.raises(kf.CapacityError):
            comm.empty_output((1, 1 << 30, 1, 1), "float32")
        exchanged(comm, rank, "send_recv_heads", [Tensor(1, (2, 2), 4, 4)])

    together(2, body)


# Stores


class Store:
    """Threads meet in a dictionary; `absent` is how it says that a key is not there."""

    def __init__(self, absent: Any = None) -> None:
        self.values: dict[str, bytes] = {}
        self.absent = absent

    def set(self, key: str, value: bytes) -> None:
        assert type(key) is str and type(value) is bytes
        self.values[key] = value

    def get(self, key: str) -> bytes:
        if key not in self.values:
            if isinstance(self.absent, Exception):
                raise self.absent
            return self.absent  # type: ignore[no-any-return]
        return self.values[key]


class TorchLike(Store):
    """As torch's stores: `wait` blocks and raises its own exception, `get` would block too."""

    def __init__(self) -> None:
        super().__init__(RuntimeError("get() before wait()"))
        self.ready = threading.Condition()
        self.waits = 0

    def set(self, key: str, value: bytes) -> None:
        with self.ready:
            super().set(key, value)
            self.ready.notify_all()

    def wait(self, keys: list[str], timeout: Any) -> None:
        with self.ready:
            self.waits += 1
            if not self.ready.wait_for(
                lambda: all(key in self.values for key in keys), timeout.total_seconds()
            ):
                raise RuntimeError("Socket Timeout")


@pytest.mark.parametrize("make", [Store, lambda: Store(KeyError("not there")), TorchLike])
def test_ranks_meet_in_a_store_of_the_callers(make: Callable[[], Store]) -> None:
    store = make()

    def body(comm: kf.All2All, rank: int) -> None:
        exchanged(comm, rank, "send_recv_heads", [TENSOR])

    together(3, body, rendezvous=store)
    assert store.values
    assert not isinstance(store, TorchLike) or store.waits


def test_a_store_in_which_nobody_comes() -> None:
    for store in (Store(), TorchLike()):
        start = time.monotonic()
        with pytest.raises(kf.PeerTimeout):
            join(0, 2, rendezvous=store, setup_timeout=0.3)
        assert time.monotonic() - start < 5


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("base", [Store, TorchLike])
@pytest.mark.parametrize(
    "junk", [5, 1.5, object(), "text", [300], b"", b"short", b"\xa5" * 300, None], ids=str
)
def test_a_store_that_gives_junk(junk: Any, base: type[Store], rank: int) -> None:
    """Junk is said at once; a store that forgets what was set, as soon as that is certain."""

    class Junk(base):  # type: ignore[misc, valid-type]
        def get(self, key: str) -> Any:
            return junk

        def wait(self, keys: list[str], timeout: Any) -> None:
            pass

    start = time.monotonic()
    with pytest.raises(kf.RendezvousError, match=r"Junk.*get\(\"kvferry//[01]\"\) must give the bytes"):
        join(rank, 2, rendezvous=Junk(), setup_timeout=0.3 if junk is None else 60)
    assert time.monotonic() - start < 5


def test_a_store_that_cuts_values_off() -> None:
    class Cut(Store):
        def get(self, key: str) -> Any:
            value = super().get(key)
            return value and value[:-1]

    with pytest.raises(kf.RendezvousError, match="bytes that no rank has set"):
        join(0, 2, rendezvous=Cut(), setup_timeout=60)


def test_what_a_store_raises_comes_through() -> None:
    class Broken(Store):
        def set(self, key: str, value: bytes) -> None:
            raise PermissionError("read-only store")

    with pytest.raises(PermissionError, match="read-only store"):
        join(0, 2, rendezvous=Broken(), setup_timeout=0.3)
