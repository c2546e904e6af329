"""PEP 517 backend: maturin, plus the CUDA compiler from PyPI where kernels can be built with it.

`KVFERRY_CUDA=off` builds without kernels and needs no compiler; `NVCC` names one that is there already.
"""

import os
import platform
import sys
from collections.abc import Mapping
from typing import Any

import maturin
from maturin import (
    build_editable,
    build_sdist,
    build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

# The release that crates/kvferry-kernels/build/nvcc.rs accepts; all five are needed to compile one kernel.
NVCC_WHEELS = [
    "nvidia-cuda-nvcc==13.0.*",
    "nvidia-cuda-crt==13.0.*",
    "nvidia-cuda-runtime==13.0.*",
    "nvidia-cuda-cccl==13.0.*",
    "nvidia-nvvm==13.0.*",
]

Settings = Mapping[str, Any] | None


def _compiler_wheels() -> list[str]:
    has_wheels = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")
    wanted = os.environ.get("KVFERRY_CUDA", "auto") != "off" and not os.environ.get("NVCC")
    return list(NVCC_WHEELS) if has_wheels and wanted else []


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    """What a wheel needs beside maturin."""
    return [*maturin.get_requires_for_build_wheel(config_settings), *_compiler_wheels()]


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    """The same as for a wheel."""
    return [*maturin.get_requires_for_build_editable(config_settings), *_compiler_wheels()]


def get_requires_for_build_sdist(config_settings: Settings = None) -> list[str]:
    """A source distribution compiles nothing."""
    return list(maturin.get_requires_for_build_sdist(config_settings))
