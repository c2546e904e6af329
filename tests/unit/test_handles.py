"""Ordered contexts, tags, transfers by layer; layouts as JSON and plans without memory; opaque pages."""

from __future__ import annotations

import itertools
import json
import time

import numpy as np
import pytest

import kvferry as kf


def config(**changes: object) -> kf.LayoutConfig:
    base = kf.LayoutConfig(
        num_blocks=64, num_layers=4, page_size=16, num_heads=4, head_dim=64, dtype="float16"
    )
    return base.replace(**changes)


def caches() -> tuple[kf.PhysicalLayout, kf.PhysicalLayout]:
    source = kf.PhysicalLayout.layer_separate(config(), kf.system())
    target = kf.PhysicalLayout.fully_contiguous(config(), kf.system(), order="universal")
    source.fill_pattern(1)
    return source, target


def test_ordered_hands_bytes_on_without_naming_jobs() -> None:
    first, _ = caches()
    stations = [kf.PhysicalLayout.fully_contiguous(config(), kf.system()) for _ in range(6)]
    with kf.TransferContext(threads=2, ordered=True) as ctx:
        jobs = [ctx.transfer(first, stations[0], range(64), range(64))]
        jobs += [ctx.transfer(a, b, range(64), range(64)) for a, b in itertools.pairwise(stations)]
        jobs[-1].wait(60)
        assert all(job.done() for job in jobs)
    stations[-1].verify_pattern(1)


def test_tags_of_any_kind_are_told_of_once() -> None:
    source, target = caches()
    with kf.TransferContext() as ctx:
        assert ctx.completed() == []
        tags: list[object] = ["request 7", ("a", 3), 3, "request 7"]
        for tag in tags:
            ctx.transfer(source, target, [1, 2], [3, 4], tag=tag).wait(60)
        ctx.transfer(source, target, [1], [3]).wait(60)
        with pytest.raises(kf.BlockIdError):
            ctx.transfer(source, target, [64], [3], tag="refused")
        told: list[tuple[object, object]] = []
        deadline = time.monotonic() + 60
        while len(told) < len(tags) and time.monotonic() < deadline:
            told += ctx.completed()
        assert [tag for tag, _ in told] == tags
        assert {type(result) for _, result in told} == {kf.TransferResult}
        assert ctx.completed() == []


def test_layers_can_be_waited_for_one_by_one() -> None:
    source, target = caches()
    with kf.TransferContext() as ctx:
        job = ctx.transfer(source, target, range(64), range(63, -1, -1), layers=range(1, 4), per_layer=True)
        for layer in (1, 2, 3):
            result = job.wait(60, layer=layer)
            assert result.bytes == 64 * config().block_bytes // 4
            assert job.done(layer=layer)
        assert job.wait(60).bytes == 64 * config().block_bytes // 4 * 3
        for layer in (0, 4, -1):
            with pytest.raises(kf.OptionError, match="layer"):
                job.wait(60, layer=layer)
        with pytest.raises(kf.OptionError, match="per_layer"):
            ctx.transfer(source, target, [0], [0]).done(layer=0)
        route = ctx.route(source, target, per_layer=True)
        assert route([1], [1]).wait(60, layer=2).blocks == 1
    target.verify_pattern(1, range(63, 60, -1), as_blocks=range(3), layers=range(1, 4))


def test_json_round_trips_and_digests_do_not_see_memory() -> None:
    layouts = [
        kf.PhysicalLayout.split_kv(config(alignment=512), kf.system(), order="HND"),
        kf.PhysicalLayout.block_pool(config().shard_heads(1, 2), kf.system(), order="universal"),
        kf.PhysicalLayout.layer_separate(config(), kf.system(), block_dim="outer_first").with_page_size(4),
        kf.PhysicalLayout.from_tensors(
            [np.zeros((2, 64, 16, 4, 64), np.float16)[:, :, ::2] for _ in range(4)],
            axes="outer block page head dim",
        ),
    ]
    for layout in layouts:
        again = kf.PhysicalLayout.from_json(layout.to_json(), kf.system())
        assert again.to_json() == layout.to_json()
        assert again.digest == layout.digest
        assert len(layout.digest) == 16
        assert again.config == layout.config
        assert again.strides == layout.strides
    assert len({layout.digest for layout in layouts}) == len(layouts)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, "version 2"),
        ({"region_bytes": 1}, "regions"),
        ({"extra": 1}, "unknown field"),
        ({"kind": "x"}, "unknown kind"),
    ],
)
def test_json_that_lies_is_refused(change: dict[str, object], words: str) -> None:
    text = kf.describe("fully_contiguous", config())
    with pytest.raises(kf.LayoutError, match=words):
        kf.PhysicalLayout.from_json(json.dumps(json.loads(text) | change), kf.system())
    for broken in ("", "{", "[]", "null", '"x"', text[:-1]):
        with pytest.raises(kf.LayoutError):
            kf.PhysicalLayout.from_json(broken, kf.system())


def test_a_plan_needs_no_memory() -> None:
    huge = config(num_blocks=1 << 24)
    source = kf.describe("layer_separate", huge, block_dim="outer_first")
    target = kf.describe("fully_contiguous", huge, order="universal")
    plan = kf.plan(source, target, [5, 1 << 23], [0, 1], layers=range(2))
    assert plan.bytes == huge.block_bytes
    assert plan.engine == "host"
    assert "LayerSeparate outer_first NHD (system) -> FullyContiguous universal" in plan.explain()
    assert "a run ends after 128 bytes" in plan.explain()
    with pytest.raises(kf.BlockIdError):
        kf.plan(source, target, [1 << 24], [0])
    for memory, engines in ((kf.system(), ["bounce"]), (kf.pinned(), ["kernel", "batch", "staged"])):
        plan = kf.plan(source, target, [0], [0], src_memory=memory, dst_memory=kf.device(0))
        assert plan.engine in engines
        explained = plan.explain()
        assert "direction h2d" in explained and "us" in explained
        assert all(name in explained for name in ("host", "kernel", "batch", "staged", "bounce"))
    with pytest.raises(kf.Unsupported, match="engine host"):
        kf.plan(source, target, [0], [0], dst_memory=kf.device(0), engine="host")
    with pytest.raises(kf.OptionError, match="block_dim"):
        kf.describe("split_kv", config(), block_dim="block_first")
    with pytest.raises(kf.OptionError, match="kind"):
        kf.describe("nonsense", config())  # type: ignore[arg-type]


def test_all_reasons_of_a_misfit_are_named() -> None:
    source, target = caches()
    assert source.incompatibilities(target) == []
    other = kf.PhysicalLayout.fully_contiguous(
        config(num_layers=5, outer_dim=1, page_size=24, head_dim=80, num_heads=8), kf.system()
    )
    reasons = source.incompatibilities(other)
    assert len(reasons) == 5
    for words in ("layer counts", "outer", "head_dim", "head counts", "page sizes"):
        assert any(words in reason for reason in reasons)


def test_opaque_pages_move_whatever_they_hold() -> None:
    rng = np.random.default_rng(3)
    source = [rng.integers(0, 256, (10, 584), np.uint8) for _ in range(3)]
    target = [np.full((12, 584), 0xA5, np.uint8) for _ in range(3)]
    pages, pool = kf.PhysicalLayout.from_pages(source), kf.PhysicalLayout.from_pages(target)
    with kf.TransferContext() as ctx:
        ctx.transfer(pages, pool, [9, 0, 3], [0, 11, 5]).wait(60)
    for a, b in zip(source, target, strict=True):
        assert (b[[0, 11, 5]] == a[[9, 0, 3]]).all()
        assert (b[[1, 2, 3, 4, 6, 7, 8, 9, 10]] == 0xA5).all()
    # Elements of any width are bytes; one tensor is one layer; strided pages are not bytes in a row.
    assert kf.PhysicalLayout.from_pages(np.zeros((4, 73), np.float64)).config.head_dim == 584
    with pytest.raises(kf.LayoutError, match="contiguous"):
        kf.PhysicalLayout.from_pages(np.zeros((4, 146), np.float64)[:, ::2])
    with pytest.raises(kf.LayoutError, match="dimensions"):
        kf.PhysicalLayout.from_pages(np.zeros((4, 2, 73), np.uint8))
    with pytest.raises(kf.LayoutError):
        kf.PhysicalLayout.from_pages([])


def test_a_tensor_given_twice_can_be_read_but_not_written() -> None:
    shared = np.zeros((8, 16, 4, 64), np.float16)
    own = [np.zeros((8, 16, 4, 64), np.float16) for _ in range(2)]
    axes = "block page head dim"
    once = kf.PhysicalLayout.from_tensors(own, axes=axes)
    twice = kf.PhysicalLayout.from_tensors([shared, shared[:]], axes=axes)
    with kf.TransferContext() as ctx:
        ctx.transfer(twice, once, [1], [2]).wait(60)
        with pytest.raises(kf.LayoutError, match="share memory"):
            ctx.transfer(once, twice, [1], [2])
