from __future__ import annotations

import array
import asyncio
import collections.abc
import ctypes
import gc
import itertools
import threading
import time
import weakref
from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from reference import Model, transferred
from support import Cache, config, large, optional, owned, small

import kvferry as kf

KINDS = [
    ("fc", "NHD", "block_first"),
    ("fc", "HND", "block_first"),
    ("fc", "universal", "block_first"),
    ("lw", "NHD", "block_first"),
    ("lw", "HND", "outer_first"),
    ("split", "NHD", "block_first"),
    ("split", "HND", "block_first"),
    ("pool", "NHD", "block_first"),
    ("pool", "universal", "block_first"),
]


def pair(**changes: Any) -> tuple[Cache, Cache, Any]:
    """Source, poisoned destination, and what to expect of a copy."""
    source, target = Cache(Model(small(**changes), "lw")), Cache(Model(small(**changes), "fc", "universal"))
    values, before = source.fill(1), target.poison()

    def expected(src: Any, dst: Any, **options: Any) -> Any:
        return transferred(
            (source.model.geometry, values), (target.model.geometry, before), src, dst, **options
        )

    return source, target, expected


@pytest.mark.parametrize("src", KINDS, ids="-".join)
@pytest.mark.parametrize("dst", KINDS, ids="-".join)
def test_every_pair_of_kinds(ctx: kf.TransferContext, src: Any, dst: Any) -> None:
    source = Cache(replace(Model(small(), *src), alignment=64))
    target = Cache(replace(Model(small(blocks=9), *dst), alignment=8))
    values, before = source.fill(1), target.poison()
    src_blocks, dst_blocks = [2, 3, 6, 0, 1], [8, 0, 5, 2, 3]
    result = ctx.transfer(source.layout, target.layout, src_blocks, dst_blocks).wait(timeout=60)
    expected = transferred(
        (source.model.geometry, values), (target.model.geometry, before), src_blocks, dst_blocks
    )
    target.check(expected)
    source.check(values)
    assert (result.blocks, result.bytes) == (5, 5 * config(small()).block_bytes)
    assert (result.engine, result.direction, result.failed_blocks) == ("host", "memcpy", [])
    assert result.seconds > 0


class TestRanges:
    @pytest.mark.parametrize("layers", [range(1), range(1, 3), range(2, 3), range(3), None])
    @pytest.mark.parametrize("heads", [range(1), range(2, 5), range(5, 6), range(6), None])
    def test_layers_and_heads(
        self, ctx: kf.TransferContext, layers: range | None, heads: range | None
    ) -> None:
        source, target, expected = pair()
        result = ctx.transfer(source.layout, target.layout, [0, 4], [1, 2], layers=layers, heads=heads).wait()
        target.check(expected([0, 4], [1, 2], layers=layers, heads=heads))
        share = len(layers or range(3)) * len(heads or range(6))
        assert result.bytes == 2 * config(small()).block_bytes * share // 18

    @pytest.mark.parametrize(("src_world", "dst_world"), [(1, 3), (3, 1), (2, 3), (3, 2), (6, 1), (1, 6)])
    def test_shards_meet_by_global_head(
        self, ctx: kf.TransferContext, src_world: int, dst_world: int
    ) -> None:
        shards = [Cache(Model(small().shard(rank, src_world), "lw", "HND")) for rank in range(src_world)]
        values = [shard.fill(1) for shard in shards]
        whole = Cache(Model(small(), "fc"))
        for rank in range(dst_world):
            target = Cache(Model(small().shard(rank, dst_world), "fc", "universal"))
            target.poison()
            for shard in shards:
                a, b = shard.model.geometry, target.model.geometry
                if a.first_head < b.first_head + b.heads and b.first_head < a.first_head + a.heads:
                    ctx.transfer(shard.layout, target.layout, range(7), range(7)).wait()
                else:
                    with pytest.raises(kf.LayoutError, match="no head in common"):
                        ctx.transfer(shard.layout, target.layout, [0], [0])
            mine = whole.fill(1)[..., b.first_head : b.first_head + b.heads, :, :]
            target.check(mine)
        assert len(values) == src_world

    def test_a_range_of_heads_between_shards(self, ctx: kf.TransferContext) -> None:
        source = Cache(Model(small().shard(1, 2), "lw"))
        target = Cache(Model(small(), "split", "HND"))
        values, before = source.fill(1), target.poison()
        ctx.transfer(source.layout, target.layout, [1], [0], heads=range(4, 6)).wait()
        target.check(
            transferred((source.model.geometry, values), (small(), before), [1], [0], heads=range(4, 6))
        )
        with pytest.raises(kf.LayoutError, match=r"source: head range 2\.\.5 .* 3\.\.6"):
            ctx.transfer(source.layout, target.layout, [1], [0], heads=range(2, 5))

    @pytest.mark.parametrize("option", ["layers", "heads"])
    @pytest.mark.parametrize(
        "value",
        [range(0), range(3, 1), range(99), range(5, 99), range(1 << 40), range((1 << 63) - 2, (1 << 63) - 1)],
    )
    def test_ranges_outside_the_layout(self, ctx: kf.TransferContext, option: str, value: range) -> None:
        source, target, _ = pair()
        options: Any = {option: value}
        with pytest.raises(kf.LayoutError, match=option[:-1]):
            ctx.transfer(source.layout, target.layout, [0], [0], **options)

    @pytest.mark.parametrize("option", ["layers", "heads"])
    @pytest.mark.parametrize(
        "value",
        [
            range(-1, 2),
            range(0, 3, 2),
            range(2, 0, -1),
            range(1 << 200),
            (0, 2),
            [0, 1],
            3,
            "0:2",
            slice(0, 2),
        ],
    )
    def test_what_is_no_range(self, ctx: kf.TransferContext, option: str, value: Any) -> None:
        source, target, _ = pair()
        options: Any = {option: value}
        with pytest.raises(kf.OptionError, match=f"{option} must be a range"):
            ctx.transfer(source.layout, target.layout, [0], [0], **options)


class TestPages:
    @pytest.mark.parametrize(("src_page", "dst_page"), [(4, 12), (12, 4), (3, 12), (12, 1), (6, 6)])
    @pytest.mark.parametrize("kind", ["fc", "lw", "pool"])
    def test_page_sizes(self, ctx: kf.TransferContext, src_page: int, dst_page: int, kind: str) -> None:
        source = Cache(Model(small(page=src_page, blocks=24 // src_page), kind))
        target = Cache(Model(small(page=dst_page, blocks=24 // dst_page), "fc", "HND"))
        values, before = source.fill(1), target.poison()
        fine = min(src_page, dst_page)
        # One coarse block's worth of tokens, backwards on the finer side.
        coarse, finer = [1], list(range(max(src_page, dst_page) // fine))[::-1]
        src, dst = (coarse, finer) if src_page > dst_page else (finer, coarse)
        ctx.transfer(source.layout, target.layout, src, dst).wait()
        a, b = source.model.geometry, target.model.geometry
        target.check(transferred((a, values), (b, before), src, dst))

    def test_partial_blocks_through_finer_pages(self, ctx: kf.TransferContext) -> None:
        source, target, _ = pair(page=12)
        values, before = source.fill(2), target.poison()
        a, b = source.layout.with_page_size(4), target.layout.with_page_size(4)
        ctx.transfer(a, b, [0, 4, 5], [20, 1, 2]).wait()
        expected = before.copy()
        for src, dst in [(0, 20), (4, 1), (5, 2)]:
            s, d = 4 * (src % 3), 4 * (dst % 3)
            expected[dst // 3, :, :, d : d + 4] = values[src // 3, :, :, s : s + 4]
        target.check(expected)

    def test_slots_are_pages_of_one_token(self, ctx: kf.TransferContext) -> None:
        source, target, _ = pair()
        values, before = source.fill(2), target.poison()
        slots = [27, 3, 9]
        ctx.transfer(
            source.layout.with_page_size(1), target.layout.with_page_size(1), slots, [0, 1, 2]
        ).wait()
        expected = before.copy()
        for at, slot in enumerate(slots):
            expected[0, :, :, at] = values[slot // 4, :, :, slot % 4]
        target.check(expected)

    def test_counts_must_pair_up(self, ctx: kf.TransferContext) -> None:
        source, target = owned(Model(small(page=12), "fc")), owned(Model(small(page=4), "fc"))
        for src, dst in [([0], [0, 1]), ([0], [0, 1, 2, 3]), ([], [0]), ([0, 1], [0, 1, 2])]:
            with pytest.raises(kf.LayoutError, match="pair up"):
                ctx.transfer(source, target, src, dst)
        with pytest.raises(kf.LayoutError, match="page sizes"):
            ctx.transfer(owned(Model(small(page=6), "fc")), owned(Model(small(page=4), "fc")), [0], [0])


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


class TestCompatibility:
    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"layers": 4}, "layer counts differ: source has 3, destination has 4"),
            ({"outer": 1}, "outer dimensions differ: source has 2, destination has 1"),
            ({"dtype": "bfloat16"}, "dtype differs"),
            ({"dim": 6}, "head_dim differs"),
            ({"heads": 3}, "head counts differ"),
            ({"page": 6}, "page sizes"),
        ],
    )
    def test_layouts_that_do_not_fit(
        self, ctx: kf.TransferContext, change: dict[str, Any], words: str
    ) -> None:
        source, target = owned(Model(small(), "fc")), owned(Model(small(**change), "fc"))
        for call in (
            lambda: ctx.transfer(source, target, [0], [0]),
            lambda: ctx.plan(source, target, [0], [0]),
            lambda: ctx.route(source, target),
        ):
            with pytest.raises(kf.LayoutError, match=words):
                call()

    def test_transform(self, ctx: kf.TransferContext) -> None:
        source, target, expected = pair()
        with pytest.raises(kf.LayoutError, match=r'transform="forbid"'):
            ctx.transfer(source.layout, target.layout, [0], [0], transform="forbid")
        target.check(expected([], []))
        same = Cache(Model(small(), "fc"))
        same.poison()
        ctx.transfer(source.layout, same.layout, [0], [0], transform="forbid").wait()
        same.check(expected([0], [0]))
        word: Any = "maybe"
        with pytest.raises(kf.OptionError, match="transform"):
            ctx.transfer(source.layout, target.layout, [0], [0], transform=word)

    def test_strategy(self, ctx: kf.TransferContext) -> None:
        source, target, _ = pair()
        ctx.transfer(source.layout, target.layout, [0], [0], strategy="memcpy").wait()
        for strategy in ("h2d", "d2h", "d2d", "p2p"):
            with pytest.raises(kf.OptionError, match=f"strategy {strategy} was asked for"):
                ctx.transfer(source.layout, target.layout, [0], [0], strategy=strategy)
        word: Any = "dma"
        with pytest.raises(kf.OptionError, match="strategy must be one of"):
            ctx.transfer(source.layout, target.layout, [0], [0], strategy=word)

    def test_engines(self, ctx: kf.TransferContext) -> None:
        source, target, expected = pair()
        engine: Any
        for engine in ("auto", "host"):
            assert ctx.transfer(source.layout, target.layout, [0], [0], engine=engine).wait().engine == "host"
        for engine in ("batch", "kernel", "staged", "disk", "remote"):
            with pytest.raises(kf.Unsupported, match=engine):
                ctx.transfer(source.layout, target.layout, [1], [1], engine=engine)
        word: Any = "warp"
        with pytest.raises(kf.OptionError, match="engine must be"):
            ctx.transfer(source.layout, target.layout, [1], [1], engine=word)
        target.check(expected([0], [0]))

    def test_gpu_options_are_refused_by_name(self, ctx: kf.TransferContext) -> None:
        source, target, _ = pair()
        options: dict[str, Any]
        for options in ({"stream": 0}, {"stream": object()}, {"num_sms": 4}, {"num_sms": 0}):
            for call in (
                lambda: ctx.transfer(source.layout, target.layout, [0], [0], **options),  # noqa: B023
                lambda: ctx.plan(source.layout, target.layout, [0], [0], **options),  # noqa: B023
                lambda: ctx.route(source.layout, target.layout, **options),  # noqa: B023
            ):
                with pytest.raises(kf.Unsupported, match=f"{next(iter(options))}="):
                    call()
        bad: Any
        for bad, error in [
            (-1, kf.OptionError),
            (1 << 90, kf.OptionError),
            ("4", TypeError),
            (1.0, TypeError),
        ]:
            with pytest.raises(error, match="num_sms"):
                ctx.transfer(source.layout, target.layout, [0], [0], num_sms=bad)

    def test_arguments_have_types(self, ctx: kf.TransferContext) -> None:
        layout: Any = owned(Model(small(), "fc"))
        bad: Any = ctx.transfer
        for arguments in [(layout,), (layout, layout, [0]), (None, layout, [0], [1]), (layout, 3, [0], [1])]:
            with pytest.raises(TypeError):
                bad(*arguments)
        with pytest.raises(TypeError):
            bad(layout, layout, [0], [1], range(3))
        with pytest.raises(TypeError):
            bad(layout, layout, [0], [1], engine=3)
        with pytest.raises(TypeError, match="prio"):
            bad(layout, layout, [0], [1], prio=3)


class TestContext:
    def test_devices_and_threads(self) -> None:
        for device in (None, "cpu"):
            with kf.TransferContext(device) as ctx:  # type: ignore[arg-type,unused-ignore]
                assert 1 <= ctx.threads <= 16
        with kf.TransferContext(threads=3) as ctx:
            assert ctx.threads == 3
            assert repr(ctx) == "TransferContext(host, 3 threads, 0 in flight)"
        bad: Any
        for bad in ("gpu", "cuda:0", "", -1, 1.5, 1 << 32, 1 << 200, [], b"cpu"):
            with pytest.raises(kf.OptionError, match="device must be"):
                kf.TransferContext(bad)
        for bad in (0, -1, 1025, 1 << 70):
            with pytest.raises(kf.OptionError, match="threads"):
                kf.TransferContext(threads=bad)
        for bad in (1.5, "2"):
            with pytest.raises(TypeError, match="threads"):
                kf.TransferContext(threads=bad)

    def test_closing(self) -> None:
        source, target, _ = pair()
        ctx = kf.TransferContext(threads=1)
        route = ctx.route(source.layout, target.layout)
        plan = route.plan([0], [0])
        ctx.close()
        ctx.close()
        ctx.close(timeout=0)
        assert repr(ctx) == "TransferContext(closed)"
        for call in (
            lambda: ctx.transfer(source.layout, target.layout, [0], [0]),
            lambda: ctx.plan(source.layout, target.layout, [0], [0]),
            lambda: ctx.route(source.layout, target.layout),
            lambda: route([0], [0]),
            lambda: route([], []),
            lambda: ctx.threads,
            lambda: ctx.in_flight,
        ):
            with pytest.raises(kf.ClosedError):
                call()
        assert plan.explain()

    def test_closing_waits(self) -> None:
        src, dst, ids = large()
        with kf.TransferContext(threads=1) as ctx:
            jobs = [ctx.transfer(src, dst, ids, ids) for _ in range(3)]
        assert all(job.done() for job in jobs)

    def test_closing_with_a_limit(self) -> None:
        src, dst, ids = large()
        ctx = kf.TransferContext(threads=1)
        jobs = [ctx.transfer(src, dst, ids, ids) for _ in range(3)]
        with pytest.raises(kf.WaitTimeout):
            ctx.close(timeout=0)
        with pytest.raises(kf.ClosedError):
            ctx.transfer(src, dst, [0], [0])
        ctx.close(timeout=60)
        assert all(job.done() for job in jobs)

    def test_an_exception_in_the_block_is_not_hidden(self) -> None:
        with pytest.raises(ZeroDivisionError), kf.TransferContext() as ctx:
            _ = 1 // (ctx.threads - ctx.threads)

    def test_in_flight(self, lazy: kf.TransferContext) -> None:
        src, dst, ids = large()
        jobs = [lazy.transfer(src, dst, ids, ids) for _ in range(4)]
        assert 1 <= lazy.in_flight <= 4
        for job in jobs:
            job.wait()
        assert lazy.in_flight == 0

    def test_routes(self, ctx: kf.TransferContext) -> None:
        source, target, expected = pair()
        route = ctx.route(source.layout, target.layout, layers=range(1, 2), heads=range(2, 4))
        route([3, 5], [0, 1]).wait()
        target.check(expected([3, 5], [0, 1], layers=range(1, 2), heads=range(2, 4)))
        assert route.plan([3, 5], [0, 1]).blocks == 2
        with pytest.raises(kf.BlockIdError):
            route([7], [0])
        bad: Any = route
        with pytest.raises(TypeError):
            bad([0])
        with pytest.raises(TypeError):
            bad([0], [0], engine="host")


class TestWaiting:
    def test_timeouts(self, lazy: kf.TransferContext) -> None:
        src, dst, ids = large()
        jobs = [lazy.transfer(src, dst, ids, ids) for _ in range(3)]
        last = jobs[-1]
        for timeout in (0, 0.0, 1e-9, False):
            with pytest.raises(kf.WaitTimeout) as caught:
                last.wait(timeout)
            assert caught.value.seconds == pytest.approx(float(timeout), abs=1e-9)
            assert isinstance(caught.value, TimeoutError)
        for timeout in (float("nan"), -1, -1e-9, float("-inf"), -(10**400)):
            with pytest.raises(kf.OptionError, match="timeout"):
                last.wait(timeout)
            with pytest.raises(kf.OptionError, match="timeout"):
                lazy.close(timeout)
        bad: Any
        for bad in ("1", [], object()):
            with pytest.raises(TypeError, match="timeout"):
                last.wait(bad)
        endless: Any
        for endless in (float("inf"), 1e300, 10**400, None, 60, np.float32(60)):
            assert last.wait(endless).bytes == 64 << 20
        assert last.wait(timeout=0).bytes == 64 << 20

    def test_a_timeout_is_kept(self, lazy: kf.TransferContext) -> None:
        src, dst, ids = large(256)
        jobs = [lazy.transfer(src, dst, ids, ids, after=None) for _ in range(4)]
        start = time.monotonic()
        with pytest.raises(kf.WaitTimeout):
            # Held behind the others, so that waiting cannot help it along.
            lazy.transfer(src, dst, ids, ids, after=jobs).wait(0.05)
        assert 0.05 <= time.monotonic() - start < 5

    def test_result_of_a_pending_job(self, lazy: kf.TransferContext) -> None:
        src, dst, ids = large()
        first = lazy.transfer(src, dst, ids, ids)
        job = lazy.transfer(src, dst, ids, ids, after=first)
        assert not job.done() and repr(job) == "Transfer(pending)"
        with pytest.raises(kf.Busy):
            job.result()
        result = job.wait()
        assert job.done() and first.done()
        assert job.result().bytes == result.bytes and "bytes in" in repr(job)
        assert repr(result).startswith("TransferResult(bytes=67108864, blocks=64, seconds=")

    def test_many_threads_wait_for_one(self, ctx: kf.TransferContext) -> None:
        src, dst, ids = large()
        job = ctx.transfer(src, dst, ids, ids)
        results: list[int] = []
        threads = [threading.Thread(target=lambda: results.append(job.wait(60).bytes)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [64 << 20] * 8

    def test_after(self, lazy: kf.TransferContext) -> None:
        first, second, third = (
            Cache(Model(small(blocks=3000), "fc", order)) for order in ("NHD", "HND", "universal")
        )
        values = first.fill(1)
        second.poison()
        third.poison()
        ids = np.arange(3000)
        for _ in range(5):
            a = lazy.transfer(first.layout, second.layout, ids, ids)
            b = lazy.transfer(second.layout, third.layout, ids, ids, after=a)
            c = lazy.transfer(third.layout, second.layout, ids, ids[::-1], after=[a, b])
            d = lazy.transfer(second.layout, third.layout, ids, ids[::-1], after=(c,))
            assert d.wait(60).blocks == 3000
            assert a.done() and b.done() and c.done()
            third.check(values)

    def test_after_what_is_done_and_after_nothing(self, ctx: kf.TransferContext) -> None:
        source, target, expected = pair()
        done = ctx.transfer(source.layout, target.layout, [0], [0])
        done.wait()
        options: Any
        for options in ([], (), None, done, [done, done]):
            ctx.transfer(source.layout, target.layout, [1], [1], after=options).wait(60)
        ctx.transfer(source.layout, target.layout, [], [], after=[done]).wait(60)
        with kf.TransferContext() as other:
            other.transfer(source.layout, target.layout, [2], [2], after=done).wait(60)
        target.check(expected([0, 1, 2], [0, 1, 2]))
        for options in (3, "x", [3], [None], {done}, iter([done]), object()):
            with pytest.raises(kf.OptionError, match="after"):
                ctx.transfer(source.layout, target.layout, [3], [3], after=options)


class TestAwait:
    def test_one(self, ctx: kf.TransferContext) -> None:
        async def main() -> kf.TransferResult:
            src, dst, ids = large()
            return await ctx.transfer(src, dst, ids, ids)

        assert asyncio.run(main()).bytes == 64 << 20

    def test_a_finished_job(self, ctx: kf.TransferContext) -> None:
        source, target, _ = pair()

        async def main() -> int:
            job = ctx.transfer(source.layout, target.layout, [0], [0])
            job.wait()
            return (await job).blocks + (await job).blocks

        assert asyncio.run(main()) == 2

    def test_many_at_once(self, ctx: kf.TransferContext) -> None:
        src, dst, _ = large(8)

        async def one(index: int) -> int:
            job = ctx.transfer(src, dst, [index % 8], [index % 8])
            if index % 3 == 0:
                await asyncio.sleep(0)
            return (await job).blocks

        async def main() -> list[int]:
            return await asyncio.gather(*[one(index) for index in range(300)])

        assert asyncio.run(main()) == [1] * 300

    def test_the_loop_runs_meanwhile(self, lazy: kf.TransferContext) -> None:
        src, dst, ids = large(128)

        async def main() -> int:
            jobs = [lazy.transfer(src, dst, ids, ids) for _ in range(3)]
            waiting = asyncio.gather(*[_result(job) for job in jobs])
            ticks = 0
            while not waiting.done():
                ticks += 1
                await asyncio.sleep(0.001)
            await waiting
            return ticks

        assert asyncio.run(main()) >= 3

    def test_two_loops_one_after_the_other_and_at_once(self, ctx: kf.TransferContext) -> None:
        src, dst, ids = large(16)

        async def main() -> int:
            return sum([(await ctx.transfer(src, dst, [i], [i])).blocks for i in ids])

        assert asyncio.run(main()) == 16
        assert asyncio.run(main()) == 16
        results: list[int] = []
        threads = [threading.Thread(target=lambda: results.append(asyncio.run(main()))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [16] * 4

    def test_one_job_in_two_loops(self, lazy: kf.TransferContext) -> None:
        src, dst, ids = large(128)
        job = lazy.transfer(src, dst, ids, ids)
        results: list[int] = []

        def other() -> None:
            results.append(asyncio.run(_result(job)).blocks)

        threads = [threading.Thread(target=other) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [128] * 3

    def test_cancelling_does_not_stop_the_job(self, lazy: kf.TransferContext) -> None:
        src, dst, ids = large(128)

        async def main() -> None:
            job = lazy.transfer(src, dst, ids, ids)
            task = asyncio.create_task(_result(job))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(_result(lazy.transfer(src, dst, ids, ids, after=job)), 1e-4)
            assert (await job).blocks == 128

        asyncio.run(main())

    def test_a_loop_that_closes_first(self, lazy: kf.TransferContext) -> None:
        src, dst, ids = large(128)
        first = lazy.transfer(src, dst, ids, ids)
        jobs = [lazy.transfer(src, dst, ids, ids, after=first) for _ in range(2)]
        loop = asyncio.new_event_loop()
        gone = weakref.ref(loop)

        async def main() -> None:
            for job in jobs:
                task = asyncio.ensure_future(_result(job))
                await asyncio.sleep(0)
                task.cancel()

        loop.run_until_complete(main())
        loop.close()
        for job in jobs:
            assert job.wait(60).blocks == 128
        assert asyncio.run(_result(jobs[0])).blocks == 128
        del loop, main
        gc.collect()
        assert gone() is None, "pending futures keep a closed loop"

    def test_outside_a_loop(self, ctx: kf.TransferContext) -> None:
        source, target, _ = pair()
        job = ctx.transfer(source.layout, target.layout, [0], [0])
        with pytest.raises(RuntimeError, match="no running event loop"):
            next(job.__await__())


async def _result(job: kf.Transfer) -> kf.TransferResult:
    return await job


def test_many_jobs_from_many_threads() -> None:
    src, dst, _ = large(32)
    with kf.TransferContext(threads=3) as ctx:
        route = ctx.route(src, dst)
        failures: list[BaseException] = []

        def submit(worker: int) -> None:
            try:
                for turn in range(60):
                    ids = [(worker + 4 * turn) % 32]
                    job = route(ids, ids)
                    if turn % 2:
                        job.wait(60)
            except kf.Error as error:
                failures.append(error)

        threads = [threading.Thread(target=submit, args=(worker,)) for worker in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures and dst.num_blocks == 32
