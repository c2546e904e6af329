"""Checksums and patterns against their formulas in NumPy."""

from __future__ import annotations

import pickle
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pytest
from reference import GUARD, Geometry, Model, mixed
from support import Cache, large, small
from xxh3 import xxh3_64

import kvferry as kf
from kvferry.testing import guard

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from reference import Bytes

MODELS = [
    Model(small(), "fc", "NHD", alignment=512),
    Model(small(), "fc", "HND"),
    Model(small(), "fc", "universal", alignment=64),
    Model(small(), "lw", "NHD", alignment=32),
    Model(small(), "lw", "HND", "outer_first"),
    Model(small(), "split", "NHD"),
    Model(small(), "pool", "universal"),
]
# Gaps inside blocks; elements that do not lie side by side.
STRIDED = [
    Model(small(), "lw", "NHD", pad={"head": 4, "page": 6}),
    Model(small(), "fc", "HND", pad={"dim": 2, "block": 10}),
    Model(small(), "split", "NHD", pad={"dim": 4}),
]
GOLDEN = 0x9E3779B97F4A7C15


EVERY = [pytest.param(m, id=f"{m.kind}-{m.order}{'-strided' * bool(m.pad)}") for m in [*MODELS, *STRIDED]]


def cache(model: Model) -> Cache:
    return Cache(model, own=not model.pad, offset=3 * model.geometry.item)


def words(geometry: Geometry) -> NDArray[np.uint64]:
    """Packed coordinates of the rows of a block: [layer, outer, token, head]."""
    layer, outer, token, head = np.ix_(*(np.arange(n, dtype=np.uint64) for n in geometry.shape[1:5]))
    packed: NDArray[np.uint64] = head + np.uint64(geometry.first_head)
    for coordinate, shift in ((token, 20), (layer, 44), (outer, 60)):
        packed = packed | coordinate << np.uint64(shift)
    return packed


def checksums(geometry: Geometry, values: Bytes) -> list[int]:
    rows = values.reshape(*geometry.shape[:5], -1)
    hashes = np.array([xxh3_64(row.tobytes()) for row in rows.reshape(-1, rows.shape[-1])], np.uint64)
    terms = mixed(hashes.reshape(rows.shape[:-1]) ^ mixed(words(geometry)))
    return [int(total) for total in terms.sum(axis=(1, 2, 3, 4), dtype=np.uint64)]


def pattern(geometry: Geometry, seed: int) -> Bytes:
    row = geometry.dim * geometry.item
    count = -(-row // 8)
    blocks = np.arange(geometry.blocks, dtype=np.uint64)[:, None, None, None, None]
    keys = mixed(mixed(mixed(np.array([seed], np.uint64)) ^ blocks) ^ words(geometry))
    steps = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    stream = mixed(keys[..., None] + steps).astype("<u8").view(np.uint8)
    return stream[..., :row].reshape(geometry.shape)


@pytest.mark.parametrize("model", EVERY)
def test_checksum_is_its_formula_in_every_layout(model: Model) -> None:
    c = cache(model)
    expected = checksums(model.geometry, c.fill(5))
    assert c.layout.checksum() == expected
    assert c.layout.checksum(np.array([4, 0, 4])) == [expected[4], expected[0], expected[4]]


@pytest.mark.parametrize("dim", [1, 3, 8, 16, 40, 64, 100, 120, 121, 300, 700])
def test_checksum_of_every_row_length_class(dim: int) -> None:
    geometry = small(blocks=1, layers=1, heads=2, dim=dim)
    c = Cache(Model(geometry, "fc"))
    expected = checksums(geometry, c.fill(dim))
    assert c.layout.checksum() == expected


def test_checksum_adds_up_over_layers_and_shards(ctx: kf.TransferContext) -> None:
    c = cache(MODELS[0])
    c.fill(1)
    total = c.layout.checksum()
    parts = [c.layout.checksum(layers=layers) for layers in (range(1), range(1, 3))]
    assert [sum(pair) % 2**64 for pair in zip(*parts, strict=True)] == total
    shards = []
    for rank in range(3):
        geometry = small().shard(rank, 3)
        shard = Cache(Model(geometry, "fc", "universal"))
        ctx.transfer(c.layout, shard.layout, range(7), range(7)).wait()
        shards.append(shard.layout.checksum())
    assert [sum(parts) % 2**64 for parts in zip(*shards, strict=True)] == total


@pytest.mark.parametrize("model", EVERY)
@pytest.mark.parametrize("seed", [0, 2**64 - 1])
def test_pattern_is_its_formula_in_every_layout(model: Model, seed: int) -> None:
    c = cache(model)
    c.layout.fill_pattern(seed)
    c.check(pattern(model.geometry, seed))
    c.layout.verify_pattern(seed)
    c.layout.check_fill(GUARD, range(7))


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float64"])
def test_pattern_of_a_shard_and_of_smaller_pages(dtype: str) -> None:
    geometry = small(dtype=dtype).shard(1, 2)
    c = Cache(Model(geometry, "lw", "HND", "outer_first"))
    c.layout.fill_pattern(9)
    c.check(pattern(geometry, 9))
    pages = c.layout.with_page_size(2)
    pages.fill_pattern(9, blocks=[13])
    shape = small(dtype=dtype, blocks=14, page=2).shard(1, 2)
    found = c.model.load(c.regions)[6, :, :, 2:]
    assert (found == pattern(shape, 9)[13]).all()
    pages.verify_pattern(9, [13])


def test_a_transfer_passes_all_checks(ctx: kf.TransferContext) -> None:
    src, dst = cache(MODELS[3]).layout, Cache(Model(small(blocks=3), "fc", "universal", alignment=64)).layout
    src.fill_pattern(3)
    with guard(dst, [0, 2], value=0xA5):
        ctx.transfer(src, dst, [6, 4], [0, 2]).wait()
    dst.verify_pattern(3, [0, 2], as_blocks=[6, 4])
    dst.verify_pattern(3, (2,), as_blocks=(4,), layers=range(1, 3))
    assert dst.checksum([0, 2]) == src.checksum([6, 4])


def test_mismatch_names_the_first_wrong_byte() -> None:
    c = cache(MODELS[1])
    c.layout.fill_pattern(1)
    values = c.model.load(c.regions)
    for at in [(5, 1, 1, 2, 3, 4, 1), (5, 2, 0, 0, 0, 0, 0), (2, 2, 1, 3, 5, 4, 0), (2, 2, 1, 3, 5, 4, 1)]:
        values[at] ^= 0xFF
    c.model.store(values, c.regions)
    with pytest.raises(kf.MismatchError) as caught:
        c.layout.verify_pattern(1, [5, 2])
    error = caught.value
    found = int(values[5, 1, 1, 2, 3, 4, 1])
    assert (error.block, error.as_block, error.layer, error.outer, error.token, error.head) == (
        5,
        5,
        1,
        1,
        2,
        3,
    )
    assert (error.offset, error.expected, error.found) == (9, found ^ 0xFF, found)
    assert (error.bad_rows, error.rows) == (3, 2 * 3 * 2 * 4 * 6)
    assert kf.MismatchError.__bases__ == (kf.Error, AssertionError)
    assert str(error).startswith(
        "block 5 does not hold the pattern of block 5: layer 1, outer 1, token 2, head 3"
    )
    assert vars(pickle.loads(pickle.dumps(error))) == vars(error)
    c.layout.verify_pattern(1, [5, 2], layers=range(1))
    with pytest.raises(kf.MismatchError) as caught:
        c.layout.verify_pattern(1, [0, 1], as_blocks=[0, 2**32 - 1])
    assert (caught.value.block, caught.value.as_block, caught.value.bad_rows) == (1, 2**32 - 1, 144)


def test_refusals() -> None:
    c = cache(MODELS[0])
    layout = c.layout
    layout.fill_pattern(1)
    with pytest.raises(kf.BlockIdError) as caught:
        layout.checksum([0, 7])
    assert (caught.value.index, caught.value.value, caught.value.limit) == (1, 7, 7)
    for call in (layout.fill_pattern, layout.verify_pattern, layout.check_fill):
        with pytest.raises(kf.BlockIdError):
            call(1, [-1])
        for bad in (-1, 2**64):
            with pytest.raises(kf.OptionError):
                call(bad)
        with pytest.raises(TypeError):
            call("1")  # type: ignore[arg-type]
    with pytest.raises(kf.OptionError, match="value"):
        layout.check_fill(256)
    with pytest.raises(kf.DuplicateBlockError):
        layout.fill_pattern(2, [1, 1])
    with pytest.raises(kf.LayoutError, match="do not pair up"):
        layout.verify_pattern(1, [1], as_blocks=[1, 2])
    for layers in (range(4), range(2, 2)):
        with pytest.raises(kf.LayoutError, match="layer range"):
            layout.checksum(layers=layers)
    with pytest.raises(kf.OptionError, match="layers"):
        layout.verify_pattern(1, layers=range(0, 3, 2))
    layout.verify_pattern(1)
    assert layout.checksum([]) == []
    lent = np.zeros((2, 4), np.uint8)
    lent.flags.writeable = False
    view = kf.PhysicalLayout.from_tensors(lent, axes="block dim")
    with pytest.raises(kf.LayoutError, match="read-only"):
        view.fill_pattern(1)
    view.check_fill(0)
    assert len(set(view.checksum())) == 1


def test_a_swap_changes_the_checksum() -> None:
    c = cache(MODELS[5])
    values = c.fill(2)
    before = c.layout.checksum()
    for axis in (1, 2, 3, 4):
        c.model.store(np.flip(values, axis), c.regions)
        assert not set(before) & set(c.layout.checksum())
    # Blocks hold what they hold wherever they are.
    c.model.store(np.flip(values, 0), c.regions)
    assert c.layout.checksum() == before[::-1]


def test_the_gil_is_released() -> None:
    layout = large(32)[0]
    layout.fill(0)
    calls: list[Callable[[], object]] = [
        partial(layout.check_fill, 0),
        partial(layout.fill_pattern, 0),
        partial(layout.verify_pattern, 0),
        layout.checksum,
    ]
    spans = []

    def work() -> None:
        for call in calls:
            start = time.perf_counter()
            call()
            spans.append((start, time.perf_counter()))

    thread = threading.Thread(target=work)
    thread.start()
    seen = []
    while thread.is_alive():
        seen.append(time.perf_counter())
        time.sleep(0.0005)
    thread.join()
    assert len(spans) == 4
    for start, end in spans:
        assert any(start < moment < end for moment in seen)
