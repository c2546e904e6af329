"""The core table: every cell, every contender, within a budget of time that drops calls, never cells."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import kvferry as kf
from kvferry.bench.gpu import ceilings, contenders, driver, foreign
from kvferry.bench.gpu.measure import CellResult, Effort, run_cell
from kvferry.bench.gpu.memory import Ground
from kvferry.bench.gpu.stats import Series, Verdict, verdict

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvferry.bench.gpu.ceilings import Ceiling
    from kvferry.bench.gpu.cells import Cell, Direction
    from kvferry.bench.gpu.place import Place

DEFAULT = Effort(seconds=0.035, least=5, most=25)
QUICK = Effort(seconds=0.0, least=1, most=1)
OURS = "kvferry auto"


@dataclass
class Table:
    """Results by cell, and what they are compared with."""

    ceilings: dict[Direction, Ceiling] = field(default_factory=dict)
    later: dict[Direction, Ceiling] = field(default_factory=dict)
    """The same measured again at the end: how much the machine drifts."""
    cells: list[CellResult] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Whether every byte was right."""
        return all(cell.good for cell in self.cells)

    def find(self, cell: Cell) -> CellResult | None:
        """A cell's result."""
        return next((result for result in self.cells if result.cell == cell), None)


@dataclass(frozen=True)
class Duel:
    """kvferry's default engine against one other, end to end."""

    cell: Cell
    other: str
    ours: float
    theirs: float

    @property
    def verdict(self) -> Verdict:
        """How it went for us."""
        return verdict(self.ours, self.theirs)

    @property
    def speedup(self) -> float:
        """Theirs over ours."""
        return self.theirs / self.ours


class Contexts:
    """One context for each GPU that does work, made when first asked for."""

    def __init__(self) -> None:
        self._made: dict[int, kf.TransferContext] = {}

    def of(self, place: Place, cell: Cell) -> kf.TransferContext:
        """The context of the GPU that works: the destination's between two."""
        ordinal = place.stream_of(cell).ordinal
        if ordinal not in self._made:
            self._made[ordinal] = kf.TransferContext(ordinal)
        return self._made[ordinal]

    def close(self) -> None:
        """Waits for everything."""
        for context in self._made.values():
            context.close()


def run(
    place: Place,
    contexts: Contexts,
    cells: list[Cell],
    effort: Effort,
    *,
    seed: int,
    budget: float | None,
    ceiling_bytes: int,
    progress: Callable[[int, int, CellResult, Ceiling], None],
) -> Table:
    """All cells; `progress` gets each result with its number, of how many, and its direction's ceiling."""
    table = Table()
    start = time.monotonic()
    for number, cell in enumerate(cells):
        if cell.direction not in table.ceilings:
            table.ceilings[cell.direction] = ceilings.measure(place, cell.direction, ceiling_bytes)
        share = 1.0
        if budget is not None and number:
            spent = time.monotonic() - start
            # What is left for each cell, in terms of what a cell took so far.
            share = max(budget - spent, 0.0) / (len(cells) - number) / (spent / number)
        result = one(place, contexts, cell, effort.scaled(share), seed=seed + number)
        table.cells.append(result)
        progress(number + 1, len(cells), result, table.ceilings[cell.direction])
    for direction in table.ceilings:
        table.later[direction] = ceilings.measure(place, direction, ceiling_bytes)
    return table


def one(
    place: Place,
    contexts: Contexts,
    cell: Cell,
    effort: Effort,
    *,
    seed: int,
    extra: list[Any] | None = None,
) -> CellResult:
    """One cell with every contender."""
    driver.use(place.stream_of(cell).ordinal)
    ground = Ground.lay(cell, *place.pair(cell), seed)
    others = foreign.contenders() if extra is None else extra
    entered = contenders.of_cell(contexts.of(place, cell), ground, place, others)
    driver.use(place.ordinal)
    return run_cell(place, ground, entered, effort)


def duels(table: Table) -> list[Duel]:
    """Every cell's default engine against every contender that is not ours."""
    found = []
    for result in table.cells:
        ours = result.series.get(OURS)
        if ours is None or not ours.ran:
            continue
        for name, series in result.series.items():
            if not name.startswith("kvferry") and series.ran:
                found.append(Duel(result.cell, name, ours.end_s, series.end_s))
    return found


def regrets(table: Table) -> list[Duel]:
    """Every cell's default engine against the best engine by force."""
    found = []
    for result in table.cells:
        ours = result.series.get(OURS)
        best = best_forced(result)
        if ours is not None and ours.ran and best is not None:
            found.append(Duel(result.cell, best.name, ours.end_s, best.end_s))
    return found


def best_forced(result: CellResult) -> Series | None:
    """The fastest engine by force."""
    forced = [
        series
        for name, series in result.series.items()
        if name.startswith("kvferry") and name != OURS and series.ran
    ]
    return min(forced, key=lambda series: series.end_s, default=None)
