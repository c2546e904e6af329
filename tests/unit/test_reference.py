"""The oracle itself: what everything else is measured against."""

from __future__ import annotations

import numpy as np
import pytest
from reference import GUARD, Geometry, Model, content, poisoned, transferred
from support import small


def test_content_is_keyed_and_unique() -> None:
    geometry = small(dtype="int64")
    values = content(geometry).reshape(-1, 8)
    assert len(np.unique(values, axis=0)) == len(values)
    assert (content(geometry) == content(geometry)).all()
    assert not (content(geometry, 1) == content(geometry, 2)).all(axis=-1).any()


def test_a_shard_holds_the_model_s_values() -> None:
    geometry = small()
    whole = content(geometry)
    for rank in range(3):
        assert (content(geometry.shard(rank, 3)) == whole[..., 2 * rank : 2 * rank + 2, :, :]).all()


def test_a_model_by_hand() -> None:
    geometry = Geometry(blocks=2, layers=1, outer=2, page=2, heads=3, dim=1, dtype="uint8")
    values = np.arange(24, dtype=np.uint8).reshape(geometry.shape)
    nhd = Model(geometry, "fc", alignment=16)
    regions = nhd.allocate()
    nhd.store(values, regions)
    assert regions[0].tolist() == [*range(12), *[GUARD] * 4, *range(12, 24)]
    assert nhd.padding_untouched(regions)
    regions[0][13] = 0
    assert not nhd.padding_untouched(regions)
    hnd = Model(geometry, "lw", order="HND", block_dim="outer_first")
    regions = hnd.allocate()
    hnd.store(values, regions)
    # Outer, block, head, token.
    assert regions[0][:12].tolist() == [0, 3, 1, 4, 2, 5, 12, 15, 13, 16, 14, 17]
    universal = Model(geometry, "pool", order="universal")
    regions = universal.allocate()
    universal.store(values, regions)
    assert regions[1].tolist() == [12, 15, 18, 21, 13, 16, 19, 22, 14, 17, 20, 23]


@pytest.mark.parametrize("kind", ["fc", "lw", "split", "pool"])
def test_store_and_load(kind: str) -> None:
    model = Model(small(), kind, order="HND", alignment=32, pad={"page": 4})
    values = content(model.geometry)
    regions = model.allocate()
    model.store(values, regions)
    assert (model.load(regions) == values).all()
    assert model.padding_untouched(regions)


def test_transferred_by_hand() -> None:
    src = Geometry(blocks=2, layers=1, outer=1, page=4, heads=2, dim=1, dtype="uint8")
    dst = Geometry(
        blocks=3, layers=1, outer=1, page=2, heads=1, dim=1, dtype="uint8", first_head=1, total_heads=2
    )
    values = np.arange(16, dtype=np.uint8).reshape(src.shape)
    after = transferred((src, values), (dst, poisoned(dst)), [1], [2, 0])
    # Head 1 of the tokens of block 1: 9, 11 to block 2 and 13, 15 to block 0.
    assert after.ravel().tolist() == [13, 15, 0xEE, 0xEE, 9, 11]
