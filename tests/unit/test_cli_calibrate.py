"""`kvferry calibrate` without a GPU: what it prints, and how it fails."""

from __future__ import annotations

import json
from typing import Any

import pytest

import kvferry as kf
from kvferry.cli import calibrate, main

MODEL: dict[str, Any] = {
    "version": 1,
    "source": "calibrated 2026-12-01",
    "h2d": {
        "kernel": {"overhead_us": 12.5, "points": [[4096, 50.1], [2 << 20, 51.0]]},
        "ctas": 4,
    },
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Calls of a calibration that succeeds."""
    calls: list[tuple[Any, ...]] = []

    def stand_in(device: int, *, peer: int | None, force: bool, show: bool) -> dict[str, Any]:
        calls.append((device, peer, force, show))
        return MODEL

    monkeypatch.setattr(kf, "calibrate", stand_in, raising=False)
    return calls


def test_it_measures_and_says(asked: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--device", "1", "--force"]) == 0
    printed = capsys.readouterr().out
    assert asked == [(1, None, True, False)]
    assert "source: calibrated 2026-12-01" in printed
    assert "h2d kernel: 12.5 us + runs at GB/s: 4 KiB 50.1, 2 MiB 51.0" in printed
    assert "measured in" in printed


def test_it_shows(asked: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--show", "--json"]) == 0
    assert asked == [(0, None, False, True)]
    assert json.loads(capsys.readouterr().out) == MODEL


@pytest.mark.parametrize(("error", "code"), [(kf.Unsupported, 2), (kf.Error, 1)])
def test_failures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: type[Exception], code: int
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error("constants off by 3")

    monkeypatch.setattr(kf, "calibrate", fails, raising=False)
    assert main(["calibrate"]) == code
    printed = capsys.readouterr()
    assert printed.out == "" and "constants off by 3" in printed.err


def test_lines_need_no_points() -> None:
    assert (
        calibrate.render({"source": "x", "d2d": {"staged_overhead_us": 0.0}})
        == "source: x\nd2d staged_overhead_us: 0.0"
    )
