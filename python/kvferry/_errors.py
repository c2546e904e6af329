"""Exceptions. Each also derives from the built-in that a caller would expect."""

from __future__ import annotations

TYPE_CHECKING = False  # typing's, without importing typing
if TYPE_CHECKING:
    from typing import Any, Self


class Error(Exception):
    """Base of everything kvferry raises on purpose. Fields are attributes."""

    def __init__(self, message: str = "", **fields: object) -> None:
        super().__init__(message)
        for name, value in fields.items():
            setattr(self, name, value)


class LayoutError(Error, ValueError):
    """A layout, configuration or array that cannot be what it claims, or two layouts that do not fit."""


class ProtocolError(LayoutError, TypeError):
    """An array whose `__dlpack__` or array interface is not what the protocol says.

    What a producer itself raises comes through, with a note that names the array.
    """


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


class _SystemError(Error, OSError):
    def __init__(self, message: str = "", errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno

    def __reduce__(self) -> tuple[type[Self], tuple[str, int | None], dict[str, Any]]:
        # OSError keeps its errno outside the instance's dict, and would forget it.
        return type(self), (str(self), self.errno), self.__dict__


class HostMemoryError(_SystemError):
    """Host memory could not be had: `errno`."""


class TransferError(Error, RuntimeError):
    """A transfer failed: `failed_blocks` are the destination blocks that must be taken as not moved."""

    failed_blocks: list[int]


class MismatchError(Error, AssertionError):
    """`block` does not hold the pattern of `as_block`.

    The first bad row, in the order of the blocks given: `layer`, `outer`, `token`, global `head`; its first
    bad byte at `offset` is `found` and should be `expected`. In all, `bad_rows` of `rows` rows differ.
    """

    block: int
    as_block: int
    layer: int
    outer: int
    token: int
    head: int
    offset: int
    expected: int
    found: int
    bad_rows: int
    rows: int


class GuardError(Error, AssertionError):
    """A byte that should have been left alone was written.

    The first one, at `offset` in `region`, is `found` and should be `expected`; `block` holds it, or is None
    where it is padding. After `testing.guard(value=None)`, which compares checksums, only `block` is known.
    """

    region: int | None
    offset: int | None
    block: int | None
    expected: int | None
    found: int | None


class WaitTimeout(Error, TimeoutError):  # noqa: N818
    """A wait ran out of time after `seconds`; the job goes on."""

    seconds: float


class RendezvousError(_SystemError, ConnectionError):
    """The place where ranks meet cannot be used or reached, or gives back what no rank has set: `errno`."""


class PeerTimeout(Error, TimeoutError):  # noqa: N818
    """Rank `peer` did not come within `seconds` to call `epoch`, an `op`, or (epoch 0) to a step of set-up.

    After a call, the communicator raises it everywhere; reset() makes it usable again.
    """

    peer: int | None
    op: str | None
    epoch: int
    seconds: float


class PeerDied(Error, ConnectionError):  # noqa: N818
    """Rank `peer`, process `pid`, has died or closed: seen in the call `op` number `epoch`.

    `op` is None where it was seen after that call; in set-up steps the epoch is 0.

    From then on the communicator raises it everywhere; make a new one with the ranks that are left.
    """

    peer: int
    pid: int
    op: str | None
    epoch: int


class ContractMismatch(Error, ValueError):  # noqa: N818
    """The ranks do not call for the same thing: `rank` is the one that differs, `reason` says how.

    No byte has moved. From then on the communicator raises it everywhere; reset() makes it usable again.
    """

    rank: int
    reason: str


class Aborted(Error, RuntimeError):  # noqa: N818
    """Rank `rank` gave up, for `reason`: it called abort(), or its device or system failed in a call.

    From then on the communicator raises it everywhere; reset() makes it usable again.
    """

    rank: int
    reason: str


class CapacityError(Error, ValueError):
    """A call whose largest result has `needed` bytes, more than the communicator's `capacity`."""

    needed: int
    capacity: int


class Busy(Error, RuntimeError):  # noqa: N818
    """Not now: the job is still running, or a resource is in use."""


class ClosedError(Error, RuntimeError):
    """Used after close()."""


class ForkError(Error, RuntimeError):
    """Made before a fork and used in the child; make a new one there."""


class Unsupported(Error, RuntimeError):  # noqa: N818
    """Something kvferry does not do here, refused by name."""
