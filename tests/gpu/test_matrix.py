"""Every layout to every layout, between every memory and a GPU, both ways, by every engine that can."""

from __future__ import annotations

from typing import Any

import pytest
from driver import SIMULATED
from gpu_support import ENGINES, HOST, KINDS, Cache, Pair
from reference import Model
from support import config, small

import kvferry as kf

pytestmark = pytest.mark.gpu

CASES = [
    *((host, way, engine) for host in HOST for way in ("h2d", "d2h") for engine in ENGINES[host]),
    *(("device", "d2d", engine) for engine in ENGINES["device"]),
]
# On a simulated GPU a kind meets every third other one, each in one of the tests.
STEP = 3 if SIMULATED else 1
SRC, DST = [2, 3, 6, 0, 1], [8, 0, 5, 2, 3]


@pytest.mark.parametrize(
    ("host", "direction", "engine", "dst_kind"),
    [
        pytest.param(*case, kind, id="-".join((*case, *kind)))
        for case in CASES
        for kind in KINDS
        if not (case[:2] == ("registered", "d2h") and kind[0] == "pool")  # pools are kvferry's own memory
    ],
)
def test_every_kind_to_every_kind(
    shared: kf.TransferContext, host: str, direction: str, engine: Any, dst_kind: tuple[str, str, str]
) -> None:
    places = (host, "device") if direction == "h2d" else ("device", host)
    target = Cache(Model(small(blocks=9), *dst_kind, alignment=8), places[1])
    for src_kind in KINDS[KINDS.index(dst_kind) % STEP :: STEP]:
        if src_kind[0] == "pool" and places[0] == "registered":
            continue
        both = Pair(Cache(Model(small(), *src_kind, alignment=64), places[0]), target)
        note = f"from {src_kind}:"
        result = shared.transfer(both.src, both.dst, SRC, DST, engine=engine).wait(60)
        both.check(SRC, DST, note)
        assert (result.blocks, result.bytes) == (5, 5 * config(small()).block_bytes), note
        assert result.direction == direction
        assert result.engine == engine if engine != "auto" else result.engine in ENGINES[host], note
        assert result.seconds > 0 and result.failed_blocks == []


@pytest.mark.parametrize("offset", [0, 8, 4, 2])
@pytest.mark.parametrize("dst_kind", [kind for kind in KINDS if kind[0] != "pool"], ids="-".join)
def test_foreign_device_arrays_between_guard_bytes(
    shared: kf.TransferContext, dst_kind: tuple[str, str, str], offset: int
) -> None:
    for host in ("pinned", "wrapped"):
        for engine in ENGINES["pinned" if host == "pinned" else "device"]:
            source = Cache(Model(small(), "lw", "HND"), host, offset=6 if host == "wrapped" else 0)
            target = Cache(Model(small(), *dst_kind), "wrapped", offset=offset)
            both = Pair(source, target)
            shared.transfer(both.src, both.dst, SRC, [6, 0, 5, 2, 3], engine=engine).wait(60)
            both.check(SRC, [6, 0, 5, 2, 3], f"{host} {engine}")
            back = Pair(target, source)
            shared.transfer(back.src, back.dst, SRC, [6, 0, 5, 2, 3], engine=engine).wait(60)
            back.check(SRC, [6, 0, 5, 2, 3], f"back to {host} {engine}")


@pytest.mark.parametrize("engine", ["host", "disk", "remote", "staged", "bounce"])
def test_engines_that_cannot_copy_on_a_device_say_so(shared: kf.TransferContext, engine: Any) -> None:
    both = Pair(Cache(Model(small(), "fc")), Cache(Model(small(), "lw")))
    with pytest.raises(kf.Unsupported, match=engine):
        shared.transfer(both.src, both.dst, [0], [1], engine=engine)
    both.check([], [])


@pytest.mark.parametrize("engine", ["kernel", "batch", "staged"])
@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_engines_that_cannot_copy_pageable_memory_say_so(
    shared: kf.TransferContext, engine: Any, direction: str
) -> None:
    places = ("system", "device") if direction == "h2d" else ("device", "system")
    both = Pair(Cache(Model(small(), "fc"), places[0]), Cache(Model(small(), "lw"), places[1]))
    with pytest.raises(kf.Unsupported, match=engine):
        shared.transfer(both.src, both.dst, [0], [1], engine=engine)
    both.check([], [])


@pytest.mark.parametrize("engine", ["kernel", "batch", "staged", "bounce"])
def test_gpu_engines_do_not_copy_host_memory(shared: kf.TransferContext, engine: Any) -> None:
    both = Pair(Cache(Model(small(), "fc"), "system"), Cache(Model(small(), "lw"), "pinned"))
    with pytest.raises(kf.Unsupported, match=engine):
        shared.transfer(both.src, both.dst, [0], [1], engine=engine)


def test_a_gpu_context_copies_host_memory_too(shared: kf.TransferContext) -> None:
    both = Pair(Cache(Model(small(), "fc"), "system"), Cache(Model(small(), "lw"), "pinned"))
    result = shared.transfer(both.src, both.dst, SRC, [6, 0, 5, 2, 3]).wait(60)
    both.check(SRC, [6, 0, 5, 2, 3])
    assert (result.engine, result.direction) == ("host", "memcpy")


def test_the_context_says_which_gpu_it_is_for(shared: kf.TransferContext, ctx: kf.TransferContext) -> None:
    assert shared.device == 0 and ctx.device is None
    assert "0" in repr(shared)


def test_a_context_of_a_gpu_that_is_not_there() -> None:
    with pytest.raises((kf.CudaError, kf.Unsupported), match=str(len(kf.devices()))):
        kf.TransferContext(len(kf.devices()))
