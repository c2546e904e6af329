"""`kvferry demo`: the main job on whatever is here, every byte verified."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import sys
import time
from typing import TYPE_CHECKING, Any

import kvferry as kf
from kvferry.cli import _machine, _render
from kvferry.cli._geometries import GEOMETRIES

if TYPE_CHECKING:
    from kvferry.cli._exchange import Exchange
    from kvferry.cli._report import Leg, Outcome

SUMMARY = "move and verify KV-cache blocks of five models, and attention heads of four processes"


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the demo's options."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the screen")
    parser.add_argument(
        "--blocks", type=_positive, metavar="N", help="blocks to move in each geometry (default: 24 to 50 MB)"
    )
    parser.add_argument(
        "--device",
        type=_device,
        default="auto",
        metavar="N",
        help="GPU that holds the caches, or cpu for host memory (default: GPU 0 if there is one)",
    )
    parser.add_argument(
        "--only",
        choices=("blocks", "heads"),
        help="only the KV-cache blocks, or only the attention heads (default: both)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="key of the data and of the slots (default: 0)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the demo: 0 every byte same, 1 a difference, 2 could not be run."""
    start = time.monotonic()
    screen = None if arguments.json else _render.Screen(sys.stdout)
    if screen:
        screen.opening()
    if importlib.util.find_spec("numpy") is None:
        print(
            "kvferry demo needs NumPy to recompute and compare every byte: pip install numpy", file=sys.stderr
        )
        return 2
    from kvferry.cli import _exchange, _job  # noqa: PLC0415 - needs NumPy

    machine = _machine.look()
    outcomes: list[Outcome] = []
    try:
        ctx, why_not = _context(arguments.device, machine)
    except (kf.CudaError, kf.Unsupported) as error:
        print(f"kvferry demo cannot use GPU {arguments.device}: {error}", file=sys.stderr)
        return 2
    try:
        with ctx:
            device = ctx.device
            if screen:
                screen.machine(machine, ctx.threads, device, why_not)
                if arguments.only != "heads":
                    screen.table_head(_job.MOVES, device)
            for number, geometry in enumerate(GEOMETRIES if arguments.only != "heads" else ()):
                blocks = arguments.blocks or geometry.blocks
                outcome = _job.run(ctx, geometry, blocks=blocks, seed=arguments.seed, mistake=number == 0)
                outcomes.append(outcome)
                if screen:
                    screen.row(outcome)
    except (MemoryError, kf.HostMemoryError) as error:
        print(f"kvferry demo ran out of memory ({error}); try --blocks 4", file=sys.stderr)
        return 2
    exchange = _exchange.run(arguments.seed) if arguments.only != "blocks" else None
    if screen and exchange:
        screen.exchange(exchange)
    verified = all(outcome.good for outcome in outcomes) and (exchange is None or exchange.good)
    seconds = time.monotonic() - start
    if screen:
        exchanged = exchange.checked_bytes if exchange else 0
        code = _job.the_code(device)
        screen.closing(outcomes, code, device, exchanged=exchanged, verified=verified, seconds=seconds)
    else:
        facts: dict[str, Any] = {"seed": arguments.seed, "verified": verified, "seconds": seconds}
        report = {
            "device": device,
            **_as_json(machine, outcomes, exchange, **facts),
        }
        print(json.dumps(report, indent=2))
    return 0 if verified else 1


def _context(device: int | str, machine: _machine.Machine) -> tuple[kf.TransferContext, str]:
    """A context on the GPU asked for, or on the first that works; and why a GPU that is here is not used."""
    if device == "cpu" or (device == "auto" and not machine.gpus):
        return kf.TransferContext(), "not asked for" if machine.gpus else ""
    if device != "auto":
        return kf.TransferContext(device), ""
    try:
        return kf.TransferContext(0), ""
    except (kf.CudaError, kf.Unsupported) as error:
        return kf.TransferContext(), str(error).partition(" (")[0]


def _as_json(
    machine: _machine.Machine,
    outcomes: list[Outcome],
    exchange: Exchange | None,
    *,
    seed: int,
    verified: bool,
    seconds: float,
) -> dict[str, Any]:
    first = outcomes[0] if outcomes else None
    geometries = []
    for outcome in outcomes:
        facts = dataclasses.asdict(outcome)
        del facts["explain"], facts["refusal"]
        facts["offload"] = _leg(outcome.offload)
        facts["bring_back"] = _leg(outcome.bring_back)
        facts["every_byte_same"] = outcome.findings.wrong_elements == 0
        facts["guards_intact"] = outcome.findings.wrong_guard_elements == 0
        geometries.append(facts)
    return {
        "verified": verified,
        "seed": seed,
        "seconds": seconds,
        "machine": dataclasses.asdict(machine),
        "geometries": geometries,
        "explain": first.explain if first else "",
        "refused": dataclasses.asdict(first.refusal) if first and first.refusal else None,
        "exchange": {**dataclasses.asdict(exchange), "good": exchange.good} if exchange else None,
    }


def _leg(leg: Leg) -> dict[str, Any]:
    return {**dataclasses.asdict(leg), "gb_per_s_median": leg.gb_per_s}


def _device(text: str) -> int | str:
    if text in ("cpu", "auto"):
        return text
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither the number of a GPU nor cpu")
    return int(text)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value
