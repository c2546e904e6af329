"""Runs the GPU rungs from an installed wheel and writes reports/gpu/<name>.json and .md.

Installs nothing and needs no Rust: PYTHONPATH or the environment must already hold kvferry, NumPy and pytest.
A test that would skip for want of a GPU fails instead.

Usage: gpu_report.py [--out DIR] [--name NAME]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Section:
    """One command of the report."""

    name: str
    command: list[str]
    exit_code: int
    seconds: float
    counts: dict[str, int]
    tail: str


def run(name: str, command: list[str], junit: Path | None = None) -> Section:
    """Runs a command with skips forbidden and reads pytest's counts from its JUnit file."""
    print(f"--- {name}: {' '.join(command)}", flush=True)
    start = time.monotonic()
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"KVFERRY_REQUIRE_GPU": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    output = done.stdout + done.stderr
    print(output, flush=True)
    counts: dict[str, int] = {}
    if junit is not None and junit.exists():
        suite = ET.parse(junit).getroot().find("testsuite")
        if suite is not None:
            counts = {key: int(suite.get(key, "0")) for key in ("tests", "failures", "errors", "skipped")}
    return Section(name, command, done.returncode, round(time.monotonic() - start, 1), counts, output[-3000:])


def pytest(name: str, expression: str, out: Path) -> Section:
    """One pytest selection."""
    junit = out / f"{name.replace(' ', '-')}.xml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        expression,
        f"--junitxml={junit}",
    ]
    section = run(name, command, junit)
    junit.unlink(missing_ok=True)
    return section


def markdown(facts: dict[str, object], sections: list[Section]) -> str:
    """The report for people."""
    lines = [f"# GPU report, {facts['date']}", ""]
    lines += [f"- {key}: {value}" for key, value in facts.items()]
    lines += ["", "| section | exit | seconds | counts |", "|---|---|---|---|"]
    for section in sections:
        counts = ", ".join(f"{value} {key}" for key, value in section.counts.items()) or "-"
        lines.append(f"| {section.name} | {section.exit_code} | {section.seconds} | {counts} |")
    for section in sections:
        lines += ["", f"## {section.name}", "", "```", section.tail.strip(), "```"]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Runs every section, whatever fails, and writes both files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "reports" / "gpu")
    parser.add_argument("--name", default=time.strftime("%Y-%m-%d"))
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)

    import kvferry  # noqa: PLC0415 - the rest of the script must work to say that it is missing

    devices = kvferry.devices()
    facts: dict[str, object] = {
        "date": time.strftime("%Y-%m-%d"),
        "kvferry": kvferry.build_info(),
        "python": platform.python_version(),
        "GPUs": [f"{d['name']} ({d['uuid']})" for d in devices],
    }
    sections = [pytest("pytest gpu", "gpu", out)]
    if len(devices) > 1:
        sections.append(pytest("pytest multigpu", "multigpu", out))
    sections.append(pytest("pytest host", "not gpu and not multigpu", out))
    sections.append(run("doctor", [sys.executable, "-m", "kvferry", "doctor"]))
    sections.append(run("demo", [sys.executable, "-m", "kvferry", "demo"]))
    report = {"facts": facts, "sections": [asdict(section) for section in sections]}
    (out / f"{arguments.name}.json").write_text(json.dumps(report, indent=1) + "\n")
    (out / f"{arguments.name}.md").write_text(markdown(facts, sections))
    print(f"wrote {out / arguments.name}.json and .md")
    # pytest's 5 is "nothing selected": no multi-GPU test exists yet on a machine with several GPUs.
    return int(any(section.exit_code not in (0, 5) for section in sections))


if __name__ == "__main__":
    sys.exit(main())
