"""Arguments of the exchange that cannot be: who is told what, and how soon."""

from __future__ import annotations

import functools
import inspect
import math
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from exchange_bodies import error_of
from exchange_calls import exchanged, given
from exchange_ranks import CAPACITY, nothing_left
from exchange_ranks import together_outcomes as ended
from exchange_reference import Tensor, same

import kvferry as kf

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TENSOR = Tensor(2, (3, 4), 6, 4, "float32")


@pytest.fixture(autouse=True)
def leaves_nothing() -> Iterator[None]:
    with nothing_left():
        yield


class Interrupted:
    def __dlpack_device__(self) -> tuple[int, int]:
        raise KeyboardInterrupt

    def __dlpack__(self, **options: Any) -> Any: ...


# What is wrong with a collective call, whoever finds it, is told to the peers.

CALLS: dict[str, tuple[type[BaseException], str, Callable[[Any, Any], Any]]] = {
    "layout": (TypeError, "layout must be a string, got int", lambda c, x: c.send_recv_heads(x, layout=5)),
    "no layout": (TypeError, "layout", lambda c, x: c.gather_heads(x, layout=None)),
    "no engine": (TypeError, "engine", lambda c, x: c.send_recv_heads(x, engine=None)),
    "surrogate": (kf.OptionError, "engine", lambda c, x: c.send_recv_heads(x, engine="\ud800")),
    "no axis": (TypeError, "axis", lambda c, x: c.allgather(x, None)),
    "axis": (TypeError, "axis must be a string", lambda c, x: c.allgather(x, axis=1)),
    "dtype": (kf.LayoutError, "unknown dtype", lambda c, x: c.send_recv_heads(x, dtype=5)),
    "stream": (kf.OptionError, "stream", lambda c, x: c.send_recv_heads(x, stream=True)),
    "unknown": (
        TypeError,
        r"^All2All\.send_recv_heads\(\) got an unexpected keyword argument 'heads'$",
        lambda c, x: c.send_recv_heads(x, heads=3),
    ),
    "axis of another": (
        TypeError,
        "unexpected keyword argument 'axis'",
        lambda c, x: c.gather_heads(x, axis=1),
    ),
    "nothing": (
        TypeError,
        r"^All2All\.gather_heads\(\) missing 1 required positional argument: 'tensors'$",
        lambda c, x: c.gather_heads(),
    ),
    "too much": (
        TypeError,
        r"^All2All\.send_recv_heads\(\) takes 1 positional argument but 2 were given$",
        lambda c, x: c.send_recv_heads(x, x),
    ),
    "too much to gather": (
        TypeError,
        r"^All2All\.allgather\(\) takes from 1 to 2 positional arguments but 3 were given$",
        lambda c, x: c.allgather(x, "heads", 3),
    ),
    "twice": (
        TypeError,
        r"^All2All\.allgather\(\) got multiple values for argument 'tensors'$",
        lambda c, x: c.allgather(x, tensors=x),
    ),
    "interrupted": (KeyboardInterrupt, "reading tensor 0", lambda c, x: c.send_recv_heads(Interrupted())),
    "masked": (kf.LayoutError, "tensor 0: masked", lambda c, x: c.send_recv_heads(np.ma.array(x))),
    "true": (TypeError, "num_heads", lambda c, x: c.send_recv_heads(x, num_heads=True)),
    "true heads": (TypeError, "query_heads", lambda c, x: c.send_recv_heads(x, query_heads=True)),
    "true splits": (TypeError, "head_splits", lambda c, x: c.send_recv_heads(x, head_splits=[True, 5])),
}


@pytest.mark.parametrize("case", CALLS)
def test_what_a_call_refuses_is_told_to_the_peers(case: str) -> None:
    kind, words, call = CALLS[case]

    def body(comm: kf.All2All, rank: int) -> Any:
        exchanged(comm, rank, "send_recv_heads", [TENSOR])
        array = given(TENSOR, "send_recv_heads", rank)
        if rank == 1:
            with pytest.raises(kind, match=words) as caught:
                call(comm, array)
            return caught.value
        return error_of(lambda: comm.send_recv_heads(array, rank_tokens=TENSOR.tokens))

    other, own = ended(2, body, timeout=60.0)
    assert own.error is None, own.error
    assert type(own.value) is kind
    assert isinstance(other.value, kf.ContractMismatch) and other.value.rank == 1, repr(other.value)
    assert other.seconds < 20


OUTPUTS: dict[str, tuple[type[BaseException], str, Callable[[Any], Any]]] = {
    "no dtype": (TypeError, "'dtype'", lambda c: c.empty_output((1, 2, 3, 4))),
    "nothing": (
        TypeError,
        "2 required positional arguments: 'shape' and 'dtype'",
        lambda c: c.empty_output(),
    ),
    "unknown": (TypeError, "'axes'", lambda c: c.empty_output((1, 2, 3, 4), "float16", axes=4)),
    "layout": (TypeError, "layout", lambda c: c.empty_output((1, 2, 3, 4), "float16", layout=None)),
    "dtype": (kf.LayoutError, "unknown dtype", lambda c: c.empty_output((1, 2, 3, 4), "half")),
    "shape": (TypeError, "shape", lambda c: c.empty_output(np.int64(3), "float16")),
    "axes": (kf.OptionError, "shape", lambda c: c.empty_output((1, 2), "float16")),
    "dtypes": (kf.OptionError, "dtype", lambda c: c.empty_output([(1, 2, 3)], ["float16"] * 100_000)),
    "shapes": (kf.LayoutError, "100000", lambda c: c.empty_output([(1, 2, 3)] * 100_000, "float16")),
}


@pytest.mark.parametrize("case", OUTPUTS)
def test_an_output_that_a_rank_refuses_is_not_waited_for(case: str) -> None:
    """It is made together, too; nothing is broken by it."""
    kind, words, make = OUTPUTS[case]

    def body(comm: kf.All2All, rank: int) -> Any:
        if rank == 1:
            with pytest.raises(kind, match=words) as caught:
                make(comm)
            error: Any = caught.value
        else:
            error = error_of(lambda: comm.empty_output((1, 2, 3, 4), "float16"))
        comm.empty_output((1, 2, 3, 4), "float16")
        exchanged(comm, rank, "send_recv_heads", [TENSOR])
        comm.close()
        return error

    other, own = ended(2, body, setup_timeout=60.0)
    assert own.error is None and other.error is None, (own.error, other.error)
    assert type(own.value) is kind
    assert isinstance(other.value, kf.ContractMismatch) and other.value.rank == 1, repr(other.value)
    assert other.seconds < 20


def test_signatures_can_be_seen() -> None:
    options = ["rank_tokens", "layout", "num_heads", "query_heads", "head_splits", "out", "stream", "num_sms"]
    for name in ("send_recv_heads", "gather_heads", "allgather"):
        found = list(inspect.signature(getattr(kf.All2All, name)).parameters)
        assert [each for each in found if each != "axis"] == ["self", "tensors", *options, "engine", "dtype"]
    assert list(inspect.signature(kf.All2All.empty_output).parameters) == ["self", "shape", "dtype", "layout"]


def test_all_can_be_given_by_name() -> None:
    x = np.arange(24.0).reshape(1, 2, 3, 4)
    with kf.All2All(0, 1, capacity_bytes=CAPACITY) as comm:
        same(comm.send_recv_heads(tensors=x, layout="BHND", engine="push"), x)
        same(comm.allgather(axis="heads", tensors=x), x)
        assert comm.empty_output(dtype="float16", shape=(1, 2, 3)).shape == (1, 2, 3)


# Every argument, and everything that it might be given.

VALUES: list[Any] = [
    *(None, object(), "x", "", b"ab", "\ud800", "\0", True, False, np.bool_(True), int, 1j),
    *(10**40, -(10**40), -1, math.nan, math.inf, -math.inf, 1.5, np.float32(1.5)),
    *([], (), {}, {1}, [[]], [None], [True], ["a"], [1.5], [10**40], [-1], [1] * 100_000, range(-1, 3)),
    *(np.zeros((2, 2), int), np.array([1.5]), np.ma.ones((1, 2, 3, 4)), [range(0, 4, 2)]),
]
X = np.ones((1, 2, 3, 4), np.float32)
SETUP: dict[str, Any] = {"rank": 0, "world_size": 1, "capacity_bytes": 1 << 16, "setup_timeout": 1.0}
NAMED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "All2All": (
        SETUP,
        [*SETUP, "device", "timeout", "buffers", "name", "rendezvous"],
    ),
    "send_recv_heads": (
        {"tensors": X},
        [
            *("rank_tokens", "layout", "num_heads", "query_heads", "head_splits"),
            *("out", "stream", "num_sms", "engine", "dtype"),
        ],
    ),
    "allgather": ({"tensors": X}, ["axis"]),
    "empty_output": ({"shape": (1, 2, 3, 4), "dtype": "float16"}, ["shape", "dtype", "layout"]),
    "capacity_for": (
        {"shape": (1, 2, 3, 4), "dtype": "float16", "world_size": 1},
        ["shape", "dtype", "world_size", "operation", "rank_tokens", "query_heads", "head_splits"],
    ),
    "head_range": ({"num_heads": 4}, ["num_heads", "query_heads"]),
    "set_timeout": ({}, ["timeout"]),
    "record_stream": ({"result": X, "stream": 0}, ["result", "stream"]),
    "abort": ({}, ["reason"]),
}


@pytest.mark.parametrize("method", NAMED)
def test_nonsense_is_refused_by_name(method: str) -> None:
    rest, arguments = NAMED[method]

    def attempt(comm: kf.All2All, **options: Any) -> None:
        if method != "All2All":
            getattr(comm, method)(**options)
            return
        if "rendezvous" in options:
            options["world_size"] = 2
        kf.All2All(**options).close()

    for argument in arguments:
        for value in VALUES:
            comm = kf.All2All(0, 1, capacity_bytes=1 << 16)
            error = error_of(functools.partial(attempt, comm, **{**rest, argument: value}))
            if error is not None:
                assert isinstance(error, (kf.Error, TypeError)), (argument, value, error)
                text = str(error).replace("tensor 0: batch", "shape").replace("no CUDA driver", "device")
                assert argument in text, (argument, value, error)
                assert len(text) < 400, (argument, value, error)
            error_of(comm.close)


def test_integers_of_numpy_are_integers() -> None:
    one: Any = np.int64(1)
    two: Any = np.uint8(2)
    four: Any = np.int32(4)
    place: dict[str, Any] = {
        "rank": np.int64(0),
        "world_size": one,
        "capacity_bytes": np.int64(CAPACITY),
        "buffers": two,
    }
    with kf.All2All(**place, timeout=one / 2, setup_timeout=four) as comm:
        x = np.ones((1, 2, 4, 3))
        for heads in (four, np.array(4), [four]):
            options: dict[str, Any] = {
                "rank_tokens": [two],
                "num_heads": heads,
                "query_heads": four,
                "num_sms": one,
            }
            same(comm.send_recv_heads(x, **options), x)
        same(comm.send_recv_heads(x, head_splits=[four]), x)
        same(comm.send_recv_heads(x, rank_tokens=np.array([2]), head_splits=[[four]]), x)
        assert comm.empty_output((one, two, four), "float16").shape == (1, 2, 4)
        assert comm.head_range(four, query_heads=four) == range(4)
        comm.set_timeout(one)


def test_lists_of_many_tensors_are_refused_unread() -> None:
    """The limit is known before any of them has been looked at."""
    many = [object()] * 100_000
    with kf.All2All(0, 1, capacity_bytes=CAPACITY) as comm:
        start = time.perf_counter()
        for _ in range(20):
            with pytest.raises(kf.LayoutError, match=r"between 1 and 16 tensors, got 100000"):
                comm.send_recv_heads(many)
        assert time.perf_counter() - start < 1


# Arrays that are not what they say


class Array:
    def __init__(self, protocol: str, fields: Any) -> None:
        setattr(self, protocol, fields)


FIELDS: list[tuple[Any, str]] = [
    ("nonsense", "must be a dict"),
    ({}, "has no 'data'"),
    ({"data": None}, "has no 'data'"),
    ({"data": 5}, "'data'"),
    ({"data": (-1, False)}, "'data'"),
    ({"shape": None}, "has no 'shape'"),
    ({"shape": 4}, "'shape'"),
    ({"shape": (1, 2, "3", 4)}, "'shape'"),
    ({"shape": (1, 2, -3, 4)}, "'shape'"),
    ({"typestr": None}, "has no 'typestr'"),
    ({"typestr": 4}, "'typestr'"),
    ({"strides": "ab"}, "'strides'"),
    ({"strides": (1, 2)}, "'strides'"),
]


@pytest.mark.parametrize("protocol", ["__array_interface__", "__cuda_array_interface__"])
@pytest.mark.parametrize(("change", "words"), FIELDS, ids=[str(change) for change, _ in FIELDS])
def test_interfaces_that_are_malformed(protocol: str, change: Any, words: str) -> None:
    fields = change if change in ({}, "nonsense") else {**X.__array_interface__, **change}
    words = words.replace("'", '"')
    with kf.All2All(0, 1, capacity_bytes=CAPACITY) as comm:
        for wrong, index in ((Array(protocol, fields), 0), ((X, Array(protocol, fields)), 1)):
            with pytest.raises(kf.ProtocolError, match=rf"^tensor {index}: its {protocol}") as caught:
                comm.send_recv_heads(wrong)
            assert words in str(caught.value)


def test_dlpack_that_is_malformed() -> None:
    class Producer:
        def __init__(self, **methods: Any) -> None:
            for name, value in methods.items():
                setattr(self, f"__{name}__", value)

    class Raises:
        def __init__(self, error: Exception) -> None:
            self.error = error

        def __call__(self, **options: Any) -> Any:
            raise self.error

    device, capsule = lambda: (1, 0), lambda **_: 3
    cases: list[tuple[Any, str]] = [
        (Producer(dlpack=capsule), "__dlpack_device__"),
        (
            Producer(dlpack=capsule, dlpack_device=lambda: 1),
            "__dlpack_device__ must give two integers, got 1",
        ),
        (Producer(dlpack=capsule, dlpack_device=lambda: ("cpu", 0)), "__dlpack_device__"),
        (Producer(dlpack=capsule, dlpack_device=device), "__dlpack__ must give a capsule, got 3"),
    ]
    with kf.All2All(0, 1, capacity_bytes=CAPACITY) as comm:
        for wrong, words in cases:
            with pytest.raises(kf.ProtocolError, match=rf"^tensor 1: its .*{words}"):
                comm.send_recv_heads((X, wrong))
        for error in (BufferError("grad"), KeyError("x")):
            with pytest.raises(type(error)) as caught:
                comm.send_recv_heads((X, Producer(dlpack=Raises(error), dlpack_device=device)))
            assert caught.value.__notes__[-1] == "kvferry was reading tensor 1"


def test_masks_are_not_dropped() -> None:
    masked = np.ma.array(X, mask=X > 0)
    with kf.All2All(0, 1, capacity_bytes=CAPACITY) as comm:
        with pytest.raises(kf.LayoutError, match="tensor 1: masked arrays are not supported"):
            comm.send_recv_heads((X, masked))
        same(comm.send_recv_heads(masked.data), X)


# What is true anyway


def test_facts_outlive_closing() -> None:
    with kf.All2All(0, 1, capacity_bytes=CAPACITY) as comm:
        kept = comm.send_recv_heads(X)
    assert (comm.rank, comm.world_size, comm.capacity_bytes, comm.device) == (0, 1, CAPACITY, None)
    assert comm.closed and comm.head_range(4) == range(4) and comm.stats()["calls"] == 1
    same(kept, X)
    wrong: Any = comm
    for call in (
        lambda: comm.set_timeout(1),
        wrong.send_recv_heads,
        wrong.empty_output,
        lambda: wrong.allgather(X, 5),
    ):
        with pytest.raises(kf.ClosedError):
            call()
