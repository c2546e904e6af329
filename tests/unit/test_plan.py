from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reference import Model, content, poisoned, transferred
from support import Cache, config, owned, small

import kvferry as kf


def layouts(
    src: str = "fc", dst: str = "fc", dst_order: str = "NHD"
) -> tuple[kf.PhysicalLayout, kf.PhysicalLayout]:
    return owned(Model(small(), src)), owned(Model(small(), dst, dst_order))


def test_whole_blocks_merge_across_ids(ctx: kf.TransferContext) -> None:
    plan = ctx.plan(*layouts(), [1, 2, 3, 6], [0, 1, 2, 5])
    block = config(small()).block_bytes
    assert (plan.blocks, plan.bytes, plan.elementary_runs, plan.num_runs) == (4, 4 * block, 4 * 6, 2)
    assert plan.run_bytes == (block, 3 * block)
    assert (plan.transforms, plan.engine) == (False, "host")
    assert plan.runs() == [
        {"src_region": 0, "src_offset": block, "dst_region": 0, "dst_offset": 0, "bytes": 3 * block},
        {"src_region": 0, "src_offset": 6 * block, "dst_region": 0, "dst_offset": 5 * block, "bytes": block},
    ]


def test_layers_come_from_their_regions(ctx: kf.TransferContext) -> None:
    plan = ctx.plan(*layouts("lw", "fc"), [0, 5], [3, 0], layers=range(1, 3))
    runs = plan.runs()
    assert len(runs) == plan.num_runs == 4
    assert {run["src_region"] for run in runs} == {1, 2} and {run["dst_region"] for run in runs} == {0}
    assert sum(run["bytes"] for run in runs) == plan.bytes
    assert plan.run_bytes == (2 * config(small()).chunk_bytes,) * 2


def test_reordering_is_by_row(ctx: kf.TransferContext) -> None:
    plan = ctx.plan(*layouts("fc", "fc", "universal"), [0], [0])
    assert plan.transforms
    assert plan.run_bytes == (10, 10)
    assert plan.num_runs == 3 * 2 * 4 * 6


def test_an_empty_plan(ctx: kf.TransferContext) -> None:
    plan = ctx.plan(*layouts(), [], [])
    assert (plan.blocks, plan.bytes, plan.num_runs, plan.run_bytes, plan.runs()) == (0, 0, 0, (0, 0), [])
    assert "0 bytes" in plan.explain()


def test_planning_moves_nothing(ctx: kf.TransferContext) -> None:
    source, target = Cache(Model(small(), "fc")), Cache(Model(small(), "lw"))
    source.fill(1)
    before = target.poison()
    plan = ctx.plan(source.layout, target.layout, [0, 1], [2, 3])
    target.check(before)
    assert plan.bytes > 0


def test_runs_are_the_copy() -> None:
    """Carrying the runs out by hand gives what the oracle says."""
    geometry = small()
    source, target = Cache(Model(geometry, "lw", "HND", "outer_first")), Cache(Model(geometry, "split"))
    source.fill(1)
    target.poison()
    ids = ([0, 1, 4], [5, 6, 0])
    options: dict[str, Any] = {"layers": range(1, 3), "heads": range(1, 4)}
    with kf.TransferContext() as ctx:
        plan = ctx.plan(source.layout, target.layout, *ids, **options)
    runs = plan.runs(limit=1 << 40)
    assert len(runs) == plan.num_runs
    for run in runs:
        from_region, to_region = source.regions[run["src_region"]], target.regions[run["dst_region"]]
        piece = from_region[run["src_offset"] : run["src_offset"] + run["bytes"]]
        to_region[run["dst_offset"] : run["dst_offset"] + run["bytes"]] = piece
    target.check(transferred((geometry, content(geometry)), (geometry, poisoned(geometry)), *ids, **options))


def test_limits_of_runs(ctx: kf.TransferContext) -> None:
    source, target = owned(Model(small(blocks=100), "fc")), owned(Model(small(blocks=100), "fc", "universal"))
    ids = np.arange(100)
    plan = ctx.plan(source, target, ids, ids)
    assert plan.num_runs == 100 * 3 * 2 * 4 * 6
    assert (
        len(plan.runs()) == 1000 and len(plan.runs(3)) == len(plan.runs(limit=3)) == 3 and plan.runs(0) == []
    )
    for bad in (-1, 1 << 64, 1 << 200):
        with pytest.raises(kf.OptionError, match="limit"):
            plan.runs(bad)
    wrong: Any = "3"
    with pytest.raises(TypeError, match="limit"):
        plan.runs(wrong)


def test_explain_says_what_and_why(ctx: kf.TransferContext) -> None:
    text = ctx.plan(*layouts("lw", "fc", "universal"), [1, 2], [3, 0], layers=range(2)).explain()
    # The words may change; what must be there is both sides, sizes, the order change and every engine.
    for part in (
        "LayerSeparate",
        "NHD (system)",
        "FullyContiguous universal (system)",
        "1920 bytes",
        "10 bytes each",
    ):
        assert part in text, text
    for part in (
        "changed in flight",
        "192",
        "engine: host (chosen)",
        "memcpy",
        "batch",
        "kernel",
        "disk",
        "GPU",
    ):
        assert part in text, text
    same = ctx.plan(*layouts(), [1, 2], [3, 4], engine="host").explain()
    assert "the same on both sides" in same and "asked for" in same


def test_repr(ctx: kf.TransferContext) -> None:
    assert repr(ctx.plan(*layouts(), [0], [1])) == "TransferPlan(1 blocks, 1440 bytes, 1 runs, engine host)"
    route = "Route(FullyContiguous in system memory -> FullyContiguous in system memory)"
    assert repr(ctx.route(*layouts())) == route


def test_a_plan_outlives_its_layouts_and_context() -> None:
    with kf.TransferContext() as ctx:
        plan = ctx.plan(*layouts(), [0], [1])
    assert "FullyContiguous" in plan.explain() and plan.runs()


def test_plans_refuse_what_transfers_refuse(ctx: kf.TransferContext) -> None:
    source, target = layouts()
    with pytest.raises(kf.BlockIdError):
        ctx.plan(source, target, [7], [0])
    with pytest.raises(kf.DuplicateBlockError):
        ctx.plan(source, target, [0, 1], [2, 2])
    with pytest.raises(kf.OverlapError):
        ctx.plan(source, source, [0], [0])
    with pytest.raises(kf.Unsupported):
        ctx.plan(source, target, [0], [0], engine="batch")
