"""Regions go out to torch and CuPy without a copy, with their true type."""

from __future__ import annotations

from typing import Any

import pytest
from support import optional, succeeds

import kvferry as kf

pytestmark = pytest.mark.gpu


def layout(memory: kf.Memory, dtype: str = "bfloat16") -> kf.PhysicalLayout:
    cfg = kf.LayoutConfig(
        num_blocks=6, num_layers=3, page_size=4, num_heads=2, head_dim=16, dtype=dtype, alignment=512
    )
    return kf.PhysicalLayout.layer_separate(cfg, memory)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int8"])
@pytest.mark.parametrize("where", ["system", "device"])
def test_torch_reads_and_writes_in_place(where: str, dtype: str) -> None:
    torch = optional("torch")
    made = layout(kf.system() if where == "system" else kf.device(0), dtype)
    tensors = [torch.from_dlpack(region) for region in made.regions]
    for tensor, region in zip(tensors, made.regions, strict=True):
        assert tensor.dtype == getattr(torch, dtype)
        assert tensor.shape == (6, 2, 4, 2, 16)
        assert tensor.data_ptr() == region.addr
        assert tensor.is_cuda == (where == "device")
    tensors[1].fill_(3)
    del made
    again = kf.PhysicalLayout.from_tensors(tensors, axes="block outer page head dim")
    assert str(again.memory) == ("system" if where == "system" else "device:0")
    assert (tensors[1] == 3).all()


def test_pinned_memory_is_host_memory_to_torch() -> None:
    torch = optional("torch")
    made = layout(kf.pinned())
    region = made.regions[0]
    assert region.__dlpack_device__()[0] == 3
    tensor = torch.from_dlpack(region.__dlpack__(max_version=(1, 0), dl_device=(1, 0)))
    assert tensor.data_ptr() == region.addr


def test_cupy_reads_device_memory() -> None:
    cupy = optional("cupy")
    made = layout(kf.device(0), "float16")
    array: Any = cupy.from_dlpack(made.regions[2])
    array[...] = 7
    assert array.data.ptr == made.regions[2].addr
    assert (cupy.asarray(made.regions[2]) == 7).all()


def test_wrapping_host_memory_does_not_initialise_cuda() -> None:
    succeeds(
        """
        import ctypes, os
        import numpy as np
        import kvferry as kf
        kf.PhysicalLayout.from_tensors(np.zeros((4, 8), np.uint8), axes="block dim")
        driver = ctypes.CDLL("libcuda.so.1")
        count = ctypes.c_int()
        assert driver.cuDeviceGetCount(ctypes.byref(count)) == 3  # not initialised
        """
    )
