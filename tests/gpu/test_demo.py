"""`kvferry demo` and `kvferry doctor` where there is a GPU: the caches lie on it, every byte is verified."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from driver import read, write
from support import succeeds

import kvferry as kf
from kvferry.cli import _job, main
from kvferry.cli._geometries import GEOMETRIES, Placement
from kvferry.cli._render import WIDTH

pytestmark = pytest.mark.gpu

BLOCKS = 3


def test_every_geometry_goes_through_the_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--json", "--blocks", str(BLOCKS)]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert report["verified"] is True and report["device"] == 0
    for found in report["geometries"]:
        for leg in ("offload", "bring_back"):
            assert found[leg]["engine"] in ("kernel", "batch", "staged")
        assert found["every_byte_same"] is True and found["guards_intact"] is True
    assert "direction d2h" in report["explain"]
    assert report["refused"]["error"] == "kvferry.DuplicateBlockError"


def test_the_screen_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--device", "0", "--blocks", str(BLOCKS)]) == 0
    screen = capsys.readouterr().out
    assert max(map(len, screen.splitlines())) <= WIDTH and screen.isascii()
    assert screen.count("every byte same") == screen.count("guards intact") == len(GEOMETRIES)
    assert "the caches lie on GPU 0" in screen and "this job runs in host memory" not in screen
    for line in _job.the_code(0):
        assert f"  {line}\n" in screen


def test_a_wrong_byte_on_the_gpu_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    move = _job.bring_back_step

    def damaged(
        ctx: kf.TransferContext, cache: kf.PhysicalLayout, pool: kf.PhysicalLayout, at: Placement
    ) -> kf.TransferResult:
        result = move(ctx, cache, pool, at)
        part = cache.region(at.back[1], 2, 0)
        write(part.addr, read(part.addr, 2) ^ np.uint8(1))
        return result

    monkeypatch.setattr(_job, "bring_back_step", damaged)
    assert main(["demo", "--json", "--blocks", str(BLOCKS)]) == 1
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert not any(found["every_byte_same"] for found in report["geometries"])


def test_the_four_lines_run() -> None:
    geometry = GEOMETRIES[0]
    names = {
        "kf": kf,
        "config": geometry.cache_config(6),
        "pool_config": geometry.pool_config(3),
        "source": [0, 4],
        "slots": [2, 1],
        "back": [3, 5],
    }
    code = list(_job.the_code(0))
    code.insert(1, "cache.fill_pattern(1)")
    code.append("cache.verify_pattern(1, back, as_blocks=source)")
    with kf.TransferContext(0) as ctx:
        exec("\n".join(code), names | {"ctx": ctx})


def test_the_example_runs() -> None:
    path = Path(__file__).parents[2] / "examples" / "gpu_offload.py"
    assert "every byte is where it belongs" in succeeds(path.read_text())


def test_a_gpu_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--device", "99"]) == 2
    assert "GPU 99" in capsys.readouterr().err


def test_the_doctor_has_tried(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--json"])
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert all(trial["worked"] for trial in report["gpu_trials"]) and report["gpu_trials"]
