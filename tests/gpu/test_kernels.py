"""Kernel bodies on a real GPU, compiled from cuda/ with the machine's nvcc and launched through the driver.

The host build covers index arithmetic, alignment and coverage of every shape; this covers the PTX branch.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import optional

pytestmark = pytest.mark.gpu

CUDA = Path(__file__).parents[2] / "cuda"


class Params(ctypes.Structure):
    """VectorizedCopyParams of vectorized_copy.cuh."""

    _fields_ = [
        ("src_table", ctypes.c_uint64),
        ("dst_table", ctypes.c_uint64),
        ("pairs", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("chunk_bytes", ctypes.c_uint64),
        ("chunks_per_pair", ctypes.c_uint64),
        ("team_shift", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    ]


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Any:
    torch = optional("torch")
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if not Path(nvcc).exists():
        pytest.skip("nvcc is not installed")
    out = tmp_path_factory.mktemp("kernels") / "vectorized_copy.fatbin"
    major, minor = torch.cuda.get_device_capability()
    command = [
        nvcc,
        "-fatbin",
        f"-arch=sm_{major}{minor}",
        "-std=c++17",
        f"-I{CUDA / 'include'}",
        "-o",
        str(out),
    ]
    subprocess.run([*command, str(CUDA / "vectorized_copy.cu")], check=True, capture_output=True, text=True)
    torch.zeros(1, device="cuda")
    driver = ctypes.CDLL("libcuda.so.1")
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    assert driver.cuModuleLoadData(ctypes.byref(module), out.read_bytes()) == 0
    assert driver.cuModuleGetFunction(ctypes.byref(function), module, b"vectorized_copy") == 0

    def run(params: Params, grid: int, block: int) -> None:
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        code = driver.cuLaunchKernel(function, grid, 1, 1, block, 1, 1, 0, None, arguments, None)
        assert code == 0
        torch.cuda.synchronize()

    return run


@pytest.mark.parametrize(
    ("pairs", "nbytes", "cut", "shape"),
    [
        (1, 5 << 30, (65536, 1024), (264, 1024)),  # 64-bit offsets
        (70_000, 132, (144, 8), (512, 256)),  # more pairs than a grid axis holds
        (300, 584, (592, 32), (16, 128)),
        (257, 1152, (1152, 64), (33, 256)),
        (40, 100_003, (4096, 256), (64, 512)),
        (9, 1, (16, 8), (4, 128)),
        (5, 0, (16, 8), (4, 128)),
    ],
)
def test_vectorized_copy(
    launch: Any, pairs: int, nbytes: int, cut: tuple[int, int], shape: tuple[int, int]
) -> None:
    (chunk, team), (grid, block) = cut, shape
    torch = optional("torch")
    stride = nbytes + 48
    source = torch.randint(0, 256, (pairs * stride + 64,), dtype=torch.uint8, device="cuda")
    target = torch.full_like(source, 0xA5)
    rng = np.random.default_rng(pairs)
    # Every pair has alignments of its own on both sides, and pairs are shuffled.
    starts = np.arange(pairs, dtype=np.int64) * stride
    src = starts[rng.permutation(pairs)] + rng.integers(0, 16, pairs)
    dst = starts + 16 + rng.integers(0, 16, pairs)
    tables = [
        torch.tensor(base.data_ptr() + at, dtype=torch.int64, device="cuda")
        for base, at in ((source, src), (target, dst))
    ]
    params = Params(
        tables[0].data_ptr(),
        tables[1].data_ptr(),
        pairs,
        nbytes,
        chunk,
        max(1, -(-nbytes // chunk)),
        team.bit_length() - 1,
        0,
    )
    launch(params, grid, block)
    expected = torch.full_like(source, 0xA5)
    if nbytes:
        for first in range(0, pairs, 4096):
            reach = torch.arange(nbytes, device="cuda") if nbytes < 1 << 20 else None
            if reach is None:
                expected[dst[first] : dst[first] + nbytes] = source[src[first] : src[first] + nbytes]
                continue
            rows = slice(first, min(pairs, first + 4096))
            at = torch.tensor(dst[rows], device="cuda")[:, None] + reach
            expected[at] = source[torch.tensor(src[rows], device="cuda")[:, None] + reach]
    assert torch.equal(target, expected)
