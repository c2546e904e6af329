"""One row of the table of bars, and what the rows are measured with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from kvferry.bench.gpu import ceilings, driver
from kvferry.bench.gpu.contenders import Kvferry
from kvferry.bench.gpu.measure import Timer, check, race
from kvferry.bench.gpu.memory import Ground
from kvferry.bench.gpu.stats import Series

if TYPE_CHECKING:
    import kvferry as kf
    from kvferry.bench.gpu.ceilings import Ceiling
    from kvferry.bench.gpu.cells import Cell, Direction
    from kvferry.bench.gpu.core import Contexts, Table
    from kvferry.bench.gpu.measure import Effort
    from kvferry.bench.gpu.place import Place

State = Literal["met", "missed", "not measured"]


@dataclass
class Bar:
    """One comparison. `value` and `limit` are in `unit`; ratios have none."""

    case: str
    limit: float
    at_least: bool
    value: float | None = None
    unit: str = ""
    detail: str = ""
    why_not: str = ""

    @property
    def state(self) -> State:
        """Whether it was met."""
        if self.value is None:
            return "not measured"
        return (
            "met" if (self.value >= self.limit if self.at_least else self.value <= self.limit) else "missed"
        )

    @property
    def asked(self) -> str:
        """The bar in words."""
        return f"{'>=' if self.at_least else '<='} {self.limit:g}{self.unit and ' ' + self.unit}"

    @property
    def measured(self) -> str:
        """What came out in words."""
        if self.value is None:
            return "-"
        return f"{self.value:.3g}{self.unit and ' ' + self.unit}"


@dataclass
class Scene:
    """Where bars are measured; what fails the check is remembered."""

    place: Place
    contexts: Contexts
    effort: Effort
    payload: int
    seed: int
    quick: bool
    table: Table | None = None
    soak_jobs: int = 200_000
    wrong: list[str] = field(default_factory=list)
    _ceilings: dict[Direction, Ceiling] = field(default_factory=dict)

    def ceiling(self, direction: Direction) -> Ceiling:
        """One large memcpy, measured once for each direction."""
        if direction not in self._ceilings:
            self._ceilings[direction] = ceilings.measure(self.place, direction, self.payload)
        return self._ceilings[direction]

    def units(self, wanted: int) -> int:
        """As many units of 2 MiB as wanted or as fit."""
        return max(min(wanted, self.payload >> 21), 1)

    def context(self, cell: Cell) -> kf.TransferContext:
        """The context that works for a cell."""
        return self.contexts.of(self.place, cell)

    def ground(self, cell: Cell) -> Ground:
        """Two caches for a cell."""
        driver.use(self.place.stream_of(cell).ordinal)
        return Ground.lay(cell, *self.place.pair(cell), self.seed)

    def kvferry(self, cell: Cell, engine: Any = "auto", **options: Any) -> tuple[Ground, Kvferry]:
        """A prepared transfer of a cell, checked once."""
        ground = self.ground(cell)
        contender = Kvferry(self.context(cell), ground, self.place.stream_of(cell), engine, **options)
        self.verify(ground, contender)
        return ground, contender

    def verify(self, ground: Ground, contender: Any) -> None:
        """One call into poisoned memory."""
        found = check(self.place, ground, contender, 0)
        if not found.good:
            self.wrong.append(f"{contender.name}: {ground.cell.name}: {found}")
        driver.use(self.place.stream_of(ground.cell).ordinal)

    def race(self, cell: Cell, entered: list[Any]) -> list[Series]:
        """Lets contenders of a cell take turns."""
        timer = Timer(self.place, self.place.stream_of(cell))
        racing = [(Series(contender.name), contender) for contender in entered]
        race(timer, racing, self.effort, 0)
        driver.use(self.place.ordinal)
        return [series for series, _ in racing]

    def timed(self, cell: Cell, engine: Any = "auto", **options: Any) -> tuple[Series, Kvferry]:
        """Kvferry's times in a cell."""
        _, contender = self.kvferry(cell, engine, **options)
        (series,) = self.race(cell, [contender])
        return series, contender


def median(values: list[float]) -> float:
    """Of a few."""
    return float(np.median(values))
