"""The measuring of `kvferry bench transfer`: moves what it names, and finds wrong and stray bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvferry.cli import bench as cli

if TYPE_CHECKING:
    from collections.abc import Callable

    import kvferry as kf

np = pytest.importorskip("numpy")

from kvferry.bench import cells, contenders, latency, measure, transfer  # noqa: E402 - they need NumPy
from kvferry.bench.buffers import POISON, SLACK, Arena, Ground  # noqa: E402

TINY = measure.Effort(seconds=0.0, least=2, most=2)
PAYLOAD = 2 << 20


@pytest.fixture(scope="module")
def arenas() -> tuple[Arena, Arena]:
    made = (Arena(PAYLOAD + SLACK), Arena(PAYLOAD + SLACK))
    made[0].randomise(1)
    return made


def small(pair: str, run: int = 4096) -> cells.Cell:
    by_name = {known.name: known for known in cells.PAIRS}
    return cells.Cell(by_name[pair], run, 1)


def options(**changes: Any) -> transfer.Options:
    return transfer.Options(
        **{
            "selection": "quick",
            "payload_bytes": PAYLOAD,
            "threads": 2,
            "seed": 0,
            "only": frozenset(),
            "available_bytes": None,
            "cache_bytes": None,
            **changes,
        }
    )


def breaking(monkeypatch: pytest.MonkeyPatch, damage: Callable[[kf.PhysicalLayout, Any], None]) -> None:
    """Has `damage` follow every transfer that the check makes."""

    class Broken:
        def __init__(self, context: kf.TransferContext) -> None:
            self._context = context

        def transfer(self, src: kf.PhysicalLayout, dst: kf.PhysicalLayout, *ids: Any) -> Any:
            result = self._context.transfer(src, dst, *ids).wait()
            damage(dst, ids)
            return type("Done", (), {"wait": lambda _: result})()

    check = measure.check
    monkeypatch.setattr(measure, "check", lambda context, *rest: check(Broken(context), *rest))  # type: ignore[arg-type]


@pytest.mark.parametrize("pair", cells.PAIRS, ids=lambda pair: pair.name)
def test_runs_are_as_long_as_the_cell_says(
    arenas: tuple[Arena, Arena], ctx: kf.TransferContext, pair: cells.Pair
) -> None:
    for run in cells.RUNS[:3]:
        ground = Ground.lay(cells.Cell(pair, run, 1), *arenas, 0)
        plan = ctx.plan(
            ground.src.layout, ground.dst.layout, ground.src_slices[0][:8], ground.dst_slices[0][:8]
        )
        # By chance two blocks may lie next to each other on both sides.
        assert plan.run_bytes[0] == run
        assert plan.bytes <= plan.num_runs * run * 1.3


def test_all_shapes_have_their_run() -> None:
    for pair in cells.PAIRS:
        for run, shape in zip(cells.RUNS, pair.shapes, strict=True):
            row, chunk = shape.dim * cells.ITEM, shape.chunk_bytes
            lies = {
                "FC-FC": shape.block_bytes,
                "FC-LW": chunk,
                "LW-FC": chunk,
                "LW-LWouter": chunk // shape.outer,
            }
            assert lies.get(pair.name, row) == run
            assert 2 * shape.block_bytes <= SLACK


def test_selections() -> None:
    full = cells.select("full", max_payload=512 << 20)
    assert {cell.run_bytes for cell in full} == set(cells.RUNS)
    assert {cell.payload_bytes >> 20 for cell in full} == {2, 4, 8, 16, 128, 512}
    assert len({(cell.pair.name, cell.run_bytes, cell.payload_bytes) for cell in full}) == len(full)
    default = cells.select("default", max_payload=512 << 20)
    assert {cell.pair.name for cell in default} == {pair.name for pair in cells.PAIRS} == set(cli.PAIRS)
    assert len(cells.select("quick", max_payload=512 << 20)) < len(default) < len(full)
    assert all(cell.payload_bytes <= 16 << 20 for cell in cells.select("full", max_payload=16 << 20))
    only = cells.select("default", max_payload=512 << 20, only=frozenset({"FC-LW"}))
    assert {cell.pair.name for cell in only} == {"FC-LW"}


@pytest.mark.parametrize("pair", [pair.name for pair in cells.PAIRS])
def test_a_cell_is_measured_and_checked(
    arenas: tuple[Arena, Arena], ctx: kf.TransferContext, pair: str
) -> None:
    with contenders.Copiers(2) as copiers:
        result = measure.run_cell(small(pair), arenas, ctx, copiers, effort=TINY, seed=3, check_before=True)
    assert result.good
    assert [check.checked_bytes for check in result.checks] == [result.cell.payload_bytes] * 2
    assert len(result.kvferry.seconds) == len(result.kvferry.submit_seconds) == len(result.numpy.seconds) == 2
    assert result.ceiling.name.startswith("memcpy x")
    assert result.ceiling.submit_at(50) is None
    assert result.ratio > 0 and result.numpy_ratio > 0


@pytest.mark.parametrize("pair", [pair.name for pair in cells.PAIRS])
def test_every_contender_moves_the_same_bytes(
    arenas: tuple[Arena, Arena], ctx: kf.TransferContext, pair: str
) -> None:
    ground = Ground.lay(small(pair), *arenas, 5)
    arenas[1].poison()
    contenders.Numpy(ground).move(1)
    by_numpy = arenas[1].bytes.copy()
    arenas[1].poison()
    contenders.Kvferry(ctx, ground).move(1)
    assert np.array_equal(by_numpy, arenas[1].bytes)
    assert (by_numpy != POISON).mean() > 0.9 * ground.src.shape.block_bytes * len(ground.src_slices[1]) / len(
        by_numpy
    )


@pytest.mark.parametrize("size", [1, 1000, (1 << 20) + 1, PAYLOAD])
def test_plain_copies_copy_all(arenas: tuple[Arena, Arena], size: int) -> None:
    source, target = (arena.bytes for arena in arenas)
    for threads, piece in ((1, None), (2, None), (3, None), (3, 4096)):
        target[:] = POISON
        with contenders.Copiers(threads) as copiers:
            copiers.copy(source[7 : 7 + size], target[9 : 9 + size], threads=threads, piece=piece)
        assert np.array_equal(source[7 : 7 + size], target[9 : 9 + size])
        assert (target[:9] == POISON).all() and (target[9 + size :] == POISON).all()


def test_calls_move_other_blocks_and_leave_one_alone(arenas: tuple[Arena, Arena]) -> None:
    ground = Ground.lay(cells.Cell(cells.PAIRS[0], 2 << 20, 1), *arenas, 0)
    assert ground.calls >= 3
    for slices in (ground.src_slices, ground.dst_slices):
        named = np.concatenate(slices)
        assert len(np.unique(named)) == len(named) < ground.dst.slots


def test_a_wrong_byte_is_found(
    arenas: tuple[Arena, Arena], ctx: kf.TransferContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    ground = Ground.lay(small("NHD-HND"), *arenas, 0)

    def flip(dst: kf.PhysicalLayout, ids: Any) -> None:
        ground.dst.planes[1][ids[1][0], 1, 15, 7, 2047] ^= 1

    breaking(monkeypatch, flip)
    found = measure.check(ctx, ground, arenas[1], 0)
    assert (found.wrong_words, found.stray_words, found.good) == (1, 0, False)


def test_a_stray_byte_is_found(
    arenas: tuple[Arena, Arena], ctx: kf.TransferContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    ground = Ground.lay(small("FC-LW"), *arenas, 0)

    def stray(dst: kf.PhysicalLayout, ids: Any) -> None:
        arenas[1].bytes[-1] = 0
        unnamed = next(slot for slot in range(ground.dst.slots) if slot not in set(ids[1].tolist()))
        ground.dst.planes[3][unnamed, 0, 0, 0, 0] = 1

    breaking(monkeypatch, stray)
    found = measure.check(ctx, ground, arenas[1], 0)
    assert (found.wrong_words, found.stray_words) == (0, 2)


def test_a_transfer_that_moves_nothing_is_found(
    arenas: tuple[Arena, Arena], ctx: kf.TransferContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    ground = Ground.lay(small("FC-FC"), *arenas, 0)
    breaking(monkeypatch, lambda *_: arenas[1].poison())
    assert measure.check(ctx, ground, arenas[1], 0).wrong_words == PAYLOAD // 8


def test_turns_are_fair() -> None:
    order: list[str] = []

    class Fake:
        def __init__(self, name: str) -> None:
            self.name = name

        def move(self, call: int, /) -> float | None:
            order.append(self.name)
            return None

    timings = measure.race([Fake("a"), Fake("b"), Fake("c")], measure.Effort(0.0, 3, 3))
    assert "".join(order) == "abc" + "abc" + "bca" + "cab"
    assert [len(timing.seconds) for timing in timings] == [3, 3, 3]


def test_small_memory_makes_smaller_payloads() -> None:
    ample = options(payload_bytes=512 << 20, available_bytes=64 << 30, cache_bytes=32 << 20)
    assert transfer.affordable(ample) == (512 << 20, [])
    payload, notes = transfer.affordable(
        options(payload_bytes=512 << 20, available_bytes=1 << 30, cache_bytes=300 << 20)
    )
    assert payload % cells.UNIT == 0
    assert 3 * payload < 1 << 30
    assert "reduced from 512 MiB" in notes[0] and "fit in the last cache" in notes[1]
    assert transfer.affordable(options(available_bytes=0))[0] == cells.UNIT


def test_latencies(arenas: tuple[Arena, Arena], ctx: kf.TransferContext) -> None:
    rows = latency.measure(ctx, arenas, calls=20, ids=1000)
    assert [row.ids for row in rows] == [1, 1, 1000, 1000]
    assert all(row.submit_us[0] > 0 for row in rows)
    assert rows[2].wait_us is None


def test_a_changed_source_is_found(arenas: tuple[Arena, Arena]) -> None:
    before = arenas[0].digest()
    arenas[0].bytes[12345] ^= 1
    assert arenas[0].digest() != before
    arenas[0].bytes[12345] ^= 1
    assert arenas[0].digest() == before
