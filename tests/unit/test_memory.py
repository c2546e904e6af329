"""How host memory is asked for: memory nodes, page size, first touch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from support import config, small

import kvferry as kf

PAGE = os.sysconf("SC_PAGE_SIZE")


def allocate(memory: kf.Memory, mib: int = 8) -> kf.PhysicalLayout:
    """A layout of `mib` MiB."""
    cfg = kf.LayoutConfig(
        num_blocks=mib, num_layers=4, page_size=16, outer_dim=2, num_heads=32, head_dim=128, dtype="float16"
    )
    layout = kf.PhysicalLayout.fully_contiguous(cfg, memory)
    assert layout.nbytes == mib << 20
    return layout


def node() -> int:
    """A memory node of this machine, or a skipped test: no NUMA support, or a container that forbids it."""
    try:
        kf.PhysicalLayout.fully_contiguous(config(small()), kf.system(numa_node="interleave"))
    except kf.HostMemoryError as error:
        pytest.skip(f"no memory placement here: {error}")
    status = Path("/proc/self/status").read_text(encoding="ascii")
    allowed = next(line for line in status.splitlines() if line.startswith("Mems_allowed_list:"))
    return int(allowed.split()[1].split(",")[0].split("-")[0])


def placement(layout: kf.PhysicalLayout) -> tuple[str, set[str]]:
    """Policy and nodes of the pages of the mapping that holds the layout, as the kernel says."""
    maps = Path("/proc/self/numa_maps")
    if not maps.exists():
        pytest.skip("no /proc/self/numa_maps")
    address = layout.region(0, 0).addr
    lines = [line.split() for line in maps.read_text(encoding="utf-8").splitlines()]
    words = max((line for line in lines if int(line[0], 16) <= address), key=lambda line: int(line[0], 16))
    return words[1], {word.split("=")[0] for word in words if word.startswith("N") and "=" in word}


def resident(layout: kf.PhysicalLayout) -> int:
    """Bytes of the layout that are in memory."""
    if not Path("/proc/self/pagemap").exists():
        pytest.skip("no /proc/self/pagemap")
    first = layout.region(0, 0).addr // PAGE
    with open("/proc/self/pagemap", "rb") as pagemap:
        pagemap.seek(first * 8)
        entries = memoryview(pagemap.read(layout.nbytes // PAGE * 8)).cast("Q")
    return sum(entry >> 63 for entry in entries) * PAGE


def test_repr_eq_and_hash_know_the_options() -> None:
    every = kf.system(numa_node="interleave", huge_pages=False, touch=True)
    assert repr(every) == "system(numa_node='interleave', huge_pages=False, touch=True)"
    assert repr(kf.system(numa_node=3)) == "system(numa_node=3)"
    assert [repr(kf.system(huge_pages=True, touch=False)), str(every)] == ["system()", "system"]
    assert kf.system(numa_node=3) == kf.system(numa_node=3) != kf.system(numa_node=2)
    assert kf.system(touch=True) != kf.system() == kf.system(numa_node=None)
    kinds = [kf.system(numa_node=0), kf.system(touch=True), kf.system(huge_pages=False), kf.system(), every]
    assert len(set(kinds * 2)) == len(kinds)
    assert {each.kind for each in kinds} == {"system"}
    assert eval(repr(every), {"system": kf.system}) == every


def test_bad_options_are_named() -> None:
    bad: Any
    for bad in (-1, 1 << 32, 1 << 200, "all", ""):
        with pytest.raises(kf.OptionError, match="numa_node"):
            kf.system(numa_node=bad)
    for bad in (1.0, b"interleave", [0]):
        with pytest.raises(TypeError, match="numa_node"):
            kf.system(numa_node=bad)
    positional: Any = kf.system
    with pytest.raises(TypeError):
        positional(0)


@pytest.mark.parametrize("huge_pages", [True, False])
def test_touch_makes_every_page_resident(huge_pages: bool) -> None:
    touched = allocate(kf.system(touch=True, huge_pages=huge_pages))
    assert resident(touched) == touched.nbytes
    # A huge page of a neighbouring mapping may reach into an untouched one.
    untouched = allocate(kf.system(huge_pages=huge_pages))
    assert resident(untouched) < untouched.nbytes // 2
    assert touched.numpy().max() == 0


@pytest.mark.parametrize("touch", [True, False])
def test_bound_memory_is_on_its_node(touch: bool) -> None:
    at = node()
    layout = allocate(kf.system(numa_node=at, touch=touch))
    layout.fill_pattern(1)
    layout.verify_pattern(1)
    assert placement(layout) == (f"bind:{at}", {f"N{at}"})


def test_interleaved_memory_works() -> None:
    node()
    layout = allocate(kf.system(numa_node="interleave"))
    layout.fill_pattern(1)
    layout.verify_pattern(1)
    assert placement(layout)[0].startswith("interleave:")


def test_an_unknown_node_is_refused_by_name() -> None:
    at = node()
    with pytest.raises(kf.HostMemoryError, match=rf"no memory node 4096 .*only {at}"):
        allocate(kf.system(numa_node=4096))


def test_layouts_tell_how_they_were_allocated() -> None:
    memory = kf.system(huge_pages=False, touch=True)
    layout = allocate(memory)
    assert layout.memory == memory
    assert layout.with_page_size(4).memory == memory == layout.region(0, 0).memory
    assert kf.PhysicalLayout.from_json(layout.to_json(), memory).memory == memory
    wrapped = kf.PhysicalLayout.from_tensors(layout.numpy(), axes=" ".join(layout.region_axes))
    assert wrapped.memory == kf.system()
