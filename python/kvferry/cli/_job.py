"""The main job, once: a cache as an engine allocates it -> a contiguous pool -> other slots of the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

import kvferry as kf
from kvferry.cli._geometries import GEOMETRIES, Geometry, Order, Placement
from kvferry.cli._pattern import POISON, U16, Pattern, Store, Verifier, fill, poison
from kvferry.cli._report import Leg, Outcome, Refusal

if TYPE_CHECKING:
    from collections.abc import Callable

MOVES = 5
"""Moves each way. The last goes into freshly poisoned slots and is the one verified."""

_FIRST = GEOMETRIES[0]


def the_code(device: int | None) -> tuple[str, ...]:
    """What `run` does for the first geometry; a test runs these lines."""
    if device is None:
        cache = f'from_tensors(tensors, axes="{_FIRST.axes}", config=config)'
    else:
        cache = f'layer_separate(config, kf.device({device}), block_dim="{_FIRST.block_dim}")'
    memory = "kf.system()" if device is None else "kf.pinned()"
    return (
        f"cache = kf.PhysicalLayout.{cache}",
        f'pool = kf.PhysicalLayout.fully_contiguous(pool_config, {memory}, order="{_FIRST.pool_order}")',
        "ctx.transfer(cache, pool, source, slots).wait()",
        "ctx.transfer(pool, cache, slots, back).wait()",
    )


_POOL_AXES: dict[Order, str] = {
    "NHD": "block layer outer page head dim",
    "HND": "block layer outer head page dim",
    "universal": "block head layer outer page dim",
}
_PLANE_AXES = ("block", "page", "head", "dim")


def run(ctx: kf.TransferContext, geometry: Geometry, *, blocks: int, seed: int, mistake: bool) -> Outcome:
    """Runs one geometry and verifies it; with `mistake`, first makes one on purpose.

    In a context with a GPU the cache lies there, filled from and read back into the arrays, and the pool is
    pinned.
    """
    key = f"{seed}/{geometry.name}"
    at = Placement.scattered(blocks, key)
    config, pool_config = geometry.cache_config(at.cache_blocks), geometry.pool_config(at.pool_blocks)
    tensors, cache_store = _allocate(geometry, config)
    arrays = kf.PhysicalLayout.from_tensors(tensors, axes=geometry.axes, config=config)
    memory = kf.system() if ctx.device is None else kf.pinned()
    pool = kf.PhysicalLayout.fully_contiguous(pool_config, memory, order=geometry.pool_order)
    pool_store = _look_into(pool, geometry.pool_order)
    poison(pool_store, list(range(at.pool_blocks)))

    heads = range(config.first_head, config.first_head + config.num_heads)
    truth = Pattern(
        key,
        layers=geometry.layers,
        outer=geometry.outer,
        page=geometry.page,
        total_heads=config.total_heads,
        heads=heads,
        head_dim=config.head_dim,
    )
    fill(cache_store, truth, at.source)
    cache = arrays if ctx.device is None else _on_gpu(geometry, config, ctx.device)

    def upload(slots: list[int]) -> None:
        if cache is not arrays:
            ctx.transfer(arrays, cache, slots, slots).wait()

    everywhere = list(range(at.cache_blocks))
    upload(everywhere)

    def clear_back() -> None:
        poison(cache_store, at.back)
        upload(at.back)

    plan = ctx.plan(cache, pool, at.source, at.pool)
    offload = _move(lambda: offload_step(ctx, cache, pool, at), plan, lambda: poison(pool_store, at.pool))
    bring_back = _move(
        lambda: bring_back_step(ctx, cache, pool, at),
        ctx.plan(pool, cache, at.pool, at.back),
        clear_back,
    )
    refusal = _make_mistake(ctx, cache, pool, at) if mistake else None
    if cache is not arrays:
        arrays.fill(0)  # whatever is right below came from the GPU
        ctx.transfer(cache, arrays, everywhere, everywhere).wait()
    return Outcome(
        name=geometry.name,
        config=repr(config),
        allocated_by=geometry.allocated_by,
        allocated=_describe(tensors),
        axes=geometry.axes,
        heads=(heads.start, heads.stop - 1, config.total_heads),
        pool_order=geometry.pool_order,
        cache_blocks=at.cache_blocks,
        pool_blocks=at.pool_blocks,
        moved_blocks=blocks,
        offload=offload,
        bring_back=bring_back,
        findings=Verifier(geometry.name, truth).verify(cache_store, pool_store, at),
        explain=plan.explain(),
        refusal=refusal,
    )


def offload_step(
    ctx: kf.TransferContext, cache: kf.PhysicalLayout, pool: kf.PhysicalLayout, at: Placement
) -> kf.TransferResult:
    """Moves the scattered blocks out."""
    return ctx.transfer(cache, pool, at.source, at.pool).wait()


def bring_back_step(
    ctx: kf.TransferContext, cache: kf.PhysicalLayout, pool: kf.PhysicalLayout, at: Placement
) -> kf.TransferResult:
    """Moves them back, to other slots."""
    return ctx.transfer(pool, cache, at.pool, at.back).wait()


def _on_gpu(geometry: Geometry, config: kf.LayoutConfig, device: int) -> kf.PhysicalLayout:
    """The cache as the engine allocates it, in the GPU's memory."""
    memory = kf.device(device)
    if geometry.split:
        return kf.PhysicalLayout.split_kv(config, memory)
    return kf.PhysicalLayout.layer_separate(
        config, memory, block_dim=geometry.block_dim, order=geometry.order
    )


def _allocate(geometry: Geometry, config: kf.LayoutConfig) -> tuple[list[Any], Store]:
    """One poisoned array for each layer (two where K and V are apart), and our view of it."""
    extents = {
        "outer": config.outer_dim,
        "block": config.num_blocks,
        "page": config.page_size,
        "head": config.num_heads,
        "dim": config.head_dim,
    }
    axes = geometry.axes.split()
    shape = [extents[axis] for axis in axes]
    tensors: list[Any] = []
    planes: list[list[U16]] = []
    for _ in range(geometry.layers):
        # bfloat16 travels as 16-bit integers: NumPy has no such type, and kvferry moves bytes.
        arrays = [np.full(shape, POISON, np.uint16) for _ in range(2 if geometry.split else 1)]
        tensors.append(tuple(arrays) if geometry.split else arrays[0])
        if "outer" in axes:
            arrays = list(np.moveaxis(arrays[0], axes.index("outer"), 0))
        planes.append([_plane(array, [axis for axis in axes if axis != "outer"]) for array in arrays])
    return tensors, Store("cache", planes, config.first_head)


def _look_into(pool: kf.PhysicalLayout, order: Order) -> Store:
    """The pool's one piece of memory, by the axes its order promises rather than by what the layout says."""
    config = pool.config
    axes = _POOL_AXES[order].split()
    extents = {
        "block": config.num_blocks,
        "layer": config.num_layers,
        "outer": config.outer_dim,
        "page": config.page_size,
        "head": config.num_heads,
        "dim": config.head_dim,
    }
    (region,) = pool.regions
    raw = np.asarray(region)
    if not raw.flags.c_contiguous:
        raise AssertionError(f"the pool is not contiguous: strides {raw.strides}")
    whole = raw.reshape(-1).view(np.uint16).reshape([extents[axis] for axis in axes])
    by_layer = whole.transpose([axes.index(axis) for axis in ("layer", "outer", *_PLANE_AXES)])
    return Store("pool", [list(planes) for planes in by_layer], config.first_head)


def _plane(array: U16, axes: list[str]) -> U16:
    if "head" not in axes:
        array, axes = array[..., None, :], [*axes[:-1], "head", axes[-1]]
    return array.transpose([axes.index(axis) for axis in _PLANE_AXES])


def _describe(tensors: list[Any]) -> str:
    """Such as "32 x [2, 43, 16, 8, 128]"."""
    pair = isinstance(tensors[0], tuple)
    shape = list(tensors[0][0].shape if pair else tensors[0].shape)
    return f"{len(tensors)} x {'(K, V) of ' if pair else ''}{shape}"


def _move(step: Callable[[], kf.TransferResult], plan: kf.TransferPlan, clear: Callable[[], None]) -> Leg:
    results = [step() for _ in range(MOVES - 1)]
    clear()
    results.append(step())
    return Leg(
        bytes=plan.bytes,
        elementary_runs=plan.elementary_runs,
        runs=plan.num_runs,
        run_bytes=plan.run_bytes,
        engine=results[-1].engine,
        seconds=[result.seconds for result in results],
    )


def _make_mistake(
    ctx: kf.TransferContext, cache: kf.PhysicalLayout, pool: kf.PhysicalLayout, at: Placement
) -> Refusal:
    """Names one guard of the pool twice; that the guards are intact afterwards shows that nothing moved."""
    source, slots = at.source[:2], at.pool_guards[:1] * 2
    if len(source) < 2:
        source = source * 2
    code = f"ctx.transfer(cache, pool, {source}, {slots})"
    try:
        ctx.transfer(cache, pool, source, slots).wait()
    except kf.Error as error:
        kind = type(error)
        also = next(base.__name__ for base in kind.__mro__ if base.__module__ == "builtins")
        return Refusal(code, f"kvferry.{kind.__name__}", also, str(error), dict(vars(error)))
    return Refusal(code, "", "", "not refused", {})
