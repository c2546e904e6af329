"""What the demo runs on."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import kvferry as kf


@dataclass(frozen=True)
class Machine:
    """Facts of this machine and this build."""

    cpu: str
    usable_cpus: int
    memory_bytes: int
    gpus: list[str]
    no_gpu: str
    """Why there is none; empty where there is one."""
    cuda_mode: str
    archs: list[str]
    toolkit: str | None
    profile: str
    python: str
    kvferry: str


def look() -> Machine:
    """Asks the machine and the package."""
    build = kf.build_info()
    gpus, no_gpu = _gpus()
    return Machine(
        cpu=_cpu(),
        usable_cpus=kf.usable_cpus(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        gpus=gpus,
        no_gpu=no_gpu,
        cuda_mode=build["cuda_mode"],
        archs=build["archs"],
        toolkit=build["toolkit"],
        profile=build["profile"],
        python=platform.python_version(),
        kvferry=build["version"],
    )


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def _gpus() -> tuple[list[str], str]:
    try:
        devices = kf.devices()
    except kf.CudaError as error:
        # The driver's message goes on to list every file name it tried.
        return [], str(error).partition(" (")[0]
    names = [f"{device['name']} ({device['total_memory'] / 1e9:.0f} GB)" for device in devices]
    return names, "" if names else "the CUDA driver lists no device"
