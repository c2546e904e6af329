"""What will therefore work, work slowly or not work: each verdict follows from the facts alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvferry.cli._system_facts import UNLIMITED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvferry.cli._facts import Facts

Status = Literal["works", "slow", "no"]

GIB = 1 << 30
SMALL_MEMORY = 2 * GIB
SMALL_SHM = GIB
SMALL_MEMLOCK = GIB


@dataclass(frozen=True)
class Verdict:
    """One line of the answer. `id` is stable; `do` is empty where nothing needs doing."""

    id: str
    status: Status
    what: str
    reason: str
    do: str = ""


def judge(facts: Facts) -> list[Verdict]:
    """All verdicts, the main ones first."""
    return [*_transfers(facts), *_speed(facts), *_memory(facts), *_python(facts)]


def _transfers(facts: Facts) -> Iterator[Verdict]:
    trial, threads = facts.host_trial, facts.package.copy_threads
    if trial.worked:
        yield Verdict("host", "works", "host transfers", f"{_count(threads, 'copy thread')}; tried")
    else:
        yield Verdict("host", "no", "host transfers", trial.detail, "report this with kvferry doctor --json")
    if facts.pinned_trial.worked:
        yield Verdict("pinned", "works", "pinned host memory", "tried")
    else:
        yield Verdict("pinned", "no", "pinned host memory", facts.pinned_trial.detail, _get_driver(facts))
    if not facts.driver.devices:
        yield Verdict("gpu", "no", "GPU transfers", facts.driver.error or "no device", _get_driver(facts))
    for device, tried in zip(facts.driver.devices, facts.gpu_trials, strict=True):
        what = f"transfers with GPU {device['ordinal']}"
        if tried.worked:
            yield Verdict("gpu", "works", what, f"tried, by the {tried.detail} engine")
        else:
            yield Verdict("gpu", "no", what, tried.detail)
    yield from _kernels(facts)


def _kernels(facts: Facts) -> Iterator[Verdict]:
    archs, mode = facts.package.kernel_archs, facts.package.cuda_mode
    if not archs:
        do = "build with nvcc at hand and KVFERRY_CUDA=require" if facts.driver.devices else ""
        yield Verdict("kernels", "no", "copy kernels", f"not in this build (KVFERRY_CUDA={mode})", do)
        return
    # Machine code runs on devices of the same major version and an equal or higher minor one.
    built = [int(arch.removeprefix("sm_").rstrip("af")) for arch in archs if arch.startswith("sm_")]
    for device in facts.driver.devices:
        major, _, minor = device["compute_capability"].partition(".")
        here = int(major) * 10 + int(minor)
        fits = any(arch // 10 == here // 10 and arch <= here for arch in built)
        what = f"copy kernels on GPU {device['ordinal']} (sm_{here})"
        reason = f"built for {', '.join(archs)}"
        do = "" if fits else f"build with KVFERRY_CUDA_ARCHS={here}"
        yield Verdict("kernels", "works" if fits else "no", what, reason, do)
    if not facts.driver.devices:
        yield Verdict("kernels", "works", "copy kernels", f"built for {', '.join(archs)}; no GPU to run them")


def _get_driver(facts: Facts) -> str:
    driver = facts.driver
    if driver.devices:
        return ""
    if driver.device_nodes or driver.kernel_module:
        return (
            "the machine has a driver but this process cannot load libcuda.so.1: in a container, start it "
            "with --gpus all and NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        )
    return "needs an NVIDIA GPU and its driver; nothing to do for host memory"


def _speed(facts: Facts) -> Iterator[Verdict]:
    if facts.package.profile != "release":
        yield Verdict(
            "build",
            "slow",
            "this build",
            f"profile {facts.package.profile}: its speeds say little",
            "pip install . builds the release profile",
        )
    limit, threads = facts.cgroup.cpu_limit, facts.package.copy_threads
    if limit is not None and threads is not None and limit < threads:
        whole = max(int(limit), 1)
        yield Verdict(
            "cpu_limit",
            "slow",
            "copy threads",
            f"the cgroup allows {limit:g} CPUs and {threads} threads are started: they get throttled",
            f"TransferContext(threads={whole})",
        )
    lacking = [name for name, there in (facts.cpu.features or {}).items() if not there]
    if "avx2" in lacking and facts.cpu.architecture in {"x86_64", "AMD64"}:
        yield Verdict("cpu_features", "slow", "host copies", f"the CPU lacks {', '.join(lacking)}")
    if len(facts.numa) > 1:
        yield Verdict(
            "numa",
            "works",
            f"{len(facts.numa)} NUMA nodes",
            "copies across nodes are slower than within one",
            "one process for each node: numactl --cpunodebind=N --membind=N",
        )
    pages = facts.memory.transparent_huge_pages
    if pages == "never":
        yield Verdict(
            "huge_pages",
            "slow",
            "first touch of large layouts",
            "transparent huge pages are off: 512 page faults for each 2 MiB",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled (as root)",
        )
    elif pages is not None:
        yield Verdict("huge_pages", "works", "huge pages", f"{pages}: kvferry asks for them")


def _memory(facts: Facts) -> Iterator[Verdict]:
    available = facts.memory.available_bytes
    if available is not None and available < SMALL_MEMORY:
        yield Verdict(
            "memory",
            "no",
            "large layouts",
            f"{_gib(available)} of memory available",
            "fewer blocks or layers",
        )
    lock = facts.system.memlock_bytes
    if isinstance(lock, int) and lock < SMALL_MEMLOCK:
        exempt = facts.system.may_lock_any
        yield Verdict(
            "memlock",
            "works" if exempt else "no",
            f"locking more than {_gib(lock)} of memory",
            "the limit is small, but CAP_IPC_LOCK is not bound by it"
            if exempt
            else "the memlock limit: mlock and network cards stop there; CUDA usually does not count",
            "" if exempt else "ulimit -l unlimited, docker run --ulimit memlock=-1, or LimitMEMLOCK=infinity",
        )
    elif lock is not None:
        shown = UNLIMITED if isinstance(lock, str) else _gib(lock)
        yield Verdict("memlock", "works", "locking memory", f"limit {shown}")
    shm = facts.system.shm_free_bytes
    if shm is None:
        yield Verdict(
            "shm", "no", "shared memory between processes", "no /dev/shm", "mount a tmpfs at /dev/shm"
        )
    elif shm < SMALL_SHM:
        yield Verdict(
            "shm",
            "slow",
            "shared memory between processes",
            f"{_gib(shm)} free in /dev/shm",
            "docker run --shm-size=8g, or an emptyDir of medium Memory in Kubernetes",
        )
    else:
        yield Verdict("shm", "works", "shared memory between processes", f"{_gib(shm)} free in /dev/shm")


def _python(facts: Facts) -> Iterator[Verdict]:
    package = facts.package
    if package.libraries.get("numpy") is None:
        yield Verdict(
            "numpy", "no", "kvferry demo, kvferry bench, layout.numpy()", "no NumPy", "pip install numpy"
        )
    if package.start_method == "fork":
        yield Verdict(
            "fork",
            "no",
            "a TransferContext made before a fork, in the child",
            "multiprocessing forks here; copy threads and CUDA do not survive that",
            'make it in the child, or multiprocessing.set_start_method("spawn")',
        )
    else:
        yield Verdict("fork", "works", "multiprocessing", f"starts processes by {package.start_method}")


def _count(number: int | None, noun: str) -> str:
    return f"an unknown number of {noun}s" if number is None else f"{number} {noun}{'s' * (number != 1)}"


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / (1 << 20):.0f} MiB"
