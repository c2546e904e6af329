"""`kvferry calibrate`: measures a GPU's engines for a few seconds, so that the default is chosen well."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any

import kvferry as kf

if TYPE_CHECKING:
    import argparse

SUMMARY = "measure a GPU's copy engines once, so that the best is chosen by default"


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds calibrate's options."""
    parser.add_argument("--device", type=int, default=0, metavar="N", help="GPU (default: 0)")
    parser.add_argument(
        "--peer", type=int, metavar="N", help="second GPU, for copies between two (default: none)"
    )
    parser.add_argument(
        "--force", action="store_true", help="save the constants even if they are far off the shipped ones"
    )
    parser.add_argument("--show", action="store_true", help="print the constants in force; measure nothing")
    parser.add_argument("--json", action="store_true", help="print the constants as JSON only")


def run(arguments: argparse.Namespace) -> int:
    """Measures and saves: 0 saved or shown, 1 refused, 2 could not be run."""
    start = time.monotonic()
    try:
        found = kf.calibrate(
            arguments.device, peer=arguments.peer, force=arguments.force, show=arguments.show
        )
    except (kf.CudaError, kf.Unsupported, ValueError) as error:
        print(f"kvferry calibrate: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except kf.Error as error:
        print(f"kvferry calibrate: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps(found, indent=1))
        return 0
    print(render(found))
    if not arguments.show:
        print(f"measured in {time.monotonic() - start:.1f} s")
    return 0


def render(found: dict[str, Any]) -> str:
    """The constants for people: a line for each engine and direction, what else is known before them."""
    lines = [f"{key}: {value}" for key, value in found.items() if not isinstance(value, dict)]
    for direction, engines in found.items():
        if not isinstance(engines, dict):
            continue
        for engine, curve in engines.items():
            if isinstance(curve, dict) and "points" in curve:
                points = ", ".join(f"{_bytes(run)} {speed:.1f}" for run, speed in curve["points"])
                lines.append(f"{direction} {engine}: {curve['overhead_us']:.1f} us + runs at GB/s: {points}")
            else:
                lines.append(f"{direction} {engine}: {curve}")
    return "\n".join(lines)


def _bytes(count: int) -> str:
    for unit, power in (("MiB", 20), ("KiB", 10)):
        if count >= 1 << power:
            return f"{count / (1 << power):.4g} {unit}"
    return f"{count} B"
