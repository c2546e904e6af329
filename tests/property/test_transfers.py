"""Random geometries, kinds, orders, ranges, pages and ids against the oracle."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from reference import INSIDE, ITEM_BYTES, Geometry, Model, transferred
from support import Cache

import kvferry as kf

# The slow profile takes minutes a test.
pytestmark = pytest.mark.timeout(3600)
CONTEXT = kf.TransferContext(threads=2)


@dataclass
class Case:
    source: Model
    target: Model
    src_blocks: list[int]
    dst_blocks: list[int]
    layers: range | None
    heads: range | None
    offsets: tuple[int, int]
    own: tuple[bool, bool]


def models(geometry: Geometry) -> st.SearchStrategy[Model]:
    def of_kind(kind: str) -> st.SearchStrategy[Model]:
        orders = sorted(INSIDE) if kind in ("fc", "pool") else ["HND", "NHD"]
        return st.builds(
            Model,
            st.just(geometry),
            st.just(kind),
            st.sampled_from(orders),
            st.sampled_from(["block_first", "outer_first"]) if kind == "lw" else st.just("block_first"),
            st.sampled_from([1, 1, 2, 16, 64, 512]),
        )

    return st.sampled_from(["fc", "lw", "split", "pool"]).flatmap(of_kind)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    small = st.integers(1, 4)
    dtype = draw(st.sampled_from(sorted(ITEM_BYTES)))
    total = draw(st.integers(1, 6))
    fine = draw(st.sampled_from([1, 2, 3, 4]))
    parts = draw(st.sampled_from([(1, 1), (1, 1), (1, 3), (2, 1), (4, 1)]))
    base = Geometry(
        blocks=1,
        layers=draw(small),
        outer=draw(st.integers(1, 2)),
        page=fine,
        heads=total,
        dim=draw(st.sampled_from([1, 2, 3, 5, 8, 16, 17])),
        dtype=dtype,
        total_heads=total,
    )

    def shard() -> tuple[int, int]:
        first = draw(st.integers(0, total - 1))
        return first, draw(st.integers(1, total - first))

    (s_first, s_heads), (d_first, d_heads) = (shard(), shard()) if draw(st.booleans()) else ((0, total),) * 2
    low, high = max(s_first, d_first), min(s_first + s_heads, d_first + d_heads)
    if low >= high:
        (d_first, d_heads), (low, high) = (s_first, s_heads), (s_first, s_first + s_heads)
    # Blocks by groups of the coarser page, so that ids pair up.
    groups = draw(st.integers(0, 5))
    spare = draw(st.integers(0, 3))
    s_parts, d_parts = parts
    blocks = (max(1, groups * s_parts + spare), max(1, groups * d_parts + spare))
    source = replace(base, blocks=blocks[0], page=fine * d_parts, first_head=s_first, heads=s_heads)
    target = replace(base, blocks=blocks[1], page=fine * s_parts, first_head=d_first, heads=d_heads)
    src_count, dst_count = groups * s_parts, groups * d_parts
    src_blocks = draw(st.lists(st.integers(0, source.blocks - 1), min_size=src_count, max_size=src_count))
    if draw(st.booleans()):
        # Runs of neighbours, so that merging has something to do.
        first = draw(st.integers(0, source.blocks - src_count))
        src_blocks = list(range(first, first + src_count))
    dst_blocks = draw(st.permutations(range(target.blocks)))[:dst_count]
    if draw(st.booleans()):
        dst_blocks = sorted(dst_blocks)

    def part(start: int, stop: int) -> range | None:
        if draw(st.booleans()):
            return None
        first = draw(st.integers(start, stop - 1))
        return range(first, draw(st.integers(first + 1, stop)))

    own = draw(st.booleans()), draw(st.booleans())
    a, b = draw(models(source)), draw(models(target))
    if not own[0] and a.kind != "pool":
        a = replace(a, pad=draw(pads(a)))
    if not own[1] and b.kind != "pool":
        b = replace(b, pad=draw(pads(b)))
    return Case(
        source=a,
        target=b,
        src_blocks=src_blocks,
        dst_blocks=list(dst_blocks),
        layers=part(0, base.layers),
        heads=part(low, high),
        offsets=(draw(st.integers(0, 17)), draw(st.integers(0, 17))),
        own=(own[0] or a.kind == "pool", own[1] or b.kind == "pool"),
    )


def pads(model: Model) -> st.SearchStrategy[dict[str, int]]:
    """Extra bytes between the steps of some axes, whole elements as arrays have them."""
    item = model.geometry.item
    axes = [axis for axis in model.axes if axis != "dim"]
    pad = st.integers(0, 3).map(lambda elements: elements * item)
    return st.dictionaries(st.sampled_from(axes), pad, max_size=2)


def with_alignment_of_arrays(model: Model) -> Model:
    # Alignment is a property of kvferry's own memory; arrays lie as they do.
    return replace(model, alignment=1)


@given(cases(), st.integers(0, 1 << 32))
def test_transfers_do_what_the_oracle_says(case: Case, key: int) -> None:
    a = case.source if case.own[0] else with_alignment_of_arrays(case.source)
    b = case.target if case.own[1] else with_alignment_of_arrays(case.target)
    source = Cache(a, own=case.own[0], offset=case.offsets[0])
    target = Cache(b, own=case.own[1], offset=case.offsets[1])
    values, before = source.fill(key), target.poison()
    options: dict[str, Any] = {"layers": case.layers, "heads": case.heads}
    expected = transferred(
        (a.geometry, values), (b.geometry, before), case.src_blocks, case.dst_blocks, **options
    )
    src_ids: Any = np.array(case.src_blocks, np.int64) if key % 2 else case.src_blocks
    plan = CONTEXT.plan(source.layout, target.layout, src_ids, case.dst_blocks, **options)
    target.check(before)
    result = CONTEXT.transfer(source.layout, target.layout, src_ids, case.dst_blocks, **options).wait(60)
    target.check(expected)
    source.check(values)
    assert (result.bytes, result.blocks) == (plan.bytes, plan.blocks)
    runs = plan.runs(limit=1 << 40)
    assert (len(runs), sum(run["bytes"] for run in runs)) == (plan.num_runs, plan.bytes)
    event(f"transforms: {plan.transforms}")


@given(cases(), st.integers(0, 1 << 32))
def test_a_route_does_what_a_transfer_does(case: Case, key: int) -> None:
    source, target = Cache(replace(case.source, pad={})), Cache(replace(case.target, pad={}))
    values, before = source.fill(key), target.poison()
    route = CONTEXT.route(source.layout, target.layout, layers=case.layers, heads=case.heads)
    # One submission per destination block of the coarser page.
    groups = len(case.src_blocks) // max(1, case.target.geometry.page // case.source.geometry.page)
    groups = min(groups, len(case.dst_blocks))
    jobs = []
    for group in range(groups):
        s, d = len(case.src_blocks) // groups, len(case.dst_blocks) // groups
        src, dst = case.src_blocks[group * s : (group + 1) * s], case.dst_blocks[group * d : (group + 1) * d]
        jobs.append(route(src, dst))
    for job in jobs:
        job.wait(60)
    target.check(
        transferred(
            (case.source.geometry, values),
            (case.target.geometry, before),
            case.src_blocks,
            case.dst_blocks,
            layers=case.layers,
            heads=case.heads,
        )
    )


@given(cases(), st.data())
def test_bad_ids_move_nothing(case: Case, data: st.DataObject) -> None:
    source, target = Cache(replace(case.source, pad={})), Cache(replace(case.target, pad={}))
    before = target.poison()
    source.fill(1)
    src, dst = list(case.src_blocks), list(case.dst_blocks)
    if not src:
        return
    side, ids, geometry = data.draw(
        st.sampled_from([("source", src, case.source.geometry), ("destination", dst, case.target.geometry)])
    )
    index = data.draw(st.integers(0, len(ids) - 1))
    bad = data.draw(st.one_of(st.integers(geometry.blocks, 1 << 70), st.integers(-(1 << 70), -1)))
    ids[index] = bad
    with pytest.raises(kf.BlockIdError) as caught:
        CONTEXT.transfer(source.layout, target.layout, src, dst)
    error = caught.value
    assert (error.side, error.index, error.limit) == (side, index, geometry.blocks)
    assert error.value == min(max(bad, -(1 << 63)), (1 << 63) - 1)
    target.check(before)
