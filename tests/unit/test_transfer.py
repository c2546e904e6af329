from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from reference import Model, transferred
from support import Cache, config, owned, pair, small

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
        for options, error in (
            ({"stream": 0}, kf.Unsupported),
            ({"stream": 1 << 40}, kf.Unsupported),
            ({"num_sms": 4}, kf.Unsupported),
            ({"stream": object()}, kf.OptionError),
            ({"stream": True}, kf.OptionError),
            ({"stream": -1}, kf.OptionError),
            ({"num_sms": 0}, kf.OptionError),
        ):
            for call in (
                lambda: ctx.transfer(source.layout, target.layout, [0], [0], **options),  # noqa: B023
                lambda: ctx.plan(source.layout, target.layout, [0], [0], **options),  # noqa: B023
                lambda: ctx.route(source.layout, target.layout, **options)([0], [0]),  # noqa: B023
            ):
                with pytest.raises(error, match=next(iter(options))):
                    call()
        with pytest.raises(kf.Unsupported, match="GPU"):
            ctx.transfer(source.layout, target.layout, [0], [0], after=1)
        bad: Any
        for bad, kind in [
            (-1, kf.OptionError),
            (1 << 90, kf.OptionError),
            ("4", TypeError),
            (1.0, TypeError),
        ]:
            with pytest.raises(kind, match="num_sms"):
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
