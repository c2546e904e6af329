"""`kvferry bench`: speeds on this machine beside plain copies and what people use, every byte checked."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvferry as kf
from kvferry.cli import _bench_all2all, _bench_gpu, _files, _host_facts, _machine

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvferry.bench.transfer import Options, Results

SUMMARY = "measure transfers and exchanges on this machine, beside plain memcpy and what people use today"
PAIRS = ("FC-FC", "FC-LW", "LW-FC", "LW-LWouter", "NHD-HND", "FC-universal")
MIN_BYTES = 2 << 20


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds one subcommand for each thing to measure."""
    subparsers = parser.add_subparsers(metavar="what", required=True)
    summary = "transfers between layouts: of GPUs if there are any, else in host memory"
    transfer = subparsers.add_parser("transfer", help=summary, description=summary)
    transfer.set_defaults(measure=_transfer)
    much = transfer.add_mutually_exclusive_group()
    much.add_argument(
        "--quick",
        dest="selection",
        action="store_const",
        const="quick",
        help="little: host payloads of 16 MiB, GPU cells of 1 and 8 blocks, one call each",
    )
    much.add_argument(
        "--full",
        dest="selection",
        action="store_const",
        const="full",
        help="everything: about 15 minutes on a host, 8 on a GPU",
    )
    transfer.set_defaults(selection="default")
    transfer.add_argument(
        "--pair", action="append", choices=PAIRS, default=[], help="host: only this pair; may be given again"
    )
    transfer.add_argument(
        "--bytes", type=_bytes, default=512 << 20, metavar="N", help="largest payload, as 512M (default)"
    )
    transfer.add_argument(
        "--threads", type=_positive, metavar="N", help="host: copy threads (default: kvferry's own)"
    )
    transfer.add_argument(
        "--seed", type=int, default=0, metavar="N", help="key of data and slots (default: 0)"
    )
    transfer.add_argument("--json", type=Path, metavar="FILE", help="write everything, all samples too")
    transfer.add_argument("--csv", type=Path, metavar="FILE", help="write a line for each contender and cell")
    transfer.add_argument("--png", type=Path, metavar="FILE", help="write a plot; needs matplotlib")
    _bench_gpu.configure(transfer)
    summary = _bench_all2all.SUMMARY
    all2all = subparsers.add_parser("all2all", help=summary, description=summary)
    all2all.set_defaults(measure=_all2all)
    _bench_all2all.configure(all2all)


def run(arguments: argparse.Namespace) -> int:
    """Measures: 0 every byte same, 1 a difference, 2 could not be run."""
    measure: Callable[[argparse.Namespace], int] = arguments.measure
    return measure(arguments)


def _transfer(arguments: argparse.Namespace) -> int:
    start = time.monotonic()
    refusal = _refusal(arguments)
    if refusal:
        print(f"kvferry bench: {refusal}", file=sys.stderr)
        return 2
    machine = _describe()
    device = _bench_gpu.ordinal(arguments)
    if device is not None:
        return _bench_gpu.run(arguments, device, machine)
    from kvferry.bench import report, transfer  # noqa: PLC0415 - they need NumPy

    options: Options = transfer.Options(
        selection=arguments.selection,
        payload_bytes=arguments.bytes,
        threads=arguments.threads,
        seed=arguments.seed,
        only=frozenset(arguments.pair),
        available_bytes=machine["memory_available_bytes"],
        cache_bytes=machine["last_cache_bytes"],
    )
    print(f"kvferry {machine['kvferry']} bench transfer")
    print(f"{machine['cpu']}, {machine['usable_cpus']} usable CPUs, load {machine['load']}", flush=True)
    if machine["profile"] != "release":
        print(f"note: a {machine['profile']} build: its speeds say little")
    for note in transfer.affordable(options)[1]:
        print(f"note: {note}", flush=True)
    try:
        results: Results = transfer.run(options, _progress)
    except (MemoryError, kf.HostMemoryError) as error:
        print(f"kvferry bench ran out of memory ({error}); try --bytes 64M", file=sys.stderr)
        return 2
    except (kf.Error, ValueError) as error:
        print(f"kvferry bench: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    finally:
        _end_progress()
    print(report.table(results))
    print()
    print(report.verdict(results, time.monotonic() - start))
    try:
        if arguments.json:
            arguments.json.write_text(json.dumps(report.as_json(results, machine), indent=1) + "\n")
        if arguments.csv:
            arguments.csv.write_text(report.as_csv(results))
        if arguments.png:
            report.plot(results, arguments.png)
    except OSError as error:
        print(f"kvferry bench: {error}", file=sys.stderr)
        return 2
    return 0 if results.good else 1


def _all2all(arguments: argparse.Namespace) -> int:
    refusal = _refusal(arguments)
    if refusal:
        print(f"kvferry bench: {refusal}", file=sys.stderr)
        return 2
    return _bench_all2all.run(arguments, _describe())


def _refusal(arguments: argparse.Namespace) -> str:
    """Why it cannot be run, before minutes are spent on it."""
    if importlib.util.find_spec("numpy") is None:
        return "needs NumPy: pip install numpy"
    if arguments.png and importlib.util.find_spec("matplotlib") is None:
        return "--png needs matplotlib: pip install matplotlib"
    for path in (arguments.json, arguments.csv, arguments.png, arguments.md):
        if path and not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
            return f"cannot write {path}: {path.parent} is no folder to write to"
    return ""


def _describe() -> dict[str, Any]:
    machine = _machine.look()
    limits = _host_facts.cgroup()
    try:
        load = " ".join(f"{value:.2f}" for value in os.getloadavg())
    except OSError:
        load = "unknown"
    return {
        "cpu": machine.cpu,
        "usable_cpus": machine.usable_cpus,
        "cpu_limit": limits.cpu_limit,
        "last_cache_bytes": _host_facts.cache().total,
        "memory_available_bytes": _host_facts.memory(limits=limits).available_bytes,
        "numa_nodes": len(_host_facts.numa()),
        "load": load,
        "kvferry": machine.kvferry,
        "profile": machine.profile,
        "python": machine.python,
    }


def _progress(number: int, count: int, name: str) -> None:
    if sys.stderr.isatty():
        print(f"\r[{number}/{count}] {name}\033[K", end="", file=sys.stderr, flush=True)


def _end_progress() -> None:
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def _bytes(text: str) -> int:
    value = _files.size(text)
    if value is None or value < MIN_BYTES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 512M, of at least 2M")
    return value
