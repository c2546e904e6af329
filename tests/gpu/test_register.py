"""kf.register_host: an engine's own host memory, pinned where it lies."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from driver import Buffer, CudaArray, Hold, Stream, read, until
from gpu_support import Cache, Pair, aligned_bytes
from reference import Model
from support import config, small

import kvferry as kf

pytestmark = pytest.mark.gpu

SRC, DST = [2, 3, 6, 0, 1], [6, 0, 5, 2, 3]
AXES = "block layer outer page head dim"


def unregistered(array: Any) -> bool:
    """Whether an array's memory is pageable again: close() leaves the work to a thread."""
    rows = array.reshape(2, -1)
    return until(lambda: kf.PhysicalLayout.from_tensors(rows, axes="block dim").memory == kf.system())


class TestRegistration:
    def test_registered_memory_is_pinned(self) -> None:
        array = aligned_bytes(1 << 20).reshape(64, -1)
        assert kf.PhysicalLayout.from_tensors(array, axes="block dim").memory.kind == "system"
        with kf.register_host(array) as registration:
            layout = kf.PhysicalLayout.from_tensors(array, axes="block dim")
            assert layout.memory == kf.pinned()
            part = kf.PhysicalLayout.from_tensors(array[3:9], axes="block dim")
            assert part.memory == kf.pinned()
            assert "1048576" in repr(registration) or "open" in repr(registration).lower()
        del layout, part
        assert unregistered(array)
        registration.close()  # twice is fine

    def test_inside_and_twice(self) -> None:
        whole = aligned_bytes(64 << 12)

        def kind(first: int, end: int) -> str:
            view = whole[first << 12 : end << 12]
            return kf.PhysicalLayout.from_tensors(view.reshape(2, -1), axes="block dim").memory.kind

        outer = kf.register_host(whole[: 32 << 12])
        inner = kf.register_host(whole[4 << 12 : 8 << 12])
        again = kf.register_host(whole[: 32 << 12])
        beside = kf.register_host(whole[32 << 12 : 48 << 12])
        assert kind(0, 32) == kind(32, 48) == "pinned" and kind(48, 64) == "system"
        outer.close()
        assert kind(0, 32) == "pinned"  # `again` still holds it
        again.close()
        assert kind(4, 8) == "pinned" and kind(32, 48) == "pinned"
        inner.close()
        beside.close()
        assert unregistered(whole) and unregistered(whole[32 << 12 :])
        kf.register_host(whole).close()

    def test_a_range_registered_in_part(self) -> None:
        """The driver cannot register a page twice, nor give back a part: refused, and nothing changes."""
        whole = aligned_bytes(64 << 12)
        with kf.register_host(whole[16 << 12 : 32 << 12]) as middle:
            for pages in ((0, 20), (30, 40), (0, 64)):
                with pytest.raises(kf.OptionError, match=f"{middle.addr:#x}"):
                    kf.register_host(whole[pages[0] << 12 : pages[1] << 12])
            for pages in ((0, 16), (32, 64)):
                kf.register_host(whole[pages[0] << 12 : pages[1] << 12]).close()
        kf.register_host(whole).close()

    def test_transfers_across_two_registrations(self, shared: kf.TransferContext) -> None:
        """Registered in pieces: no copy may straddle two registrations, whichever engine makes it."""
        model = Model(small(blocks=64), "fc")
        whole = aligned_bytes(-(-model.region_bytes // 8192) * 8192)
        half = len(whole) // 2 // 4096 * 4096
        first, second = kf.register_host(whole[:half]), kf.register_host(whole[half:])
        target = Cache(model)
        for engine in ("auto", "kernel", "batch", "staged"):
            region = whole[: model.region_bytes]
            view = model.view(region)
            array = np.ndarray(view.shape[:-1], np.uint16, region, 0, view.strides[:-1])
            layout = kf.PhysicalLayout.from_tensors(array, axes=AXES, config=config(model.geometry))
            assert layout.memory.kind == "pinned"
            values = Cache(model, "system").fill(3)
            model.store(values, [region])
            target.poison()
            shared.transfer(layout, target.layout, range(64), range(64), engine=engine).wait(60)
            target.check(values, engine)
        del layout
        first.close()
        second.close()

    def test_closing_while_a_job_reads(self, shared: kf.TransferContext) -> None:
        """close() does not pull pages from under a transfer: it refuses, or leaves them to the job."""
        both = Pair(Cache(Model(small(), "fc"), "registered"), Cache(Model(small(), "lw")))
        stream = Stream()
        with Hold(stream) as hold:
            job = shared.transfer(both.src, both.dst, SRC, DST, stream=stream)
            with suppress(kf.Busy):
                both.source.registration.close()
            hold.release()
            job.wait(60)
        both.target.check(both.expected(SRC, DST))
        stream.close()

    def test_what_cannot_be_registered(self) -> None:
        bad: Any
        for bad in (object(), None, 5, "text"):
            with pytest.raises((TypeError, kf.Error)):
                kf.register_host(bad)
        with pytest.raises((kf.LayoutError, kf.Unsupported, BufferError)):
            kf.register_host(aligned_bytes(1 << 14).reshape(4, -1)[:, ::2])  # not contiguous
        with pytest.raises((kf.LayoutError, kf.OptionError)):
            kf.register_host(np.empty(0, np.uint8))
        with pytest.raises((kf.Unsupported, kf.LayoutError, TypeError)):
            kf.register_host(CudaArray(Buffer(4096), (4096,), "|u1"))

    def test_read_only_memory(self, shared: kf.TransferContext) -> None:
        array = aligned_bytes(1 << 16)
        array[:] = 7
        array.flags.writeable = False
        with kf.register_host(array):
            source = kf.PhysicalLayout.from_tensors(array.reshape(4, -1), axes="block dim")
            target = kf.PhysicalLayout.fully_contiguous(source.config, kf.device(0))
            shared.transfer(source, target, range(4), range(4)).wait(60)
            assert (read(target.regions[0].addr, 1 << 16) == 7).all()
            with pytest.raises(kf.LayoutError, match="read-only"):
                shared.transfer(target, source, [0], [0])
            del source

    def test_the_array_lives_as_long_as_the_registration(self) -> None:
        array: Any = aligned_bytes(1 << 16).view(type("Watched", (np.ndarray,), {}))
        alive = weakref.ref(array)
        registration = kf.register_host(array)
        del array
        gc.collect()
        assert alive() is not None
        registration.close()
        gc.collect()
        kf.usable_cpus()
        assert until(lambda: alive() is None, 5)
