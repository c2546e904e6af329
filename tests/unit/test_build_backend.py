"""The build backend asks for the CUDA compiler where it can be used, and only there.

Needs neither maturin nor a network.
"""

import importlib.util
import platform
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
BACKEND = ROOT / "build_backend" / "kvferry_build.py"
HOOKS = ("build_wheel", "build_editable", "build_sdist")
METADATA = ("prepare_metadata_for_build_wheel", "prepare_metadata_for_build_editable")

pytestmark = pytest.mark.skipif(not BACKEND.exists(), reason="tests run outside the source tree")


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The backend over a stand-in for maturin, on Linux x86_64 with a clean environment."""
    hooks: dict[str, Any] = {name: object() for name in HOOKS + METADATA}
    requires = {
        f"get_requires_for_{name}": lambda settings=None, name=name: [f"maturin-{name}"] for name in HOOKS
    }
    monkeypatch.setitem(sys.modules, "maturin", SimpleNamespace(**hooks, **requires))
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.delenv("KVFERRY_CUDA", raising=False)
    monkeypatch.delenv("NVCC", raising=False)
    spec = importlib.util.spec_from_file_location("kvferry_build", BACKEND)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("kind", ["wheel", "editable"])
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("mode", [None, "auto", "require"])
def test_linux_gets_the_compiler(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch, kind: str, machine: str, mode: str | None
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    if mode is not None:
        monkeypatch.setenv("KVFERRY_CUDA", mode)
    wanted = getattr(backend, f"get_requires_for_build_{kind}")({})
    assert wanted == [f"maturin-build_{kind}", *backend.NVCC_WHEELS]


@pytest.mark.parametrize("kind", ["wheel", "editable"])
@pytest.mark.parametrize(("name", "value"), [("KVFERRY_CUDA", "off"), ("NVCC", "/opt/cuda/bin/nvcc")])
def test_no_compiler_when_unwanted_or_given(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch, kind: str, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    assert getattr(backend, f"get_requires_for_build_{kind}")() == [f"maturin-build_{kind}"]


@pytest.mark.parametrize(
    ("system", "machine"), [("darwin", "arm64"), ("win32", "AMD64"), ("linux", "ppc64le")]
)
def test_no_compiler_where_there_are_no_wheels(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch, system: str, machine: str
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert backend.get_requires_for_build_wheel() == ["maturin-build_wheel"]


def test_a_source_distribution_needs_no_compiler(backend: ModuleType) -> None:
    assert backend.get_requires_for_build_sdist() == ["maturin-build_sdist"]


def test_the_hooks_are_maturins(backend: ModuleType) -> None:
    for name in HOOKS + METADATA:
        assert getattr(backend, name) is getattr(sys.modules["maturin"], name)


def test_five_wheels_of_one_release(backend: ModuleType) -> None:
    assert len(backend.NVCC_WHEELS) == 5
    assert {wheel.partition("==")[2] for wheel in backend.NVCC_WHEELS} == {"13.0.*"}


def test_every_place_names_the_same_wheels(backend: ModuleType) -> None:
    """The list is written where it is used; these must not drift apart."""
    for path in ("crates/kvferry-kernels/build/nvcc.rs", "scripts/find_nvcc.py"):
        text = (ROOT / path).read_text(encoding="utf-8")
        for wheel in backend.NVCC_WHEELS:
            assert wheel.partition("==")[0] in text, f"{path} does not name {wheel}"
