"""What surrounds the process: the kernel, limits, containers, the driver's files; and what Python has."""

from __future__ import annotations

import importlib.metadata
import multiprocessing
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kvferry as kf
from kvferry.cli import _files

LIBRARIES = ("numpy", "torch", "cupy", "matplotlib")
UNLIMITED = "unlimited"
_CAP_IPC_LOCK = 14
_CONTAINERS = ("kubepods", "docker", "containerd", "libpod", "lxc", "crio")


@dataclass(frozen=True)
class System:
    """The kernel and what it allows."""

    kernel: str | None
    container: list[str]
    """What hints at one."""
    memlock_bytes: int | str | None
    """The soft limit; "unlimited" where there is none."""
    memlock_hard_bytes: int | str | None
    may_lock_any: bool | None
    """Whether the process has CAP_IPC_LOCK, to which the limit does not apply."""
    shm_bytes: int | None
    shm_free_bytes: int | None


@dataclass(frozen=True)
class Driver:
    """The NVIDIA driver, by its files and as kvferry sees it."""

    kernel_module: str | None
    device_nodes: list[str]
    devices: list[dict[str, Any]]
    error: str | None
    """Why kvferry sees no device."""


@dataclass(frozen=True)
class Package:
    """This build of kvferry, and the Python it is in."""

    kvferry: str
    path: str
    profile: str
    cuda_mode: str
    toolkit: str | None
    kernel_archs: list[str]
    copy_threads: int | None
    """Copy threads of a TransferContext, unless told otherwise."""
    python: str
    executable: str
    libraries: dict[str, str | None]
    """Installed versions, found without importing them."""
    start_method: str
    """How multiprocessing starts a process unless told otherwise."""


def system(root: Path = Path("/")) -> System:
    """Reads /proc and asks for the size of /dev/shm."""
    status = _files.lines(root / "proc/self/status")
    soft, hard = _memlock(_files.lines(root / "proc/self/limits"))
    try:
        shm = os.statvfs(root / "dev/shm")
    except OSError:
        total = free = None
    else:
        total, free = shm.f_blocks * shm.f_frsize, shm.f_bavail * shm.f_frsize
    return System(
        kernel=_files.text(root / "proc/sys/kernel/osrelease"),
        container=_container(root),
        memlock_bytes=soft,
        memlock_hard_bytes=hard,
        may_lock_any=_may_lock_any(_files.field(status, "CapEff"), _files.text(root / "proc/self/uid_map")),
        shm_bytes=total,
        shm_free_bytes=free,
    )


def driver(root: Path = Path("/")) -> Driver:
    """Looks at the driver's files and asks kvferry for its devices."""
    version = _files.lines(root / "proc/driver/nvidia/version")
    module = next((line.partition(":")[2].strip() for line in version if line.startswith("NVRM")), None)
    nodes = [f"/dev/{path.name}" for path in _files.entries(root / "dev", "nvidia[0-9]*")]
    nodes += [f"/dev/{name}" for name in ("nvidiactl", "nvidia-uvm") if _files.exists(root / "dev" / name)]
    devices: list[dict[str, Any]] = []
    error = None
    try:
        for device in kf.devices():
            major, minor = device["compute_capability"]
            devices.append({**device, "compute_capability": f"{major}.{minor}"})
    except (kf.Error, OSError, RuntimeError) as failure:
        # The message of a driver that is not there goes on to list every file name that was tried.
        error = str(failure).partition(" (looked for")[0]
    else:
        error = None if devices else "the CUDA driver lists no device"
    return Driver(kernel_module=module, device_nodes=nodes, devices=devices, error=error)


def package() -> Package:
    """Asks kvferry and Python."""
    build = kf.build_info()
    return Package(
        kvferry=build["version"],
        path=str(Path(kf.__file__ or "").parent),
        profile=build["profile"],
        cuda_mode=build["cuda_mode"],
        toolkit=build["toolkit"],
        kernel_archs=build["archs"],
        copy_threads=_copy_threads(),
        python=platform.python_version(),
        executable=sys.executable,
        libraries={name: _version(name) for name in LIBRARIES},
        # Asking without allow_none would fix the method for the rest of the process.
        start_method=multiprocessing.get_start_method(allow_none=True)
        or ("fork" if sys.version_info < (3, 14) else "forkserver"),
    )


def _copy_threads() -> int | None:
    try:
        with kf.TransferContext("cpu") as context:
            return context.threads
    except (kf.Error, OSError, RuntimeError):
        return None


def _version(library: str) -> str | None:
    # CuPy's wheels are named after the toolkit they are for.
    names = ("cupy", "cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x") if library == "cupy" else (library,)
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _memlock(limits: list[str]) -> tuple[int | str | None, int | str | None]:
    for line in limits:
        if line.startswith("Max locked memory"):
            soft, hard = (*line.removeprefix("Max locked memory").split(), "", "")[:2]
            return _limit(soft), _limit(hard)
    return None, None


def _limit(word: str) -> int | str | None:
    return UNLIMITED if word == UNLIMITED else _files.number(word)


def _may_lock_any(mask: str | None, uid_map: str | None) -> bool | None:
    """A capability counts only in the machine's own user namespace, which maps every id to itself."""
    try:
        has = bool(int(mask or "", 16) >> _CAP_IPC_LOCK & 1)
    except ValueError:
        return None
    return has and (uid_map is None or uid_map.split() == ["0", "0", "4294967295"])


def _container(root: Path) -> list[str]:
    hints = [f"/{name}" for name in (".dockerenv", "run/.containerenv") if _files.exists(root / name)]
    groups = _files.text(root / "proc/1/cgroup") or ""
    hints += [f"cgroup names {name}" for name in _CONTAINERS if name in groups]
    environment = _files.text(root / "proc/1/environ") or ""
    for entry in environment.split("\0"):
        name, _, value = entry.partition("=")
        if name == "container" and value:
            hints.append(f"init says {value}")
    if root == Path("/") and "KUBERNETES_SERVICE_HOST" in os.environ:
        hints.append("KUBERNETES_SERVICE_HOST is set")
    if "microsoft" in (_files.text(root / "proc/sys/kernel/osrelease") or "").lower():
        hints.append("WSL kernel")
    return hints
