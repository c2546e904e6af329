"""Between the oracle and kvferry: layouts made from models, and what optional libraries there are."""

from __future__ import annotations

import ctypes
import importlib
import os
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from reference import GUARD, Geometry, Model, content, poisoned, transferred

import kvferry as kf

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reference import Bytes

REQUIRE_GPU = os.environ.get("KVFERRY_REQUIRE_GPU") == "1"


def gpu_reason(needed: int = 1) -> str | None:
    """Why GPU tests cannot run here; None if they can."""
    try:
        found = len(kf.devices())
    except kf.CudaError as error:
        return str(error)
    return None if found >= needed else f"needs {needed} GPU(s), {found} found"


def optional(name: str) -> Any:
    """An optional library, or a skip that says which."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"{name} is not installed ({error})")


def config(geometry: Geometry, alignment: int = 1) -> kf.LayoutConfig:
    return kf.LayoutConfig(
        num_blocks=geometry.blocks,
        num_layers=geometry.layers,
        outer_dim=geometry.outer,
        page_size=geometry.page,
        num_heads=geometry.heads,
        head_dim=geometry.dim,
        dtype=geometry.dtype,
        alignment=alignment,
        first_head=geometry.first_head,
        total_heads=geometry.total_heads,
    )


def owned(model: Model, memory: kf.Memory | None = None) -> kf.PhysicalLayout:
    """A layout of kvferry's own memory for a model."""
    cfg = config(model.geometry, model.alignment)
    memory = memory or kf.system()
    order: Any = model.order
    if model.kind == "fc":
        return kf.PhysicalLayout.fully_contiguous(cfg, memory, order=order)
    if model.kind == "split":
        return kf.PhysicalLayout.split_kv(cfg, memory, order=order)
    if model.kind == "pool":
        return kf.PhysicalLayout.block_pool(cfg, memory, order=order)
    block_dim: Any = model.block_dim
    return kf.PhysicalLayout.layer_separate(cfg, memory, block_dim=block_dim, order=order)


def flat(layout: kf.PhysicalLayout) -> list[Bytes]:
    """The regions' raw bytes by address, not by kvferry's idea of their shape. Keep the layout alive."""
    return [
        np.ctypeslib.as_array((ctypes.c_uint8 * region.nbytes).from_address(region.addr))
        for region in layout.regions
    ]


def borrowed(model: Model, regions: Sequence[Bytes]) -> kf.PhysicalLayout:
    """A layout over NumPy arrays that lie as the model says; not for block pools."""
    geometry = model.geometry
    raw = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[geometry.item]
    arrays = []
    for region in regions:
        view = model.view(region)
        arrays.append(np.ndarray(view.shape[:-1], raw, region, 0, view.strides[:-1]))
    axes = " ".join(model.axes)
    tensors: Any = arrays[0] if model.kind == "fc" else arrays
    if model.kind == "split" and geometry.outer == 2:
        tensors = list(zip(arrays[::2], arrays[1::2], strict=True))
    return kf.PhysicalLayout.from_tensors(tensors, axes=axes, config=config(geometry))


class Cache:
    """A model with memory: kvferry's own, or NumPy's behind guard bytes."""

    def __init__(self, model: Model, *, own: bool = True, offset: int = 0) -> None:
        self.model = model
        if own:
            self.layout = owned(model)
            self.layout.fill(GUARD)
            self.regions = flat(self.layout)
            self.guarded: list[Bytes] = []
        else:
            margin = 64
            size = model.region_bytes + 2 * margin + offset
            self.guarded = [np.full(size, GUARD, np.uint8) for _ in range(model.num_regions)]
            start = margin + offset
            self.regions = [whole[start : start + model.region_bytes] for whole in self.guarded]
            self.layout = borrowed(model, self.regions)

    def fill(self, key: int) -> Bytes:
        """Fills the cache with the oracle's content; returns it."""
        values = content(self.model.geometry, key)
        self.model.store(values, self.regions)
        return values

    def poison(self) -> Bytes:
        values = poisoned(self.model.geometry)
        self.model.store(values, self.regions)
        return values

    def check(self, expected: Bytes) -> None:
        """Every element is as expected, and nothing else was written."""
        found = self.model.load(self.regions)
        if (found != expected).any():
            wrong = np.argwhere(found != expected)
            at = tuple(wrong[0])
            pytest.fail(
                f"{len(wrong)} wrong bytes, first at {at}: {found[at]:#x}, expected {expected[at]:#x}"
            )
        assert self.model.padding_untouched(self.regions), "padding was written"
        for whole, region in zip(self.guarded, self.regions, strict=False):
            start = region.ctypes.data - whole.ctypes.data
            outside = np.concatenate([whole[:start], whole[start + len(region) :]])
            assert (outside == GUARD).all(), "guard bytes around an array were written"


def small(**changes: Any) -> Geometry:
    """A small geometry with five different extents."""
    return Geometry(**{"blocks": 7, "layers": 3, "outer": 2, "page": 4, "heads": 6, "dim": 5, **changes})


def pair(**changes: Any) -> tuple[Cache, Cache, Any]:
    """Source, poisoned destination, and what to expect of a copy."""
    source, target = Cache(Model(small(**changes), "lw")), Cache(Model(small(**changes), "fc", "universal"))
    values, before = source.fill(1), target.poison()

    def expected(src: Any, dst: Any, **options: Any) -> Any:
        return transferred(
            (source.model.geometry, values), (target.model.geometry, before), src, dst, **options
        )

    return source, target, expected


def large(mib: int = 64) -> tuple[kf.PhysicalLayout, kf.PhysicalLayout, list[int]]:
    """Two layouts between which a copy of all blocks takes some milliseconds: rows change their order."""
    cfg = kf.LayoutConfig(
        num_blocks=mib, num_layers=4, page_size=16, num_heads=64, head_dim=64, dtype="float16"
    )
    assert cfg.block_bytes == 1 << 20
    src = kf.PhysicalLayout.fully_contiguous(cfg, kf.system(), order="NHD")
    dst = kf.PhysicalLayout.fully_contiguous(cfg, kf.system(), order="universal")
    return src, dst, list(range(mib))


def python(code: str, *flags: str, timeout: float = 60, **env: Any) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh interpreter."""
    return subprocess.run(
        [sys.executable, *flags, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={**os.environ, "PYTHONFAULTHANDLER": "1", **env},
    )


def with_tests() -> dict[str, Any]:
    """Environment in which a fresh interpreter finds the modules beside this one too."""
    here = os.path.dirname(os.path.abspath(__file__))
    return {"PYTHONPATH": os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))}


def succeeds(code: str, *flags: str, timeout: float = 60, **env: Any) -> str:
    """Runs code in a fresh interpreter, which must end well and say nothing on stderr; its output."""
    # From 3.12 on os.fork() warns in a process with threads, which is what these tests are about.
    done = python(code, *flags, timeout=timeout, **{"PYTHONWARNINGS": "ignore::DeprecationWarning", **env})
    assert (done.returncode, done.stderr) == (0, ""), f"exit {done.returncode}\n{done.stderr}"
    return done.stdout
