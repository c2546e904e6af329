"""memcpy_batch and vectorized_copy: the reference's two primitives, on raw addresses."""

from __future__ import annotations

import time
from array import array
from typing import Any

import numpy as np
import pytest
from driver import (
    Buffer,
    CudaArray,
    DefaultStream,
    Hold,
    Mark,
    Stream,
    capture,
    device_array,
    read,
    until,
    write,
)
from gpu_support import aligned_bytes, scaled

import kvferry as kf

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True, scope="module")
def opened() -> Any:
    """The first use of a device loads kernels, which may wait for a held stream."""
    with kf.TransferContext(0) as ctx:
        kf.memcpy_batch([], [], [], stream=1)
        yield ctx


MODES = ["batched_with_fallback", "batch_without_fallback", "fallback_only"]
SIZES = [1, 7, 64, 0, 4096, 333, 16, 100_000]


class Copies:
    """Ranges of many sizes in one buffer, scattered over another between guard bytes."""

    def __init__(self, way: str, sizes: list[int] = SIZES, seed: int = 1, align: int = 1) -> None:
        rng = np.random.default_rng(seed)
        total = sum(sizes) + 64 * len(sizes) + 64
        self.data = rng.integers(0, 256, total, np.uint8)
        self.pinned = kf.PhysicalLayout.fully_contiguous(
            kf.LayoutConfig(
                num_blocks=1, num_layers=1, outer_dim=1, page_size=1, inner_dim=total, dtype="uint8"
            ),
            kf.pinned(),
        )
        host, first, second = self.pinned.regions[0].addr, Buffer(total), Buffer(total)
        self.keep = first, second
        self.src_addr, self.dst_addr = {
            "h2d": (host, first.addr),
            "d2h": (first.addr, host),
            "d2d": (first.addr, second.addr),
        }[way]
        write(self.src_addr, self.data)
        write(self.dst_addr, np.full(total, 0x5C, np.uint8))
        order = rng.permutation(len(sizes))
        src_at, dst_at = np.zeros(len(sizes), np.int64), np.zeros(len(sizes), np.int64)
        at = 0
        for index, size in enumerate(sizes):
            src_at[index] = at
            at += -(-(size + 13) // align) * align
        at = 16
        for index in order:
            dst_at[index] = at
            at += -(-(sizes[index] + 5) // align) * align
        assert at <= total
        self.src, self.dst = self.src_addr + src_at, self.dst_addr + dst_at
        self.sizes = np.array(sizes, np.int64)
        self.want = np.full(total, 0x5C, np.uint8)
        for a, b, size in zip(src_at, dst_at, sizes, strict=True):
            self.want[b : b + size] = self.data[a : a + size]

    def check(self) -> None:
        assert (read(self.dst_addr, len(self.want)) == self.want).all()
        assert (read(self.src_addr, len(self.data)) == self.data).all()

    def untouched(self) -> None:
        assert (read(self.dst_addr, len(self.want)) == 0x5C).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", ["h2d", "d2h", "d2d"])
class TestMemcpyBatch:
    @pytest.mark.parametrize("kind", ["own", "legacy-0", "legacy-1", "per-thread"])
    def test_sizes_of_every_kind(self, way: str, mode: Any, kind: str) -> None:
        copies = Copies(way)
        defaults = {"legacy-0": 0, "legacy-1": 1, "per-thread": 2}
        stream = DefaultStream(defaults[kind]) if kind in defaults else Stream()
        with Hold(stream) as hold:
            kf.memcpy_batch(copies.src, copies.dst, copies.sizes, stream=stream.handle, mode=mode)
            mark = Mark(stream)
            time.sleep(0.01)
            assert not mark.reached
            copies.untouched()
            hold.release()
            assert until(lambda: mark.reached)
        stream.synchronize()
        copies.check()
        stream.close()

    @pytest.mark.parametrize("shape", ["list", "array", "uint64", "int32-sizes", "tuple"])
    def test_buffers_of_addresses(self, way: str, mode: Any, shape: str) -> None:
        copies = Copies(way)
        make: dict[str, Any] = {
            "list": lambda values: [int(value) for value in values],
            "tuple": lambda values: tuple(int(value) for value in values),
            "array": lambda values: array("Q", [int(value) for value in values]),
            "uint64": lambda values: values.astype(np.uint64),
            "int32-sizes": lambda values: values,
        }
        sizes = copies.sizes.astype(np.int32) if shape == "int32-sizes" else make[shape](copies.sizes)
        with Stream() as stream:
            kf.memcpy_batch(make[shape](copies.src), make[shape](copies.dst), sizes, stream=stream, mode=mode)
            stream.synchronize()
        copies.check()

    def test_nothing(self, way: str, mode: Any) -> None:
        copies = Copies(way)
        with Stream() as stream:
            kf.memcpy_batch([], [], [], stream=stream, mode=mode)
            kf.memcpy_batch([copies.src_addr], [copies.dst_addr], [0], stream=stream, mode=mode)
            kf.memcpy_batch([0], [0], [0], stream=stream, mode=mode)
            stream.synchronize()
        copies.untouched()

    def test_many(self, way: str, mode: Any) -> None:
        """More than one call of the driver takes."""
        copies = Copies(way, [32] * scaled(20_000, 9000))
        with Stream() as stream:
            kf.memcpy_batch(copies.src, copies.dst, copies.sizes, stream=stream, mode=mode)
            stream.synchronize()
        copies.check()

    def test_lengths_that_differ(self, way: str, mode: Any) -> None:
        copies = Copies(way)
        a, b, sizes = list(copies.src), list(copies.dst), list(copies.sizes)
        with Stream() as stream:
            for wrong in ((a[1:], b, sizes), (a, b[1:], sizes), (a, b, sizes[1:]), (a, [], sizes)):
                with pytest.raises((kf.OptionError, kf.LayoutError), match="equally long"):
                    kf.memcpy_batch(*wrong, stream=stream, mode=mode)
            stream.synchronize()
        copies.untouched()

    def test_values_that_are_wrong(self, way: str, mode: Any) -> None:
        copies = Copies(way)
        a, b = int(copies.src[0]), int(copies.dst[0])
        with Stream() as stream:
            wrong: Any
            for wrong in (([-1], [b], [1]), ([a], [b], [-1]), ([a], [1 << 70], [1]), ([a], [b], [1.5])):
                with pytest.raises((kf.Error, TypeError)):
                    kf.memcpy_batch(*wrong, stream=stream, mode=mode)
            for wrong in (([0], [b], [1]), ([a], [0], [1])):
                with pytest.raises(kf.Error):
                    kf.memcpy_batch(*wrong, stream=stream, mode=mode)
        copies.untouched()


def test_fallback_under_capture() -> None:
    """Copy nodes, one for each copy; the batch call cannot be captured and says so."""
    copies = Copies("d2d")
    arguments = copies.src, copies.dst, copies.sizes
    with Stream() as stream:
        for mode in ("batched_with_fallback", "fallback_only"):
            write(copies.dst_addr, np.full(len(copies.want), 0x5C, np.uint8))

            def body(mode: Any = mode) -> None:
                kf.memcpy_batch(*arguments, stream=stream, mode=mode)

            graph = capture(stream, body)
            copies.untouched()
            graph.replay(stream)
            copies.check()
            graph.close()

        def refused() -> None:
            with pytest.raises(kf.Error, match="captur"):
                kf.memcpy_batch(*arguments, stream=stream, mode="batch_without_fallback")

        capture(stream, refused).close()


def test_an_unknown_mode() -> None:
    copies = Copies("d2d")
    bad: Any = "fast"
    with Stream() as stream, pytest.raises(kf.OptionError, match="fast"):
        kf.memcpy_batch(copies.src, copies.dst, copies.sizes, stream=stream, mode=bad)


class TestVectorizedCopy:
    @pytest.mark.parametrize("way", ["h2d", "d2h", "d2d"])
    @pytest.mark.parametrize("nbytes", [1, 3, 16, 17, 132, 576, 584, 656, 4096, 32_768, 100_003])
    def test_any_size_and_alignment(self, way: str, nbytes: int) -> None:
        pairs = 40 if nbytes < 5000 else 5
        copies = Copies(way, [nbytes] * pairs)
        with Stream() as stream:
            kf.vectorized_copy(device_array(copies.src), device_array(copies.dst), nbytes, stream=stream)
            stream.synchronize()
        copies.check()

    def test_more_pairs_than_a_grid_axis_holds(self) -> None:
        copies = Copies("d2d", [24] * scaled(70_000, 2000), align=8)
        with Stream() as stream:
            kf.vectorized_copy(
                device_array(copies.src, np.uint64), device_array(copies.dst, np.uint64), 24, stream=stream
            )
            stream.synchronize()
        copies.check()

    @pytest.mark.parametrize("handle", [0, 1, 2])
    def test_default_streams(self, handle: int) -> None:
        copies = Copies("d2d", [100] * 20)
        tables = device_array(copies.src), device_array(copies.dst)
        stream = DefaultStream(handle)
        with Hold(stream) as hold:
            kf.vectorized_copy(*tables, 100, stream=handle)
            mark = Mark(stream)
            time.sleep(0.01)
            copies.untouched()
            hold.release()
            assert until(lambda: mark.reached)
        stream.synchronize()
        copies.check()

    def test_under_capture(self) -> None:
        copies = Copies("d2d", [100] * 20)
        tables = device_array(copies.src), device_array(copies.dst)
        with Stream() as stream:
            graph = capture(stream, lambda: kf.vectorized_copy(*tables, 100, stream=stream))
            copies.untouched()
            graph.replay(stream)
            graph.close()
        copies.check()

    def test_tables_in_pinned_memory(self) -> None:
        """The GPU reads them where they lie; they must stay until the copy is done."""
        copies = Copies("d2d", [100] * 20)
        whole = aligned_bytes(8192)
        with kf.register_host(whole):
            tables = whole[:160].view(np.int64), whole[4096:4256].view(np.int64)
            tables[0][:], tables[1][:] = copies.src, copies.dst
            with Stream() as stream:
                kf.vectorized_copy(*tables, 100, stream=stream)
                stream.synchronize()
        copies.check()

    def test_nothing(self) -> None:
        empty = CudaArray(Buffer(8), (0,), "<i8")
        copies = Copies("d2d", [100] * 3)
        with Stream() as stream:
            kf.vectorized_copy(empty, empty, 100, stream=stream)
            kf.vectorized_copy(device_array(copies.src), device_array(copies.dst), 0, stream=stream)
            stream.synchronize()
        copies.untouched()

    def test_what_is_refused(self) -> None:
        copies = Copies("d2d", [100] * 3)
        a, b = device_array(copies.src), device_array(copies.dst)
        with Stream() as stream:
            for wrong in (
                (a, device_array(copies.dst[:2]), 100),
                (device_array(copies.src, np.int32), b, 100),
                (device_array(copies.src, np.float64), b, 100),
                (a, b, -1),
                (a, b, 1 << 70),
            ):
                with pytest.raises((kf.Error, TypeError)):
                    kf.vectorized_copy(*wrong, stream=stream)
            # Tables in pageable memory would be read by the GPU: refused by name.
            with pytest.raises((kf.Unsupported, TypeError), match="memory"):
                kf.vectorized_copy(copies.src, copies.dst, 100, stream=stream)
        copies.untouched()
