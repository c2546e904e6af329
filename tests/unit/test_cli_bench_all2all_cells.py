"""`kvferry bench all2all` without GPUs: cells, plan, data."""

from __future__ import annotations

import itertools

import pytest

np = pytest.importorskip("numpy")

from kvferry.bench.all2all import (  # noqa: E402 - they need NumPy
    cells,
    data,
    plan,
)
from kvferry.bench.all2all.cells import Cell  # noqa: E402

GPU = plan.Options(device="gpu", world=2)

SHAPES = [
    cells.one(2, 1, 5, 32, 16),
    cells.one(4, 2, 3, 30, 16),
    cells.one(3, 1, 2, 7, 80, "e4m3"),
    cells.fused(4, 3, 16, 2, 8),
    cells.fused(2, 3, 32, 8, 8),
    Cell(2, (5, 0, 3), (6,), 16, "fp32"),
    Cell(1, (2, 3), (8,), 16, splits=(2, 6)),
]


@pytest.mark.parametrize("cell", SHAPES, ids=lambda cell: cell.name)
def test_heads_and_bytes_of_a_cell(cell: Cell) -> None:
    for tensor, heads in enumerate(cell.heads):
        ranges = cell.head_ranges(tensor)
        # Every head has an owner; each rank's are beside one another and in order.
        assert sorted({head for part in ranges for head in part}) == list(range(heads))
        assert [part.start for part in ranges] == sorted(part.start for part in ranges)
    sent = {pair: cell.sent(*pair) for pair in itertools.product(range(cell.world), repeat=2)}
    for rank in range(cell.world):
        got = sum(
            int(np.prod(cell.result_shape(rank, tensor))) * cell.item for tensor in range(len(cell.heads))
        )
        assert sum(sent[source, rank] for source in range(cell.world)) == got
        assert got <= cell.result_bytes(rank) < got + 256 * len(cell.heads)
        others = [other for other in range(cell.world) if other != rank]
        assert cell.wire >= max(
            sum(sent[rank, other] for other in others), sum(sent[other, rank] for other in others)
        )


def test_queries_and_their_keys_stay_together() -> None:
    cell = cells.fused(4, 1, 16, 2, 8)
    for queries, keys in zip(cell.head_ranges(0), cell.head_ranges(1), strict=True):
        assert {query // 8 for query in queries} == set(keys)
    assert cells.equal(30, 4) == (8, 8, 7, 7)
    assert cells.one(4, 1, 1, 30, 8).head_ranges(0) == [range(8), range(8, 16), range(16, 23), range(23, 30)]


def test_names_tell_cells_apart() -> None:
    names = [cell.name for cell in SHAPES]
    assert len(set(names)) == len(names)
    assert cells.one(2, 1, 128, 32, 128).name == "1,128,32,128 bf16"
    assert cells.fused(2, 128, 32, 8, 128).name == "1,128,qkv 32/8,128 bf16"
    assert cells.whole(2, 75_827, 40, 128).name == "1,37914+37913,40,128 bf16"
    assert Cell(1, (4, 4), (32,), 128, splits=(12, 20)).name == "1,4,32,128 bf16 split 12/20"


@pytest.mark.parametrize("selection", ["quick", "default", "full"])
@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize("device", ["gpu", "cpu", "host"])
def test_plans(device: plan.Device, world: int, selection: plan.Selection) -> None:
    options = plan.Options(device=device, world=world, selection=selection)
    found = plan.tasks(options)
    assert found and len({task.name for task in found}) == len(found)
    assert plan.tasks(plan.Options.load(options.dump())) == found
    for task in found:
        assert task.cell.world == world and task.group in plan.GROUPS
        assert task.ways and len(set(task.ways)) == len(task.ways)
        assert task.cell.largest_result <= plan.capacity(found)
        # Words of four bytes carry the data.
        assert task.cell.dim * task.cell.item % 4 == 0
    groups = [task.group for task in found]
    assert groups[0] == "setup" and groups.index("core" if device != "cpu" else "bandwidth") == 1


def test_the_plan_has_what_the_issue_names() -> None:
    found = {task.name: task for task in plan.tasks(GPU)}
    full = plan.tasks(plan.Options(device="gpu", world=2, selection="full"))
    shapes = {task.cell.name for task in found.values()}
    for tokens in (128, 1024, 4096, 16_384, 65_536):
        assert f"1,{tokens},32,128 bf16" in shapes
    for name in ("2,8192,40,128 bf16", "1,37800,40,128 bf16", "1,37914+37913,40,128 bf16"):
        assert name in shapes
    assert {task.cell.heads for task in found.values()} >= {(24,), (30,), (32, 8, 8), (32, 4, 4), (16, 2, 2)}
    assert {task.cell.dim for task in found.values()} >= {64, 80, 96, 128, 256}
    assert {task.cell.dtype for task in found.values()} == set(cells.DTYPES)
    assert {task.cell.batch for task in found.values()} == {1, 2, 4}
    sizes = [task.cell.rank_bytes for task in found.values() if task.group == "latency"]
    assert min(sizes) == 1 << 10 and max(sizes) == 1 << 20
    sizes = [task.cell.rank_bytes for task in found.values() if task.group == "bandwidth"]
    assert min(sizes) == 1 << 20 and max(sizes) == 1 << 30
    # What no bar compares with is measured only when all is.
    assert any("memcpy ipc" in task.ways for task in full)
    assert not any("memcpy ipc" in task.ways for task in found.values())
    for tokens in (4096, 16_384):
        assert {"push 16", "push 32"} <= set(found[f"core 1,{tokens},32,128 bf16"].ways)
    assert {way for task in full for way in task.ways if way.startswith("push")} == set(plan.push(*plan.SMS))
    # Shapes that are compared have the bytes of what they are compared with.
    twin = cells.one(2, 1, plan.TWIN, 32, 128).wire
    long_twin = cells.one(2, 1, plan.LONG_TWIN, 32, 128).wire
    for task in found.values():
        if task.group == "shapes":
            assert min(abs(task.cell.wire / twin - 1), abs(task.cell.wire / long_twin - 1)) < 0.005
    assert cells.one(2, 2, 8192, 40, 128).wire == twin


@pytest.mark.parametrize("cell", SHAPES, ids=lambda cell: cell.name)
def test_the_data_tells_every_place_apart(cell: Cell) -> None:
    maths = data.Numpy()
    grounds = [data.Ground(maths, cell, rank, seed=3) for rank in range(cell.world)]
    for tensor in range(len(cell.heads)):
        words = np.concatenate([ground.given(tensor).reshape(-1) for ground in grounds])
        assert len(np.unique(words)) == len(words)
    for rank, ground in enumerate(grounds):
        # Put together by NumPy alone, from what the ranks give.
        got = [
            np.concatenate([each.inputs[tensor] for each in grounds], axis=1)[:, :, part.start : part.stop]
            for tensor, part in ((t, cell.head_ranges(t)[rank]) for t in range(len(cell.heads)))
        ]
        got = [np.ascontiguousarray(each) for each in got]
        assert ground.check(got) == "" and ground.intact() == ""
        assert "results for" in ground.check(got[:-1])
        got[-1].view(np.uint8).reshape(-1)[-1] ^= 1
        assert ground.check(got) == f"1 wrong words in tensor {len(got) - 1}"
        ground.poison(got)
        assert "wrong words" in ground.check(got)
        assert "not" in ground.check([each[:, :-1] for each in got])
        ground.inputs[0].view(np.uint8).reshape(-1)[:1] ^= 1
        assert ground.intact() == ("input 0 was written" if ground.inputs[0].size else "")


def test_written_guards_are_seen() -> None:
    ground = data.Ground(data.Numpy(), SHAPES[0], 0, 0)
    whole = ground.inputs[0].base
    whole.view(np.int32).reshape(-1)[data.GUARD_WORDS - 1] = 0
    assert ground.intact() == "guard words beside input 0 were written"
