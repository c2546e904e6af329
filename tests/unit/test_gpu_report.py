"""scripts/gpu_report.py without a GPU: choosing sections, time limits, and what it writes."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gpu_report.py"


@pytest.fixture(scope="module")
def report() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_report", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_report"] = module
    spec.loader.exec_module(module)
    return module


def plan(report: Any, out: Path, **changes: Any) -> Any:
    known = {"out": out, "name": "x", "binaries": out / "bin", "limit": None, "bench": (), "devices": 1}
    return report.Plan(**(known | changes))


def test_sections_are_chosen_by_name_and_group(report: Any) -> None:
    assert report.chosen("bench,gpu") == ("gpu", "bench")
    assert report.chosen("tests,bench") == ("gpu", "multigpu", "sanitize", "rust", "bench")
    assert set(report.chosen("all")) == set(report.SECTIONS)
    with pytest.raises(argparse.ArgumentTypeError, match="'speed' is not one of"):
        report.chosen("gpu,speed")
    assert "host" not in report.parse([]).only


def test_a_section_has_its_output_and_exit_code(
    report: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [
        sys.executable,
        "-c",
        "import os; print(os.environ['KVFERRY_REQUIRE_GPU']); raise SystemExit(3)",
    ]
    section = report.run(plan(report, tmp_path), "three", command, 60)
    assert (section.exit_code, section.good, section.tail.strip()) == (3, False, "1")
    assert "1\n" in capsys.readouterr().out


def test_a_section_out_of_time_is_ended_with_its_children(report: Any, tmp_path: Path) -> None:
    nested = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    command = [sys.executable, "-c", f"print('begun', flush=True)\n{nested}"]
    section = report.run(plan(report, tmp_path, limit=3.0), "slow", command, 600)
    assert section.exit_code == report.TIMED_OUT and not section.good
    assert section.seconds < 60 and "begun" in section.tail


def test_rust_binaries_are_found(report: Any, tmp_path: Path) -> None:
    assert list(report.rust(plan(report, tmp_path))) == []
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "notes.txt").write_text("no program")
    for name, code in (("b", 1), ("a", 0)):
        program = folder / name
        program.write_text(f"#!/bin/sh\nexit {code}\n")
        program.chmod(0o755)
    found = list(report.rust(plan(report, tmp_path)))
    assert [(section.name, section.good) for section in found] == [("rust a", True), ("rust b", False)]


def test_no_sanitizer_is_a_failure(report: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "SANITIZERS", ("no-such-program",))
    found = list(report.sanitize(plan(report, tmp_path)))
    assert [section.exit_code for section in found] == [report.NOT_THERE] * 2
    assert not any(section.good for section in found)


def test_all2all_brings_its_bars(report: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(report.all2all(plan(report, tmp_path))) == []
    bar = {"case": "small", "limit": 8.5, "at_least": False, "unit": "us", "value": 7.81234, "why_not": ""}
    bars = [bar | {"state": "met"}, bar | {"state": "missed", "value": 9.0}]
    bars.append(bar | {"state": "not measured", "value": None, "why_not": "no time left"})

    def run(_: Any, name: str, command: list[str], limit: float) -> Any:
        Path(command[command.index("--json") + 1]).write_text(json.dumps({"bars": bars}))
        return report.Section(name, command, 0, 1.0)

    monkeypatch.setattr(report, "run", run)
    (section,) = report.all2all(plan(report, tmp_path, devices=2, all2all=("--full",)))
    assert section.bars == bars and section.command[-1] == "--full"
    report.write(plan(report, tmp_path), {"date": "x"}, [section])
    assert json.loads((tmp_path / "x.json").read_text())["sections"][0]["bars"] == bars
    text = (tmp_path / "x.md").read_text()
    assert "| small | <= 8.5 us | 7.81 us | met |" in text and "| 9 us | **missed** |" in text
    assert "| - (no time left) | not measured |" in text


def test_the_report_is_written(report: Any, tmp_path: Path) -> None:
    about: dict[str, object] = {"date": "2026-12-01"}
    sections = [
        report.Section("good", ["true"], 0, 1.0, {"tests": 3}, "fine"),
        report.Section("slow", ["sleep"], report.TIMED_OUT, 9.0),
        report.Section("bad", ["false"], 1, 0.1),
        report.Section("nothing selected", ["pytest"], 5, 0.1),
    ]
    report.write(plan(report, tmp_path), about, sections)
    facts = json.loads((tmp_path / "x.json").read_text())
    assert [section["exit_code"] for section in facts["sections"]] == [0, report.TIMED_OUT, 1, 5]
    text = (tmp_path / "x.md").read_text()
    assert "| good | ok | 1.0 | 3 tests |" in text and "| nothing selected | ok |" in text
    assert "**out of time**" in text and "**exit 1**" in text
