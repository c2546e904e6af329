"""`kvferry doctor`: reads what is there, calls what is not there unknown, and draws the right conclusions."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

import kvferry as kf
from kvferry.cli import _doctor_text, _facts, _files, _host_facts, _system_facts, _trials, _verdicts, main

if TYPE_CHECKING:
    from pathlib import Path

    from kvferry.cli._facts import Facts

GIB = 1 << 30

MACHINE = {
    "proc/cpuinfo": "processor\t: 0\nmodel name\t: A CPU\nflags\t\t: sse2 avx2 erms hypervisor\n\n"
    "processor\t: 1\nmodel name\t: A CPU\n",
    "proc/self/status": "Name:\tx\nCapEff:\t0000000000004000\nCpus_allowed:\tb\nCpus_allowed_list:\t0-1,3\n",
    "proc/self/uid_map": "         0          0 4294967295\n",
    "proc/self/limits": "Limit   Soft Limit   Hard Limit   Units\n"
    "Max locked memory         65536                unlimited            bytes\n",
    "proc/self/cgroup": "0::/kubepods/pod1/box\n",
    "proc/1/cgroup": "0::/kubepods/pod1/box\n",
    "proc/1/environ": "HOME=/\0container=podman\0",
    "proc/meminfo": "MemTotal:  16777216 kB\nMemAvailable:  8388608 kB\nHugepagesize: 2048 kB\n",
    "proc/sys/kernel/osrelease": "6.1.0-test\n",
    "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module  580.1\nGCC version: 12\n",
    "dev/nvidia0": "",
    "dev/nvidiactl": "",
    "run/.containerenv": "",
    "sys/fs/cgroup/kubepods/pod1/cpu.max": "150000 100000\n",
    "sys/fs/cgroup/kubepods/pod1/box/cpu.max": "max 100000\n",
    "sys/fs/cgroup/kubepods/pod1/box/memory.max": f"{4 * GIB}\n",
    "sys/fs/cgroup/kubepods/pod1/box/memory.current": f"{GIB}\n",
    "sys/fs/cgroup/memory.max": "max\n",
    "sys/devices/system/cpu/online": "0-3\n",
    "sys/devices/system/node/node0/cpulist": "0-1\n",
    "sys/devices/system/node/node0/meminfo": "Node 0 MemTotal:       8388608 kB\n",
    "sys/devices/system/node/node10/cpulist": "\n",
    "sys/devices/system/node/node2/cpulist": "2-3\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n",
    "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages": "8\n",
    "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages": "5\n",
}
for _cpu in range(4):
    for _index, (_level, _type, _size, _shared) in enumerate(
        [(1, "Data", "32K", _cpu), (1, "Instruction", "64K", _cpu), (3, "Unified", "30720K", _cpu // 2)]
    ):
        _folder = f"sys/devices/system/cpu/cpu{_cpu}/cache/index{_index}"
        MACHINE |= {f"{_folder}/level": f"{_level}\n", f"{_folder}/type": f"{_type}\n"}
        MACHINE |= {f"{_folder}/size": f"{_size}\n", f"{_folder}/shared_cpu_list": f"{_shared}\n"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, content in MACHINE.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    (tmp_path / "dev/shm").mkdir()
    return tmp_path


def verdicts(facts: Facts) -> dict[str, _verdicts.Verdict]:
    return {verdict.id: verdict for verdict in _verdicts.judge(facts)}


def changed(facts: Facts, part: str, **changes: Any) -> Facts:
    return dataclasses.replace(facts, **{part: dataclasses.replace(getattr(facts, part), **changes)})


def test_it_reads_what_the_kernel_says(root: Path) -> None:
    cpu = _host_facts.cpu(root)
    assert (cpu.model, cpu.total, cpu.allowed, cpu.virtual_machine) == ("A CPU", 4, 3, True)
    assert cpu.features == {"avx2": True, "avx512f": False, "erms": True}
    cache = _host_facts.cache(root)
    assert (cache.level, cache.bytes, cache.count, cache.total) == (3, 30 << 20, 2, 60 << 20)
    assert [(node.node, node.cpus, node.memory_bytes) for node in _host_facts.numa(root)] == [
        (0, "0-1", 8 * GIB),
        (2, "2-3", None),
        (10, "", None),
    ]
    limits = _host_facts.cgroup(root)
    assert limits == _host_facts.Cgroup(2, 1.5, 4 * GIB, GIB)
    memory = _host_facts.memory(root, limits)
    assert (memory.total_bytes, memory.available_bytes) == (16 * GIB, 3 * GIB)
    assert _host_facts.memory(root).available_bytes == 8 * GIB
    assert memory.transparent_huge_pages == "never"
    assert memory.shmem_huge_pages is None
    assert memory.hugetlb == [{"page_bytes": 2 << 20, "total": 8, "free": 5}]
    system = _system_facts.system(root)
    assert system.kernel == "6.1.0-test"
    assert (system.memlock_bytes, system.memlock_hard_bytes) == (65536, "unlimited")
    assert system.may_lock_any is True
    assert system.shm_bytes
    assert system.container == ["/run/.containerenv", "cgroup names kubepods", "init says podman"]
    driver = _system_facts.driver(root)
    assert driver.kernel_module == "NVIDIA UNIX Open Kernel Module  580.1"
    assert driver.device_nodes == ["/dev/nvidia0", "/dev/nvidiactl"]


def test_version_1_cgroups(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/box\n2:cpu,cpuacct:/box\n0::/\n",
        "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us": "50000",
        "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us": "100000",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        "sys/fs/cgroup/memory/box/memory.limit_in_bytes": str(GIB),
        "sys/fs/cgroup/memory/box/memory.usage_in_bytes": "7",
    }
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    assert _host_facts.cgroup(tmp_path) == _host_facts.Cgroup(1, 0.5, GIB, 7)


def test_a_capability_of_another_namespace_does_not_count(root: Path) -> None:
    (root / "proc/self/uid_map").write_text("0 1000 1\n")
    assert _system_facts.system(root).may_lock_any is False


def test_nothing_there_is_unknown_not_an_error(tmp_path: Path) -> None:
    facts = _facts.gather(tmp_path / "nowhere")
    assert (facts.cpu.model, facts.cpu.total, facts.cpu.features, facts.cache.total) == (None,) * 4
    assert facts.numa == []
    assert facts.memory.available_bytes is facts.system.shm_bytes is facts.system.memlock_bytes is None
    json.dumps(facts.as_json())
    found = _verdicts.judge(facts)
    assert _doctor_text.render(facts, found).count("unknown") >= 10
    assert verdicts(facts)["shm"].status == "no"


@pytest.mark.parametrize("content", ["", "\0\xff\n", "a: b: c\n::::\n[", "-1 -2\n9" * 50, "0-99999999999\n"])
def test_nonsense_is_not_an_error(root: Path, content: str) -> None:
    for name in MACHINE:
        (root / name).write_text(content)
    facts = _facts.gather(root)
    _doctor_text.render(facts, _verdicts.judge(facts))


def test_folders_and_unreadable_files_are_unknown(root: Path) -> None:
    for name in MACHINE:
        (root / name).unlink()
        (root / name).mkdir()
    assert _facts.gather(root).memory.total_bytes is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0-3,8,10-11", [0, 1, 2, 3, 8, 10, 11]), ("", []), ("3-1", None), ("x", None), (None, None)],
)
def test_kernel_lists(text: str | None, expected: list[int] | None) -> None:
    assert _files.members(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2048K", 2 << 20),
        ("16 kB", 16384),
        ("512M", 512 << 20),
        ("7", 7),
        ("-7", None),
        ("", None),
        ("²", None),
    ],
)
def test_sizes(text: str, expected: int | None) -> None:
    assert _files.size(text) == expected


def test_verdicts_follow_from_the_facts(root: Path) -> None:
    facts = _facts.gather(root)
    facts = changed(facts, "package", copy_threads=3, profile="debug", start_method="fork")
    facts = changed(facts, "system", may_lock_any=False, shm_free_bytes=64 << 20)
    found = verdicts(facts)
    assert found["host"].status == "works"
    assert found["build"].status == "slow"
    assert found["cpu_limit"].do == "TransferContext(threads=1)"
    assert found["numa"].reason
    assert found["huge_pages"].status == "slow"
    assert found["memlock"].status == "no" and "64" not in found["memlock"].do
    assert found["shm"].status == "slow" and "--shm-size" in found["shm"].do
    assert found["fork"].status == "no"

    better = changed(facts, "package", copy_threads=1, profile="release", start_method="spawn")
    better = changed(better, "system", memlock_bytes="unlimited", shm_free_bytes=8 * GIB)
    better = changed(better, "memory", transparent_huge_pages="madvise", available_bytes=GIB)
    found = verdicts(dataclasses.replace(better, numa=[]))
    assert not {"build", "cpu_limit", "numa"} & found.keys()
    assert {found[name].status for name in ("huge_pages", "memlock", "shm", "fork")} == {"works"}
    assert found["memory"].status == "no"


def test_verdicts_on_gpus(root: Path) -> None:
    device = {
        "ordinal": 0,
        "name": "H200",
        "uuid": "GPU-1",
        "compute_capability": "9.0",
        "sm_count": 132,
        "total_memory": 140 * GIB,
        "pci_bus_id": "0000:01:00.0",
    }
    facts = changed(_facts.gather(root), "driver", devices=[device], error=None)
    facts = changed(facts, "package", kernel_archs=["sm_80", "sm_100"], cuda_mode="require", toolkit="13.0")
    broken = _trials.Trial(False, "out of memory")
    facts = dataclasses.replace(facts, gpu_trials=[broken])
    found = verdicts(facts)
    assert found["gpu"].status == "no" and found["gpu"].reason == "out of memory"
    assert found["kernels"].status == "no" and "KVFERRY_CUDA_ARCHS=90" in found["kernels"].do
    screen = _doctor_text.render(facts, _verdicts.judge(facts))
    assert "H200, sm_90, 132 SMs, 140 GiB, PCI 0000:01:00.0, GPU-1" in screen.replace("\n" + " " * 18, " ")

    facts = dataclasses.replace(facts, gpu_trials=[_trials.Trial(True, "kernel")])
    found = verdicts(changed(facts, "package", kernel_archs=["sm_90a"]))
    assert found["gpu"].status == found["kernels"].status == "works"


def test_a_driver_that_does_not_reach_the_process(root: Path) -> None:
    facts = changed(_facts.gather(root), "driver", devices=[], error="no CUDA driver on this machine")
    facts = dataclasses.replace(facts, gpu_trials=[])
    assert "--gpus all" in verdicts(facts)["gpu"].do


def test_a_host_trial_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise kf.HostMemoryError("no memory for copy threads\nand more")

    monkeypatch.setattr(kf, "TransferContext", broken)
    facts = _facts.gather()
    assert facts.host_trial == _trials.Trial(False, "no memory for copy threads")
    assert facts.package.copy_threads is None
    assert verdicts(facts)["host"].status == "no"


def test_the_screen_is_plain_and_narrow(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    screen = capsys.readouterr().out
    assert screen.isascii() and "\033" not in screen
    long = [line for line in screen.splitlines() if len(line) > _doctor_text.WIDTH and " " in line[20:]]
    assert not long
    assert "What will therefore work" in screen
    assert "host transfers" in screen


def test_json_keys_are_stable(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {name: sorted(report[name]) for name in ("cpu", "cache", "cgroup", "driver", "host_trial")} == {
        "cpu": ["allowed", "architecture", "features", "model", "total", "virtual_machine"],
        "cache": ["bytes", "count", "level"],
        "cgroup": ["cpu_limit", "memory_limit_bytes", "memory_used_bytes", "version"],
        "driver": ["device_nodes", "devices", "error", "kernel_module"],
        "host_trial": ["detail", "worked"],
    }
    assert next(iter(report)) == "schema" and report["schema"] == 1
    assert list(report)[-1] == "verdicts"
    for verdict in report["verdicts"]:
        assert list(verdict) == ["id", "status", "what", "reason", "do"]
        assert verdict["status"] in {"works", "slow", "no"}


def test_it_imports_no_library() -> None:
    code = (
        "import sys; from kvferry.cli import main; main(['doctor', '--json']); "
        "sys.exit(any(name in sys.modules for name in ('numpy', 'torch', 'cupy')))"
    )
    subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, timeout=60, check=True)
