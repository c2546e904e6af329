"""Who is measured: kvferry engine by engine, and the ways people move blocks today."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

import kvferry as kf
from kvferry.bench.gpu import driver

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from kvferry.bench.buffers import Ids
    from kvferry.bench.gpu.memory import Ground
    from kvferry.bench.gpu.place import Place

ENGINES = ("auto", "kernel", "batch", "staged")


class Contender(Protocol):
    """Moves one call's payload, in one of two ways."""

    @property
    def name(self) -> str:
        """Its name in tables."""

    def ids(self, call: int, /) -> tuple[Ids, Ids]:
        """The blocks it moves, for the check."""

    def start(self, call: int, /) -> Callable[[], object]:
        """Submits as users would; what it returns waits until the last byte has arrived."""

    def enqueue(self, call: int, /) -> Callable[[], object] | None:
        """Submits on the bench's stream, for events around it; None where it cannot be put there."""


class Kvferry:
    """A prepared route: the default engine, or one by force."""

    def __init__(
        self, context: kf.TransferContext, ground: Ground, stream: driver.Stream, engine: Any, **options: Any
    ) -> None:
        self.name = f"kvferry {engine}"
        self.ground = self._ground = ground
        # Planned once here, so that what an engine cannot do is said before anything is timed.
        plan = context.plan(ground.src.layout, ground.dst.layout, *ground.ids(0), engine=engine, **options)
        self.engine: str = plan.engine
        self._route = context.route(ground.src.layout, ground.dst.layout, engine=engine, **options)
        self._on_stream = context.route(
            ground.src.layout, ground.dst.layout, engine=engine, stream=stream.handle, **options
        )

    def ids(self, call: int, /) -> tuple[Ids, Ids]:
        """The blocks of a call."""
        return self._ground.ids(call)

    def start(self, call: int, /) -> Callable[[], object]:
        """Submits; what it returns waits."""
        return self._route(*self._ground.ids(call)).wait

    def enqueue(self, call: int, /) -> Callable[[], object] | None:
        """Submits on the bench's stream."""
        return self._on_stream(*self._ground.ids(call)).wait


class OnStream:
    """A contender whose work is all on one stream, and done when that is."""

    def __init__(self, stream: driver.Stream) -> None:
        self._stream = stream

    def submit(self, call: int) -> None:
        """Puts the work on the stream."""
        raise NotImplementedError

    def start(self, call: int, /) -> Callable[[], object]:
        """Submits; what it returns waits."""
        self.submit(call)
        return self._stream.synchronize

    def enqueue(self, call: int, /) -> Callable[[], object] | None:
        """Submits on the bench's stream."""
        self.submit(call)
        return self._stream.synchronize


class Pointers(OnStream):
    """A contender that is given addresses, worked out before it is timed."""

    name = ""

    def __init__(self, ground: Ground, stream: driver.Stream) -> None:
        super().__init__(stream)
        self._ground = ground
        self._run_bytes = ground.cell.run_bytes
        self._tables: dict[int, Any] = {}

    def ids(self, call: int, /) -> tuple[Ids, Ids]:
        """The blocks of a call."""
        return self._ground.ids(call)

    def prepare(self, call: int) -> None:
        """Works the addresses of a call out, untimed."""
        number = call % self._ground.calls
        if number not in self._tables:
            src, dst = self._ground.ids(number)
            tables = (
                self._ground.src.run_pointers(src, self._run_bytes),
                self._ground.dst.run_pointers(dst, self._run_bytes),
            )
            self._tables = {number: self.convert(*tables)}

    def convert(self, src: NDArray[np.uint64], dst: NDArray[np.uint64]) -> Any:
        """The addresses as the contender wants them."""
        return src, dst

    def table(self, call: int) -> Any:
        """What `prepare` made."""
        self.prepare(call)
        return self._tables[call % self._ground.calls]


class CopyLoop(Pointers):
    """One cuMemcpyAsync for each run."""

    name = "copy loop"

    def convert(self, src: NDArray[np.uint64], dst: NDArray[np.uint64]) -> Any:
        """The addresses in its own form."""
        return list(zip(dst.tolist(), src.tolist(), strict=True))

    def submit(self, call: int) -> None:
        """Puts the work on the stream."""
        copy, nbytes, stream = (
            driver.function("cuMemcpyAsync", keep_gil=True),
            self._run_bytes,
            self._stream.handle,
        )
        status = 0
        for dst, src in self.table(call):
            status |= copy(dst, src, nbytes, stream)
        if status:
            raise driver.DriverError(f"cuMemcpyAsync returned {status}")


class DriverBatch(Pointers):
    """The driver's batch call on tables of addresses; the reference's path for whole blocks."""

    name = "driver batch"

    def convert(self, src: NDArray[np.uint64], dst: NDArray[np.uint64]) -> Any:
        """The addresses in its own form."""
        return src, dst, np.full(len(src), self._run_bytes, np.uint64)

    def submit(self, call: int) -> None:
        """Puts the work on the stream."""
        kf.memcpy_batch(*self.table(call), stream=self._stream.handle, mode="batch_without_fallback")


def forced(context: kf.TransferContext, ground: Ground, stream: driver.Stream) -> list[tuple[str, Any]]:
    """Kvferry's engines: contenders, or why one cannot do this."""
    made: list[tuple[str, Any]] = []
    for engine in ENGINES:
        name = f"kvferry {engine}"
        try:
            made.append((name, Kvferry(context, ground, stream, engine)))
        except kf.Unsupported as error:
            made.append((name, str(error).splitlines()[0]))
    return made


def of_cell(
    context: kf.TransferContext, ground: Ground, place: Place, extra: list[Any]
) -> list[tuple[str, Any]]:
    """All contenders of a core cell by name; a string says why one does not take part."""
    from kvferry.bench.gpu.reference import Reference  # noqa: PLC0415 - it builds on this module

    stream = place.stream_of(ground.cell)
    made = forced(context, ground, stream)
    plain: list[Any] = [CopyLoop, DriverBatch]
    if ground.cell.pair != "FC-FC":
        plain.append(Reference)
    for make in [*plain, *extra]:
        name = getattr(make, "name", "") or make.__name__.lower()
        try:
            contender = make(ground, stream)
        except (driver.DriverError, ImportError, kf.Error, ValueError) as error:
            made.append((name, f"{type(error).__name__}: {str(error).splitlines()[0]}"))
        else:
            if contender is not None:
                made.append((contender.name, contender))
    return made


def seconds(action: Callable[[], object]) -> float:
    """How long it took."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start
