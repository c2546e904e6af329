from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
from reference import ITEM_BYTES
from support import config, optional, small

import kvferry as kf

FIELDS: dict[str, Any] = {
    "num_blocks": 4,
    "num_layers": 3,
    "outer_dim": 2,
    "page_size": 16,
    "num_heads": 8,
    "head_dim": 64,
    "dtype": "bfloat16",
}


def make(**changes: Any) -> kf.LayoutConfig:
    fields = {**FIELDS, **changes}
    return kf.LayoutConfig(**{name: value for name, value in fields.items() if value is not ...})


def test_fields_come_back() -> None:
    cfg = make(alignment=64, first_head=8, total_heads=32)
    assert {name: getattr(cfg, name) for name in FIELDS} == FIELDS
    assert (cfg.alignment, cfg.first_head, cfg.total_heads) == (64, 8, 32)
    assert cfg.chunk_bytes == 16 * 8 * 64 * 2
    assert cfg.block_bytes == 3 * 2 * cfg.chunk_bytes


def test_defaults() -> None:
    cfg = make(outer_dim=...)
    assert (cfg.outer_dim, cfg.alignment, cfg.first_head, cfg.total_heads) == (2, 1, 0, 8)


def test_inner_dim_is_one_wide_head() -> None:
    cfg = make(num_heads=..., head_dim=..., inner_dim=576, outer_dim=1)
    assert (cfg.num_heads, cfg.head_dim) == (1, 576)
    assert cfg.replace(inner_dim=512).head_dim == 512
    with pytest.raises(kf.LayoutError, match="inner_dim"):
        cfg.replace(inner_dim=512, num_heads=2)
    with pytest.raises(kf.LayoutError, match="inner_dim"):
        make(inner_dim=512)


@pytest.mark.parametrize("name", [name for name in FIELDS if name != "dtype"])
@pytest.mark.parametrize("value", [0, -1, -(1 << 200), 1 << 63, 1 << 64, 1 << 200])
def test_sizes_out_of_range(name: str, value: int) -> None:
    with pytest.raises(kf.LayoutError, match=name):
        make(**{name: value})


@pytest.mark.parametrize(
    "name", ["num_blocks", "page_size", "alignment", "first_head", "total_heads", "outer_dim"]
)
@pytest.mark.parametrize("value", [1.0, "4", [4], b"4", object()])
def test_sizes_of_the_wrong_type(name: str, value: object) -> None:
    with pytest.raises(TypeError, match=name):
        make(**{name: value})


def test_numpy_integers_are_sizes() -> None:
    assert make(num_blocks=np.int32(5), head_dim=np.uint8(128)).num_blocks == 5


@pytest.mark.parametrize("value", [3, 48, (1 << 30) + 1, 1 << 31])
def test_alignment_is_a_power_of_two(value: int) -> None:
    with pytest.raises(kf.LayoutError, match="alignment"):
        make(alignment=value)


def test_products_are_checked() -> None:
    with pytest.raises(kf.LayoutError, match="2\\^63"):
        make(num_blocks=1 << 31, page_size=1 << 31, head_dim=1 << 31)
    with pytest.raises(kf.LayoutError):
        make(first_head=(1 << 63) - 1)


@pytest.mark.parametrize("name", ["num_heads", "head_dim", "dtype"])
def test_what_is_required(name: str) -> None:
    with pytest.raises((kf.LayoutError, TypeError), match=name):
        make(**{name: ...})
    with pytest.raises(kf.LayoutError, match=name):
        make(**{name: None})


def test_arguments_are_named() -> None:
    bad: Any = kf.LayoutConfig
    with pytest.raises(TypeError):
        bad(1, 2, 3)
    with pytest.raises(TypeError, match="blocks"):
        make(blocks=3)


@pytest.mark.parametrize("name", ITEM_BYTES)
def test_dtypes_by_name(name: str) -> None:
    cfg = make(dtype=name)
    assert cfg.dtype == name
    assert cfg.chunk_bytes == 16 * 8 * 64 * ITEM_BYTES[name]
    assert make(dtype=f"torch.{name}") == cfg


@pytest.mark.parametrize("dtype", [np.dtype("float16"), np.float16, np.dtype("int64"), np.int64, np.uint8])
def test_numpy_dtypes(dtype: Any) -> None:
    assert make(dtype=dtype).dtype == np.dtype(dtype).name


def test_ml_dtypes() -> None:
    ml = optional("ml_dtypes")
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        scalar = getattr(ml, name)
        assert make(dtype=scalar).dtype == make(dtype=np.dtype(scalar)).dtype == name


def test_torch_dtypes() -> None:
    torch = optional("torch")
    assert make(dtype=torch.bfloat16).dtype == "bfloat16"


@pytest.mark.parametrize(
    "dtype", ["float", "bf16", "Float16", "", "complex64", 5, object(), np.dtype(">f4"), bool]
)
def test_unknown_dtypes(dtype: Any) -> None:
    if dtype == np.dtype(">f4"):
        # A NumPy dtype is taken by its name; arrays of the other byte order are refused as arrays.
        assert make(dtype=dtype).dtype == "float32"
        return
    with pytest.raises(kf.LayoutError, match="unknown dtype"):
        make(dtype=dtype)


def test_equality_hash_and_repr() -> None:
    a, b = make(), make()
    assert a == b and hash(a) == hash(b) and len({a, b}) == 1
    other: Any
    assert a != make(num_blocks=5)
    for other in ("x", None, 3):
        assert a != other
    for cfg in (a, make(alignment=64), make(first_head=8, total_heads=32)):
        assert eval(repr(cfg), {"LayoutConfig": kf.LayoutConfig}) == cfg
    left, right = a, b
    with pytest.raises(TypeError):
        _ = left < right  # type: ignore[operator]


def test_immutable() -> None:
    cfg: Any = make()
    with pytest.raises(AttributeError):
        cfg.num_blocks = 3
    with pytest.raises(AttributeError):
        cfg.other = 3


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_and_copies(protocol: int) -> None:
    cfg = make(alignment=128, first_head=8, total_heads=32)
    assert pickle.loads(pickle.dumps(cfg, protocol)) == cfg
    assert copy.copy(cfg) == copy.deepcopy(cfg) == cfg


def test_replace() -> None:
    cfg = make(alignment=64)
    assert cfg.replace() == cfg
    assert cfg.replace(num_blocks=9) == make(alignment=64, num_blocks=9)
    assert cfg.replace(num_heads=4).total_heads == 4
    assert cfg.replace(num_heads=4, total_heads=8).total_heads == 8
    assert cfg.replace(dtype="int8").dtype == "int8"
    assert cfg.replace(num_blocks=None) == cfg
    with pytest.raises(kf.OptionError, match=r"unknown field .num_block.;"):
        cfg.replace(num_block=9)
    with pytest.raises(kf.LayoutError, match="page_size"):
        cfg.replace(page_size=0)
    with pytest.raises(TypeError, match="page_size"):
        cfg.replace(page_size="x")


def test_shards() -> None:
    cfg = make()
    parts = [cfg.shard_heads(rank, 4) for rank in range(4)]
    assert [(part.first_head, part.num_heads, part.total_heads) for part in parts] == [
        (0, 2, 8),
        (2, 2, 8),
        (4, 2, 8),
        (6, 2, 8),
    ]
    again = parts[1].shard_heads(1, 2)
    assert (again.first_head, again.num_heads, again.total_heads) == (3, 1, 8)
    assert parts[1] == config(small(blocks=4, page=16, heads=8, dim=64, dtype="bfloat16").shard(1, 4))
    for rank, world in [(4, 4), (0, 3), (0, 0), (-1, 2), (0, -2), (1 << 70, 2)]:
        with pytest.raises(kf.LayoutError):
            cfg.shard_heads(rank, world)
    bad: Any = "1"
    with pytest.raises(TypeError, match="world"):
        cfg.shard_heads(0, bad)
