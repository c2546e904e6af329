"""Climbs the test ladder: runs each rung, streams its output, and prints one line per rung at the end.

Usage: rungs.py test|check|bench|soak|tools. Needs only Python 3.11 with venv and pip; sets up everything else
under the repository (.venv, .nvcc, target, dist).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
NVCC = ROOT / ".nvcc"
DIST = ROOT / "dist"
SIMULATED = ROOT / "target" / "simulated"
NVCC_WHEELS = ("nvcc", "crt", "runtime", "cccl")

# Closing lines of the runners: cargo test, nextest, pytest.
COUNTS = tuple(
    re.compile(pattern)
    for pattern in (
        r"test result: \w+\. (?P<passed>\d+) passed; (?P<failed>\d+) failed; (?P<skipped>\d+) ignored",
        r"tests? run: (?P<passed>\d+) passed(?: \([^)]*\))?(?:, (?P<failed>\d+) failed)?"
        r"(?:, (?P<skipped>\d+) skipped)?",
        r"^(?:=+ )?(?:(?P<failed>\d+) failed, )?(?P<passed>\d+) passed(?:, (?P<skipped>\d+) skipped)?.* in ",
    )
)


@dataclass
class Rung:
    """One step: commands run in order; the first that fails fails the rung."""

    name: str
    commands: list[list[str]]
    env: dict[str, str] = field(default_factory=dict)


@dataclass
class Outcome:
    """How a rung went."""

    name: str
    state: str
    seconds: float
    detail: str


def dev_packages() -> list[str]:
    """What developers need, from pyproject.toml, without the package itself."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    return [need for extra in ("test", "dev") for need in extras[extra] if not need.startswith("kvferry")]


def venv_bin(venv: Path, name: str) -> str:
    """Path of a program in a virtual environment."""
    return str(venv / "bin" / name)


def make_venv(venv: Path, *packages: str) -> list[list[str]]:
    """Commands that create `venv` and install `packages` into it."""
    python = venv_bin(venv, "python")
    create = [] if Path(python).exists() else [[sys.executable, "-m", "venv", str(venv)]]
    return [*create, [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages]]


def cargo_test(*arguments: str) -> list[str]:
    """The test runner: nextest where it is installed, cargo test where it is not."""
    if shutil.which("cargo-nextest"):
        return ["cargo", "nextest", "run", "--no-fail-fast", "--status-level", "fail", *arguments]
    # Named tests exclude the wholesale selection.
    which = [] if "--test" in arguments else ["--lib", "--tests", "--examples"]
    return ["cargo", "test", *which, *arguments]


def kernel_rungs() -> Iterator[Rung]:
    """Rungs that need the CUDA compiler from PyPI."""
    python = venv_bin(NVCC, "python")
    wheels = [f"nvidia-cuda-{name}==13.0.*" for name in NVCC_WHEELS] + ["nvidia-nvvm==13.0.*"]
    yield Rung("CUDA compiler", make_venv(NVCC, *wheels))
    yield Rung("kernels, all archs", [[python, "scripts/check_kernels.py"]])
    yield Rung("build modes", [[python, "scripts/test_build_modes.py"]])


def rust_rungs() -> Iterator[Rung]:
    """Rungs that need Rust and g++ only (and a Python for PyO3's configuration)."""
    off = {"KVFERRY_CUDA": "off", "PYO3_PYTHON": venv_bin(VENV, "python")}
    yield Rung("format", [["cargo", "fmt", "--all", "--check"]])
    yield Rung(
        "clippy",
        [["cargo", "clippy", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"]],
        off,
    )
    yield Rung("Rust tests", [cargo_test()], off)
    # Overflow wraps silently in release; and the crate must stand without what its siblings switch on.
    alone = ["cargo", "check", "-q", "-p", "kvferry-layout", "--all-targets"]
    chosen = [word for name in ("plan_copies", "overlap", "hostile") for word in ("--test", name)]
    release = cargo_test("--release", "-p", "kvferry-layout", *chosen)
    quick_link = {
        "CARGO_PROFILE_RELEASE_LTO": "off",
        "CARGO_TARGET_DIR": str(ROOT / "target" / "release-tests"),
    }
    yield Rung("layout alone and in release", [alone, release], off | quick_link)
    yield Rung("doctests", [["cargo", "test", "--doc", "-q"]], off)
    docs = ["cargo", "doc", "--workspace", "--no-deps", "-q"]
    yield Rung("rustdoc", [docs], off | {"RUSTDOCFLAGS": "-D warnings"})
    yield Rung("sanitized kernel bodies", [["scripts/sanitize.sh"]])


def simulated_gpu() -> dict[str, str]:
    """The environment of a program that is to see the simulated driver, with two GPUs."""
    return {"LD_LIBRARY_PATH": str(SIMULATED), "KVFERRY_FAKE_DEVICES": "2"}


def simulated_rust_rung() -> Rung:
    """GPU tests of the Rust crates on the simulated driver: nothing may skip there."""
    build = {
        "KVFERRY_CUDA": "require",
        "NVCC": str(SIMULATED / "nvcc"),
        "CARGO_TARGET_DIR": str(ROOT / "target" / "simulated-tests"),
        "KVFERRY_REQUIRE_GPU": "1",
    }
    driver = ["scripts/fake_cuda.sh", "--test", str(SIMULATED)]
    tests = cargo_test("-p", "kvferry-cuda", "-p", "kvferry")
    return Rung("Rust tests, simulated GPU", [driver, tests], build | simulated_gpu())


def simulated_python_rung() -> Rung:
    """The GPU tests on the installed wheel and the simulated driver."""
    command = [venv_bin(VENV, "python"), "-m", "pytest", "-q", "-m", "gpu or multigpu"]
    return Rung("pytest, simulated GPU", [command], simulated_gpu())


def python_rungs() -> Iterator[Rung]:
    """Rungs on the installed wheel."""

    def run(name: str, *arguments: str) -> list[str]:
        return [venv_bin(VENV, name), *arguments]

    yield Rung("ruff", [run("ruff", "check", "."), run("ruff", "format", "--check", ".")])
    yield Rung("mypy", [run("mypy")])
    # Only the native module has a stub apart from its code.
    allowed = ("--allowlist", "scripts/stubtest.txt", "--ignore-unused-allowlist")
    yield Rung("stubtest", [run("python", "-m", "mypy.stubtest", *allowed, "kvferry._core")])
    yield Rung("pytest", [run("python", "-m", "pytest", "-q", "-m", "not gpu and not multigpu")])


def wheel_rung(*, kernels: bool) -> Rung:
    """Builds the wheel from the sdist, as pip would for a user, and installs it."""
    python = venv_bin(VENV, "python")
    env = {
        "KVFERRY_CUDA": "require" if kernels else "off",
        "CARGO_TARGET_DIR": str(ROOT / "target" / "wheel"),
    }
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    check = [
        "-c",
        f"import kvferry; info = kvferry.build_info(); print(info); assert bool(info['archs']) is {kernels}",
    ]
    return Rung(
        "wheel from sdist" if kernels else "wheel",
        [
            [sys.executable, "-c", f"import shutil; shutil.rmtree({str(DIST)!r}, ignore_errors=True)"],
            [venv_bin(VENV, "maturin"), "sdist", "-o", str(DIST)],
            [*pip, "wheel", "-q", "--no-deps", "-w", str(DIST), "@sdist"],
            [*pip, "install", "-q", "--force-reinstall", "--no-deps", "@wheel"],
            [python, *check],
        ],
        env,
    )


def soak_rungs() -> Iterator[Rung]:
    """The long runs."""
    off = {"KVFERRY_CUDA": "off"}
    yield Rung(
        "property tests, 20,000 cases",
        [cargo_test("--release", "-p", "kvferry-layout")],
        off | {"PROPTEST_CASES": "20000"},
    )
    yield Rung(
        "a million jobs",
        [["cargo", "test", "--release", "-p", "kvferry", "--test", "soak", "--", "--ignored", "--nocapture"]],
        off,
    )
    yield Rung(
        "10,000 skewed exchanges, 2,000 random calls",
        [cargo_test("--release", "-p", "kvferry", "--test", "all2all_exchange")],
        off | {"KVFERRY_SOAK": "1"},
    )


def bench_rungs() -> Iterator[Rung]:
    """Speed, not correctness, though every cell is checked."""
    off = {"KVFERRY_CUDA": "off"}
    for example in ("host_bandwidth", "plan_cost", "verify_speed", "all2all_cpu"):
        run = ["cargo", "run", "--release", "-q", "-p", "kvferry", "--example", example]
        yield Rung(f"bench {example}", [run], off)
    yield Rung("bench transfer", [[venv_bin(VENV, "kvferry"), "bench", "transfer"]])


def resolve(command: list[str]) -> list[str]:
    """Replaces @sdist and @wheel by what was built."""
    found = {"@sdist": "*.tar.gz", "@wheel": "*.whl"}
    return [str(next(DIST.glob(found[word]))) if word in found else word for word in command]


def climb(rung: Rung) -> Outcome:
    """Runs one rung and reads the counts from its output."""
    start = time.monotonic()
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for command in rung.commands:
        words = resolve(command)
        print(f"\n--- {rung.name}: {' '.join(words)[:150]}", flush=True)
        process = subprocess.Popen(
            words,
            cwd=ROOT,
            env=os.environ | rung.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            for pattern in COUNTS:
                if match := pattern.search(re.sub(r"\x1b\[[0-9;]*m", "", line)):
                    for key, value in match.groupdict().items():
                        counts[key] += int(value or 0)
                    break
        if process.wait() != 0:
            return Outcome(
                rung.name,
                "FAILED",
                time.monotonic() - start,
                f"exit {process.returncode}: {' '.join(words)[:80]}",
            )
    detail = ", ".join(f"{value} {key}" for key, value in counts.items() if value)
    return Outcome(rung.name, "ok", time.monotonic() - start, detail)


def gpu_rungs() -> list[Outcome]:
    """The rungs of other machines, counted as not run."""
    why = "not run here: GPU tests run from the same wheel with scripts/gpu_report.py, see reports/gpu"
    names = ("pytest -m gpu, real GPU", "pytest -m multigpu, real GPUs")
    return [Outcome(name, "not run", 0.0, why) for name in names]


def plan(name: str) -> list[Rung]:
    """The rungs of a target, in order."""
    tools = Rung("tools", make_venv(VENV, *dev_packages()))
    match name:
        case "tools":
            return [tools]
        case "check":
            return [tools, *rust_rungs(), wheel_rung(kernels=False), *python_rungs()]
        case "bench":
            return [tools, wheel_rung(kernels=False), *bench_rungs()]
        case "soak":
            return [tools, *soak_rungs()]
        case _:
            return [
                tools,
                *rust_rungs(),
                simulated_rust_rung(),
                *kernel_rungs(),
                wheel_rung(kernels=True),
                *python_rungs(),
                simulated_python_rung(),
            ]


def main() -> int:
    """Climbs every rung, whatever fails, and sums up."""
    name = sys.argv[1] if len(sys.argv) > 1 else "test"
    start = time.monotonic()
    outcomes = [climb(rung) for rung in plan(name)]
    if name == "test":
        outcomes += gpu_rungs()
    print(f"\n{'rung':<28} {'result':<8} {'time':>6}  detail")
    for outcome in outcomes:
        print(f"{outcome.name:<28} {outcome.state:<8} {outcome.seconds:5.0f}s  {outcome.detail}")
    passed, failed, skipped = (
        sum(o.state == state for o in outcomes) for state in ("ok", "FAILED", "not run")
    )
    print(f"in {time.monotonic() - start:.0f} s; rungs:")
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
