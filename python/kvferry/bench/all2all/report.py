"""Renderings: lines as tasks end, JSON and CSV."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from typing import TYPE_CHECKING, Any

from kvferry.bench.all2all.bars import ENGINES, GRAPHS, OWN
from kvferry.bench.gpu.stats import spread

if TYPE_CHECKING:
    from kvferry.bench.all2all.results import Measured, Results

PUSHES = tuple(way for way in ENGINES if way.startswith("push"))
COLUMNS: dict[str, tuple[str, ...]] = {
    "owned": ("owned",),
    "out=": ("out",),
    "push": PUSHES,
    "copy": ("copy",),
    "graph": GRAPHS,
    "ref": ("reference", "reference 16", "reference 32", "reference 64"),
    "nccl": ("nccl",),
    "n graph": ("nccl graph",),
    "n bare": ("nccl bare",),
    "memcpy": ("memcpy both",),
}
"""Columns of times; of several ways the fastest."""
CPU_COLUMNS: dict[str, tuple[str, ...]] = {"owned": ("owned",), "out=": ("out",), "memcpy": ("memcpy",)}
LEGEND = """\
us of one exchange: events around each call, submission hidden behind a delay; the slowest rank of each
iteration, then the median. owned: kvferry, results owned; out=: into a tensor that peers know; push: the best
of the CTA counts; copy: the copy engine; graph: 20 exchanges in a CUDA graph, over 20; ref: the reference's
method with copied-out result (our implementation); nccl: permute + all_to_all + permute; n bare: the
all_to_all alone; memcpy: as many bytes to the peers, all GPUs at once, driven by one process. GB/s: bytes
that cross the busiest rank's border, by the best of owned and out=. of mcp: its part of memcpy. Every way was
checked bit by bit.
""".splitlines()


def heading(columns: dict[str, tuple[str, ...]] = COLUMNS) -> str:
    """The table's first line."""
    cells = "".join(f"{name:>9}" for name in columns)
    numbers = f"{'GB/s':>8}{'of mcp':>8}{'x nccl':>8}{'host us':>9}"
    return f"{'B,N per rank,H,D':<34}{'MB/rank':>9}{cells}{numbers}  bits"


def line(found: Measured, columns: dict[str, tuple[str, ...]] = COLUMNS) -> str:
    """A task's line."""
    cell = found.task.cell
    if found.task.kind != "exchange":
        return other_line(found)
    head = f"{cell.name:<34}{cell.rank_bytes / 1e6:>9.3g}"
    if not found.rows:
        return f"{head}  not measured: {found.skipped}"
    times = [found.seconds(*ways) for ways in columns.values()]
    cells = "".join(f"{seconds * 1e6:>9.1f}" if seconds else f"{'-':>9}" for seconds in times)
    speed, ours = found.gb_per_s(*OWN), found.seconds(*OWN)
    ceiling = found.seconds(*columns["memcpy"])
    nccl = found.seconds("nccl")
    submit = found.rows["owned"].submit_s if "owned" in found.rows else None
    text = head + cells
    text += f"{speed:>8.1f}" if speed else f"{'-':>8}"
    text += f"{ceiling / ours:>8.3f}" if ceiling and ours else f"{'-':>8}"
    text += f"{nccl / ours:>8.2f}" if nccl and ours else f"{'-':>8}"
    text += f"{submit * 1e6:>9.1f}" if submit else f"{'-':>9}"
    return f"{text}  {state(found)}"


def state(found: Measured) -> str:
    """What the checks and the ways say."""
    if found.faults:
        return f"WRONG: {found.faults[0]}"
    notes = sorted({row.note for row in found.rows.values() if row.note})
    copied = [way for way, row in found.rows.items() if row.value("copied_out")]
    notes += [f"{', '.join(copied)}: copied out"] if copied else []
    return "same" + (f" ({'; '.join(notes)})" if notes else "")


def other_line(found: Measured) -> str:
    """Set-up, host time, products, skew: a line each."""
    kind, rows = found.task.kind, found.rows
    if not rows:
        return f"{kind}: not measured: {found.skipped}"
    parts = []
    for way, row in rows.items():
        if row.why:
            parts.append(f"{way}: {row.why}")
        elif kind == "setup":
            parts.append(f"first {row.value('first_s') or 0:.3f} s, median {row.device_s or 0:.3f} s")
        elif kind == "cost":
            names = ("cpu_us", "drop_us", "wall_us")
            parts.append("fused call " + ", ".join(f"{name} {row.value(name) or 0:.2f}" for name in names))
        elif kind == "gemm":
            moved = "" if way == "alone" else f" (exchange {row.value('exchange_us') or 0:.0f} us)"
            short = [r for r in row.ranks if not r.values.get("covered", True)]
            moved += ", ended before the products" if short else ""
            parts.append(f"{way} {100 * (row.value('slowdown') or 0):+.1f} %{moved}")
        else:
            early, late, usual = (row.value(name) or 0 for name in ("early_us", "late_us", "usual_us"))
            parts.append(f"{way} ms: early {early:.0f}, late {late:.1f}, usual {usual:.1f} us")
    return f"{found.task.name}: " + "; ".join(parts)


def recovery_line(found: dict[str, Any]) -> str:
    """The stopped and the killed rank."""
    if not found:
        return "recovery: not measured"
    parts = []
    if "stop" in found:
        took, said = found["stop"]["waited_s"], found["stop"]["error"]
        parts.append(f"SIGSTOP: {said} after {took:.3f} s of {found['timeout_s']:g}")
        parts.append(f"the other: {found.get('stop_other', {}).get('error', '-')}")
    if "kill" in found:
        parts.append(
            f"SIGKILL: {found['kill']['error']} after {found['kill'].get('delay_s', 0) * 1e3:.1f} ms"
        )
    for key in ("reset", "anew"):
        parts += [f"{key}: {'; '.join(filter(None, found[key])) or 'well'}"] if key in found else []
    parts += [found["why"]] if found.get("why") else []
    return "recovery: " + "; ".join(parts)


def summary(results: Results) -> list[str]:
    """What to know after the tables."""
    lines = [recovery_line(results.recovery)] if results.recovery else []
    missing: dict[str, str] = {}
    for found in results.every:
        for way, row in found.rows.items():
            if row.why:
                missing.setdefault(f"{way}: {row.why}", found.task.name)
    lines += [f"not run: {why} ({name})" for why, name in missing.items()]
    skipped = [found.task.name for found in results.every if found.skipped]
    lines += [f"not measured ({len(skipped)}): {', '.join(skipped)}"] if skipped else []
    lines += [f"WRONG: {what}" for what in results.wrong]
    lines += [f"WRONG: {fault}" for found in results.every for fault in found.faults]
    lines += [f"note: {note}" for note in results.notes]
    counts = {
        name: sum(bar.state == name for bar in results.bars) for name in ("met", "missed", "not measured")
    }
    lines.append("bars: " + ", ".join(f"{count} {name}" for name, count in counts.items()))
    spent = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in results.seconds.items())
    lines.append(f"{'every bit same' if results.good else 'WRONG BITS OR FAILURES'}; {spent}")
    return lines


def as_json(results: Results) -> dict[str, Any]:
    """Everything, with all samples."""
    return {
        "schema": 1,
        "bench": "all2all",
        "facts": results.facts,
        "verified": results.good,
        "wrong": results.wrong + [fault for found in results.every for fault in found.faults],
        "notes": results.notes,
        "seconds": results.seconds,
        "bars": [dataclasses.asdict(bar) | {"state": bar.state} for bar in results.bars],
        "recovery": results.recovery,
        "tasks": [_task(found) for found in results.measured.values()],
        "cpu": [_task(found) for found in results.cpu.values()],
    }


def _task(found: Measured) -> dict[str, Any]:
    cell = found.task.cell
    return {
        "name": found.task.name,
        "group": found.task.group,
        "kind": found.task.kind,
        "cell": dataclasses.asdict(cell) | {"rank_bytes": cell.rank_bytes, "wire_bytes": cell.wire},
        "skipped": found.skipped,
        "ways": {
            way: {
                "device_us": _us(row.device_s),
                "submit_us": _us(row.submit_s),
                "gb_per_s": found.gb_per_s(way),
                "why": row.why,
                "wrong": row.wrong,
                "note": row.note,
                "ranks": [
                    {
                        "device_us": [_us(each) for each in record.device],
                        "submit_us": [_us(each) for each in record.submit],
                        "values": record.values,
                    }
                    for record in row.ranks
                ],
            }
            for way, row in found.rows.items()
        },
    }


def as_text(facts: dict[str, Any]) -> str:
    """`as_json` as text, a line for each task."""
    text = json.dumps(facts | {"tasks": "@tasks", "cpu": "@cpu"}, indent=1)
    for key in ("tasks", "cpu"):
        each = ",\n".join(json.dumps(task) for task in facts[key])
        text = text.replace(f'"@{key}"', f"[\n{each}\n ]", 1)
    return text + "\n"


def _us(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e6, 3)


_NAMES = (
    *("backend", "group", "shape", "ranks", "rank_bytes", "wire_bytes", "way", "samples", "device_us_p5"),
    *("device_us_p50", "device_us_p95", "submit_us_p50", "gb_per_s", "of_memcpy", "verified", "why"),
)


def as_csv(results: Results) -> str:
    """A line for each way of each task."""
    out = io.StringIO()
    writer = csv.DictWriter(out, _NAMES, lineterminator="\n")
    writer.writeheader()
    for backend, tasks in (("device", results.measured), ("cpu", results.cpu)):
        for found in tasks.values():
            cell, ceiling = found.task.cell, found.seconds("memcpy both") or found.seconds("memcpy")
            for way, row in found.rows.items():
                device = row.device
                low, middle, high = (value * 1e6 for value in spread(device)) if device else ("", "", "")
                speed, seconds = found.gb_per_s(way), row.device_s
                writer.writerow(
                    {
                        "backend": results.facts.get("device", "") if backend == "device" else backend,
                        "group": found.task.group,
                        "shape": cell.name,
                        "ranks": cell.world,
                        "rank_bytes": cell.rank_bytes,
                        "wire_bytes": cell.wire,
                        "way": way,
                        "samples": len(device),
                        "device_us_p5": low if low == "" else round(float(low), 2),
                        "device_us_p50": middle if middle == "" else round(float(middle), 2),
                        "device_us_p95": high if high == "" else round(float(high), 2),
                        "submit_us_p50": "" if row.submit_s is None else round(row.submit_s * 1e6, 2),
                        "gb_per_s": "" if speed is None else round(speed, 3),
                        "of_memcpy": round(ceiling / seconds, 4) if ceiling and seconds else "",
                        "verified": not row.wrong and not row.why,
                        "why": row.why or row.wrong,
                    }
                )
    return out.getvalue()
