"""Doctor's screen: facts, then verdicts, at most 100 columns."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvferry.cli._facts import Facts
    from kvferry.cli._verdicts import Verdict

WIDTH = 100
UNKNOWN = "unknown"
_LABEL = 16
_SHOWN = {"works": "works", "slow": "slowly", "no": "no"}


def render(facts: Facts, verdicts: list[Verdict]) -> str:
    """The whole screen."""
    lines = [f"kvferry {facts.package.kvferry} doctor", "", "Machine"]
    for label, value in _facts(facts):
        if label:
            lines += _wrapped(f"  {label:<{_LABEL}}", value)
        else:
            lines += ["", value]
    lines += ["", "What will therefore work"]
    for verdict in verdicts:
        say = f"{verdict.what}: {verdict.reason}"
        lines += _wrapped(f"  {_SHOWN[verdict.status]:<8}", say)
        if verdict.do:
            lines += _wrapped(" " * 10 + "-> ", verdict.do)
    return "\n".join(line.rstrip() for line in lines)


def _facts(facts: Facts) -> Iterator[tuple[str, str]]:
    """(label, value), and ("", heading) where a group starts."""
    yield from _machine(facts)
    yield "", "Limits"
    limits = facts.cgroup
    cpus = "no CPU limit" if limits.cpu_limit is None else f"{limits.cpu_limit:g} CPUs"
    memory = "no memory limit" if limits.memory_limit_bytes is None else _bytes(limits.memory_limit_bytes)
    yield "cgroup", UNKNOWN if limits.version is None else f"version {limits.version}, {cpus}, {memory}"
    system = facts.system
    exempt = "; CAP_IPC_LOCK: not bound by it" if system.may_lock_any else ""
    yield "memlock", f"{_bytes(system.memlock_bytes)} (hard {_bytes(system.memlock_hard_bytes)}){exempt}"
    yield "/dev/shm", f"{_bytes(system.shm_bytes)}, {_bytes(system.shm_free_bytes)} free"
    yield "", "kvferry and Python"
    package = facts.package
    kernels = ", ".join(package.kernel_archs) or "none"
    toolkit = f", toolkit {package.toolkit}" if package.toolkit else ""
    yield "build", f"{package.profile}, kernels {kernels} (KVFERRY_CUDA={package.cuda_mode}{toolkit})"
    yield "installed in", package.path
    yield "Python", f"{package.python}, {package.executable}, processes start by {package.start_method}"
    yield "libraries", ", ".join(f"{name} {found or '-'}" for name, found in package.libraries.items())
    yield "", "NVIDIA driver"
    yield from _driver(facts)


def _machine(facts: Facts) -> Iterator[tuple[str, str]]:
    cpu, memory, system = facts.cpu, facts.memory, facts.system
    yield "CPU", f"{cpu.model or UNKNOWN} ({cpu.architecture}{', virtual' if cpu.virtual_machine else ''})"
    yield "CPUs", f"{_or_unknown(cpu.allowed)} usable of {_or_unknown(cpu.total)}"
    features = cpu.features
    shown = (
        UNKNOWN
        if features is None
        else ", ".join(name if there else f"no {name}" for name, there in features.items())
    )
    yield "features", shown
    cache = facts.cache
    several = f", {cache.count} of them" if (cache.count or 1) > 1 else ""
    yield "last cache", f"L{_or_unknown(cache.level)}, {_bytes(cache.bytes)}{several}"
    nodes = "; ".join(
        f"node {node.node}: CPUs {node.cpus or 'none'}, {_bytes(node.memory_bytes)}" for node in facts.numa
    )
    yield "NUMA", nodes or UNKNOWN
    yield "memory", f"{_bytes(memory.total_bytes)}, {_bytes(memory.available_bytes)} available"
    reserved = ", ".join(
        f"{_or_unknown(pages['free'])} of {_or_unknown(pages['total'])} x {_bytes(pages['page_bytes'])} free"
        for pages in memory.hugetlb
    )
    transparent = memory.transparent_huge_pages or UNKNOWN
    yield "huge pages", f"transparent: {transparent}; hugetlb: {reserved or UNKNOWN}"
    yield "kernel", system.kernel or UNKNOWN
    yield "container", "; ".join(system.container) or "no sign of one"


def _driver(facts: Facts) -> Iterator[tuple[str, str]]:
    driver = facts.driver
    yield "kernel module", driver.kernel_module or "none"
    yield "device nodes", " ".join(driver.device_nodes) or "none"
    if driver.error:
        yield "GPUs", f"none: {driver.error}"
    for device in driver.devices:
        yield (
            f"GPU {device['ordinal']}",
            f"{device['name']}, sm_{device['compute_capability'].replace('.', '')}, "
            f"{device['sm_count']} SMs, {_bytes(device['total_memory'])}, PCI {device['pci_bus_id']}, "
            f"{device['uuid']}",
        )


def _or_unknown(value: object) -> str:
    return UNKNOWN if value is None else str(value)


def _bytes(value: int | str | None) -> str:
    if value is None or isinstance(value, str):
        return _or_unknown(value)
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if value >= 1 << power:
            return f"{value / (1 << power):.4g} {unit}"
    return f"{value} B"


def _wrapped(label: str, value: str) -> list[str]:
    return textwrap.wrap(
        value,
        WIDTH,
        initial_indent=label,
        subsequent_indent=" " * len(label),
        break_long_words=False,
        break_on_hyphens=False,
    ) or [label]
