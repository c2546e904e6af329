"""Exceptions. Each also derives from the built-in that a caller would expect."""

from __future__ import annotations


class Error(Exception):
    """Base of everything kvferry raises on purpose. Fields are attributes."""

    def __init__(self, message: str = "", **fields: object) -> None:
        super().__init__(message)
        for name, value in fields.items():
            setattr(self, name, value)


class LayoutError(Error, ValueError):
    """A layout, configuration or array that cannot be what it claims, or two layouts that do not fit."""


class OptionError(Error, ValueError):
    """An option with an illegal value."""


class BlockIdError(Error, IndexError):
    """A block id outside its layout: `side`, `index` in the list, `value`, and `limit` (number of blocks)."""

    side: str
    index: int
    value: int
    limit: int


class DuplicateBlockError(Error, ValueError):
    """A destination block given twice: `value`, at positions `first` and `second`."""

    value: int
    first: int
    second: int


class OverlapError(Error, ValueError):
    """Source and destination share bytes: `src_block`, `dst_block`, first shared `address`."""

    src_block: int
    dst_block: int
    address: int


class CudaError(Error, RuntimeError):
    """The CUDA driver refused or is missing: `code`, `name`, `call` (None where there is none)."""

    code: int | None
    name: str | None
    call: str | None


class HostMemoryError(Error, OSError):
    """Host memory could not be had: `errno`."""

    def __init__(self, message: str = "", errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno


class TransferError(Error, RuntimeError):
    """A transfer failed: `failed_blocks` are the destination blocks that must be taken as not moved."""

    failed_blocks: list[int]


class WaitTimeout(Error, TimeoutError):
    """A wait ran out of time after `seconds`; the job goes on."""

    seconds: float


class Busy(Error, RuntimeError):
    """Not now: the job is still running, or a resource is in use."""


class ClosedError(Error, RuntimeError):
    """Used after close()."""


class ForkError(Error, RuntimeError):
    """Made before a fork and used in the child; make a new one there."""


class Unsupported(Error, RuntimeError):
    """Something kvferry does not do here, refused by name."""
