"""`kvferry bench all2all`: options, progress line by line, files."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvferry.cli import _bench_common

if TYPE_CHECKING:
    from kvferry.bench.all2all.results import Measured, Results

SUMMARY = "attention heads exchanged between ranks: of GPUs if there are two, else processes of this host"
DEVICES = ("auto", "gpu", "cpu", "host")
BUDGET_S = 100.0


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds its options."""
    much = parser.add_mutually_exclusive_group()
    much.add_argument(
        "--quick", dest="selection", action="store_const", const="quick", help="two small shapes, few calls"
    )
    much.add_argument(
        "--full",
        dest="selection",
        action="store_const",
        const="full",
        help="everything, more calls, no budget: about 6 minutes on two GPUs",
    )
    parser.set_defaults(selection="default")
    parser.add_argument(
        "--device",
        choices=DEVICES,
        default="auto",
        help="cpu: the CPU backend; host: the GPU plan on torch's CPU tensors, to try it (default: auto)",
    )
    parser.add_argument(
        "--world", type=_ranks, metavar="N", help="ranks (default: one for each GPU; 2 on CPUs)"
    )
    parser.add_argument(
        "--only",
        type=_groups,
        default=None,
        metavar="LIST",
        help="groups of cells, with commas; an unknown one lists them",
    )
    parser.add_argument(
        "--budget",
        type=_bench_common.seconds,
        default=None,
        metavar="SECONDS",
        help=f"for all; cells that come too late are not measured (default: {BUDGET_S:g}; --full: none)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="key of the data (default: 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything, all samples too")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write a line for each way of each cell")
    parser.add_argument("--md", type=Path, metavar="FILE", help="write the summary in Markdown")
    parser.add_argument("--png", type=Path, metavar="FILE", help="write a plot; needs matplotlib")


def run(arguments: argparse.Namespace, machine: dict[str, Any]) -> int:
    """Measures: 0 every bit same, 1 a difference, 2 could not be run."""
    from kvferry.bench.all2all import markdown, plan, report, run  # noqa: PLC0415 - they need NumPy

    gpus = _count()
    asked: plan.Device | Literal["auto"] = arguments.device
    device: plan.Device = asked if asked != "auto" else "gpu" if gpus > 1 else "cpu"
    world = arguments.world or (gpus if device == "gpu" else 2)
    refusal = _refusal(device, world, gpus)
    if refusal:
        print(f"kvferry bench: {refusal}", file=sys.stderr)
        return 2
    budget = arguments.budget or (None if arguments.selection == "full" else BUDGET_S)
    options = plan.Options(
        device=device,
        world=world,
        selection=arguments.selection,
        budget=budget,
        only=arguments.only or plan.GROUPS,
        seed=arguments.seed,
    )
    start = time.monotonic()
    print(f"kvferry {machine['kvferry']} bench all2all, {world} ranks, {device}, {arguments.selection}")
    if machine["profile"] != "release":
        print(f"note: a {machine['profile']} build: its speeds say little")
    if device == "host":
        print("note: CPU tensors in place of GPUs: the numbers mean nothing")
    results: Results = run.run(options, _Lines(device))
    print()
    for bar in results.bars:
        print(_bar(bar))
    print()
    print("\n".join(report.summary(results)))
    print(f"{time.monotonic() - start:.0f} s in all")
    return _bench_common.write(arguments, results, report, markdown, machine)


class _Lines:
    """Prints what has ended; where a person watches, what is going on too."""

    def __init__(self, device: str) -> None:
        self._start, self._device, self._group = time.monotonic(), device, ""
        self._columns: dict[str, tuple[str, ...]] = {}

    def section(self, name: str) -> None:
        from kvferry.bench.all2all import report  # noqa: PLC0415 - as above

        print(f"\n--- {name}, after {time.monotonic() - self._start:.0f} s", flush=True)
        on_cpu = self._device == "cpu" or name == "CPU backend"
        self._columns = report.CPU_COLUMNS if on_cpu else report.COLUMNS
        if name == "exchanges" and not on_cpu:
            print("\n".join(report.LEGEND), flush=True)

    def task(self, number: int, count: int, found: Measured) -> None:
        from kvferry.bench.all2all import report  # noqa: PLC0415 - as above

        if sys.stderr.isatty():
            print(f"\r[{number}/{count}]\033[K", end="\r", file=sys.stderr, flush=True)
        if found.task.group != self._group and found.task.kind == "exchange":
            self._group = found.task.group
            print(f"{self._group}\n{report.heading(self._columns)}", flush=True)
        print(report.line(found, self._columns), flush=True)

    def note(self, text: str) -> None:
        print(f"note: {text}", flush=True)


def _bar(bar: Any) -> str:
    from kvferry.bench.gpu import report  # noqa: PLC0415 - as above

    return report.bar_line(bar)


def _refusal(device: str, world: int, gpus: int) -> str:
    """Why it cannot be run, before minutes are spent on it."""
    if device == "gpu" and world > gpus:
        return f"{world} ranks need as many GPUs, {gpus} found"
    if device == "gpu" and (missing := [name for name in ("torch", "cupy") if not _there(name)]):
        return f"GPUs are measured with {' and '.join(missing)}, not installed here; try --device cpu"
    if device == "host" and not _there("torch"):
        return "--device host needs torch"
    return ""


def _there(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _count() -> int:
    # A simulated driver's memory cannot be torch's.
    if os.environ.get("KVFERRY_FAKE_DEVICES"):
        return 0
    return _bench_common.gpus()


def _groups(text: str) -> tuple[str, ...]:
    from kvferry.bench.all2all.plan import GROUPS  # noqa: PLC0415 - it needs NumPy

    return _bench_common.names(text, GROUPS)


def _ranks(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 16:
        raise argparse.ArgumentTypeError(f"{value} is not between 1 and 16")
    return value
