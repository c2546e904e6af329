"""The guard check: any byte that nobody should have written is found and named."""

from __future__ import annotations

import numpy as np
import pytest
from reference import GUARD, Model
from support import Cache, small

import kvferry as kf
from kvferry.testing import guard

MODELS = [
    Model(small(), "fc", "NHD", alignment=512),
    Model(small(), "lw", "HND", "outer_first"),
    Model(small(), "split", "NHD"),
    Model(small(), "pool", "universal"),
    Model(small(), "lw", "NHD", alignment=32, pad={"head": 4, "page": 6}),
    Model(small(), "fc", "HND", pad={"dim": 2, "block": 10}),
]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: f"{model.kind}-{model.order}")
def test_guard_finds_any_byte(model: Model) -> None:
    c = Cache(model, own=not model.pad, offset=2)
    c.layout.fill_pattern(1, [3])
    c.layout.check_fill(GUARD, [3])
    # Which block each byte belongs to, by what the oracle stores there.
    blocks = np.arange(7, dtype=np.uint8).reshape(7, 1, 1, 1, 1, 1, 1)
    owner = model.allocate(255)
    model.store(np.broadcast_to(blocks, model.geometry.shape), owner)
    places = [(region, at) for region in range(len(owner)) for at in range(len(owner[region]))]
    for region, at in places[:: max(1, len(places) // 500)]:
        block = int(owner[region][at])
        before = c.regions[region][at]
        c.regions[region][at] = before ^ 1
        if block == 3:
            c.layout.check_fill(GUARD, [3])
        else:
            with pytest.raises(kf.GuardError) as caught:
                c.layout.check_fill(GUARD, [3])
            error = caught.value
            assert (error.region, error.offset, error.block) == (region, at, None if block == 255 else block)
            assert (error.expected, error.found) == (GUARD, GUARD ^ 1)
        c.regions[region][at] = before


def test_guard_respects_interleaved_tensors() -> None:
    """K and V as two views of one tensor span each other's bytes."""
    memory = np.full((4, 2, 8), GUARD, np.uint8)
    layout = kf.PhysicalLayout.from_tensors([(memory[:, 0], memory[:, 1])], axes="block dim")
    layout.fill_pattern(1, [2])
    layout.check_fill(GUARD, [2])
    with pytest.raises(kf.GuardError) as caught:
        layout.check_fill(GUARD, [1])
    assert caught.value.block == 2


def test_guard_context() -> None:
    layout = Cache(Model(small(), "fc", alignment=256)).layout
    with guard(layout, [1, 2], value=0xA5):
        layout.fill_pattern(1, [2])
    with pytest.raises(kf.GuardError) as caught, guard(layout, [1, 2], value=7):
        layout.fill_pattern(1, [3])
    assert (caught.value.block, caught.value.expected) == (3, 7)
    layout.fill_pattern(1)
    with guard(layout, np.array([1, 2]), value=None):
        layout.fill_pattern(2, [1])
    layout.verify_pattern(1, [0, 3])
    with pytest.raises(kf.GuardError, match="block 4") as caught, guard(layout, [1], value=None):
        layout.fill_pattern(2, [4])
    assert (caught.value.block, caught.value.region) == (4, None)
    # The body's own exception comes through.
    with pytest.raises(kf.DuplicateBlockError), guard(layout):
        write_and_fail(layout)


def write_and_fail(layout: kf.PhysicalLayout) -> None:
    layout.fill_pattern(1, [3])
    layout.fill_pattern(1, [3, 3])
