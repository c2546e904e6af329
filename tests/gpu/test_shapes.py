"""Shapes that break index arithmetic: odd rows, mixed alignments, many runs, far offsets, parts of caches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from driver import SIMULATED, Buffer, CudaArray, read, write
from gpu_support import ENGINES, KINDS, Cache, Pair, pair, scaled, shuffled
from reference import GUARD, ITEM_BYTES, Geometry, Model
from support import config, small

import kvferry as kf

if TYPE_CHECKING:
    from numpy.typing import NDArray

pytestmark = pytest.mark.gpu

WAYS = [("pinned", "device"), ("device", "pinned"), ("device", "device")]
BOTH = pytest.mark.parametrize(("src", "dst"), WAYS, ids=["-".join(way) for way in WAYS])


def engines(src: str, dst: str) -> tuple[Any, ...]:
    return ENGINES["device" if src == dst else "pinned"]


@BOTH
class TestRows:
    @pytest.mark.parametrize(
        "row", [1, 3, 7, 15, 16, 17, 32, 48, 64, 100, 128, 132, 144, 257, 576, 584, 656, 1152, 4104]
    )
    def test_odd_row_widths(self, shared: kf.TransferContext, src: str, dst: str, row: int) -> None:
        """A row is the run wherever heads and tokens change places."""
        geometry = Geometry(5, 2, 1, 3, 2, row, "uint8")
        for engine in engines(src, dst):
            for kinds in [(KINDS[4], KINDS[0]), (KINDS[0], KINDS[2]), (KINDS[0], KINDS[3])]:
                both = pair(geometry, src, dst, *kinds)
                shared.transfer(both.src, both.dst, [4, 0, 2], [1, 3, 0], engine=engine).wait(60)
                both.check([4, 0, 2], [1, 3, 0], f"{engine} {kinds}")

    @pytest.mark.parametrize(("width", "page"), [(584, 64), (656, 1), (132, 64), (576, 16), (1152, 1)])
    def test_opaque_latent_rows(
        self, shared: kf.TransferContext, src: str, dst: str, width: int, page: int
    ) -> None:
        """MLA pages, indexer rows with their scales: one head of `width` bytes, whole pages move."""
        geometry = Geometry(12, 3, 1, page, 1, width, "uint8")
        ids = shuffled(8, 12), shuffled(8, 12, 2)
        for engine in engines(src, dst):
            both = pair(geometry, src, dst)
            result = shared.transfer(both.src, both.dst, *ids, engine=engine).wait(60)
            both.check(*ids, engine)
            assert result.bytes == 8 * 3 * page * width

    @pytest.mark.parametrize("dtype", sorted(ITEM_BYTES))
    def test_every_dtype(self, shared: kf.TransferContext, src: str, dst: str, dtype: str) -> None:
        for engine in engines(src, dst):
            both = pair(small(dtype=dtype), src, dst, KINDS[4], KINDS[2])
            shared.transfer(both.src, both.dst, range(7), range(6, -1, -1), engine=engine).wait(60)
            both.check(range(7), range(6, -1, -1), engine)

    def test_padding_between_everything(self, shared: kf.TransferContext, src: str, dst: str) -> None:
        for alignment in (1, 2, 64, 4096):
            source = Cache(Model(small(), "lw", "NHD", "outer_first", alignment=alignment), src)
            target = Cache(Model(small(), "fc", "HND", alignment=512), dst)
            for engine in engines(src, dst):
                both = Pair(source, target)
                shared.transfer(both.src, both.dst, [6, 1], [0, 3], engine=engine).wait(60)
                both.check([6, 1], [0, 3], f"{engine} {alignment}")


@BOTH
class TestParts:
    @pytest.mark.parametrize("layers", [range(1), range(1, 3), range(2, 3), None])
    @pytest.mark.parametrize("heads", [range(1), range(2, 5), range(5, 6), None])
    def test_layers_and_heads(
        self, shared: kf.TransferContext, src: str, dst: str, layers: range | None, heads: range | None
    ) -> None:
        for engine in engines(src, dst):
            both = pair(small(), src, dst, KINDS[3], KINDS[2])
            options: Any = {"layers": layers, "heads": heads}
            shared.transfer(both.src, both.dst, [0, 4], [1, 2], engine=engine, **options).wait(60)
            both.check([0, 4], [1, 2], engine, **options)

    @pytest.mark.parametrize(("src_world", "dst_world"), [(1, 3), (3, 1), (2, 3), (6, 1)])
    def test_shards_meet_by_global_head(
        self, shared: kf.TransferContext, src: str, dst: str, src_world: int, dst_world: int
    ) -> None:
        sources = [Cache(Model(small().shard(r, src_world), "lw", "HND"), src) for r in range(src_world)]
        values = [source.fill(1) for source in sources]
        for rank in range(dst_world):
            target = Cache(Model(small().shard(rank, dst_world), "fc", "universal"), dst)
            want = target.fill(1)
            target.poison()
            for source in sources:
                theirs = source.model.geometry
                mine = target.model.geometry
                meet = max(theirs.first_head, mine.first_head) < min(
                    theirs.first_head + theirs.heads, mine.first_head + mine.heads
                )
                if meet:
                    shared.transfer(source.layout, target.layout, range(7), range(7)).wait(60)
            target.check(want)
        for source, value in zip(sources, values, strict=True):
            source.check(value)

    @pytest.mark.parametrize(("coarse", "fine"), [(4, 1), (4, 2), (8, 1)])
    def test_page_sizes_meet(
        self, shared: kf.TransferContext, src: str, dst: str, coarse: int, fine: int
    ) -> None:
        parts = coarse // fine
        for engine in engines(src, dst):
            source = Cache(Model(small(page=coarse, blocks=4), "lw", "HND"), src)
            target = Cache(Model(small(page=fine, blocks=4 * parts), "fc"), dst)
            both = Pair(source, target)
            ids = shuffled(2 * parts, 4 * parts)
            shared.transfer(both.src, both.dst, [3, 1], ids, engine=engine).wait(60)
            both.check([3, 1], ids, engine)
            back = Pair(target, source)
            shared.transfer(back.src, back.dst, ids, [0, 2], engine=engine).wait(60)
            back.check(ids, [0, 2], engine)

    def test_single_tokens_of_coarse_blocks(self, shared: kf.TransferContext, src: str, dst: str) -> None:
        """A layout re-addressed in finer pages: partial blocks are only ids."""
        for engine in engines(src, dst):
            both = pair(small(), src, dst)
            from_, to = [5, 17, 18], [1, 27, 8]
            tokens = both.src.with_page_size(1), both.dst.with_page_size(1)
            shared.transfer(*tokens, from_, to, engine=engine).wait(60)
            want = both.before.copy()
            for a, b in zip(from_, to, strict=True):
                want[b // 4, :, :, b % 4] = both.values[a // 4, :, :, a % 4]
            both.target.check(want, engine)


@BOTH
class TestCounts:
    def test_nothing(self, shared: kf.TransferContext, src: str, dst: str) -> None:
        for engine in engines(src, dst):
            both = pair(small(), src, dst)
            job = shared.transfer(both.src, both.dst, [], [], engine=engine)
            assert job.done() and (job.wait(0).bytes, job.wait(0).blocks) == (0, 0)
            both.check([], [])

    def test_one_block(self, shared: kf.TransferContext, src: str, dst: str) -> None:
        for engine in engines(src, dst):
            both = pair(small(blocks=1), src, dst)
            shared.transfer(both.src, both.dst, [0], [0], engine=engine).wait(60)
            both.check([0], [0], engine)

    def test_neighbours_merge(self, shared: kf.TransferContext, src: str, dst: str) -> None:
        for engine in engines(src, dst):
            both = pair(small(blocks=40), src, dst, KINDS[0], KINDS[0])
            from_, to = [*range(3, 20), 30, 31, 2], [*range(10, 27), 0, 1, 39]
            plan = shared.plan(both.src, both.dst, from_, to, engine=engine)
            assert (plan.num_runs, plan.elementary_runs) == (3, 20 * 6)
            shared.transfer(both.src, both.dst, from_, to, engine=engine).wait(60)
            both.check(from_, to, engine)

    def test_one_source_for_many_destinations(self, shared: kf.TransferContext, src: str, dst: str) -> None:
        for engine in engines(src, dst):
            both = pair(small(), src, dst)
            shared.transfer(both.src, both.dst, [5] * 7, range(7), engine=engine).wait(60)
            both.check([5] * 7, range(7), engine)

    @pytest.mark.parametrize("count", [1, 2, 127, 128, 129, 383, 384, 385, 3799, 3800, 3801, 9000])
    def test_numbers_of_ids_around_every_limit(
        self, shared: kf.TransferContext, src: str, dst: str, count: int
    ) -> None:
        geometry = Geometry(count + 3, 1, 1, 1, 1, 20, "uint8")
        ids = shuffled(count, count + 3), shuffled(count, count + 3, 2)
        for engine in engines(src, dst):
            if SIMULATED and count > 385 and engine == "batch":
                continue
            both = pair(geometry, src, dst)
            shared.transfer(both.src, both.dst, *ids, engine=engine).wait(60)
            both.check(*ids, engine)

    def test_more_runs_than_a_grid_axis_holds_with_mixed_alignments(
        self, shared: kf.TransferContext, src: str, dst: str
    ) -> None:
        """Runs of 11 bytes at every offset modulo 16; 65,536 is where 16-bit grids and counters end."""
        geometry = Geometry(scaled(6000, 700), 3, 2, 1, 2, 11, "uint8")
        count = geometry.blocks - 500
        ids = shuffled(count, geometry.blocks), shuffled(count, geometry.blocks, 2)
        for engine in ("auto", "kernel"):
            both = pair(geometry, src, dst, KINDS[4], KINDS[2])
            plan = shared.plan(both.src, both.dst, *ids, engine=engine)
            assert SIMULATED or plan.elementary_runs > 65_535
            shared.transfer(both.src, both.dst, *ids, engine=engine).wait(60)
            both.check(*ids, engine)

    def test_many_layers(self, shared: kf.TransferContext, src: str, dst: str) -> None:
        """Region bases that fit parameters (100), and that do not (2,100 on both sides)."""
        for layers in (100, scaled(2100, 300)):
            geometry = Geometry(4, layers, 1, 1, 1, 24, "uint8")
            both = pair(geometry, src, dst, KINDS[3], KINDS[3])
            for engine in ("auto", "kernel"):
                both.target.put(both.before)
                shared.transfer(both.src, both.dst, [3, 1], [0, 2], engine=engine).wait(60)
                both.check([3, 1], [0, 2], f"{engine} {layers} layers")

    def test_many_regions_of_a_pool(self, shared: kf.TransferContext, src: str, dst: str) -> None:
        geometry = Geometry(scaled(600, 300), 2, 2, 2, 2, 8)
        ids = shuffled(200, geometry.blocks), shuffled(200, geometry.blocks, 2)
        for engine in ("auto", "kernel"):
            both = pair(geometry, src, dst, KINDS[9], KINDS[10])
            shared.transfer(both.src, both.dst, *ids, engine=engine).wait(60)
            both.check(*ids, engine)


@pytest.mark.parametrize("engine", ["auto", "kernel", "batch", "staged"])
@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_large_transfers(shared: kf.TransferContext, engine: Any, direction: str) -> None:
    """More than rings hold: every chunk of a pipeline is used again and again."""
    geometry = Geometry(scaled(300, 12), 8, 2, 16, 8, 32, "float64")
    assert SIMULATED or geometry.nbytes > 128 << 20
    where = ("pinned", "device") if direction == "h2d" else ("device", "pinned")
    both = pair(geometry, *where)
    ids = shuffled(geometry.blocks, geometry.blocks), shuffled(geometry.blocks, geometry.blocks, 2)
    result = shared.transfer(both.src, both.dst, *ids, engine=engine).wait(60)
    both.check(*ids, engine)
    assert result.bytes == geometry.nbytes


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_large_pageable_transfers(shared: kf.TransferContext, direction: str) -> None:
    geometry = Geometry(scaled(100, 12), 8, 2, 16, 8, 32, "float64")
    where = ("system", "device") if direction == "h2d" else ("device", "system")
    both = pair(geometry, *where)
    ids = shuffled(geometry.blocks, geometry.blocks), shuffled(geometry.blocks, geometry.blocks, 2)
    jobs = [shared.transfer(both.src, both.dst, ids[0][at::4], ids[1][at::4]) for at in range(4)]
    assert {job.wait(60).engine for job in jobs} == {"bounce"}
    both.check(*ids)


@pytest.mark.skipif(SIMULATED, reason="needs gigabytes of GPU memory")
@pytest.mark.parametrize("engine", ["auto", "kernel", "batch"])
def test_offsets_beyond_four_gibibytes(shared: kf.TransferContext, engine: Any) -> None:
    """Blocks on both sides of 2, 4 and 8 GiB between guard blocks; FC to layer-separate and back."""
    cfg = kf.LayoutConfig(
        num_blocks=18_000, num_layers=2, page_size=16, num_heads=8, head_dim=1024, dtype="uint8"
    )
    assert cfg.block_bytes == 512 << 10
    big = kf.PhysicalLayout.fully_contiguous(cfg, kf.device(0))
    assert big.nbytes > 8 << 30
    small_cfg = cfg.replace(num_blocks=8)
    pool = kf.PhysicalLayout.layer_separate(small_cfg, kf.pinned())
    # Block 4095 ends at 2 GiB, 8191 at 4 GiB, 16383 at 8 GiB.
    far = [0, 4095, 4096, 8191, 8192, 16_383, 16_384, 17_999]
    rng = np.random.default_rng(1)
    start = big.regions[0].addr
    blocks: list[NDArray[np.uint8]] = []
    for block in far:
        blocks.append(rng.integers(0, 256, cfg.block_bytes, np.uint8))
        write(start + block * cfg.block_bytes, blocks[-1])
    shared.transfer(big, pool, far, range(8), engine=engine).wait(60)
    found = np.stack(pool.numpy())  # layer, block, outer, page, head, dim
    for at, content in enumerate(blocks):
        assert (found[:, at].reshape(-1) == content).all(), far[at]
    # And back, to the blocks one further on; neighbours stay.
    to = [5, 4094, 4097, 8190, 8193, 16_382, 16_385, 17_998]
    around = [7, 4093, 4098, 8189, 8194, 16_381, 16_386, 17_997]
    for block in (*to, *around):
        write(start + block * cfg.block_bytes, np.full(cfg.block_bytes, GUARD, np.uint8))
    shared.transfer(pool, big, range(8), to, engine=engine).wait(60)
    for at, block in enumerate(to):
        assert (read(start + block * cfg.block_bytes, cfg.block_bytes) == blocks[at]).all(), block
    for at, block in enumerate(far):
        assert (read(start + block * cfg.block_bytes, cfg.block_bytes) == blocks[at]).all(), block
    for block in around:
        assert (read(start + block * cfg.block_bytes, cfg.block_bytes) == GUARD).all(), block
    # On the device alone: far to far.
    shared.transfer(big, big, far, around, engine=engine).wait(60)
    for at, block in enumerate(around):
        assert (read(start + block * cfg.block_bytes, cfg.block_bytes) == blocks[at]).all(), block


class TestRefusals:
    """Wrong input moves nothing, names index, value and limit, and launches nothing."""

    @pytest.mark.parametrize("engine", ["auto", "kernel", "batch"])
    @pytest.mark.parametrize(
        ("src", "dst", "error", "fields"),
        [
            ([0, 7], [0, 1], kf.BlockIdError, {"side": "source", "index": 1, "value": 7, "limit": 7}),
            ([0, 1], [0, -1], kf.BlockIdError, {"side": "destination", "index": 1, "value": -1, "limit": 7}),
            ([0, 1], [5, 5], kf.DuplicateBlockError, {"value": 5, "first": 0, "second": 1}),
            ([0, 1], [5], kf.LayoutError, {}),
        ],
    )
    def test_ids(
        self, shared: kf.TransferContext, *, engine: Any, src: Any, dst: Any, error: Any, fields: Any
    ) -> None:
        both = pair(small(), "device", "device")
        with pytest.raises(error) as caught:
            shared.transfer(both.src, both.dst, src, dst, engine=engine)
        assert {name: getattr(caught.value, name) for name in fields} == fields
        both.check([], [])

    def test_permuting_a_cache_in_place(self, shared: kf.TransferContext) -> None:
        cache = Cache(Model(small(), "fc"))
        values = cache.fill()
        with pytest.raises(kf.OverlapError):
            shared.transfer(cache.layout, cache.layout, [0, 1, 2], [2, 0, 1])
        cache.check(values)
        # Disjoint blocks of one cache are fine.
        shared.transfer(cache.layout, cache.layout, [0, 1, 2], [4, 6, 5]).wait(60)
        want = values.copy()
        want[[4, 6, 5]] = values[[0, 1, 2]]
        cache.check(want)

    def test_read_only_device_arrays_are_sources_only(self, shared: kf.TransferContext) -> None:
        geometry = small()
        model = Model(geometry, "fc")
        values = Cache(model)
        content = values.fill()
        image = model.allocate()
        model.store(content, image)
        shape = tuple(geometry.extents[axis] for axis in model.axes)
        array = CudaArray(Buffer.of(image[0]), shape, "<f2", read_only=True)
        lent = kf.PhysicalLayout.from_tensors(array, axes=" ".join(model.axes), config=config(geometry))
        target = Cache(Model(geometry, "lw"))
        target.poison()
        shared.transfer(lent, target.layout, range(7), range(7)).wait(60)
        target.check(content)
        with pytest.raises(kf.LayoutError, match="read-only"):
            shared.transfer(target.layout, lent, [0], [0])

    def test_layers_that_share_a_cache(self, shared: kf.TransferContext) -> None:
        array = CudaArray(Buffer(2 * 7 * 4 * 6 * 5 * 2, fill=1), (2, 7, 4, 6, 5), "<f2")
        twice = kf.PhysicalLayout.from_tensors([array, array], axes="outer block page head dim")
        other = kf.PhysicalLayout.fully_contiguous(twice.config, kf.device(0))
        shared.transfer(twice, other, [0], [1]).wait(60)
        with pytest.raises(kf.LayoutError, match="share"):
            shared.transfer(other, twice, [0], [1])

    def test_a_transform_may_be_forbidden(self, shared: kf.TransferContext) -> None:
        both = pair(small(), "device", "pinned", KINDS[0], KINDS[1])
        with pytest.raises(kf.LayoutError):
            shared.transfer(both.src, both.dst, [0], [1], transform="forbid")
        both.check([], [])

    def test_strategies_are_cross_checked(self, shared: kf.TransferContext) -> None:
        both = pair(small(), "device", "pinned")
        shared.transfer(both.src, both.dst, [0], [1], strategy="d2h").wait(60)
        with pytest.raises(kf.OptionError, match="d2h"):
            shared.transfer(both.src, both.dst, [0], [1], strategy="h2d")

    @pytest.mark.parametrize("num_sms", [0, -1, 1 << 40])
    def test_numbers_of_multiprocessors(self, shared: kf.TransferContext, num_sms: int) -> None:
        both = pair(small(), "device", "pinned")
        with pytest.raises(kf.OptionError, match="num_sms"):
            shared.transfer(both.src, both.dst, [0], [1], num_sms=num_sms)

    @pytest.mark.parametrize("num_sms", [1, 3, 132, 100_000])
    def test_any_number_of_multiprocessors_copies_everything(
        self, shared: kf.TransferContext, num_sms: int
    ) -> None:
        for engine in ("auto", "kernel"):
            both = pair(small(blocks=50), "device", "device", KINDS[4], KINDS[2])
            ids = shuffled(50, 50), shuffled(50, 50, 2)
            shared.transfer(both.src, both.dst, *ids, num_sms=num_sms, engine=engine).wait(60)
            both.check(*ids, num_sms)
