"""CuPy arrays, streams and events."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from driver import SIMULATED
from gpu_support import Cache
from reference import Model
from support import config, optional, small

import kvferry as kf

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(SIMULATED, reason="CuPy needs a real GPU"),
]

AXES = "block outer page head dim"
SPIN = r"""
extern "C" __global__ void spin(long long cycles) {
    long long start = clock64();
    while (clock64() - start < cycles) {}
}
"""


@pytest.fixture(scope="module")
def cupy() -> Any:
    return optional("cupy")


@pytest.fixture(scope="module")
def spin(cupy: Any) -> Any:
    kernel = cupy.RawKernel(SPIN, "spin")
    return lambda: kernel((1,), (1,), (np.int64(150_000_000),))


def test_arrays_both_ways(shared: kf.TransferContext, cupy: Any) -> None:
    array = cupy.random.randint(0, 1 << 16, (7, 2, 4, 6, 5)).astype(cupy.uint16).view(cupy.float16)
    layout = kf.PhysicalLayout.from_tensors(array, axes=AXES)
    target = Cache(Model(small(layers=1), "fc", "universal"), "pinned")
    target.poison()
    shared.transfer(layout, target.layout, range(7), range(7)).wait(60)
    want = array.view(cupy.uint8).get().reshape(7, 1, 2, 4, 6, 5, 2)
    target.check(want)


def test_stream_none_follows_cupy_s_current_stream(shared: kf.TransferContext, cupy: Any, spin: Any) -> None:
    array = cupy.zeros((7, 2, 4, 6, 5), cupy.float16)
    layout = kf.PhysicalLayout.from_tensors(array, axes=AXES)
    pool = kf.PhysicalLayout.fully_contiguous(layout.config, kf.pinned())
    # Compiled by CuPy at their first use, which takes longer than the spin.
    spin()
    array.fill(1)
    cupy.cuda.Device().synchronize()
    for stream in (cupy.cuda.Stream.null, cupy.cuda.Stream(non_blocking=True)):
        for value in (3, 4):
            with stream:
                spin()
                array.fill(value)
                job = shared.transfer(layout, pool, range(7), range(7))
                assert not job.done()
                job.wait_on(stream)
                array.fill(99)
                job.wait(60)
            assert (pool.numpy() == value).all()
            stream.synchronize()


def test_streams_and_events_as_arguments(shared: kf.TransferContext, cupy: Any, spin: Any) -> None:
    array = cupy.zeros((7, 2, 4, 6, 5), cupy.float16)
    layout = kf.PhysicalLayout.from_tensors(array, axes=AXES)
    pool = kf.PhysicalLayout.fully_contiguous(layout.config, kf.pinned())
    stream = cupy.cuda.Stream(non_blocking=True)
    for how in ("stream", "after", "event"):
        with stream:
            spin()
            array.fill(len(how))
            event = stream.record()
        options: dict[str, Any] = {
            "stream": {"stream": stream},
            "after": {"after": stream},
            "event": {"after": event},
        }[how]
        job = shared.transfer(layout, pool, range(7), range(7), **options)
        assert not job.done(), how
        job.wait(60)
        assert (pool.numpy() == len(how)).all(), how
        stream.synchronize()


def test_exported_layouts_follow_cupy_too(shared: kf.TransferContext, cupy: Any, spin: Any) -> None:
    made = kf.PhysicalLayout.fully_contiguous(config(small()), kf.device(0))
    pool = kf.PhysicalLayout.fully_contiguous(made.config, kf.pinned())
    array = cupy.asarray(made.regions[0])
    with cupy.cuda.Stream(non_blocking=True):
        spin()
        array.fill(5)
        job = shared.transfer(made, pool, range(7), range(7))
        assert not job.done()
        job.wait(60)
    assert (pool.numpy() == 5).all()


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_device_ids(shared: kf.TransferContext, cupy: Any, dtype: str) -> None:
    source, target = Cache(Model(small(), "lw")), Cache(Model(small(), "fc"), "pinned")
    values, before = source.fill(), target.poison()
    src, dst = cupy.array([3, 1], dtype), cupy.array([0, 5], dtype)
    shared.transfer(source.layout, target.layout, src, dst).wait(60)
    want = before.copy()
    want[[0, 5]] = values[[3, 1]]
    target.check(want)
    with pytest.raises((TypeError, kf.Error), match="source"):
        shared.transfer(source.layout, target.layout, cupy.array([1.0]), [0])


def test_pinned_arrays_of_cupy(shared: kf.TransferContext, cupy: Any) -> None:
    host = optional("cupyx").empty_pinned((7, 2, 4, 6, 5), np.float16)
    host[...] = 6
    source = kf.PhysicalLayout.from_tensors(host, axes=AXES)
    assert source.memory == kf.pinned()
    array = cupy.zeros((7, 2, 4, 6, 5), cupy.float16)
    target = kf.PhysicalLayout.from_tensors(array, axes=AXES)
    shared.transfer(source, target, range(7), range(7)).wait(60)
    assert bool((array == 6).all())
