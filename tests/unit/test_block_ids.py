from __future__ import annotations

import array
import collections.abc
import ctypes
import itertools
from collections import deque
from typing import Any

import numpy as np
import pytest
from reference import Model, transferred
from support import Cache, optional, owned, pair, small

import kvferry as kf


class Sequence:
    """A sequence that is none of the built-in ones, and may lie about its length."""

    def __init__(self, items: list[int], length: int | None = None) -> None:
        self.items, self.length = items, length

    def __len__(self) -> int:
        return len(self.items) if self.length is None else self.length

    def __getitem__(self, index: int) -> int:
        return self.items[index]


class TestIds:
    SRC = (5, 0, 3)
    DST = (1, 6, 2)

    @pytest.mark.parametrize(
        "make",
        [
            list,
            tuple,
            *[(lambda ids, code=code: array.array(code, ids)) for code in "bBhHiIlLqQ"],
            *[
                (lambda ids, dtype=dtype: np.array(ids, dtype))
                for dtype in (
                    "int8",
                    "uint8",
                    "int16",
                    "uint16",
                    "int32",
                    "uint32",
                    "int64",
                    "uint64",
                    ">i4",
                    ">u8",
                )
            ],
            lambda ids: memoryview(array.array("i", ids)),
            lambda ids: np.repeat(np.array(ids, np.int64), 3)[::3],
            lambda ids: np.array(ids[::-1], np.int32)[::-1],
            lambda ids: np.array([ids, ids], np.int64).T[:, 0],
            lambda ids: np.frombuffer(b"x" + np.array(ids, np.int64).tobytes(), np.int64, offset=1),
            lambda ids: [np.int64(value) for value in ids],
            lambda ids: [np.uint8(value) for value in ids],
            bytes,
            bytearray,
            lambda ids: (ctypes.c_int32 * 3)(*ids),
            lambda ids: (ctypes.c_uint64 * 3)(*ids),
        ],
    )
    def test_whatever_holds_integers(self, ctx: kf.TransferContext, make: Any) -> None:
        source, target, expected = pair()
        ctx.transfer(source.layout, target.layout, make(self.SRC), make(self.DST)).wait()
        target.check(expected(self.SRC, self.DST))

    def test_ranges_and_deques(self, ctx: kf.TransferContext) -> None:
        source, target, expected = pair()
        ctx.transfer(source.layout, target.layout, range(6, 0, -2), deque([1, 6, 2])).wait()
        target.check(expected([6, 4, 2], [1, 6, 2]))

    def test_torch_tensors(self, ctx: kf.TransferContext) -> None:
        torch = optional("torch")
        for dtype in (torch.int32, torch.int64, torch.uint8):
            source, target, expected = pair()
            src, dst = torch.tensor(self.SRC, dtype=dtype), torch.tensor(self.DST, dtype=dtype)
            ctx.transfer(source.layout, target.layout, src, dst).wait()
            target.check(expected(self.SRC, self.DST))
        with pytest.raises(TypeError, match="integers"):
            ctx.plan(source.layout, target.layout, torch.tensor([0.0]), [0])

    @pytest.mark.parametrize(
        "make", [list, tuple, lambda _: range(0), lambda _: np.zeros(0, np.int64), lambda _: b""]
    )
    def test_none_at_all(self, ctx: kf.TransferContext, make: Any) -> None:
        source, target, expected = pair()
        job = ctx.transfer(source.layout, target.layout, make([]), make([]))
        assert job.done() and job.result().bytes == 0 and job.wait(0).blocks == 0
        target.check(expected([], []))

    @pytest.mark.parametrize(
        "ids",
        [
            [7],
            [-1],
            [1 << 31],
            [(1 << 32) - 1],
            [1 << 32],
            [-(1 << 40)],
            [1 << 63],
            [1 << 64],
            [(1 << 64) + 3],
            [1 << 130],
            [-(1 << 130)],
            np.array([7], np.int32),
            np.array([-1], np.int8),
            np.array([-1], np.int32),
            np.array([-1], np.int64),
            np.array([1 << 32], np.int64),
            np.array([-(1 << 63)], np.int64),
            np.array([(1 << 64) - 1], np.uint64),
            np.array([7], ">i8"),
            range(7, 8),
            range(-1, 0),
        ],
    )
    @pytest.mark.parametrize("side", ["source", "destination"])
    def test_out_of_range(self, ctx: kf.TransferContext, ids: Any, side: str) -> None:
        source, target, expected = pair()
        src, dst = (ids, [0]) if side == "source" else ([0], ids)
        with pytest.raises(kf.BlockIdError, match=f"^{side} block id") as caught:
            ctx.transfer(source.layout, target.layout, src, dst)
        error = caught.value
        value = min(max(int(ids[0]), -(1 << 63)), (1 << 63) - 1)
        assert (error.side, error.index, error.value, error.limit) == (side, 0, value, 7)
        assert isinstance(error, IndexError)
        target.check(expected([], []))

    def test_the_first_bad_one_is_named(self, ctx: kf.TransferContext) -> None:
        source, target, _ = pair()
        for make in (list, lambda ids: np.array(ids, np.int64)[::1], lambda ids: np.repeat(ids, 2)[::2]):
            with pytest.raises(kf.BlockIdError) as caught:
                ctx.transfer(source.layout, target.layout, make([0, 1, -5, 9]), [0, 1, 2, 3])
            assert (caught.value.index, caught.value.value) == (2, -5)

    def test_the_limit_is_in_the_layout_s_own_pages(self, ctx: kf.TransferContext) -> None:
        source, target = owned(Model(small(page=12), "fc")), owned(Model(small(page=4), "fc"))
        for bad in ([7], np.array([7])):
            with pytest.raises(kf.BlockIdError) as caught:
                ctx.transfer(source, target, bad, [0, 1, 2])
            assert (caught.value.value, caught.value.limit) == (7, 7)

    @pytest.mark.parametrize(
        "ids",
        [
            [1.0],
            ["1"],
            [None],
            [[1]],
            [True],
            [object()],
            [np.float32(1)],
            [np.bool_(True)],
            np.array([1.0]),
            np.array([True]),
            np.array(["1"]),
            np.array([1], object),
            np.array([1j]),
            array.array("d", [1]),
            array.array("f", [1]),
            "1",
            "",
            None,
            3,
            1.5,
            np.int64(1),
            np.array(1),
            {1},
            {1: 2},
            iter([1]),
            (value for value in [1]),
            itertools.count(),
            object(),
            Sequence([1]),
        ],
    )
    def test_what_holds_no_integers(self, ctx: kf.TransferContext, ids: Any) -> None:
        source, target, _ = pair()
        with pytest.raises(TypeError):
            ctx.transfer(source.layout, target.layout, ids, [0])
        with pytest.raises(TypeError):
            ctx.plan(source.layout, target.layout, [0], ids)
        with pytest.raises(TypeError):
            ctx.route(source.layout, target.layout)([0], ids)

    def test_dimensions(self, ctx: kf.TransferContext) -> None:
        source, target, _ = pair()
        for ids in (np.zeros((1, 1), np.int64), np.zeros((1, 0), np.int64)):
            with pytest.raises(kf.LayoutError, match="one-dimensional, got 2"):
                ctx.transfer(source.layout, target.layout, ids, [0])

    def test_lengths_that_lie(self, ctx: kf.TransferContext) -> None:
        source, target, _ = pair()
        collections.abc.Sequence.register(Sequence)
        for length in (0, 1, 1 << 40, (1 << 63) - 1, 1 << 70, -1):
            ctx.transfer(source.layout, target.layout, Sequence([2], length), [0]).wait()
        for ids in (range(1 << 60), range(1 << 70)):
            with pytest.raises(kf.BlockIdError) as caught:
                ctx.transfer(source.layout, target.layout, ids, [0])
            assert (caught.value.index, caught.value.value) == (7, 7)

    def test_sequences_that_raise(self, ctx: kf.TransferContext) -> None:
        class Bad:
            def __index__(self) -> int:
                raise ZeroDivisionError

        source, target, _ = pair()
        with pytest.raises(ZeroDivisionError):
            ctx.transfer(source.layout, target.layout, [Bad()], [0])

    def test_a_list_that_changes_while_read(self, ctx: kf.TransferContext) -> None:
        class Eater:
            def __index__(self) -> int:
                ids.clear()
                return 1

        source, target, _ = pair()
        ids: list[Any] = [Eater(), Eater(), 2]
        with pytest.raises(kf.LayoutError, match="pair up"):
            ctx.transfer(source.layout, target.layout, ids, [0, 1, 2])

    def test_duplicates(self, ctx: kf.TransferContext) -> None:
        source, target, expected = pair()
        with pytest.raises(kf.DuplicateBlockError) as caught:
            ctx.transfer(source.layout, target.layout, [0, 1, 2, 3], [1, 5, 2, 5])
        assert (caught.value.value, caught.value.first, caught.value.second) == (5, 1, 3)
        assert isinstance(caught.value, ValueError)
        target.check(expected([], []))
        ctx.transfer(source.layout, target.layout, [4, 4, 4], [0, 1, 2]).wait()
        target.check(expected([4, 4, 4], [0, 1, 2]))

    def test_overlap(self, ctx: kf.TransferContext) -> None:
        cache = Cache(Model(small(), "fc"))
        values = cache.fill(1)
        with pytest.raises(kf.OverlapError) as caught:
            ctx.transfer(cache.layout, cache.layout, [0, 1, 2], [2, 3, 1])
        error = caught.value
        assert error.src_block == error.dst_block and error.src_block in (1, 2)
        assert error.address == cache.layout.region(error.src_block, 0).addr
        assert isinstance(error, ValueError)
        cache.check(values)
        ctx.transfer(cache.layout, cache.layout, [0, 1], [3, 2]).wait()
        cache.check(transferred((small(), values), (small(), values), [0, 1], [3, 2]))

    def test_overlap_between_layouts(self, ctx: kf.TransferContext) -> None:
        raw = np.zeros((8, 4, 16), np.uint8)
        wrap = kf.PhysicalLayout.from_tensors
        low, high = wrap(raw[:6], axes="block page dim"), wrap(raw[2:], axes="block page dim")
        ctx.transfer(low, high, [0, 1], [4, 5]).wait()
        with pytest.raises(kf.OverlapError):
            ctx.transfer(low, high, [4], [2])
        k, v = raw[:, :2], raw[:, 2:]
        ctx.transfer(
            wrap(k, axes="block page dim"), wrap(v, axes="block page dim"), range(8), range(8)
        ).wait()
