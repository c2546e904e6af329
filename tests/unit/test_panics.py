"""Whatever is passed anywhere: a TypeError or an error of kvferry's own, never a panic, never a crash."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import pytest
from reference import Model
from support import config, owned, small

import kvferry as kf
from kvferry import _core


class Hostile:
    """Every question is answered by an exception, or by something odd."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def _give(self) -> Any:
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("__array", "__cuda", "__dlpack", "name", "numpy", "tolist", "dtype")):
            return self._give()
        raise AttributeError(name)

    def __index__(self) -> int:
        answer: int = self._give()
        return answer

    def __float__(self) -> float:
        answer: float = self._give()
        return answer

    def __len__(self) -> int:
        answer: int = self._give()
        return answer

    def __iter__(self) -> Any:
        return self._give()

    def __str__(self) -> str:
        return "hostile"


def pool() -> list[Any]:
    layout = owned(Model(small(), "fc"))
    with kf.TransferContext(threads=1) as closed:
        job = closed.transfer(layout, owned(Model(small(), "lw")), [0], [0])
        job.wait()
        route = closed.route(layout, owned(Model(small(), "lw")))
    return [
        None,
        True,
        0,
        1,
        -1,
        3,
        1 << 31,
        1 << 32,
        1 << 63,
        1 << 64,
        1 << 200,
        -(1 << 200),
        0.0,
        float("nan"),
        float("inf"),
        1e308,
        "",
        "NHD",
        "host",
        "float16",
        "block page head dim",
        "\0",
        "\ud800",
        b"",
        b"\xff" * 8,
        [],
        [0],
        [0, 1, 2],
        [[0]],
        [None],
        ((), ()),
        range(3),
        range(-5, 5),
        range(1 << 70),
        slice(3),
        {},
        {"a": 1},
        {0},
        object(),
        int,
        np.zeros(0, np.int64),
        np.zeros((2, 3, 4, 5), np.float16),
        np.arange(3)[::-1],
        np.array(3),
        np.array([object()]),
        np.zeros(3, "V0"),
        np.zeros((2, 2), "S0"),
        memoryview(b"abcd"),
        layout,
        layout.regions[0],
        layout.config,
        kf.system(),
        kf.device(0),
        kf.pinned(),
        closed,
        lone(),
        lone().empty_output((1, 2, 3, 4), "float16"),
        job,
        route,
        kf.TransferContext(threads=1),
        *[
            Hostile(answer)
            for answer in (ZeroDivisionError(), AttributeError(), TypeError(), 1 << 70, -1, 1, None, "x")
        ],
    ]


def lone() -> kf.All2All:
    """A communicator of one rank, whom nobody waits for."""
    return kf.All2All(0, 1, capacity_bytes=1 << 16)


def targets() -> dict[str, Any]:
    layout, other = owned(Model(small(), "fc")), owned(Model(small(), "lw", "HND"))
    ctx = kf.TransferContext(threads=1)
    job = ctx.transfer(layout, other, [0], [0])
    plan = ctx.plan(layout, other, [0], [0])
    route = ctx.route(layout, other)
    found: dict[str, Any] = {
        name: value
        for name, value in vars(_core).items()
        if callable(value) and not name.startswith("_") and name != "inject_driver_fault"
    }
    comm = lone()
    array = comm.empty_output((1, 2, 3, 4), "float16")
    plain = (layout, other.regions[0], layout.config, kf.system(), ctx, job, job.wait(), plan, route)
    for instance in (*plain, comm, array):
        for name in dir(instance):
            if name in (
                "close",
                # What comes after it would be refused for its sake.
                "abort",
                "__class__",
                "__init_subclass__",
                "__subclasshook__",
                "__reduce_ex__",
                "__exit__",
                # From Python 3.12 on; CPython's own wrapper converts its argument. See test_export.py.
                "__buffer__",
            ):
                continue
            value = getattr(instance, name, None)
            if callable(value):
                found[f"{type(instance).__name__}.{name}"] = value
    found["transfer (fitting)"] = lambda *a, **k: ctx.transfer(layout, other, *a, **k)
    found["plan (fitting)"] = lambda *a, **k: ctx.plan(layout, other, *a, **k)
    found["from_tensors (fitting)"] = lambda value, **k: kf.PhysicalLayout.from_tensors(
        value, **{"axes": "block page head dim", **k}
    )
    x = np.zeros((1, 2, 4, 4), np.float16)
    for name in ("send_recv_heads", "gather_heads", "allgather"):
        found[f"{name} (fitting)"] = functools.partial(getattr(comm, name), x)
    found["from_group"] = kf.All2All.from_group
    found["capacity_for"] = kf.All2All.capacity_for
    found["All2All (alone)"] = lambda **k: kf.All2All(
        0, 1, **{"capacity_bytes": 4096, "setup_timeout": 0.1, **k}
    )
    found["config (fitting)"] = lambda **k: kf.LayoutConfig(
        **{
            "num_blocks": 2,
            "num_layers": 2,
            "page_size": 2,
            "num_heads": 2,
            "head_dim": 2,
            "dtype": "int8",
            **k,
        }
    )
    return found


OPTIONS = ["layers", "heads", "stream", "after", "engine", "num_sms", "transform", "strategy"]
CALL = [
    "rank_tokens",
    "layout",
    "num_heads",
    "query_heads",
    "head_splits",
    "out",
    "num_sms",
    "engine",
    "dtype",
]
SIZES = ["num_blocks", "num_layers", "page_size", "num_heads", "head_dim", "outer_dim", "inner_dim"]
KEYWORDS = {
    "transfer": OPTIONS,
    "plan": OPTIONS,
    "route": OPTIONS,
    "from_tensors": ["axes", "config", "dtype"],
    "config": [*SIZES, "dtype", "alignment", "first_head", "total_heads"],
    "replace": [*SIZES, "dtype", "alignment", "first_head", "total_heads"],
    "layer_separate": ["block_dim", "order"],
    "fully_contiguous": ["order"],
    "TransferContext": ["device", "threads"],
    "send_recv_heads": CALL,
    "gather_heads": CALL,
    "allgather": [*CALL, "axis"],
    "empty_output": ["layout"],
    "capacity_for": ["operation", "rank_tokens", "query_heads", "head_splits"],
    "All2All": ["capacity_bytes", "rendezvous", "device", "timeout", "setup_timeout", "buffers", "name"],
    "wait": ["timeout"],
    "runs": ["limit"],
}
FINE = (
    kf.Error,
    TypeError,
    ValueError,
    ZeroDivisionError,
    AttributeError,
    BufferError,
    RuntimeError,
    MemoryError,
)


@pytest.mark.parametrize("seed", range(3))
def test_nothing_panics(seed: int) -> None:
    rng = random.Random(seed)
    values, functions = pool(), targets()
    calls = 0
    for name, function in functions.items():
        short = name.split(" ")[0].split(".")[-1]
        for _ in range(60):
            arguments = [rng.choice(values) for _ in range(rng.choice([0, 1, 1, 2, 2, 3, 4]))]
            options = {key: rng.choice(values) for key in KEYWORDS.get(short, []) if rng.random() < 0.3}
            if short == "wait" and not options and not arguments:
                continue
            try:
                result = function(*arguments, **options)
                str(result), repr(result)
            except FINE:
                pass
            except BaseException as error:  # noqa: BLE001 a panic is no Exception
                pytest.fail(f"{name}(*{arguments!r}, **{options!r}) raised {type(error).__name__}: {error}")
            calls += 1
    assert calls > 1000


def test_a_layout_of_any_kind_of_nonsense_is_refused_with_its_config() -> None:
    for value in pool():
        for bad in ([value], {"a": value}, [(value, value)]):
            try:
                kf.PhysicalLayout.from_tensors(
                    bad, axes="block page head dim", config=config(small(layers=1))
                )
            except FINE:
                continue
