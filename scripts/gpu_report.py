"""Runs the GPU rungs from an installed wheel; writes <name>.json and .md, and the bench's files beside them.

Installs nothing and needs no Rust: PYTHONPATH or the environment must already hold kvferry, NumPy and pytest.
A test that would skip for want of a GPU fails instead. Every section has a time limit, and one that fails
does not stop the others. Where one command may not run for long, choose sections:

    gpu_report.py --out $OUT --only gpu,multigpu,sanitize,rust
    gpu_report.py --out $OUT --only calibrate,bench --name 2026-12-01-h200

Rust test binaries are run from --bin (.carry/bin), each file by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ET
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parent.parent
TAIL = 4000
SANITIZERS = ("compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer")
TIMED_OUT = 124
NOT_THERE = 127
# pytest's "nothing selected": no test of that kind exists.
FINE = (0, 5)


@dataclass
class Section:
    """One command of the report."""

    name: str
    command: list[str]
    exit_code: int
    seconds: float
    counts: dict[str, int] = field(default_factory=dict)
    tail: str = ""
    bars: list[dict[str, object]] = field(default_factory=list)
    """Of a bench: what was asked for and what was measured."""

    @property
    def good(self) -> bool:
        """Whether it did what it should."""
        return self.exit_code in FINE


@dataclass(frozen=True)
class Plan:
    """What to run and where to write."""

    out: Path
    name: str
    binaries: Path
    limit: float | None
    bench: tuple[str, ...]
    devices: int
    all2all: tuple[str, ...] = ()


def run(plan: Plan, name: str, command: list[str], limit: float, junit: Path | None = None) -> Section:
    """Runs a command with skips forbidden, for `limit` seconds at most, and reads pytest's JUnit file."""
    limit = min(limit, plan.limit or limit)
    print(f"--- {name} (at most {limit:.0f} s): {' '.join(command)}", flush=True)
    start = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"KVFERRY_REQUIRE_GPU": "1", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    assert process.stdout is not None
    late = threading.Event()

    def stop() -> None:
        late.set()
        # It may have ended at this moment.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    clock = threading.Timer(limit, stop)
    clock.start()
    tail = ""
    with process.stdout as lines:
        for line in lines:
            print(line, end="", flush=True)
            tail = (tail + line)[-TAIL:]
    code = process.wait()
    clock.cancel()
    clock.join()
    code = TIMED_OUT if late.is_set() else code
    counts: dict[str, int] = {}
    if junit is not None and junit.exists():
        suite = ET.parse(junit).getroot().find("testsuite")
        if suite is not None:
            counts = {key: int(suite.get(key, "0")) for key in ("tests", "failures", "errors", "skipped")}
        junit.unlink()
    return Section(name, command, code, round(time.monotonic() - start, 1), counts, tail)


def pytest(plan: Plan, name: str, expression: str, limit: float, prefix: tuple[str, ...] = ()) -> Section:
    """One pytest selection."""
    junit = plan.out / f"{name.replace(' ', '-')}.xml"
    pick = ["-q", "-p", "no:cacheprovider", "-m", expression, f"--junitxml={junit}"]
    # Under a tool every test takes longer.
    pick += ["-o", "timeout=300"] if prefix else []
    return run(plan, name, [*prefix, sys.executable, "-m", "pytest", *pick], limit, junit)


def gpu(plan: Plan) -> Iterator[Section]:
    """Tests on one GPU."""
    yield pytest(plan, "pytest gpu", "gpu and not multigpu", 400)


def multigpu(plan: Plan) -> Iterator[Section]:
    """Tests on two."""
    if plan.devices > 1:
        yield pytest(plan, "pytest multigpu", "multigpu", 240)


def host(plan: Plan) -> Iterator[Section]:
    """The tests that need no GPU, on the machine that has one."""
    yield pytest(plan, "pytest host", "not gpu and not multigpu", 300)


def sanitize(plan: Plan) -> Iterator[Section]:
    """A short set under compute-sanitizer."""
    program = next((found for found in map(shutil.which, SANITIZERS) if found), None)
    for tool in ("memcheck", "initcheck"):
        name = f"compute-sanitizer {tool}"
        if program is None:
            yield Section(name, [SANITIZERS[0]], NOT_THERE, 0.0, tail="compute-sanitizer is not installed")
            continue
        prefix = (program, "--tool", tool, "--error-exitcode", "9", "--target-processes", "all")
        yield pytest(plan, name, "gpu and sanitize", 240, prefix)


def rust(plan: Plan) -> Iterator[Section]:
    """Test binaries built elsewhere."""
    found = sorted(plan.binaries.glob("*")) if plan.binaries.is_dir() else []
    for path in (path for path in found if path.is_file() and os.access(path, os.X_OK)):
        yield run(plan, f"rust {path.name}", [str(path)], 180)


def calibrate(plan: Plan) -> Iterator[Section]:
    """Measures the constants and prints them."""
    kvferry = [sys.executable, "-m", "kvferry", "calibrate"]
    yield run(plan, "calibrate", kvferry, 60)
    yield run(plan, "calibrate show", [*kvferry, "--show"], 30)


def bench(plan: Plan) -> Iterator[Section]:
    """The core table and the bars, with their files."""
    command = [sys.executable, "-m", "kvferry", "bench", "transfer", "--sections", "core,bars"]
    yield run(plan, "bench transfer", [*command, *files(plan, "bench"), *plan.bench], 560)


def all2all(plan: Plan) -> Iterator[Section]:
    """Exchanges between all GPUs and their bars."""
    if plan.devices < 2:
        return
    command = [sys.executable, "-m", "kvferry", "bench", "all2all"]
    section = run(plan, "bench all2all", [*command, *files(plan, "all2all"), *plan.all2all], 420)
    with contextlib.suppress(OSError, ValueError, KeyError):
        section.bars = json.loads((plan.out / f"{plan.name}-all2all.json").read_text())["bars"]
    yield section


def files(plan: Plan, what: str) -> list[str]:
    """Options that have a bench write its files, the plot where it can."""
    stem = plan.out / f"{plan.name}-{what}"
    kinds = ["json", "csv", "md"]
    if importlib.util.find_spec("matplotlib"):
        kinds.append("png")
    else:
        print("no matplotlib: no plot")
    return [word for kind in kinds for word in (f"--{kind}", f"{stem}.{kind}")]


def facts(plan: Plan) -> Iterator[Section]:
    """What the machine has, and the main job."""
    yield run(plan, "doctor", [sys.executable, "-m", "kvferry", "doctor"], 60)
    yield run(plan, "demo", [sys.executable, "-m", "kvferry", "demo"], 60)


SECTIONS: dict[str, Callable[[Plan], Iterator[Section]]] = {
    "gpu": gpu,
    "multigpu": multigpu,
    "sanitize": sanitize,
    "rust": rust,
    "calibrate": calibrate,
    "bench": bench,
    "all2all": all2all,
    "facts": facts,
    "host": host,
}
GROUPS = {"tests": ("gpu", "multigpu", "sanitize", "rust"), "all": tuple(SECTIONS)}
DEFAULT = tuple(name for name in SECTIONS if name != "host")


def chosen(text: str) -> tuple[str, ...]:
    """Sections by name or by group, in the report's order."""
    words = text.split(",")
    names = {name for word in words for name in GROUPS.get(word, (word,))}
    unknown = sorted(names - set(SECTIONS))
    if unknown:
        known = ", ".join([*SECTIONS, *GROUPS])
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {known}")
    return tuple(name for name in SECTIONS if name in names)


def markdown(about: dict[str, object], sections: list[Section]) -> str:
    """The report for people."""
    lines = [f"# GPU report, {about['date']}", ""]
    lines += [f"- {key}: {value}" for key, value in about.items()]
    lines += ["", "| section | | seconds | counts |", "|---|---|---|---|"]
    for section in sections:
        counts = ", ".join(f"{value} {key}" for key, value in section.counts.items()) or "-"
        state = "ok" if section.good else {TIMED_OUT: "**out of time**"}.get(section.exit_code)
        lines.append(
            f"| {section.name} | {state or f'**exit {section.exit_code}**'} | {section.seconds} | {counts} |"
        )
    for section in sections:
        lines += ["", f"## {section.name}", "", *bar_table(section.bars), "```", section.tail.strip(), "```"]
    return "\n".join(lines) + "\n"


def bar_table(bars: list[dict[str, object]]) -> list[str]:
    """A bench's bars as a table, if there are any."""
    if not bars:
        return []
    lines = ["| case | bar | measured | |", "|---|---|---|---|"]
    for bar in bars:
        sign, unit, value = (">=" if bar["at_least"] else "<="), bar["unit"], bar["value"]
        shown = f"{value:.3g} {unit}" if isinstance(value, float) else f"- ({bar['why_not']})"
        state = f"**{bar['state']}**" if bar["state"] == "missed" else bar["state"]
        lines.append(f"| {bar['case']} | {sign} {bar['limit']} {unit} | {shown} | {state} |")
    return [*lines, ""]


def write(plan: Plan, about: dict[str, object], sections: list[Section]) -> None:
    """Both files; after every section, so that a stopped run leaves what it had."""
    report = {"facts": about, "sections": [asdict(section) for section in sections]}
    (plan.out / f"{plan.name}.json").write_text(json.dumps(report, indent=1) + "\n")
    (plan.out / f"{plan.name}.md").write_text(markdown(about, sections))


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "reports" / "gpu")
    parser.add_argument("--name", default=time.strftime("%Y-%m-%d"))
    parser.add_argument(
        "--bin", type=Path, default=ROOT / ".carry" / "bin", help="folder of Rust test binaries"
    )
    parser.add_argument("--only", type=chosen, default=DEFAULT, metavar="LIST", help="sections, with commas")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="upper bound of every section's limit")
    parser.add_argument(
        "--bench",
        default="",
        metavar="OPTIONS",
        help='more options of bench transfer, such as "--budget 240"',
    )
    parser.add_argument(
        "--all2all", default="", metavar="OPTIONS", help='more options of bench all2all, such as "--full"'
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Runs the sections asked for and writes both files."""
    arguments = parse(argv)
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)

    import kvferry  # noqa: PLC0415 - the rest of the script must work to say that it is missing

    devices = kvferry.devices()
    plan = Plan(
        out=out.resolve(),
        name=arguments.name,
        binaries=arguments.bin,
        limit=arguments.limit,
        bench=tuple(arguments.bench.split()),
        devices=len(devices),
        all2all=tuple(arguments.all2all.split()),
    )
    about: dict[str, object] = {
        "date": time.strftime("%Y-%m-%d"),
        "kvferry": kvferry.build_info(),
        "python": platform.python_version(),
        "GPUs": [f"{d['name']} ({d['uuid']})" for d in devices],
    }
    sections: list[Section] = []
    for name in arguments.only:
        for section in SECTIONS[name](plan):
            sections.append(section)
            write(plan, about, sections)
    write(plan, about, sections)
    for section in sections:
        state = "ok" if section.good else "FAILED"
        print(f"{state:<7} {section.seconds:6.1f} s  {section.name} {section.counts or ''}")
    print(f"wrote {plan.out / plan.name}.json and .md")
    return int(not all(section.good for section in sections))


if __name__ == "__main__":
    sys.exit(main())
