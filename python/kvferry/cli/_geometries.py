"""The demo's five caches: the shapes of known models, allocated as engines allocate them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

import kvferry as kf

Order = Literal["NHD", "HND", "universal"]


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """One model's cache, how its engine allocates it, and the pool its blocks are offloaded to."""

    name: str
    layers: int
    heads: int
    head_dim: int
    allocated_by: str
    axes: str
    """Axes of each layer's tensor, or of each of its (K, V) pair where "outer" is missing and not 1."""
    pool_order: Order
    blocks: int
    """Blocks the demo moves when not told otherwise."""
    outer: int = 2
    page: int = 16
    shard: tuple[int, int] | None = None
    """(rank, world) where the cache holds one rank's heads; the pool holds all of them."""

    @property
    def split(self) -> bool:
        """Whether K and V are separate tensors."""
        return self.outer > 1 and "outer" not in self.axes.split()

    @property
    def order(self) -> Literal["NHD", "HND"]:
        """Whether tokens or heads are further out."""
        axes = self.axes.split()
        heads_first = "head" in axes and axes.index("head") < axes.index("page")
        return "HND" if heads_first else "NHD"

    @property
    def block_dim(self) -> Literal["block_first", "outer_first"]:
        """Which is further out in a layer's tensor: blocks, or K and V."""
        return "outer_first" if self.axes.startswith("outer") else "block_first"

    def pool_config(self, num_blocks: int) -> kf.LayoutConfig:
        """The whole model's configuration."""
        sizes: dict[str, int] = {"num_heads": self.heads, "head_dim": self.head_dim}
        if "head" not in self.axes.split():
            sizes = {"inner_dim": self.heads * self.head_dim}
        return kf.LayoutConfig(
            num_blocks=num_blocks,
            num_layers=self.layers,
            outer_dim=self.outer,
            page_size=self.page,
            dtype="bfloat16",
            **sizes,
        )

    def cache_config(self, num_blocks: int) -> kf.LayoutConfig:
        """The configuration of this rank's cache."""
        config = self.pool_config(num_blocks)
        return config.shard_heads(*self.shard) if self.shard else config


@dataclass(frozen=True)
class Placement:
    """Which slots are named; every other one is a guard. Block i goes source[i] -> pool[i] -> back[i]."""

    cache_blocks: int
    pool_blocks: int
    source: list[int]
    pool: list[int]
    back: list[int]

    @classmethod
    def scattered(cls, blocks: int, seed: str) -> Placement:
        """`blocks` blocks at random slots, with guards among them, the two cache sides apart."""
        rng = random.Random(seed)
        cache_blocks = 2 * blocks + blocks // 2 + 3
        pool_blocks = blocks + blocks // 4 + 3
        named = rng.sample(range(cache_blocks), 2 * blocks)
        return cls(
            cache_blocks=cache_blocks,
            pool_blocks=pool_blocks,
            source=named[:blocks],
            pool=rng.sample(range(pool_blocks), blocks),
            back=named[blocks:],
        )

    @property
    def cache_guards(self) -> list[int]:
        """Cache slots that no transfer names."""
        return sorted(set(range(self.cache_blocks)) - set(self.source) - set(self.back))

    @property
    def pool_guards(self) -> list[int]:
        """Pool slots that no transfer names."""
        return sorted(set(range(self.pool_blocks)) - set(self.pool))


GEOMETRIES = (
    Geometry(
        name="Llama-3.1-8B",
        layers=32,
        heads=8,
        head_dim=128,
        allocated_by="vLLM",
        axes="outer block page head dim",
        pool_order="universal",
        blocks=24,
    ),
    Geometry(
        name="Llama-3.1-70B TP4",
        layers=80,
        heads=8,
        head_dim=128,
        shard=(1, 4),
        allocated_by="vLLM FlashInfer",
        axes="block outer head page dim",
        pool_order="universal",
        blocks=24,
    ),
    Geometry(
        name="Qwen2.5-7B",
        layers=28,
        heads=4,
        head_dim=128,
        allocated_by="SGLang, by page",
        axes="block page head dim",
        pool_order="HND",
        blocks=48,
    ),
    Geometry(
        name="DeepSeek-V3 MLA",
        layers=61,
        heads=1,
        head_dim=576,
        outer=1,
        allocated_by="vLLM MLA",
        axes="block page dim",
        pool_order="NHD",
        blocks=45,
    ),
    Geometry(
        name="odd: 3 heads x 80",
        layers=5,
        heads=3,
        head_dim=80,
        page=13,
        allocated_by="head-first",
        axes="block head outer page dim",
        pool_order="universal",
        blocks=384,
    ),
)
