"""Small things done for real, so that doctor reports what happened and not what should."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import kvferry as kf

_FAILURES = (kf.Error, OSError, RuntimeError, ValueError, MemoryError)


@dataclass(frozen=True)
class Trial:
    """How it went."""

    worked: bool
    detail: str
    """Which engine did it, or the error."""


def host() -> Trial:
    """Moves one small block between two host layouts and looks at what arrived."""
    try:
        config = _config()
        source = kf.PhysicalLayout.layer_separate(config, kf.system())
        target = kf.PhysicalLayout.fully_contiguous(config, kf.system(), order="universal")
        source.fill(0x5A)
        target.fill(0)
        with kf.TransferContext("cpu", threads=1) as context:
            result = context.transfer(source, target, [1], [0]).wait(timeout=10.0)
        (region,) = target.regions
        found = ctypes.string_at(region.addr, region.nbytes)
        if found != b"\x5a" * config.block_bytes + bytes(region.nbytes - config.block_bytes):
            return Trial(False, "the bytes that arrived are not those that were sent")
    except _FAILURES as error:
        return Trial(False, _first_line(error))
    return Trial(True, result.engine)


def pinned() -> Trial:
    """Makes a small layout in pinned memory."""
    try:
        kf.PhysicalLayout.fully_contiguous(_config(), kf.pinned())
    except _FAILURES as error:
        return Trial(False, _first_line(error))
    return Trial(True, "pinned")


def gpu(ordinal: int) -> Trial:
    """Moves a block into a GPU's memory and back to another place, and looks at what arrived."""
    try:
        config = _config()
        there = kf.PhysicalLayout.fully_contiguous(config, kf.device(ordinal))
        here = kf.PhysicalLayout.fully_contiguous(config, kf.pinned())
        here.fill_pattern(1, [0])
        with kf.TransferContext(ordinal, threads=1) as context:
            context.transfer(here, there, [0], [1]).wait(timeout=30.0)
            result = context.transfer(there, here, [1], [1]).wait(timeout=30.0)
        here.verify_pattern(1, [1], as_blocks=[0])
    except _FAILURES as error:
        return Trial(False, _first_line(error))
    return Trial(True, result.engine)


def _config() -> kf.LayoutConfig:
    return kf.LayoutConfig(
        num_blocks=2, num_layers=2, page_size=4, num_heads=2, head_dim=16, dtype="bfloat16"
    )


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0].partition(" (looked for")[0]
