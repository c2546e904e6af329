"""Block ids that lie on the GPU: read by the kernel, checked by the kernel, named by the error."""

from __future__ import annotations

import time
import weakref
from typing import Any

import numpy as np
import pytest
from driver import Buffer, CudaArray, Hold, Stream, device_array
from gpu_support import KINDS, Cache, Pair, pair, scaled, shuffled
from reference import Geometry, Model
from support import small

import kvferry as kf

pytestmark = pytest.mark.gpu

WAYS = [("pinned", "device"), ("device", "pinned"), ("device", "device")]
BOTH = pytest.mark.parametrize(("src", "dst"), WAYS, ids=["-".join(way) for way in WAYS])
SRC, DST = [2, 3, 6, 0, 1], [6, 0, 5, 2, 3]
DTYPES = [np.int32, np.int64]


@BOTH
@pytest.mark.parametrize("sides", ["both", "source", "destination"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_either_side(shared: kf.TransferContext, src: str, dst: str, sides: str, dtype: Any) -> None:
    both = pair(small(), src, dst, KINDS[4], KINDS[2])
    a: Any = device_array(SRC, dtype) if sides != "destination" else SRC
    b: Any = device_array(DST, dtype) if sides != "source" else np.array(DST)
    result = shared.transfer(both.src, both.dst, a, b).wait(60)
    both.check(SRC, DST)
    assert (result.engine, result.blocks) == ("kernel", 5)
    both.target.put(both.before)
    route = shared.route(both.src, both.dst, layers=range(1, 3), heads=range(2, 5))
    route(a, b).wait(60)
    both.check(SRC, DST, layers=range(1, 3), heads=range(2, 5))


@BOTH
def test_a_token_slot_map(shared: kf.TransferContext, src: str, dst: str) -> None:
    """page_size 1: every token has a slot of its own, ids as the engine keeps them on the GPU."""
    slots = scaled(40_000, 3000)
    geometry = Geometry(slots, 2, 2, 1, 2, 8, "bfloat16")
    count = slots - 100
    ids = shuffled(count, slots), shuffled(count, slots, 2)
    both = pair(geometry, src, dst, KINDS[7], KINDS[3])
    shared.transfer(both.src, both.dst, device_array(ids[0]), device_array(ids[1], np.int32)).wait(60)
    both.check(*ids)
    both.target.put(both.before)
    shared.transfer(both.src, both.dst, np.array(ids[0]), np.array(ids[1])).wait(60)
    both.check(*ids)


def test_finer_pages(shared: kf.TransferContext) -> None:
    both = pair(small(), "device", "pinned")
    tokens = both.src.with_page_size(1), both.dst.with_page_size(1)
    shared.transfer(*tokens, device_array([5, 17, 18]), device_array([1, 27, 8])).wait(60)
    want = both.before.copy()
    for a, b in ((5, 1), (17, 27), (18, 8)):
        want[b // 4, :, :, b % 4] = both.values[a // 4, :, :, a % 4]
    both.target.check(want)


def test_coarse_ids_are_expanded_or_refused(shared: kf.TransferContext) -> None:
    """Page sizes that differ need ids in the finer page: on the device nobody can expand them unseen."""
    source, target = Cache(Model(small(), "lw")), Cache(Model(small(page=1, blocks=28), "fc"))
    both = Pair(source, target)
    try:
        job = shared.transfer(both.src, both.dst, device_array([5]), [3, 9, 0, 27])
    except (kf.Unsupported, kf.LayoutError):
        both.check([], [])
    else:
        job.wait(60)
        both.check([5], [3, 9, 0, 27])


class TestBadIds:
    @BOTH
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("value", [7, -1, 1 << 20, -(1 << 31), (1 << 31) - 1])
    @pytest.mark.parametrize("side", ["source", "destination"])
    def test_the_job_fails_and_the_others_move(
        self, shared: kf.TransferContext, *, src: str, dst: str, dtype: Any, value: int, side: str
    ) -> None:
        both = pair(small(), src, dst)
        a, b = list(SRC), list(DST)
        (a if side == "source" else b)[3] = value
        job = shared.transfer(both.src, both.dst, device_array(a, dtype), device_array(b, dtype))
        with pytest.raises(kf.TransferError) as caught:
            job.wait(60)
        message = str(caught.value)
        assert side in message
        for word in ("3", str(value), "7"):
            assert word in message, f"{word} is not in {message!r}"
        both.check([*SRC[:3], SRC[4]], [*DST[:3], DST[4]])
        assert job.done()
        with pytest.raises(kf.TransferError):
            job.result()
        # The next one is not infected.
        both.target.put(both.before)
        shared.transfer(both.src, both.dst, device_array(SRC), device_array(DST)).wait(60)
        both.check(SRC, DST)

    @pytest.mark.parametrize("value", [1 << 32, (1 << 32) + 1, -(1 << 63), (1 << 63) - 1])
    def test_values_beyond_32_bits_do_not_wrap(self, shared: kf.TransferContext, value: int) -> None:
        both = pair(small(), "device", "device")
        job = shared.transfer(both.src, both.dst, device_array([0, value]), device_array([1, 2]))
        with pytest.raises(kf.TransferError, match=str(value)):
            job.wait(60)
        both.check([0], [1])

    def test_many(self, shared: kf.TransferContext) -> None:
        geometry = Geometry(2000, 1, 1, 1, 1, 16, "uint8")
        both = pair(geometry, "device", "pinned")
        a, b = np.array(shuffled(1500, 2000)), np.array(shuffled(1500, 2000, 2))
        bad = np.zeros(1500, bool)
        bad[[0, 17, 800, 1499]] = True
        good_a, good_b = a[~bad].tolist(), b[~bad].tolist()
        a[bad] = 2000
        job = shared.transfer(both.src, both.dst, device_array(a), device_array(b))
        with pytest.raises(kf.TransferError, match="2000"):
            job.wait(60)
        both.check(good_a, good_b)

    def test_on_a_callers_stream(self, shared: kf.TransferContext) -> None:
        both = pair(small(), "device", "device")
        ids = device_array([0, 50]), device_array([1, 2])
        with Stream() as stream, Hold(stream) as hold:
            job = shared.transfer(both.src, both.dst, *ids, stream=stream, tag="bad")
            time.sleep(0.01)
            hold.release()
            with pytest.raises(kf.TransferError, match="50"):
                job.wait(60)
        both.check([0], [1])
        [(tag, error)] = shared.completed()
        assert tag == "bad" and isinstance(error, kf.TransferError)

    def test_host_ids_beside_device_ids_are_checked_before(self, shared: kf.TransferContext) -> None:
        both = pair(small(), "device", "device")
        with pytest.raises(kf.BlockIdError) as caught:
            shared.transfer(both.src, both.dst, device_array([0, 1]), [0, 7])
        assert (caught.value.index, caught.value.value, caught.value.limit) == (1, 7, 7)
        both.check([], [])


class TestRefusals:
    def test_counts_that_differ(self, shared: kf.TransferContext) -> None:
        both = pair(small(), "device", "device")
        for a, b in (([0, 1], [0]), ([0], [0, 1, 2])):
            with pytest.raises(kf.LayoutError):
                shared.transfer(both.src, both.dst, device_array(a), device_array(b))
            with pytest.raises(kf.LayoutError):
                shared.transfer(both.src, both.dst, a, device_array(b))
        both.check([], [])

    @pytest.mark.parametrize("typestr", ["<f4", "<f8", "<c8", "|b1", ">i8"])
    def test_types_that_are_no_ids(self, shared: kf.TransferContext, typestr: str) -> None:
        both = pair(small(), "device", "device")
        ids = CudaArray(Buffer(64, fill=0), (2,), typestr)
        with pytest.raises((TypeError, kf.Error), match="source"):
            shared.transfer(both.src, both.dst, ids, [0, 1])

    def test_shapes_that_are_no_lists(self, shared: kf.TransferContext) -> None:
        both = pair(small(), "device", "device")
        buffer = Buffer(256, fill=0)
        for shape, strides in (((2, 1), None), ((), None), ((2,), (16,))):
            ids = CudaArray(buffer, shape, "<i8", strides=strides)
            with pytest.raises(kf.Error, match="source"):
                shared.transfer(both.src, both.dst, ids, [0, 1])
        both.check([], [])

    @pytest.mark.parametrize("engine", ["batch", "staged", "bounce", "host"])
    def test_engines_that_cannot_read_them(self, shared: kf.TransferContext, engine: Any) -> None:
        both = pair(small(), "pinned", "device")
        with pytest.raises(kf.Unsupported, match=engine):
            shared.transfer(both.src, both.dst, device_array(SRC), device_array(DST), engine=engine)

    def test_pageable_and_host_transfers(self, shared: kf.TransferContext, ctx: kf.TransferContext) -> None:
        for src, dst in (("system", "device"), ("device", "system"), ("pinned", "system")):
            both = pair(small(), src, dst)
            with pytest.raises(kf.Unsupported):
                shared.transfer(both.src, both.dst, device_array(SRC), device_array(DST))
        both = pair(small(), "pinned", "system")
        with pytest.raises(kf.Unsupported):
            ctx.transfer(both.src, both.dst, device_array(SRC), device_array(DST))

    def test_checks_of_contents_read_host_lists(self) -> None:
        cache = Cache(Model(small(), "fc"), "pinned")
        with pytest.raises((kf.Unsupported, TypeError)):
            cache.layout.checksum(device_array([0]))


class TestOrder:
    def test_ids_written_by_the_callers_stream(self, shared: kf.TransferContext) -> None:
        both = pair(small(), "device", "pinned")
        ids = device_array([0] * 5), device_array([4] * 5)
        new = Buffer.of(np.array(SRC)), Buffer.of(np.array(DST))
        with Stream() as stream, Hold(stream) as hold:
            for array, buffer in zip(ids, new, strict=True):
                stream.copy(array.addr, buffer.addr, 40)
            job = shared.transfer(both.src, both.dst, *ids, stream=stream)
            hold.release()
            job.wait(60)
        both.check(SRC, DST)

    def test_no_ids(self, shared: kf.TransferContext) -> None:
        both = pair(small(), "device", "device")
        empty = CudaArray(Buffer(8), (0,), "<i8")
        assert shared.transfer(both.src, both.dst, empty, empty).wait(10).blocks == 0
        both.check([], [])

    def test_ids_live_as_long_as_the_job(self, shared: kf.TransferContext) -> None:

        both = pair(small(), "device", "device")
        ids = [device_array(SRC), device_array(DST)]
        alive = [weakref.ref(array) for array in ids]
        with Stream() as stream, Hold(stream) as hold:
            job = shared.transfer(both.src, both.dst, *ids, stream=stream)
            del ids
            assert all(ref() is not None for ref in alive)
            hold.release()
            job.wait(60)
        both.check(SRC, DST)
