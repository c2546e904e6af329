"""The summary that goes into reports and the README."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.bench.cells import size
from kvferry.bench.gpu import core, report

if TYPE_CHECKING:
    from kvferry.bench.gpu.measure import CellResult
    from kvferry.bench.gpu.transfer import Results


def render(results: Results) -> str:
    """Facts, bars, the core table by direction, what was lost, extras."""
    facts = results.facts
    lines = ["# kvferry bench transfer", ""]
    if facts.get("simulated"):
        lines += ["**A simulated driver: the numbers mean nothing.**", ""]
    lines += [f"- {key}: {value}" for key, value in facts.items() if key != "simulated"]
    if results.bars:
        lines += ["", "## Bars", "", "| case | bar | measured | | how |", "|---|---|---|---|---|"]
        for bar in results.bars:
            said = bar.why_not if bar.value is None else bar.detail
            state = f"**{bar.state}**" if bar.state == "missed" else bar.state
            lines.append(
                f"| {bar.case} | {bar.asked} | {bar.measured} | {state} | {said.replace('|', '/')} |"
            )
    if results.table.cells:
        lines += ["", "## Core table", "", *[f"{text}  " for text in report.LEGEND]]
        for direction in results.table.ceilings:
            lines += _direction(results, direction)
    lines += ["", "## Summary", "", *[f"- {text}" for text in report.summary(results)]]
    if results.extra:
        lines += [
            "",
            "## Short rows and slices",
            "",
            "```",
            *[report.extra_line(row) for row in results.extra],
            "```",
        ]
    return "\n".join(lines) + "\n"


def _direction(results: Results, direction: str) -> list[str]:
    shorts = [f"x {name}" for name in report.OTHERS]
    ceiling = next(found for name, found in results.table.ceilings.items() if name == direction)
    lines = [
        "",
        f"### {direction}: one large memcpy {ceiling.end / 1e9:.1f} GB/s of payload",
        "",
        "| layouts | run | payload | engine | GB/s | µs | of memcpy | event | "
        + " | ".join([*shorts, "x best engine"])
        + " |",
        "|" + "---|" * (9 + len(shorts)),
    ]
    of_direction = [result for result in results.table.cells if result.cell.direction == direction]
    return lines + [_row(results, result) for result in of_direction]


def _row(results: Results, result: CellResult) -> str:
    cell, ours = result.cell, result.series.get(core.OURS)
    ceiling = results.table.ceilings[cell.direction]
    what = f"| {cell.pair} | {size(cell.run_bytes)} | {size(cell.payload_bytes)} |"
    if ours is None or not ours.ran:
        return f"{what} {'; '.join(result.errors) or 'did not run'} |"
    event = "" if ours.event_s is None else f"{ceiling.event_share(cell.payload_bytes, ours.event_s):.3f}"
    others = [result.series.get(name) for name in report.OTHERS] + [core.best_forced(result)]
    ratios = [f"{series.end_s / ours.end_s:.2f}" if series and series.ran else "" for series in others]
    numbers = (
        f" {result.engine} | {cell.gb_per_s(ours.end_s):.1f} | {ours.end_s * 1e6:.1f} | "
        f"{ceiling.share(cell.payload_bytes, ours.end_s):.3f} | {event} |"
    )
    return what + numbers + " " + " | ".join(ratios) + " |" + ("" if result.good else " WRONG BYTES |")


def plot(results: Results, path: str) -> None:
    """Speed over run length by direction and pair, at 128 MiB or the most there is; needs matplotlib."""
    import matplotlib  # noqa: PLC0415 - optional

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415 - optional, and after the backend

    kinds = list(dict.fromkeys((result.cell.direction, result.cell.pair) for result in results.table.cells))
    if not kinds:
        return
    columns = (len(kinds) + 1) // 2
    figure, axes = pyplot.subplots(
        2, columns, figsize=(3.6 * columns, 6.4), layout="constrained", squeeze=False
    )
    # Column by column: the two pairs of a direction below one another.
    places = [axes[number % 2][number // 2] for number in range(2 * columns)]
    for axis in places[len(kinds) :]:
        axis.set_axis_off()
    for axis, (direction, pair) in zip(places, kinds, strict=False):
        found = [r for r in results.table.cells if (r.cell.direction, r.cell.pair) == (direction, pair)]
        most = min(max(r.cell.payload_bytes for r in found), 128 << 20)
        shown = [r for r in found if r.cell.payload_bytes == most]
        for name in (core.OURS, *report.OTHERS):
            points = [(r.cell.run_bytes, r.cell.gb_per_s(r.series[name].end_s)) for r in shown
                      if name in r.series and r.series[name].ran]  # fmt: skip
            if points:
                runs, speeds = zip(*points, strict=True)
                axis.plot(runs, speeds, marker="o", markersize=3, label=name)
        if shown:
            ceiling = results.table.ceilings[shown[0].cell.direction]
            axis.axhline(
                ceiling.end * shown[0].cell.traffic / 1e9, color="gray", linewidth=0.8, linestyle=":"
            )
        axis.set_xscale("log", base=2)
        axis.set_title(f"{direction} {pair}, {size(most)}", fontsize=9)
        axis.set_xlabel("run, bytes")
    for row in axes:
        row[0].set_ylabel("GB/s end to end")
    places[0].legend(fontsize=7)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
