"""For your own tests: the right bytes arrived, and nothing else was written.

    from kvferry.testing import guard
    src.fill_pattern(seed=1)
    with guard(dst, except_blocks=[0, 1], value=0xA5):
        ctx.transfer(src, dst, [3, 5], [0, 1]).wait()
    dst.verify_pattern(1, [0, 1], as_blocks=[3, 5])
    assert dst.checksum([0, 1]) == src.checksum([3, 5])

The checks themselves are methods of `PhysicalLayout` and also serve self-checks in production.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvferry._errors import GuardError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvferry._core import PhysicalLayout

__all__ = ["guard"]


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
