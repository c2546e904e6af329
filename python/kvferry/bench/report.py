"""Renderings of what was measured: a table of at most 100 columns, JSON, CSV and a plot."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING, Any

from kvferry.bench.cells import LEGEND, size

if TYPE_CHECKING:
    from pathlib import Path

    from kvferry.bench.measure import CellResult, Timing
    from kvferry.bench.transfer import Results

_COLUMNS = "{:<12} {:>7} {:>7} {:>7} {:>6} {:>7} {:>11} {:>7} {:>6} {:>6} {:>7}  {}"
_LATENCIES = "{:<38} {:>12} {:>9} {:>12} {:>9} {:>9}"
_PERCENTS = (5, 50, 95)


def table(results: Results) -> str:
    """The cells, then the latencies."""
    lines = [
        *LEGEND,
        f"memcpy: the fastest plain copy of as many bytes with up to {results.threads} threads.",
        "numpy: fancy indexing, layer by layer where the layouts differ.",
        "GB/s: payload, counted once, over the median time from the call to the last byte, and p5 to p95.",
        "",
        _COLUMNS.format("", "", "", "", "memcpy", "kvferry", "", "/memcpy", "numpy", "/numpy", "submit", ""),
        _COLUMNS.format(
            "pair", "run", "blocks", "payload", "GB/s", "GB/s", "", "", "GB/s", "", "us", "bytes"
        ),
    ]
    for result in results.cells:
        cell, payload = result.cell, result.cell.payload_bytes
        slow, fast = (result.kvferry.gb_per_s(payload, percent) for percent in (95, 5))
        submit = result.kvferry.submit_at(50)
        lines.append(
            _COLUMNS.format(
                cell.pair.name,
                size(cell.run_bytes),
                cell.ids,
                size(payload),
                f"{result.ceiling.gb_per_s(payload):.2f}",
                f"{result.kvferry.gb_per_s(payload):.2f}",
                f"{slow:.2f}-{fast:.2f}",
                f"{result.ratio:.2f}",
                f"{result.numpy.gb_per_s(payload):.2f}",
                f"{result.numpy_ratio:.1f}",
                "" if submit is None else f"{submit * 1e6:.0f}",
                "same" if result.good else "WRONG",
            )
        )
    lines += ["", _LATENCIES.format("latency, us", "submit, p50", "p99", "wait, p50", "p99", "ns an id")]
    for row in results.latencies:
        numbers = [f"{value:.1f}" for value in (*row.submit_us, *(row.wait_us or ()))]
        numbers += [""] * (4 - len(numbers))
        lines.append(_LATENCIES.format(row.what, *numbers, f"{row.ns_per_id:.1f}" if row.ids > 1 else ""))
    return "\n".join(line.rstrip() for line in lines)


def verdict(results: Results, seconds: float) -> str:
    """The closing line."""
    checked = sum(check.checked_bytes for cell in results.cells for check in cell.checks)
    bad = [cell.cell.name for cell in results.cells if not cell.good]
    if not results.source_unchanged:
        bad.append("the source was written")
    said = f"WRONG BYTES: {'; '.join(bad)}" if bad else "every byte same, guards intact, source unchanged"
    return f"{said}: {len(results.cells)} cells, {checked / 1e9:.2f} GB compared, {seconds:.0f} s in all"


def as_json(results: Results, machine: dict[str, Any]) -> dict[str, Any]:
    """Everything, with all samples."""
    return {
        "schema": 1,
        "bench": "transfer",
        "machine": machine,
        "threads": results.threads,
        "buffer_bytes": results.buffer_bytes,
        "notes": results.notes,
        "verified": results.good,
        "source_unchanged": results.source_unchanged,
        "cells": [_cell(result) for result in results.cells],
        "latencies": [
            {
                "what": row.what,
                "calls": row.calls,
                "ids": row.ids,
                "submit_us": {"p50": row.submit_us[0], "p99": row.submit_us[1]},
                "wait_us": None if row.wait_us is None else {"p50": row.wait_us[0], "p99": row.wait_us[1]},
                "ns_per_id": row.ns_per_id,
            }
            for row in results.latencies
        ],
    }


def as_csv(results: Results) -> str:
    """A line for each contender of each cell."""
    out = io.StringIO()
    writer: csv.DictWriter[str] | None = None
    for result in results.cells:
        cell = _cell(result)
        contenders = cell.pop("contenders")
        del cell["checks"], cell["shape"]
        for timing in contenders.values():
            del timing["seconds"]
            row = {**cell, **timing}
            if writer is None:
                writer = csv.DictWriter(out, list(row), lineterminator="\n")
                writer.writeheader()
            writer.writerow(row)
    return out.getvalue()


def plot(results: Results, path: Path) -> None:
    """Bars of GB/s for each cell, p5 to p95 as whiskers."""
    import matplotlib  # noqa: PLC0415 - optional

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415 - optional, and after the backend

    shown = results.cells
    figure, axis = pyplot.subplots(figsize=(9, 1.6 + 0.55 * len(shown)), layout="constrained")
    thickness = 0.27
    for offset, which in enumerate(("ceiling", "kvferry", "numpy")):
        timings: list[Timing] = [getattr(result, which) for result in shown]
        sizes = [result.cell.payload_bytes for result in shown]
        pairs = list(zip(timings, sizes, strict=True))
        middle = [timing.gb_per_s(payload) for timing, payload in pairs]
        low = [timing.gb_per_s(payload) - timing.gb_per_s(payload, 95) for timing, payload in pairs]
        high = [timing.gb_per_s(payload, 5) - timing.gb_per_s(payload) for timing, payload in pairs]
        places = [number + (offset - 1) * thickness for number in range(len(shown))]
        label = "plain memcpy" if which == "ceiling" else which
        axis.barh(places, middle, thickness, xerr=(low, high), label=label, error_kw={"linewidth": 0.8})
    axis.set_yticks(range(len(shown)), [result.cell.name for result in shown])
    axis.set_ylim(len(shown) - 0.4, -0.6)
    axis.set_xlabel(f"GB/s, median (p5 to p95); {results.threads} threads")
    axis.set_title("kvferry bench transfer, host to host")
    axis.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _cell(result: CellResult) -> dict[str, Any]:
    cell, shape = result.cell, result.cell.shape
    return {
        "pair": cell.pair.name,
        "run_bytes": cell.run_bytes,
        "blocks": cell.ids,
        "block_bytes": shape.block_bytes,
        "payload_bytes": cell.payload_bytes,
        "shape": shape.extents(cell.ids),
        "runs": result.runs,
        "of_memcpy": result.ratio,
        "of_numpy": result.numpy_ratio,
        "verified": result.good,
        "checks": [
            {
                "checked_bytes": check.checked_bytes,
                "wrong_words": check.wrong_words,
                "stray_words": check.stray_words,
            }
            for check in result.checks
        ],
        "contenders": {
            which: _timing(timing, cell.payload_bytes)
            for which, timing in (
                ("memcpy", result.ceiling),
                ("kvferry", result.kvferry),
                ("numpy", result.numpy),
            )
        },
    }


def _timing(timing: Timing, payload: int) -> dict[str, Any]:
    gb_per_s = {f"gb_per_s_p{percent}": timing.gb_per_s(payload, 100 - percent) for percent in _PERCENTS}
    submit = timing.submit_at(50)
    return {
        "contender": timing.name,
        "samples": len(timing.seconds),
        **gb_per_s,
        **{f"seconds_p{percent}": timing.at(percent) for percent in _PERCENTS},
        "submit_us_p50": None if submit is None else submit * 1e6,
        "seconds": timing.seconds,
    }
