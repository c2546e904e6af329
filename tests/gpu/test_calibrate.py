"""kf.calibrate: constants measured, saved, and used by the contexts made afterwards."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from driver import SIMULATED
from gpu_support import pair
from support import small

import kvferry as kf

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.gpu


def test_the_constants_in_force(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVFERRY_CACHE_DIR", str(tmp_path))
    shown = kf.calibrate(show=True)
    assert "H200" in shown["source"] and not list(tmp_path.iterdir())
    for direction in ("h2d", "d2h", "d2d", "p2p"):
        for engine in ("kernel", "batch"):
            curve = shown[direction][engine]
            assert curve["overhead_us"] > 0 and curve["points"] == sorted(curve["points"])
    both = pair(small(), "pinned", "device")
    with kf.TransferContext(0) as ctx:
        assert shown["source"] in ctx.plan(both.src, both.dst, [0], [0]).explain()


def test_what_is_asked_for_wrongly() -> None:
    with pytest.raises(kf.CudaError, match=str(len(kf.devices()))):
        kf.calibrate(len(kf.devices()), show=True)
    with pytest.raises(kf.OptionError, match="device"):
        kf.calibrate(-1)


@pytest.mark.slow
@pytest.mark.skipif(SIMULATED, reason="a simulated GPU has no speed")
def test_measuring(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVFERRY_CACHE_DIR", str(tmp_path))
    found = kf.calibrate(force=True)
    assert found["h2d"]["kernel"]["points"] and kf.calibrate(show=True) == found
    [path] = [path for path in tmp_path.iterdir() if path.suffix == ".json"]
    assert json.loads(path.read_text())["model"] == found
    both = pair(small(), "pinned", "device")
    with kf.TransferContext(0) as ctx:
        assert found["source"] in ctx.plan(both.src, both.dst, [0], [0]).explain()
        ctx.transfer(both.src, both.dst, [0], [1]).wait(60)
        both.check([0], [1])
