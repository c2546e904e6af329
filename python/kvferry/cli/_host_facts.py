"""What the kernel says of this machine's CPUs, caches and memory. A fact that cannot be had is None."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

from kvferry.cli import _files

FEATURES = ("avx2", "avx512f", "erms")
"""CPU features that copies make use of."""
NO_LIMIT = 1 << 60
"""A version 1 cgroup without a memory limit names a number near 2^63."""


@dataclass(frozen=True)
class Cpu:
    """The processors."""

    model: str | None
    architecture: str
    total: int | None
    """Online in the machine."""
    allowed: int | None
    """In this process's affinity mask."""
    features: dict[str, bool] | None
    virtual_machine: bool | None


@dataclass(frozen=True)
class Cache:
    """The last cache before memory."""

    level: int | None
    bytes: int | None
    """Of one of them."""
    count: int | None

    @property
    def total(self) -> int | None:
        """Bytes of all of them."""
        return None if self.bytes is None else self.bytes * (self.count or 1)


@dataclass(frozen=True)
class Node:
    """One NUMA node."""

    node: int
    cpus: str | None
    memory_bytes: int | None


@dataclass(frozen=True)
class Cgroup:
    """What the container or service manager leaves to this process; None is no limit, or unknown."""

    version: int | None
    cpu_limit: float | None
    memory_limit_bytes: int | None
    memory_used_bytes: int | None


@dataclass(frozen=True)
class Memory:
    """Host memory."""

    total_bytes: int | None
    available_bytes: int | None
    """What the kernel calls available, or what the cgroup leaves if that is less."""
    swap_bytes: int | None
    huge_page_bytes: int | None
    transparent_huge_pages: str | None
    shmem_huge_pages: str | None
    hugetlb: list[dict[str, int | None]]
    """For each page size its `page_bytes`, and how many are reserved (`total`) and `free`."""


def cpu(root: Path = Path("/")) -> Cpu:
    """Reads /proc/cpuinfo, /proc/self/status and /sys."""
    info = _files.lines(root / "proc/cpuinfo")
    flags = _files.field(info, "flags") or _files.field(info, "Features")
    words = flags.split() if flags else None
    online = _files.members(_files.text(root / "sys/devices/system/cpu/online"))
    processors = sum(line.startswith("processor") for line in info)
    status = _files.lines(root / "proc/self/status")
    allowed = _files.members(_files.field(status, "Cpus_allowed_list"))
    return Cpu(
        model=_files.field(info, "model name") or _files.field(info, "Model"),
        architecture=platform.machine(),
        total=len(online) if online else processors or None,
        allowed=len(allowed) if allowed else None,
        features={name: name in words for name in FEATURES} if words else None,
        virtual_machine="hypervisor" in words if words else None,
    )


def cache(root: Path = Path("/")) -> Cache:
    """The highest level that holds data."""
    cpus = root / "sys/devices/system/cpu"
    level, of_one = 0, None
    shared: set[str] = set()
    for processor in _files.entries(cpus, "cpu[0-9]*"):
        for index in _files.entries(processor / "cache", "index[0-9]*"):
            found = _files.number(_files.text(index / "level")) or 0
            if found < max(level, 1) or _files.text(index / "type") == "Instruction":
                continue
            if found > level:
                level, of_one, shared = found, _files.size(_files.text(index / "size")), set()
            shared.add(_files.text(index / "shared_cpu_list") or "")
    return Cache(level=level or None, bytes=of_one, count=len(shared) or None)


def numa(root: Path = Path("/")) -> list[Node]:
    """The nodes; none where the kernel names none."""
    found = []
    for folder in _files.entries(root / "sys/devices/system/node", "node[0-9]*"):
        node = _files.number(folder.name.removeprefix("node"))
        if node is None:
            continue
        info = [line.partition(f"Node {node} ")[2] for line in _files.lines(folder / "meminfo")]
        memory = _files.size(_files.field(info, "MemTotal"))
        found.append(Node(node=node, cpus=_files.text(folder / "cpulist"), memory_bytes=memory))
    return found


def memory(root: Path = Path("/"), limits: Cgroup | None = None) -> Memory:
    """Reads /proc/meminfo and /sys."""
    info = _files.lines(root / "proc/meminfo")
    available = _files.size(_files.field(info, "MemAvailable"))
    if limits and limits.memory_limit_bytes is not None:
        left = max(limits.memory_limit_bytes - (limits.memory_used_bytes or 0), 0)
        available = left if available is None else min(available, left)
    transparent = root / "sys/kernel/mm/transparent_hugepage"
    hugetlb: list[dict[str, int | None]] = [
        {
            "page_bytes": _files.size(folder.name.removeprefix("hugepages-").upper()),
            "total": _files.number(_files.text(folder / "nr_hugepages")),
            "free": _files.number(_files.text(folder / "free_hugepages")),
        }
        for folder in _files.entries(root / "sys/kernel/mm/hugepages", "hugepages-*")
    ]
    return Memory(
        total_bytes=_files.size(_files.field(info, "MemTotal")),
        available_bytes=available,
        swap_bytes=_files.size(_files.field(info, "SwapTotal")),
        huge_page_bytes=_files.size(_files.field(info, "Hugepagesize")),
        transparent_huge_pages=_files.chosen(_files.text(transparent / "enabled")),
        shmem_huge_pages=_files.chosen(_files.text(transparent / "shmem_enabled")),
        hugetlb=hugetlb,
    )


def cgroup(root: Path = Path("/")) -> Cgroup:
    """The tightest limits of this process's groups, version 1, 2 or both."""
    mounts = root / "sys/fs/cgroup"
    version = None
    cpus: list[float] = []
    bytes_: list[tuple[int, int | None]] = []
    for line in _files.lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            version = version or 2
            for mount in (mounts, mounts / "unified"):
                for group in _upwards(mount, path):
                    cpus += _quota((_files.text(group / "cpu.max") or "").split())
                    bytes_ += _limit(group, "memory.max", "memory.current")
        names = controllers.split(",")
        for name in {"cpu", "memory"}.intersection(names):
            version = 1
            mount = mounts / controllers if _files.exists(mounts / controllers) else mounts / name
            for group in _upwards(mount, path):
                quota = (_files.text(group / f"cpu.cfs_{part}_us") or "" for part in ("quota", "period"))
                cpus += _quota(list(quota))
                bytes_ += _limit(group, "memory.limit_in_bytes", "memory.usage_in_bytes")
    tightest = min(bytes_, key=lambda pair: pair[0], default=(None, None))
    return Cgroup(
        version=version,
        cpu_limit=min(cpus, default=None),
        memory_limit_bytes=tightest[0],
        memory_used_bytes=tightest[1],
    )


def _upwards(mount: Path, path: str) -> list[Path]:
    """The group's folder and its parents up to the mount: in a container only the latter may be there."""
    parts = [part for part in path.split("/") if part not in {"", ".", ".."}]
    return [mount.joinpath(*parts[:count]) for count in range(len(parts), -1, -1)]


def _quota(words: list[str]) -> list[float]:
    quota, period = (*words, "", "")[:2]
    of_time, time = _files.number(quota), _files.number(period)
    return [of_time / time] if of_time and time else []


def _limit(group: Path, limit: str, used: str) -> list[tuple[int, int | None]]:
    found = _files.number(_files.text(group / limit))
    if found is None or found >= NO_LIMIT:
        return []
    return [(found, _files.number(_files.text(group / used)))]
