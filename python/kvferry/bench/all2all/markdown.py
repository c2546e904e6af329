"""The summary that goes into reports and the README, and the plot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvferry.bench.all2all import report
from kvferry.bench.all2all.bars import GRAPHS, OWN

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvferry.bench.all2all.results import Measured, Results

_LINES: dict[str, tuple[str, ...]] = {
    "kvferry": OWN,
    "kvferry, graph": GRAPHS,
    "kvferry, 16 CTAs": ("push 16",),
    "kvferry, copy engine": ("copy",),
    "reference's method": ("reference",),
    "permute + NCCL": ("nccl",),
    "permute + NCCL, graph": ("nccl graph",),
    "peer memcpy, both ways": ("memcpy both",),
    "memcpy": ("memcpy",),
}


def render(results: Results) -> str:
    """Facts, bars, the tables by group, what is missing."""
    lines = ["# kvferry bench all2all", ""]
    if results.facts.get("device") == "host":
        lines += ["**CPU tensors in place of GPUs: the numbers mean nothing.**", ""]
    lines += [f"- {key}: {value}" for key, value in results.facts.items()]
    lines += ["", "## Bars", "", "| case | bar | measured | | how |", "|---|---|---|---|---|"]
    for bar in results.bars:
        said = (bar.why_not if bar.value is None else bar.detail).replace("|", "/")
        shown = f"**{bar.state}**" if bar.state == "missed" else bar.state
        lines.append(f"| {bar.case} | {bar.asked} | {bar.measured} | {shown} | {said} |")
    columns = report.CPU_COLUMNS if results.facts.get("device") == "cpu" else report.COLUMNS
    lines += ["", "## Exchanges", "", *[f"{text}  " for text in report.LEGEND]]
    lines += _tables(results.measured, columns)
    sms = results.of_group("sms", "core")
    if any(way in found.rows for found in sms for way in report.PUSHES):
        lines += ["", "## CTAs", "", "µs by number of CTAs (push engine) and GB/s", "", *_sms(sms)]
    if results.cpu:
        lines += ["", "## CPU backend", *_tables(results.cpu, report.CPU_COLUMNS)]
    others = [found for found in results.measured.values() if found.task.kind != "exchange" and found.rows]
    if others:
        lines += ["", "## Beside exchanges", "", *[f"- {report.line(found)}" for found in others]]
    lines += ["", "## Summary", "", *[f"- {text}" for text in report.summary(results)]]
    return "\n".join(lines) + "\n"


def _tables(measured: dict[str, Measured], columns: dict[str, tuple[str, ...]]) -> list[str]:
    lines: list[str] = []
    exchanges = [found for found in measured.values() if found.task.kind == "exchange" and found.rows]
    for group in dict.fromkeys(found.task.group for found in exchanges):
        of_group = [found for found in exchanges if found.task.group == group]
        used = {
            name: ways for name, ways in columns.items() if any(found.seconds(*ways) for found in of_group)
        }
        heads = [
            "B,N per rank,H,D",
            "MB/rank",
            *[f"{name} µs" for name in used],
            "GB/s",
            "of memcpy",
            "x NCCL",
            "bits",
        ]
        lines += ["", f"### {group}", "", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
        for found in of_group:
            ours, ceiling = found.seconds(*OWN), found.seconds(*columns["memcpy"])
            nccl, speed = found.seconds("nccl"), found.gb_per_s(*OWN)
            cells = [found.task.cell.name, f"{found.task.cell.rank_bytes / 1e6:.3g}"]
            cells += [_us(found.seconds(*ways)) for ways in used.values()]
            cells.append(f"{speed:.1f}" if speed else "")
            cells.append(f"{ceiling / ours:.3f}" if ceiling and ours else "")
            cells.append(f"{nccl / ours:.2f}" if nccl and ours else "")
            cells.append(report.state(found).replace("|", "/"))
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _us(seconds: float | None) -> str:
    return f"{seconds * 1e6:.1f}" if seconds else ""


def _sms(found: list[Measured]) -> list[str]:
    shown = [each for each in found if any(way in each.rows for way in report.PUSHES)]
    ways = [way for way in (*report.PUSHES, "reference 16", "reference") if any(way in m.rows for m in shown)]
    lines = [f"| shape | {' | '.join(ways)} |", "|---" * (len(ways) + 1) + "|"]
    for each in shown:
        cells = []
        for way in ways:
            seconds, speed = each.seconds(way), each.gb_per_s(way)
            cells.append(f"{seconds * 1e6:.1f} · {speed:.0f}" if seconds and speed else "")
        lines.append(f"| {each.task.cell.name} | {' | '.join(cells)} |")
    return lines


def plot(results: Results, path: str) -> None:
    """Time over size for small exchanges, speed over size for all; needs matplotlib."""
    import matplotlib  # noqa: PLC0415 - optional

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415 - optional, and after the backend

    # One head layout in each: 8x64 and 32x128.
    small = [found for found in results.of_group("latency") if found.task.cell.dim == 64]
    usual = results.of_group("bandwidth", "core", "sms")
    large = [f for f in usual if f.task.cell.heads == (32,) and f.task.cell.batch == 1]
    if not small and not large:
        return
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.4), layout="constrained")

    def microseconds(found: Measured, ways: tuple[str, ...]) -> float | None:
        seconds = found.seconds(*ways)
        return seconds * 1e6 if seconds else None

    def speed(found: Measured, ways: tuple[str, ...]) -> float | None:
        return found.gb_per_s(*ways)

    panels: tuple[tuple[Any, list[Measured], Callable[[Measured, tuple[str, ...]], float | None], str], ...]
    panels = ((left, small, microseconds, "µs"), (right, large, speed, "GB/s across the busiest border"))
    for axis, chosen, value, label in panels:
        _panel(axis, chosen, value, label)
    figure.suptitle(f"kvferry bench all2all, {results.facts.get('ranks')} ranks", fontsize=10)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _panel(
    axis: Any,
    chosen: list[Measured],
    value: Callable[[Measured, tuple[str, ...]], float | None],
    label: str,
) -> None:
    panel = axis
    ordered = sorted(chosen, key=lambda found: found.task.cell.rank_bytes)
    for name, ways in _LINES.items():
        # The same size may have been measured in two groups.
        points = {f.task.cell.rank_bytes: y for f in ordered if (y := value(f, ways)) is not None}
        if points:
            panel.plot(list(points), list(points.values()), marker="o", markersize=3, label=name)
    panel.set_xscale("log", base=2)
    panel.set_xlabel("bytes per rank")
    panel.set_ylabel(label)
    if ordered:
        panel.legend(fontsize=7)
