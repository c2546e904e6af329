"""`kvferry explain`: layouts by kind or JSON; the plan's words and counts; errors without traceback."""

from __future__ import annotations

import argparse
import io
import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

import kvferry as kf
from kvferry.cli import explain, main

if TYPE_CHECKING:
    from pathlib import Path

SMALL = ["--blocks", "8", "--layers", "4", "--page", "4", "--heads", "2", "--dim", "16"]
LW, POOL = "layer_separate:block_first:NHD", "fully_contiguous:universal"


def explained(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert main(["explain", *options, "--json"]) == 0
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    return facts


def refused(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["explain", *options]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "Traceback" not in printed.err
    assert printed.err.startswith("kvferry explain: ")
    return printed.err


@pytest.mark.parametrize(("text", "expected"), [("3,5,7-9", [3, 5, 7, 8, 9]), ("0", [0]), ("2-2, 1", [2, 1])])
def test_ids(text: str, expected: list[int]) -> None:
    assert explain.ids(text) == expected


@pytest.mark.parametrize("text", ["", "a", "5-3", "1,,2", "-1", "1-", "0-99999999999"])
def test_ids_that_are_none(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        explain.ids(text)


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--src", LW],
        ["--src", LW, "--dst", POOL, "--tp", "1"],
        ["--src", LW, "--dst", POOL, "--layer-range", "3"],
        ["--src", LW, "--dst", POOL, "--src-ids", "9-1"],
        ["--src", LW, "--dst", POOL, "--src-memory", "disk"],
        ["--src", LW, "--dst", POOL, "--layers", "many"],
    ],
)
def test_wrong_usage_is_refused(capsys: pytest.CaptureFixture[str], options: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["explain", *options])
    assert exit_.value.code == 2
    assert "usage: kvferry explain" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--src", "nowhere.json", "--dst", POOL], "nowhere.json"),
        (["--src", "fully_contiguous:NHD:HND", "--dst", POOL], "exclude each other"),
        (["--src", "fully_contiguous:sideways", "--dst", POOL], "sideways"),
        (["--src", LW, "--dst", POOL, "--heads", "6", "--tp", "0/4"], "LayoutError"),
        (["--src", LW, "--dst", POOL, "--layers", "0"], "LayoutError"),
        (["--src", LW, "--dst", POOL, "--dst-blocks-total", "0"], "LayoutError"),
        (["--src", LW, "--dst", POOL, "--dtype", "float7"], "float7"),
        (["--src", "{}", "--dst", "{}", "--layers", "3"], "--layers"),
        (["--src", "{}", "--dst", POOL, "--tp", "0/2"], "--tp"),
        (["--src", LW, "--dst", "{}", "--dst-page", "8"], "--dst-page"),
        (["--src", "-", "--dst", "-"], "standard input"),
    ],
)
def test_errors_say_why(capsys: pytest.CaptureFixture[str], options: list[str], reason: str) -> None:
    assert reason in refused(capsys, *options)


def test_the_screen_is_the_plans_own(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--src", LW, "--dst", POOL, *SMALL, "--src-ids", "3,5", "--dst-ids", "0-1"]
    assert main(["explain", *options]) == 0
    screen = capsys.readouterr().out
    assert screen.startswith("LayerSeparate block_first NHD (system) -> FullyContiguous universal (system)\n")
    assert screen.rstrip("\n") == explained(capsys, *options)["explain"].rstrip("\n")


def test_counts_are_those_of_real_layouts(capsys: pytest.CaptureFixture[str]) -> None:
    facts = explained(
        capsys,
        "--src",
        LW,
        "--dst",
        POOL,
        *SMALL,
        "--src-ids",
        "3,5,1",
        "--dst-ids",
        "0-2",
        "--layer-range",
        "1:3",
    )
    config = kf.LayoutConfig(
        num_blocks=8, num_layers=4, page_size=4, num_heads=2, head_dim=16, dtype="bfloat16"
    )
    src = kf.PhysicalLayout.layer_separate(config, kf.system())
    dst = kf.PhysicalLayout.fully_contiguous(config, kf.system(), order="universal")
    with kf.TransferContext(threads=1) as context:
        plan = context.plan(src, dst, [3, 5, 1], [0, 1, 2], layers=range(1, 3))
    assert (facts["blocks"], facts["bytes"]) == (plan.blocks, plan.bytes)
    assert facts["elementary_runs"] == plan.elementary_runs
    assert (facts["num_runs"], tuple(facts["run_bytes"])) == (plan.num_runs, plan.run_bytes)
    assert (facts["transforms"], facts["engine"]) == (plan.transforms, "host")


def test_one_ranks_heads_into_a_pool_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    whole = explained(capsys, "--src", LW, "--dst", POOL, *SMALL)
    share = explained(capsys, "--src", LW, "--dst", POOL, *SMALL, "--tp", "1/2")
    heads = explained(capsys, "--src", LW, "--dst", POOL, *SMALL, "--head-range", "1:2")
    assert share["bytes"] == heads["bytes"] == whole["bytes"] // 2
    back = explained(capsys, "--src", POOL, "--dst", LW, *SMALL, "--dst-tp", "1/2")
    assert back["bytes"] == share["bytes"]


def test_nothing_is_allocated(capsys: pytest.CaptureFixture[str]) -> None:
    huge = ["--blocks", "4000000", "--layers", "80"]
    facts = explained(capsys, "--src", LW, "--dst", POOL, *huge, "--src-ids", "3999999", "--dst-ids", "7")
    assert facts["blocks"] == 1


def test_descriptors_inline_from_a_file_and_from_standard_input(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = explained(capsys, "--src", LW, "--dst", POOL, *SMALL)
    src, dst = json.dumps(expected["src"]), json.dumps(expected["dst"])
    (tmp_path / "src.json").write_text(src)
    monkeypatch.setattr(sys, "stdin", io.StringIO(dst))
    assert explained(capsys, "--src", str(tmp_path / "src.json"), "--dst", "-") == expected
    assert explained(capsys, "--src", src, "--dst", dst) == expected
    assert explained(capsys, "--src", src, "--dst", POOL, *SMALL) == expected


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--src-ids", "8"], "BlockIdError"),
        (["--src-ids", "1,2", "--dst-ids", "3,3"], "DuplicateBlockError"),
        (["--src-ids", "1,2"], "Error"),
        (["--engine", "steam"], "OptionError"),
        (["--engine", "kernel"], "Unsupported"),
        (["--forbid-transform"], "LayoutError"),
        (["--layer-range", "0:9"], "Error"),
        (["--head-range", "2:1"], "Error"),
    ],
)
def test_refused_transfers_say_why(
    capsys: pytest.CaptureFixture[str], options: list[str], error: str
) -> None:
    assert error in refused(capsys, "--src", LW, "--dst", POOL, *SMALL, *options)


@pytest.mark.parametrize("text", ["{", "{}", '{"version": 99}', "[" * 10000, '{"version": 1, "kind": 3}'])
def test_hostile_descriptors(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str) -> None:
    path = tmp_path / "hostile.json"
    path.write_text(text)
    assert "Error" in refused(capsys, "--src", str(path), "--dst", POOL)


def test_binary_files_and_folders(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    refused(capsys, "--src", str(tmp_path / "binary"), "--dst", POOL)
    refused(capsys, "--src", str(tmp_path), "--dst", POOL)


@pytest.mark.parametrize("kind", ["fully_contiguous", "layer_separate", "split_kv", "block_pool"])
def test_every_kind(capsys: pytest.CaptureFixture[str], kind: str) -> None:
    assert explained(capsys, "--src", kind, "--dst", f"{kind}:HND", *SMALL)["bytes"] == 4 * 2 * 4 * 2 * 16 * 2


def test_memories_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--src", LW, "--dst", POOL, *SMALL, "--src-memory", "device:0", "--dst-memory", "pinned"]
    code = main(["explain", *options])
    printed = capsys.readouterr()
    assert code in {0, 2}
    assert "d2h" in printed.out + printed.err
