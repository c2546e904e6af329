"""Not marked: says whether the GPU tests ran, and if not, why."""

from __future__ import annotations

import os

import pytest
from support import REQUIRE_GPU, gpu_reason

import kvferry as kf


def test_gpu_tests_run_or_say_why() -> None:
    reason = gpu_reason()
    if reason is None:
        return
    if REQUIRE_GPU:
        pytest.fail(f"KVFERRY_REQUIRE_GPU=1, but there is no GPU to test with: {reason}")
    pytest.skip(f"every GPU test was skipped: {reason}")


def test_the_wheel_is_the_one_to_test() -> None:
    info = kf.build_info()
    expected = os.environ.get("KVFERRY_EXPECT_CUDA")
    if expected is None:
        assert info["cuda_mode"] in ("auto", "require", "off")
    else:
        assert info["cuda_mode"] == expected
    if REQUIRE_GPU:
        assert info["archs"], "this wheel holds no kernels: build it with KVFERRY_CUDA=require"
