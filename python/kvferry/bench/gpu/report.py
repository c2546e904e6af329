"""Renderings: lines as cells end, JSON, CSV and Markdown."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from typing import TYPE_CHECKING, Any

from kvferry.bench.cells import size
from kvferry.bench.gpu import core
from kvferry.bench.gpu.stats import spread

if TYPE_CHECKING:
    from kvferry.bench.gpu.bar import Bar
    from kvferry.bench.gpu.ceilings import Ceiling
    from kvferry.bench.gpu.extra import Row
    from kvferry.bench.gpu.measure import CellResult
    from kvferry.bench.gpu.stats import Series
    from kvferry.bench.gpu.transfer import Results

OTHERS = ("copy loop", "driver batch", "reference", "torch index", "LMCache")
_SHORT = {
    "copy loop": "/loop",
    "driver batch": "/batch",
    "reference": "/ref",
    "torch index": "/torch",
    "LMCache": "/LMC",
}
_COLUMNS = "{:<11} {:>7} {:>7} {:>8} {:>6} {:>8} {:>6} {:>6} {:>7}" + " {:>6}" * (len(OTHERS) + 1) + "  {}"
LEGEND = """\
FC: all layers in one tensor. LW: a tensor for each layer, outer first. FC-FC: blocks as long as the run.
GB/s: payload (twice on one GPU: read and written) over the median from the call to the end of wait().
of memcpy: of one large pinned (or device, or peer) memcpy in the same run; event: the same between events,
submission hidden. /x: kvferry's speed over that contender's, end to end; /best: over the best engine by
force. Contenders are given their addresses or ids ready-made; torch and LMCache keep host blocks side by
side, LMCache chunks in its own order. Every contender was checked once in every cell, byte by byte.
""".splitlines()


def heading() -> str:
    """The table's first line."""
    shorts = [_SHORT[name] for name in OTHERS]
    return _COLUMNS.format(
        "dir pair",
        "run",
        "payload",
        "engine",
        "GB/s",
        "us",
        "of mcp",
        "event",
        "submit",
        *shorts,
        "/best",
        "bytes",
    )


def line(result: CellResult, ceiling: Ceiling) -> str:
    """A cell's line."""
    cell, ours = result.cell, result.series.get(core.OURS)
    what = (f"{cell.direction} {cell.pair}", size(cell.run_bytes), size(cell.payload_bytes))
    state = "same" if result.good else "WRONG"
    if ours is None or not ours.ran:
        why = result.errors[0] if result.errors else ours.not_run if ours else "did not run"
        return _COLUMNS.format(*what, "-", *([""] * (5 + len(OTHERS) + 1)), f"{state}: {why}").rstrip()
    ratios = [_ratio(result.series.get(name), ours) for name in OTHERS]
    event = "" if ours.event_s is None else f"{ceiling.event_share(cell.payload_bytes, ours.event_s):.3f}"
    return _COLUMNS.format(
        *what,
        result.engine,
        f"{cell.gb_per_s(ours.end_s):.1f}",
        f"{ours.end_s * 1e6:.1f}",
        f"{ceiling.share(cell.payload_bytes, ours.end_s):.3f}",
        event,
        f"{(ours.submit_s or 0) * 1e6:.1f}",
        *ratios,
        _ratio(core.best_forced(result), ours),
        state,
    ).rstrip()


def _ratio(theirs: Series | None, ours: Series) -> str:
    return f"{theirs.end_s / ours.end_s:.2f}" if theirs is not None and theirs.ran else "-"


def bar_line(bar: Bar) -> str:
    """A bar's line."""
    said = bar.why_not if bar.value is None else bar.detail
    return f"{bar.state:<12} {bar.measured:>12}  {bar.asked:<12} {bar.case}" + (f" ({said})" if said else "")


def extra_line(row: Row) -> str:
    """An extra row's line."""
    what = f"{row.what:<10} {row.direction} {row.row_bytes:>4} B rows  {row.engine:<14}"
    if row.why_not:
        return f"{what} {'-' if row.good else 'FAILED'} ({row.why_not})"
    return (
        f"{what} {row.gb_per_s:>8.1f} GB/s, {row.of_ceiling:.3f} of memcpy  {'same' if row.good else 'WRONG'}"
    )


def summary(results: Results) -> list[str]:
    """What to know after the tables."""
    lines = []
    table = results.table
    for direction, first in table.ceilings.items():
        later = table.later.get(direction)
        drift = f", at the end {later.end / 1e9:.1f}" if later else ""
        lines.append(
            f"one {size(first.nbytes)} memcpy {direction}: {first.end / 1e9:.1f} GB/s of payload{drift}"
        )
    found = core.duels(table)
    for name in OTHERS:
        of_name = [duel.verdict for duel in found if duel.other == name]
        if of_name:
            counts = ", ".join(f"{of_name.count(word)} {word}" for word in ("win", "tie", "lose"))
            lines.append(f"against {name}: {counts}")
    lines += [_lost(duel) for duel in found if duel.verdict == "lose"]
    for regret in sorted(core.regrets(table), key=lambda duel: duel.speedup):
        if regret.speedup < 0.95:
            lines.append(f"regret {regret.speedup:.2f}: {regret.cell.name}, {regret.other} was faster")
    missing: dict[str, str] = {}
    # The last cell has layers, which all of them can move.
    for result in table.cells:
        for name, series in result.series.items():
            if series.not_run and not name.startswith("kvferry"):
                missing[name] = series.not_run
    ran = {name for result in table.cells for name, series in result.series.items() if series.ran}
    lines += [f"{name} did not take part: {why}" for name, why in missing.items() if name not in ran]
    lines += [f"WRONG: {what}" for what in results.wrong]
    lines += [f"WRONG: {cell.cell.name}: {_faults(cell)}" for cell in table.cells if not cell.good]
    lines += [f"note: {note}" for note in results.notes]
    spent = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in results.seconds.items())
    checked = sum(check.checked_bytes for cell in table.cells for check in cell.checks.values())
    state = "every byte same, guards intact" if results.good else "WRONG BYTES OR FAILURES"
    lines.append(f"{state}: {len(table.cells)} cells, {checked / 1e9:.1f} GB compared; {spent}")
    return lines


def _lost(duel: core.Duel) -> str:
    times = f"{duel.ours * 1e6:.1f} us against {duel.theirs * 1e6:.1f}"
    return f"lost {duel.speedup:.2f}: {duel.cell.name}, {duel.other}: {times}"


def _faults(result: CellResult) -> str:
    bad = [f"{name}: {check}" for name, check in result.checks.items() if not check.good]
    return "; ".join([*result.errors, *bad])


def as_json(results: Results) -> dict[str, Any]:
    """Everything, with all samples."""
    return {
        "schema": 1,
        "bench": "transfer-gpu",
        "facts": results.facts,
        "notes": results.notes,
        "verified": results.good,
        "seconds": results.seconds,
        "ceilings": {name: dataclasses.asdict(found) for name, found in results.table.ceilings.items()},
        "ceilings_later": {name: dataclasses.asdict(found) for name, found in results.table.later.items()},
        "cells": [_cell(result) for result in results.table.cells],
        "duels": [_duel(duel) for duel in core.duels(results.table)],
        "regrets": [_duel(duel) for duel in core.regrets(results.table)],
        "bars": [dataclasses.asdict(bar) | {"state": bar.state} for bar in results.bars],
        "extra": [dataclasses.asdict(row) for row in results.extra],
        "wrong": results.wrong,
    }


def _duel(duel: core.Duel) -> dict[str, Any]:
    return {
        "cell": duel.cell.name,
        "other": duel.other,
        "ours_s": duel.ours,
        "theirs_s": duel.theirs,
        "speedup": duel.speedup,
        "verdict": duel.verdict,
    }


def _cell(result: CellResult) -> dict[str, Any]:
    cell = result.cell
    return {
        "direction": cell.direction,
        "pair": cell.pair,
        "run_bytes": cell.run_bytes,
        "blocks": cell.ids,
        "block_bytes": cell.shape.block_bytes,
        "payload_bytes": cell.payload_bytes,
        "engine": result.engine,
        "verified": result.good,
        "errors": result.errors,
        "checks": {name: dataclasses.asdict(check) for name, check in result.checks.items()},
        "contenders": {name: _series(series) for name, series in result.series.items()},
    }


def _series(series: Series) -> dict[str, Any]:
    """Samples in microseconds."""
    if not series.ran:
        return {"not_run": series.not_run}
    return {
        f"{what}_us": [round(second * 1e6, 2) for second in getattr(series, what)]
        for what in ("end", "event", "submit")
    }


def as_text(facts: dict[str, Any]) -> str:
    """`as_json` as text, a line for each cell."""
    cells = ",\n".join(json.dumps(cell) for cell in facts["cells"])
    rest = json.dumps(facts | {"cells": "@cells"}, indent=1)
    return rest.replace('"@cells"', f"[\n{cells}\n ]", 1) + "\n"


def as_csv(results: Results) -> str:
    """A line for each contender of each core cell."""
    out = io.StringIO()
    names = [
        "direction", "pair", "run_bytes", "blocks", "payload_bytes", "contender", "engine", "samples",
        "end_us_p5", "end_us_p50", "end_us_p95", "event_us_p50", "submit_us_p50", "gb_per_s", "of_memcpy",
        "verified",
    ]  # fmt: skip
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    for result in results.table.cells:
        cell, ceiling = result.cell, results.table.ceilings[result.cell.direction]
        for name, series in result.series.items():
            if not series.ran:
                continue
            low, middle, high = (value * 1e6 for value in spread(series.end))
            check = result.checks.get(name)
            writer.writerow(
                {
                    "direction": cell.direction,
                    "pair": cell.pair,
                    "run_bytes": cell.run_bytes,
                    "blocks": cell.ids,
                    "payload_bytes": cell.payload_bytes,
                    "contender": name,
                    "engine": result.engine if name == core.OURS else "",
                    "samples": len(series.end),
                    "end_us_p5": round(low, 2),
                    "end_us_p50": round(middle, 2),
                    "end_us_p95": round(high, 2),
                    "event_us_p50": "" if series.event_s is None else round(series.event_s * 1e6, 2),
                    "submit_us_p50": "" if series.submit_s is None else round(series.submit_s * 1e6, 2),
                    "gb_per_s": round(cell.gb_per_s(series.end_s), 3),
                    "of_memcpy": round(ceiling.share(cell.payload_bytes, series.end_s), 4),
                    "verified": check is not None and check.good,
                }
            )
    return out.getvalue()
