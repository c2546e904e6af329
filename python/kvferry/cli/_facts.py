"""Everything doctor finds out, gathered."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.cli import _host_facts, _system_facts, _trials

SCHEMA = 1
"""Raised when a key of the JSON changes its meaning or goes."""


@dataclass(frozen=True)
class Facts:
    """What was found. A fact that could not be had is None."""

    cpu: _host_facts.Cpu
    cgroup: _host_facts.Cgroup
    memory: _host_facts.Memory
    cache: _host_facts.Cache
    numa: list[_host_facts.Node]
    system: _system_facts.System
    package: _system_facts.Package
    driver: _system_facts.Driver
    host_trial: _trials.Trial
    pinned_trial: _trials.Trial
    gpu_trials: list[_trials.Trial]
    """One for each of the driver's devices."""

    def as_json(self) -> dict[str, Any]:
        """The facts as plain data."""
        return {"schema": SCHEMA, **dataclasses.asdict(self)}


def gather(root: Path = Path("/")) -> Facts:
    """Looks at everything; files are looked for under `root`."""
    limits = _host_facts.cgroup(root)
    driver = _system_facts.driver(root)
    return Facts(
        cpu=_host_facts.cpu(root),
        cgroup=limits,
        memory=_host_facts.memory(root, limits),
        cache=_host_facts.cache(root),
        numa=_host_facts.numa(root),
        system=_system_facts.system(root),
        package=_system_facts.package(),
        driver=driver,
        host_trial=_trials.host(),
        pinned_trial=_trials.pinned(),
        gpu_trials=[_trials.gpu(device["ordinal"]) for device in driver.devices],
    )
