"""Beyond the core table: order changes with short rows, and slices of heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import kvferry as kf
from kvferry.bench.gpu import cells, driver
from kvferry.bench.gpu.contenders import ENGINES, Kvferry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvferry.bench.gpu.bar import Scene
    from kvferry.bench.gpu.cells import Cell, Direction

ROWS = (16, 32, 64, 128, 256, 512)
_HEADS = 8


@dataclass(frozen=True)
class Row:
    """One line: an engine's share of one large memcpy."""

    what: str
    direction: Direction
    row_bytes: int
    engine: str
    of_ceiling: float
    gb_per_s: float
    good: bool
    why_not: str = ""


def run(scene: Scene, progress: Callable[[Row], None]) -> list[Row]:
    """All rows."""
    rows = []
    for direction in cells.DIRECTIONS:
        if direction == "p2p" and scene.place.peer is None:
            continue
        for size in ROWS:
            for row in (*orders(scene, direction, size), *slices(scene, direction, size)):
                rows.append(row)
                progress(row)
    return rows


def orders(scene: Scene, direction: Direction, size: int) -> Iterator[Row]:
    """NHD to HND, all engines that can; a copy-engine descriptor for each short row would take minutes."""
    cell = cells.reorder(direction, size, scene.units(64))
    apart = {"batch"} if size < 512 else set()
    if direction in {"d2d", "p2p"}:
        apart.add("staged")
    for engine in (name for name in ENGINES if name not in apart):
        yield _row(scene, "NHD-HND", cell, engine, cell.payload_bytes)


def slices(scene: Scene, direction: Direction, size: int) -> Iterator[Row]:
    """One head of eight, NHD to NHD: rows of `size` bytes, a head apart on both sides."""
    cell = cells.reorder(direction, size, scene.units(64))
    cell = cells.Cell(direction, "head 3 of 8", cells.FC, cells.FC, cell.shape, size, cell.ids)
    yield _row(scene, "head slice", cell, "auto", cell.payload_bytes // _HEADS, heads=range(3, 4))


def _row(scene: Scene, what: str, cell: Cell, engine: str, payload: int, **options: range) -> Row:
    wrong = len(scene.wrong)
    try:
        ground = scene.ground(cell)
        contender = Kvferry(scene.context(cell), ground, scene.place.stream_of(cell), engine, **options)
        if options:
            _verify_slice(scene, cell, contender, options["heads"])
        else:
            scene.verify(ground, contender)
        (series,) = scene.race(cell, [contender])
    except (kf.Error, driver.DriverError) as error:
        why = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        good = isinstance(error, kf.Unsupported)
        return Row(what, cell.direction, cell.run_bytes, engine, 0.0, 0.0, good=good, why_not=why)
    ceiling, on_gpus = scene.ceiling(cell.direction), cell.direction in {"d2d", "p2p"}
    seconds = series.event_s if on_gpus and series.event_s else series.end_s
    share = (ceiling.event_share if on_gpus else ceiling.share)(payload, seconds)
    speed = cell.traffic * payload / seconds / 1e9
    name = f"auto: {contender.engine}" if engine == "auto" else engine
    good = len(scene.wrong) == wrong
    return Row(what, cell.direction, cell.run_bytes, name, share, speed, good=good)


def _verify_slice(scene: Scene, cell: Cell, contender: Kvferry, heads: range) -> None:
    """Only the named heads may have moved: the check of whole blocks counts the other heads as wrong."""
    ground = contender.ground
    scene.place.poison(ground.dst.arena)
    contender.start(0)()
    check = scene.place.check(ground, ground.ids(0), heads=heads)
    if not check.good:
        scene.wrong.append(f"{contender.name}: {cell.name}, heads {heads}: {check}")
