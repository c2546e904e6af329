#!/usr/bin/env python3
"""Compiles every kernel for every default architecture and checks what the GPU-less tests cannot see.

Fails on register spills, on a stack frame, on more registers than the table allows, and on kernels whose PTX
lacks the wide global accesses they are meant to use. Prints one line per kernel and architecture. Needs nvcc
13.0 and a host compiler.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from find_nvcc import NvccNotFoundError, find_nvcc

CUDA = Path(__file__).resolve().parent.parent / "cuda"
ARCHS = ("80", "90", "100", "120")
PTX_ARCHS = ("80", "120")
# As in build/compile.rs, less what only concerns the fatbin.
FLAGS = ("-std=c++17", "-O3", "-Iinclude", "-Werror=all-warnings")

STRIDED = ("strided_tile", "strided_tile_large", "strided_word", "strided_word_large")
# 65,536 registers per multiprocessor: 64 allow one CTA of 1,024 threads, what the launch geometry counts on.
EXCHANGE = ("exchange", "exchange_large")
REGISTER_CAP = (
    {"vectorized_copy": 64, "exchange_arrive": 64, "exchange_probe": 64}
    | dict.fromkeys(STRIDED, 64)
    | dict.fromkeys(EXCHANGE, 64)
)
# Long-lived values (epoch, flags, lane, some steps of the walk) give way to the words that are on their way.
COLD_STACK = dict.fromkeys(EXCHANGE, 64)
# A 16-byte access in any of its spellings, with or without cache hints.
WIDE = r"\.global(?:\.[\w:]+)*\.(?:v2\.[usbf]64|v4\.[usbf]32|b128)\b"
WIDE_ACCESS = (rf"\bld{WIDE}", rf"\bst{WIDE}")
# What ranks tell each other is ordered beyond the GPU: an arrival releases the bytes before it, and whoever
# waits acquires.
ARRIVE, ACQUIRE = r"\bred\.release\.sys\.global\.add\.u64\b", r"\bld\.acquire\.sys\.global\.u64\b"
RELEASE, TICKET = r"\bst\.release\.sys\.global\.u64\b", r"\batom\.acq_rel\.gpu\.global\.add\.u32\b"
PTX_MUST_HAVE = (
    dict.fromkeys((*STRIDED, "vectorized_copy"), WIDE_ACCESS)
    | dict.fromkeys(EXCHANGE, (*WIDE_ACCESS, ARRIVE, ACQUIRE, RELEASE, TICKET))
    | {"exchange_probe": (ACQUIRE, RELEASE)}
)
# Parameters are read where they lie: a copy of 32 KiB per thread would be a stack frame. What a peer writes
# while the kernel runs is never read through the cache for read-only data.
PTX_MUST_NOT_HAVE = (
    dict.fromkeys(STRIDED, (r"\.local\b",))
    | dict.fromkeys(EXCHANGE, (r"\.local\b", r"\.nc\b"))
    | {"exchange_probe": (r"\.nc\b",)}
)


@dataclass(frozen=True)
class Usage:
    """What ptxas says about one kernel."""

    kernel: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int

    def faults(self) -> list[str]:
        """Reasons to refuse it."""
        found = []
        if self.kernel not in REGISTER_CAP:
            found.append("has no entry in REGISTER_CAP")
        elif self.registers > REGISTER_CAP[self.kernel]:
            found.append(f"uses {self.registers} registers, {REGISTER_CAP[self.kernel]} allowed")
        allowed = COLD_STACK.get(self.kernel, 0)
        if not allowed and (self.spill_stores or self.spill_loads):
            found.append(f"spills {self.spill_stores} + {self.spill_loads} bytes")
        if self.stack > allowed:
            found.append(f"has a stack frame of {self.stack} bytes, {allowed} allowed")
        return found


def run_nvcc(nvcc: Path, arguments: Sequence[str]) -> str:
    """Runs nvcc in cuda/; returns what it says (ptxas reports on stderr)."""
    done = subprocess.run([nvcc, *FLAGS, *arguments], cwd=CUDA, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{nvcc} failed with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def parse_usage(report: str) -> list[Usage]:
    """Reads the report of `-Xptxas -v`."""
    usages = []
    for part in re.split(r"Compiling entry function ", report)[1:]:
        name = re.match(r"'([^']+)'", part)
        memory = re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part
        )
        registers = re.search(r"Used (\d+) registers", part)
        if not (name and memory and registers):
            sys.exit(f"cannot read the report of ptxas:\n{part}")
        stack, stores, loads = (int(group) for group in memory.groups())
        usages.append(Usage(name[1], int(registers[1]), stack, stores, loads))
    return usages


def kernels_in(ptx: str) -> dict[str, str]:
    """The PTX of each entry point."""
    parts = re.split(r"\.entry\s+(\w+)", ptx)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def check_arch(nvcc: Path, source: Path, arch: str, out: Path) -> list[tuple[str, list[str]]]:
    """Compiles to machine code; a line and its faults per kernel."""
    report = run_nvcc(nvcc, ["-cubin", "-Xptxas", "-v", f"-arch=sm_{arch}", "-o", str(out), source.name])
    usages = parse_usage(report)
    if not usages:
        return [(f"{source.name} sm_{arch}", ["holds no kernel"])]
    return [(f"{u.kernel:24} sm_{arch:4} {u.registers:3} registers", u.faults()) for u in usages]


def check_ptx(nvcc: Path, source: Path, arch: str, out: Path) -> list[tuple[str, list[str]]]:
    """Compiles to PTX and looks for the accesses each kernel must have; a line and its faults per kernel."""
    run_nvcc(nvcc, ["-ptx", f"-arch=compute_{arch}", "-o", str(out), source.name])
    lines = []
    for kernel, text in kernels_in(out.read_text()).items():
        wanted = PTX_MUST_HAVE.get(kernel, ())
        counts = [len(re.findall(pattern, text)) for pattern in wanted]
        faults = [f"lacks {pattern}" for pattern, count in zip(wanted, counts, strict=True) if count == 0]
        faults += [
            f"has {pattern}" for pattern in PTX_MUST_NOT_HAVE.get(kernel, ()) if re.search(pattern, text)
        ]
        lines.append((f"{kernel:24} compute_{arch}: wanted accesses {counts}", faults))
    return lines


def main() -> int:
    """Checks all kernels."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nvcc", type=Path, help="instead of searching for one")
    options = parser.parse_args()
    try:
        nvcc = options.nvcc or find_nvcc()
    except NvccNotFoundError as error:
        sys.exit(str(error))

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        jobs = []
        for source in sorted(CUDA.glob("*.cu")):
            stem = Path(folder) / source.stem
            jobs += [
                pool.submit(check_arch, nvcc, source, arch, stem.with_suffix(f".{arch}.cubin"))
                for arch in ARCHS
            ]
            jobs += [
                pool.submit(check_ptx, nvcc, source, arch, stem.with_suffix(f".{arch}.ptx"))
                for arch in PTX_ARCHS
            ]
        lines = [line for job in jobs for line in job.result()]

    failed = 0
    for text, faults in lines:
        print(f"{text}  {'; '.join(faults) or 'ok'}")
        failed += bool(faults)
    if not lines:
        sys.exit(f"no kernels in {CUDA}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
