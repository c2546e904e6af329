"""Markers, profiles and the rule that GPU tests cannot lie."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
from driver import SIMULATED
from hypothesis import HealthCheck, settings
from support import REQUIRE_GPU, gpu_reason

import kvferry as kf

# Held streams must not hold up others that share a hardware queue with them. Read when CUDA starts.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
# Holds let go by themselves (driver.Hold); a simulated GPU that gives up before would fail all later tests.
os.environ.setdefault("KVFERRY_FAKE_HOLD_MS", "60000")

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

_COMMON: dict[str, Any] = {
    "deadline": None,
    "print_blob": True,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
settings.register_profile("fast", max_examples=60, **_COMMON)
settings.register_profile("slow", max_examples=3000, **_COMMON)
settings.load_profile(os.environ.get("KVFERRY_HYPOTHESIS", "fast"))


def needed_gpus(item: pytest.Item) -> int:
    if item.get_closest_marker("multigpu") is not None:
        return 2
    return 1 if item.get_closest_marker("gpu") is not None else 0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what only a simulated GPU can serve: on a real one, a skip would be a failure."""
    if SIMULATED:
        return
    gone = [item for item in items if item.get_closest_marker("simulated") is not None]
    config.hook.pytest_deselected(items=gone)
    items[:] = [item for item in items if item not in gone]


def pytest_runtest_setup(item: pytest.Item) -> None:
    needed = needed_gpus(item)
    reason = gpu_reason(needed) if needed else None
    if reason is not None:
        pytest.skip(f"no GPU to test with: {reason}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Under KVFERRY_REQUIRE_GPU=1 a GPU test that skips, for whatever reason, has failed."""
    report = yield
    if report.skipped and REQUIRE_GPU and needed_gpus(item):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"KVFERRY_REQUIRE_GPU=1, but the test was skipped: {reason}"
    return report


@pytest.fixture
def ctx() -> Iterator[kf.TransferContext]:
    with kf.TransferContext(threads=2) as context:
        yield context


@pytest.fixture
def lazy() -> Iterator[kf.TransferContext]:
    """One copy thread: jobs queue up behind one another."""
    with kf.TransferContext(threads=1) as context:
        yield context


@pytest.fixture
def gpu() -> Iterator[kf.TransferContext]:
    """A context of the first GPU."""
    with kf.TransferContext(0, threads=2) as context:
        yield context


@pytest.fixture(scope="module")
def shared() -> Iterator[kf.TransferContext]:
    """One context of the first GPU for a whole module: for tests that leave nothing behind in it."""
    with kf.TransferContext(0, threads=2) as context:
        yield context
