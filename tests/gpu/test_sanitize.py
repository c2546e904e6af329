"""A short walk over every engine, direction and way of passing ids: what compute-sanitizer runs."""

from __future__ import annotations

from typing import Any

import pytest
from driver import Buffer, Stream, capture, device_array
from gpu_support import KINDS, Cache, Pair, pair, shuffled
from reference import Geometry, Model
from support import small

import kvferry as kf

pytestmark = [pytest.mark.gpu, pytest.mark.sanitize]

WAYS = [
    ("pinned", "device", "kernel"),
    ("device", "pinned", "kernel"),
    ("device", "device", "kernel"),
    ("pinned", "device", "batch"),
    ("device", "pinned", "batch"),
    ("device", "device", "batch"),
    ("pinned", "device", "staged"),
    ("device", "pinned", "staged"),
    ("system", "device", "bounce"),
    ("device", "system", "bounce"),
]


@pytest.mark.parametrize(("src", "dst", "engine"), WAYS)
def test_engines(shared: kf.TransferContext, src: str, dst: str, engine: Any) -> None:
    """Order changes with odd rows, into padded blocks, and back."""
    geometry = Geometry(9, 3, 2, 4, 3, 11, "uint8")
    source = Cache(Model(geometry, "lw", "HND", alignment=16), src)
    target = Cache(Model(geometry, "fc", "universal", alignment=64), dst)
    for a, b in ((source, target), (target, source)):
        both = Pair(a, b)
        forced: Any = engine if (a, b) == (source, target) else "auto"
        shared.transfer(both.src, both.dst, [8, 1, 2, 5], [0, 3, 4, 7], engine=forced).wait(60)
        both.check([8, 1, 2, 5], [0, 3, 4, 7])


def test_arrays_between_guards(shared: kf.TransferContext) -> None:
    for offset in (0, 2):
        both = Pair(
            Cache(Model(small(), *KINDS[7]), "wrapped", offset=6),
            Cache(Model(small(), *KINDS[4]), "wrapped", offset=offset),
        )
        shared.transfer(both.src, both.dst, [6, 0], [0, 6]).wait(60)
        both.check([6, 0], [0, 6])


@pytest.mark.parametrize("count", [300, 5000])
def test_ids_in_parameters_and_in_a_table(shared: kf.TransferContext, count: int) -> None:
    both = pair(Geometry(count, 1, 1, 1, 1, 24, "uint8"), "device", "device")
    ids = shuffled(count, count), shuffled(count, count, 2)
    shared.transfer(both.src, both.dst, *ids, engine="kernel").wait(60)
    both.check(*ids)


def test_ids_on_the_gpu(shared: kf.TransferContext) -> None:
    both = pair(small(), "pinned", "device")
    shared.transfer(both.src, both.dst, device_array([3, 1]), device_array([0, 6])).wait(60)
    both.check([3, 1], [0, 6])
    both.target.put(both.before)
    with pytest.raises(kf.TransferError, match="99"):
        shared.transfer(both.src, both.dst, device_array([3, 99]), device_array([0, 6])).wait(60)
    both.check([3], [0])


def test_captured(shared: kf.TransferContext) -> None:
    both = pair(small(), "pinned", "device")
    with Stream() as stream:
        graph = capture(stream, lambda: shared.transfer(both.src, both.dst, [3, 1], [0, 6], stream=stream))
        graph.replay(stream)
        both.check([3, 1], [0, 6])
        graph.close()


def test_primitives() -> None:
    a, b = Buffer(4096, fill=1), Buffer(4096, fill=2)
    addresses = [a.addr + 3, a.addr + 1000], [b.addr + 16, b.addr + 2001]
    with Stream() as stream:
        kf.memcpy_batch(*addresses, [17, 600], stream=stream)
        kf.vectorized_copy(device_array(addresses[0]), device_array(addresses[1]), 333, stream=stream)
        stream.synchronize()
