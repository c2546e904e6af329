"""`kvferry doctor`: what is here, and what will therefore work."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

from kvferry.cli import _doctor_text, _facts, _verdicts

if TYPE_CHECKING:
    import argparse

SUMMARY = "say what this machine and build have, and what will therefore work"


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds doctor's options."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the screen")


def run(arguments: argparse.Namespace) -> int:
    """Looks and reports; what it finds does not change the exit code."""
    facts = _facts.gather()
    verdicts = _verdicts.judge(facts)
    if arguments.json:
        judged = [dataclasses.asdict(verdict) for verdict in verdicts]
        print(json.dumps({**facts.as_json(), "verdicts": judged}, indent=2))
    else:
        print(_doctor_text.render(facts, verdicts))
    return 0
