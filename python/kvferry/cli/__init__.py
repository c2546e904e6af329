"""The `kvferry` command.

A subcommand is one module here with `SUMMARY`, `configure(parser)` and `run(arguments)`, named in `COMMANDS`.
It imports at module level nothing that a bare installation lacks.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Protocol

import kvferry
from kvferry.cli import bench, calibrate, demo, doctor, explain

if TYPE_CHECKING:
    from collections.abc import Sequence


class Command(Protocol):
    """What a subcommand's module has."""

    @property
    def SUMMARY(self) -> str:  # noqa: N802 - a module's constant
        """One line for `kvferry --help`."""

    def configure(self, parser: argparse.ArgumentParser, /) -> None:
        """Adds the subcommand's options."""

    def run(self, arguments: argparse.Namespace, /) -> int:
        """Does the work and returns the exit code: 0 good, 1 found wrong, 2 could not be run."""


COMMANDS: dict[str, Command] = {
    "demo": demo,
    "doctor": doctor,
    "explain": explain,
    "bench": bench,
    "calibrate": calibrate,
}


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="kvferry", description="Moves KV-cache blocks between memories and layouts."
    )
    parser.add_argument("--version", action="version", version=f"kvferry {kvferry.__version__}")
    subparsers = parser.add_subparsers(metavar="command", required=True)
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=command.SUMMARY, description=command.SUMMARY)
        command.configure(subparser)
        subparser.set_defaults(run=command.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    arguments = build_parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader has gone, as in `kvferry demo | head`; the interpreter must not flush into it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return code
