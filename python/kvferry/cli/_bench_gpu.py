"""`kvferry bench transfer` where there is a GPU: options, progress line by line, files."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvferry as kf
from kvferry.cli import _bench_common

if TYPE_CHECKING:
    from kvferry.bench.gpu.transfer import Results

SECTIONS = ("core", "bars", "extra")
DIRECTIONS = ("h2d", "d2h", "d2d", "p2p")


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the options that matter on GPUs only."""
    group = parser.add_argument_group("with a GPU")
    group.add_argument(
        "--device",
        type=_device,
        default="auto",
        metavar="N",
        help="GPU to measure, or cpu for host memory only (default: GPU 0 if there is one)",
    )
    group.add_argument(
        "--peer",
        type=_peer,
        default="auto",
        metavar="N",
        help="second GPU, or none (default: the next, if any)",
    )
    group.add_argument(
        "--sections",
        type=_sections,
        default=None,
        metavar="LIST",
        help="of core, bars and extra, with commas (default: core; --full: all)",
    )
    group.add_argument(
        "--bars",
        action="store_const",
        const=("bars",),
        dest="sections",
        help="the bars only, about 2 minutes",
    )
    group.add_argument(
        "--direction",
        action="append",
        choices=DIRECTIONS,
        default=[],
        help="only this one; may be given again",
    )
    group.add_argument(
        "--budget",
        type=_bench_common.seconds,
        metavar="SECONDS",
        help="time for the core table: drops calls, never cells (default: none; it takes about 4 minutes)",
    )
    group.add_argument(
        "--soak-jobs", type=int, default=200_000, metavar="N", help="small jobs of that bar (default: 200000)"
    )
    group.add_argument("--md", type=Path, metavar="FILE", help="write the summary in Markdown")


def ordinal(arguments: argparse.Namespace) -> int | None:
    """The GPU to measure; None for host memory."""
    if arguments.device == "cpu":
        return None
    if arguments.device != "auto":
        return int(arguments.device)
    return 0 if _bench_common.gpus() else None


def run(arguments: argparse.Namespace, device: int, machine: dict[str, Any]) -> int:
    """Measures: 0 every byte same, 1 a difference, 2 could not be run."""
    from kvferry.bench.gpu import driver, markdown, report, transfer  # noqa: PLC0415 - they need NumPy

    start = time.monotonic()
    full = arguments.selection == "full"
    options = transfer.Options(
        device=device,
        peer=_other(arguments.peer, device),
        sections=arguments.sections or (SECTIONS if full else ("core",)),
        payload_bytes=arguments.bytes,
        seed=arguments.seed,
        budget=arguments.budget,
        quick=arguments.selection == "quick",
        directions=tuple(arguments.direction),
        soak_jobs=arguments.soak_jobs,
    )
    print(
        f"kvferry {machine['kvferry']} bench transfer, GPU {device}, sections {', '.join(options.sections)}"
    )
    if machine["profile"] != "release":
        print(f"note: a {machine['profile']} build: its speeds say little")
    if transfer.SIMULATED:
        print("note: a simulated driver: its numbers mean nothing")
    try:
        results: Results = transfer.run(options, _Lines())
    except (kf.Error, driver.DriverError, MemoryError, ValueError) as error:
        print(f"kvferry bench: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    print()
    print("\n".join(_short(report.summary(results))))
    print(f"{time.monotonic() - start:.0f} s in all")
    return _bench_common.write(arguments, results, report, markdown, machine)


class _Lines:
    """Prints what has ended, with the time since the start."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def section(self, name: str) -> None:
        from kvferry.bench.gpu import report  # noqa: PLC0415 - as above

        print(f"\n--- {name}, after {time.monotonic() - self._start:.0f} s", flush=True)
        if name == "core":
            print("\n".join([*report.LEGEND, "", report.heading()]), flush=True)

    def cell(self, number: int, count: int, result: Any, ceiling: Any) -> None:
        from kvferry.bench.gpu import report  # noqa: PLC0415 - as above

        print(report.line(result, ceiling), flush=True)
        if number in {count // 4, count // 2, 3 * count // 4}:
            print(f"[{number} of {count} cells after {time.monotonic() - self._start:.0f} s]", flush=True)

    def group(self, name: str, rows: list[Any], seconds: float) -> None:
        from kvferry.bench.gpu import report  # noqa: PLC0415 - as above

        print(f"[{name}: {seconds:.1f} s]", flush=True)
        for row in rows:
            print(report.bar_line(row), flush=True)

    def row(self, row: Any) -> None:
        from kvferry.bench.gpu import report  # noqa: PLC0415 - as above

        print(report.extra_line(row), flush=True)


def _short(lines: list[str], most: int = 60) -> list[str]:
    """The last lines matter most; files hold all."""
    if len(lines) <= most:
        return lines
    half = most // 2
    return [*lines[:half], f"... {len(lines) - most} more in --json and --md ...", *lines[-half:]]


def _other(asked: str, device: int) -> int | None:
    if asked == "none":
        return None
    if asked != "auto":
        return int(asked)
    return next((number for number in range(_bench_common.gpus()) if number != device), None)


def _device(text: str) -> str:
    if text in {"auto", "cpu"} or text.isdecimal():
        return text
    raise argparse.ArgumentTypeError(f"{text!r} is neither the number of a GPU nor cpu")


def _peer(text: str) -> str:
    if text in {"auto", "none"} or text.isdecimal():
        return text
    raise argparse.ArgumentTypeError(f"{text!r} is neither the number of a GPU nor none")


def _sections(text: str) -> tuple[str, ...]:
    return _bench_common.names(text, SECTIONS)
