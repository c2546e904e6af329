"""Bars on bandwidth: shares of one large memcpy in the same run."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import kvferry as kf
from kvferry.bench.cells import Shape, size
from kvferry.bench.gpu import cells, driver
from kvferry.bench.gpu.bar import Bar, median
from kvferry.bench.gpu.contenders import ENGINES, Kvferry
from kvferry.bench.gpu.memory import Arena, Ground
from kvferry.bench.gpu.reference import Reference

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvferry.bench.buffers import Ids
    from kvferry.bench.gpu.bar import Scene
    from kvferry.bench.gpu.cells import Cell, Direction

_PCIE: tuple[Direction, Direction] = ("h2d", "d2h")
_TOKEN = Shape(1, 2, 1, 8, 128)
"""One layer's K and V of one token: rows of 2 KiB."""


def share(scene: Scene, cell: Cell, limit: float, *, event: bool = False, **options: Any) -> Bar:
    """What part of the ceiling the default engine reaches in a cell."""
    series, contender = scene.timed(cell, **options)
    ceiling, payload = scene.ceiling(cell.direction), cell.payload_bytes
    end = ceiling.share(payload, series.end_s)
    between = ceiling.event_share(payload, series.event_s) if series.event_s else end
    what = "event time" if event else "end to end"
    detail = (
        f"{what}; {contender.engine}; {cell.gb_per_s(series.end_s):.1f} GB/s end to end, "
        f"{cell.gb_per_s(series.event_s or series.end_s):.1f} between events ({between:.3f})"
    )
    ids = f"{cell.ids} blocks of {size(cell.shape.block_bytes)}"
    name = f"{cell.direction} {cell.pair}, {size(cell.run_bytes)} runs, {ids}, of one large memcpy"
    return Bar(name, limit, at_least=True, value=between if event else end, detail=detail)


def pcie(scene: Scene) -> Iterator[Bar]:
    """FC<->LW, FC->FC and scattered runs across PCIe."""
    for direction in _PCIE:
        for units, limit in ((256, 0.97), (64, 0.97), (8, 0.90)):
            yield share(scene, cells.fc_lw(direction, 32 << 10, scene.units(units)), limit)
        for units, limit in ((256, 0.98), (64, 0.98), (8, 0.95)):
            yield share(scene, cells.fc_fc(direction, 2 << 20, scene.units(units)), limit)
        for run, limit in ((16 << 10, 0.90), (4 << 10, 0.88)):
            yield share(scene, cells.fc_fc(direction, run, scene.units(256)), limit)


def one_block(scene: Scene) -> Iterator[Bar]:
    """One block against the reference's path."""
    for direction in _PCIE:
        cell = cells.fc_lw(direction, 32 << 10, 1)
        ground, ours = scene.kvferry(cell)
        stream = scene.place.stream_of(cell)
        references = []
        for kept in (False, True):
            try:
                references.append(Reference(ground, stream, kept=kept))
                scene.verify(ground, references[-1])
            except driver.DriverError as error:
                case = f"{direction} FC<->LW, 1 block of 32 KiB runs, end to end, of the reference's time"
                yield Bar(case, 0.35, at_least=False, why_not=str(error))
                return
        mine, *theirs = scene.race(cell, [ours, *references])
        for series in theirs:
            name = f"{direction} FC<->LW, 1 block of 32 KiB runs, end to end, of the {series.name}'s time"
            detail = f"{mine.end_s * 1e6:.1f} us against {series.end_s * 1e6:.1f} us; {ours.engine}"
            yield Bar(name, 0.35, at_least=False, value=mine.end_s / series.end_s, detail=detail)


def device(scene: Scene) -> Iterator[Bar]:
    """Copies within one GPU."""
    for run, limit in ((2 << 20, 0.90), (64 << 10, 0.90), (16 << 10, 0.80), (4 << 10, 0.70)):
        yield share(scene, cells.fc_fc("d2d", run, scene.units(256)), limit, event=True)
    yield share(scene, cells.fc_lw("d2d", 64 << 10, scene.units(256)), 0.90, event=True)


def peer(scene: Scene) -> Iterator[Bar]:
    """Copies between two GPUs by few CTAs."""
    for run in (64 << 10, 512 << 10, 2 << 20):
        name = f"p2p FC-FC, {size(run)} runs, at most 16 CTAs, of one peer memcpy"
        if scene.place.peer is None:
            yield Bar(name, 0.90, at_least=True, why_not="needs two GPUs")
            continue
        cell = cells.fc_fc("p2p", run, scene.units(64))
        bar = share(scene, cell, 0.90, event=True, engine="kernel", num_sms=16)
        yield replace(bar, case=name)


def tokens(scene: Scene) -> Iterator[Bar]:
    """A token slot map: very many ids of 2 KiB rows."""
    ids = min(131_072, scene.payload // _TOKEN.block_bytes)
    for direction in (*_PCIE, "d2d"):
        units = ids * _TOKEN.block_bytes >> 21
        cell = cells.fc_lw(direction, 2 << 10, max(units, 1), _TOKEN)
        ground = scene.ground(cell)
        stream = scene.place.stream_of(cell)
        entered: list[Any] = []
        for engine in ENGINES:
            try:
                entered.append(Kvferry(scene.context(cell), ground, stream, engine))
            except kf.Unsupported:
                continue
        for contender in entered:
            scene.verify(ground, contender)
        auto, *forced = scene.race(cell, entered)
        best = min(forced, key=lambda series: series.end_s)
        name = f"{direction} {cell.ids} ids, page_size 1, 2 KiB runs"
        submit = (auto.submit_s or 0.0) * 1e3
        how = f"{entered[0].engine}, Python"
        yield Bar(f"{name}: submit", 1.2, at_least=False, value=submit, unit="ms", detail=how)
        said = ", ".join(f"{s.name} {cell.gb_per_s(s.end_s):.1f}" for s in (auto, *forced))
        yield Bar(
            f"{name}: auto against the best forced engine",
            0.95,
            at_least=True,
            value=best.end_s / auto.end_s,
            detail=f"GB/s: {said}",
        )
        ceiling = scene.ceiling(cell.direction)
        between = ceiling.event_share(cell.payload_bytes, auto.event_s or auto.end_s)
        yield Bar(
            f"{name}: of one large memcpy (a goal)",
            0.85,
            at_least=True,
            value=ceiling.share(cell.payload_bytes, auto.end_s),
            detail=f"{between:.3f} between events",
        )


def both_ways(scene: Scene) -> Iterator[Bar]:
    """Both directions at once against two large copies at once."""
    place = scene.place
    pairs = [cells.fc_fc(direction, 2 << 20, scene.units(256)) for direction in _PCIE]
    contenders = [scene.kvferry(cell)[1] for cell in pairs]
    driver.use(place.ordinal)
    streams = [driver.Stream(place.ordinal) for _ in pairs]
    arenas = [place.pair(cell) for cell in pairs]
    payload = pairs[0].payload_bytes
    ours, theirs = [], []
    for call in range(9 if not scene.quick else 2):
        start = time.perf_counter()
        for stream, (src, dst) in zip(streams, arenas, strict=True):
            stream.copy(dst.addr, src.addr, payload)
        for stream in streams:
            stream.synchronize()
        theirs.append(time.perf_counter() - start)
        start = time.perf_counter()
        waits = [contender.start(call) for contender in contenders]
        for wait in waits:
            wait()
        ours.append(time.perf_counter() - start)
    mine, copies = median(ours), median(theirs)
    detail = f"{2 * payload / mine / 1e9:.1f} against {2 * payload / copies / 1e9:.1f} GB/s in total"
    name = "h2d and d2h at once, 2 MiB blocks, of two simultaneous large copies"
    yield Bar(name, 0.95, at_least=True, value=copies / mine, detail=detail)


def pageable(scene: Scene) -> Iterator[Bar]:
    """Pageable host memory against the driver's own copy of it."""
    place = scene.place
    host = Arena(place.nbytes, kf.system())
    host.bytes[:] = place.host_src.bytes
    for direction in _PCIE:
        base = cells.fc_fc(direction, 2 << 20, scene.units(128))
        src, dst = (host, place.device_dst) if direction == "h2d" else (place.device_src, host)
        driver.use(place.ordinal)
        ground = Ground.lay(base, src, dst, scene.seed)
        route = scene.context(base).route(ground.src.layout, ground.dst.layout)
        contender = _Plain(ground, route)
        scene.verify(ground, contender)
        payload, ours, theirs = base.payload_bytes, [], []
        for call in range(5 if not scene.quick else 1):
            start = time.perf_counter()
            contender.start(call)()
            ours.append(time.perf_counter() - start)
            start = time.perf_counter()
            if direction == "h2d":
                driver.call("cuMemcpyHtoD_v2", dst.addr, src.addr, payload)
            else:
                driver.call("cuMemcpyDtoH_v2", dst.addr, src.addr, payload)
            theirs.append(time.perf_counter() - start)
        mine, plain = median(ours), median(theirs)
        detail = f"{payload / mine / 1e9:.1f} against {payload / plain / 1e9:.1f} GB/s"
        name = f"{direction} pageable host, 2 MiB blocks, times the driver's own copy"
        yield Bar(name, 2.0, at_least=True, value=plain / mine, detail=detail)


class _Plain:
    """A route without a stream."""

    name = "kvferry auto"

    def __init__(self, ground: Ground, route: kf.Route) -> None:
        self._ground, self._route = ground, route

    def ids(self, call: int, /) -> tuple[Ids, Ids]:
        return self._ground.ids(call)

    def start(self, call: int, /) -> Any:
        return self._route(*self._ground.ids(call)).wait
