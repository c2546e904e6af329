"""Finds an nvcc 13.0, in the places and the order of crates/kvferry-kernels/build/nvcc.rs."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

RELEASE = "13.0"
WHEELS = (
    "nvidia-cuda-nvcc",
    "nvidia-cuda-crt",
    "nvidia-cuda-runtime",
    "nvidia-cuda-cccl",
    "nvidia-nvvm",
)


class NvccNotFoundError(RuntimeError):
    """No nvcc of the wanted release; the message lists what was looked at."""


def _candidates() -> Iterator[tuple[str, Path]]:
    if nvcc := os.environ.get("NVCC"):
        yield "NVCC", Path(nvcc)
    spec = find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        yield f"wheels of {sys.executable}", Path(folder) / "cu13/bin/nvcc"
    if home := os.environ.get("CUDA_HOME"):
        yield "CUDA_HOME", Path(home) / "bin/nvcc"
    if found := shutil.which("nvcc"):
        yield "PATH", Path(found)


def _release(nvcc: Path) -> str:
    try:
        text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        return f"unusable: {error}"
    match = re.search(r"release (\d+\.\d+)", text)
    return match[1] if match else "unknown"


def find_nvcc() -> Path:
    """The first nvcc of the wanted release, or `NvccNotFoundError`."""
    refused = []
    for origin, nvcc in _candidates():
        release = _release(nvcc)
        if release == RELEASE:
            return nvcc
        refused.append(f"{origin} ({nvcc}: {release})")
    wheels = " ".join(f"'{name}=={RELEASE}.*'" for name in WHEELS)
    looked = "; ".join(refused) or "nothing named one"
    message = f"no nvcc {RELEASE} (NVCC, wheels, CUDA_HOME, PATH: {looked}); pip install {wheels}"
    raise NvccNotFoundError(message)


if __name__ == "__main__":
    try:
        print(find_nvcc())
    except NvccNotFoundError as error:
        sys.exit(str(error))
