"""Importing is free: nothing but the standard library, and little of that."""

from __future__ import annotations

import statistics

import pytest
from support import succeeds

import kvferry as kf

BLOCK = """
import sys
for name in ("numpy", "torch", "cupy", "ml_dtypes"):
    sys.modules[name] = None
"""


def test_needs_nothing_installed() -> None:
    # -S leaves site-packages, and with it the installation, out: the package's own folder is put back.
    home = kf.__file__.rpartition("/kvferry/")[0]
    out = succeeds(
        f"""
        import sys
        sys.path.insert(0, {home!r})
        {BLOCK.strip().replace(chr(10), chr(10) + " " * 8)}
        import kvferry as kf
        sizes = dict(num_blocks=4, num_layers=2, page_size=4, num_heads=2, head_dim=8)
        cfg = kf.LayoutConfig(**sizes, dtype="float16")
        src = kf.PhysicalLayout.layer_separate(cfg, kf.system())
        dst = kf.PhysicalLayout.fully_contiguous(cfg, kf.system(), order="universal")
        src.fill(7)
        with kf.TransferContext() as ctx:
            print(ctx.transfer(src, dst, [0, 1], [3, 2]).wait().bytes)
        data = memoryview(bytearray(b"x" * 16)).cast("B", (4, 4))
        print(kf.PhysicalLayout.from_tensors(data, axes="block dim").config.dtype)
        try:
            dst.numpy()
        except ImportError:
            print("no numpy")
        """,
        "-S",
        "-E",
    )
    assert out.split("\n") == ["1024", "uint8", "no numpy", ""]


def test_warns_about_nothing() -> None:
    succeeds("import kvferry, kvferry._async", "-W", "error", "-X", "dev")


def test_loads_neither_numpy_nor_asyncio_nor_a_driver() -> None:
    succeeds(
        """
        import sys
        import kvferry
        assert not {"numpy", "torch", "cupy", "asyncio", "subprocess", "ctypes"} & set(sys.modules)
        assert "libcuda" not in open("/proc/self/maps").read()
        """
    )


def test_is_quick() -> None:
    code = "import time; t = time.perf_counter(); import kvferry; print(time.perf_counter() - t)"
    times = [float(succeeds(code)) for _ in range(5)]
    # About 5 ms here; a busy machine gets time.
    assert statistics.median(times) < 0.06 or min(times) < 0.06, times


def test_all_is_what_there_is() -> None:
    public = {name for name in vars(kf) if not name.startswith("_")}
    assert set(kf.__all__) - {"__version__"} <= public
    assert sorted(kf.__all__) == kf.__all__
    assert all(getattr(kf, name).__doc__ for name in kf.__all__ if name != "__version__")
    for name in kf.__all__:
        if isinstance(getattr(kf, name), type):
            assert getattr(kf, name).__module__ in ("kvferry", "kvferry._errors"), name


def test_build_info() -> None:
    info = kf.build_info()
    assert info["version"] == kf.__version__
    assert info["cuda_mode"] in ("auto", "require", "off") and info["profile"] in ("debug", "release")
    assert bool(info["archs"]) == (info["toolkit"] is not None)
    assert all(arch.startswith(("sm_", "compute_")) for arch in info["archs"])
    info["archs"].append("mine")
    assert kf.build_info() != info
    assert 1 <= kf.usable_cpus() <= 4096


@pytest.mark.parametrize(
    "name", ["LayoutConfig", "PhysicalLayout", "TransferContext", "Transfer", "Memory", "Region"]
)
def test_classes_are_final(name: str) -> None:
    with pytest.raises(TypeError, match="not an acceptable base type"):
        type("Mine", (getattr(kf, name),), {})
