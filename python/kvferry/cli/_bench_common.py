"""What the commands that measure GPUs share: reading options, counting GPUs, writing files."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

import kvferry as kf

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType


def write(
    arguments: argparse.Namespace,
    results: Any,
    report: ModuleType,
    markdown: ModuleType,
    machine: dict[str, Any],
) -> int:
    """Writes the files asked for. 0 if the results are good, 1 if not, 2 if a file could not be written."""
    try:
        if arguments.json:
            arguments.json.write_text(report.as_text(report.as_json(results) | {"machine": machine}))
        if arguments.csv:
            arguments.csv.write_text(report.as_csv(results))
        if arguments.md:
            arguments.md.write_text(markdown.render(results))
        if arguments.png:
            markdown.plot(results, str(arguments.png))
    except OSError as error:
        print(f"kvferry bench: {error}", file=sys.stderr)
        return 2
    return 0 if results.good else 1


def gpus() -> int:
    """GPUs that the driver shows; 0 without one."""
    try:
        return len(kf.devices())
    except kf.CudaError:
        return 0


def names(text: str, known: Sequence[str]) -> tuple[str, ...]:
    """Names with commas, all of them known."""
    found = tuple(text.split(","))
    unknown = [name for name in found if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(known)}")
    return found


def seconds(text: str) -> float:
    """A time above 0."""
    value = float(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not a time to spend")
    return value
