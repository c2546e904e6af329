"""For your own tests: the right bytes arrived, and nothing else was written.

    from kvferry.testing import guard
    src.fill_pattern(seed=1)
    with guard(dst, except_blocks=[0, 1], value=0xA5):
        ctx.transfer(src, dst, [3, 5], [0, 1]).wait()
    dst.verify_pattern(1, [0, 1], as_blocks=[3, 5])
    assert dst.checksum([0, 1]) == src.checksum([3, 5])

The checks themselves are methods of `PhysicalLayout` and also serve self-checks in production.

`driver_fault` lets a call of the CUDA driver fail, to see what your code makes of it.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvferry._core import clear_driver_faults, inject_driver_fault, settle_memory
from kvferry._errors import GuardError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvferry._core import PhysicalLayout

__all__ = ["DriverFault", "driver_fault", "guard", "settle_memory"]


@contextmanager
def guard(layout: PhysicalLayout, except_blocks: Any = (), *, value: int | None = None) -> Iterator[None]:
    """Raise GuardError if the body writes anything but the payload of `except_blocks`.

    By default the contents stay and checksums of the other blocks are compared: for caches in use and
    read-only memory. Padding is not looked at then, and the error names a `block` but no `region` or
    `offset`. With a `value`, every byte of the layout is set to it first and looked at afterwards, padding
    included. The body must wait for its transfers. If it raises, nothing is checked.
    """
    if value is not None:
        layout.fill(value)
        yield
        layout.check_fill(value, except_blocks)
        return
    excepted = {int(block) for block in except_blocks}
    others = [block for block in range(layout.num_blocks) if block not in excepted]
    before = layout.checksum(others)
    yield
    for block, old, new in zip(others, before, layout.checksum(others), strict=True):
        if old != new:
            message = f"block {block} has changed"
            raise GuardError(message, region=None, offset=None, block=block, expected=None, found=None)


class DriverFault:
    """A fault that `driver_fault` has planted."""

    happened: bool | None = None
    """Whether the call was made and failed; None until the block has ended."""


@contextmanager
def driver_fault(call: str, nth: int = 1, code: int = 2) -> Iterator[DriverFault]:
    """Let the `nth` call of a CUDA driver function inside the block fail, in whatever thread it happens.

    The driver never sees the call, so nothing on the GPU breaks. Only kvferry's own calls count.
    call: the name that errors show, such as "cuLaunchKernel". code: the driver's number of the error, 2 being
    CUDA_ERROR_OUT_OF_MEMORY. One fault at a time: the end of a block takes all back.
    """
    fault = DriverFault()
    inject_driver_fault(call, nth, code)
    try:
        yield fault
    finally:
        fault.happened = clear_driver_faults() == 0
