"""`kvferry demo`: verifies what it says it verifies, and says where a wrong byte is."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

import kvferry as kf
from kvferry.cli import main
from kvferry.cli._geometries import GEOMETRIES, Placement
from kvferry.cli._render import OPENING, WIDTH, Screen
from kvferry.cli._report import Refusal

if TYPE_CHECKING:
    from collections.abc import Callable

np = pytest.importorskip("numpy")

from kvferry.cli import _exchange, _job, _pattern  # noqa: E402 - they need NumPy

BLOCKS = 3
LLAMA_8B, LLAMA_70B, _, DEEPSEEK, ODD = GEOMETRIES


def run_json(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, Any]]:
    options = ("--only", "blocks", "--device", "cpu", "--blocks", str(BLOCKS), *options)
    code = main(["demo", "--json", *options])
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, report


def after(
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    damage: Callable[[kf.PhysicalLayout, kf.PhysicalLayout, Placement], None],
) -> None:
    """Has `damage` follow every move of `step`."""
    move = getattr(_job, step)

    def moved(
        ctx: kf.TransferContext, cache: kf.PhysicalLayout, pool: kf.PhysicalLayout, at: Placement
    ) -> kf.TransferResult:
        result: kf.TransferResult = move(ctx, cache, pool, at)
        damage(cache, pool, at)
        return result

    monkeypatch.setattr(_job, step, moved)


def is_of(geometry: Any, layout: kf.PhysicalLayout) -> bool:
    config = layout.config
    return (config.num_layers, config.total_heads) == (geometry.layers, geometry.heads)


def flip(layout: kf.PhysicalLayout, slot: int, layer: int, outer: int, index: tuple[int, int, int]) -> None:
    """Flips one bit of one element of an NHD-ordered part [token, head, dim]."""
    config = layout.config
    part = np.asarray(layout.region(slot, layer, outer)).view(np.uint16)
    part = part.reshape(config.page_size, config.num_heads, config.head_dim)
    part[index] ^= 0x0100
    assert np.shares_memory(part, np.asarray(layout.region(slot, layer, outer)))


def test_every_byte_of_every_geometry_is_verified(capsys: pytest.CaptureFixture[str]) -> None:
    code, report = run_json(capsys)
    assert code == 0
    assert report["verified"] is True
    assert [found["name"] for found in report["geometries"]] == [geometry.name for geometry in GEOMETRIES]
    for geometry, found in zip(GEOMETRIES, report["geometries"], strict=True):
        ranks = geometry.shard[1] if geometry.shard else 1
        own = (
            geometry.layers * geometry.outer * geometry.page * geometry.heads * geometry.head_dim * 2 // ranks
        )
        assert found["offload"]["bytes"] == found["bring_back"]["bytes"] == BLOCKS * own
        assert len(found["offload"]["seconds"]) == _job.MOVES
        assert found["offload"]["elementary_runs"] >= found["offload"]["runs"] > 0
        assert found["every_byte_same"] is True
        assert found["guards_intact"] is True
        # Each block in the three places where it must lie; and all of both memories that is neither.
        assert found["findings"]["checked_bytes"] == 3 * BLOCKS * own
        everything = found["cache_blocks"] * own + found["pool_blocks"] * own * ranks
        assert found["findings"]["guard_bytes"] == everything - 3 * BLOCKS * own
    assert report["machine"]["kvferry"] == kf.__version__
    assert "runs:" in report["explain"]
    assert report["refused"]["error"] == "kvferry.DuplicateBlockError"
    assert report["refused"]["fields"] == {
        "value": report["refused"]["fields"]["value"],
        "first": 0,
        "second": 1,
    }


@pytest.mark.parametrize("seed", ["1", "-7"])
def test_other_seeds_and_a_single_block(capsys: pytest.CaptureFixture[str], seed: str) -> None:
    code, report = run_json(capsys, "--seed", seed, "--blocks", "1")
    assert code == 0
    assert report["verified"] is True
    assert report["geometries"][0]["moved_blocks"] == 1


def test_a_wrong_byte_brought_back_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    touched: list[Placement] = []

    def damage(cache: kf.PhysicalLayout, _: kf.PhysicalLayout, at: Placement) -> None:
        if is_of(LLAMA_8B, cache):
            touched.append(at)
            # Once, in the last move: the one that goes into freshly poisoned slots.
            if len(touched) == _job.MOVES:
                flip(cache, at.back[1], 2, 1, (3, 5, 7))

    after(monkeypatch, "bring_back_step", damage)
    code, report = run_json(capsys)
    assert code == 1
    assert report["verified"] is False
    assert [found["every_byte_same"] for found in report["geometries"]] == [False, True, True, True, True]
    assert all(found["guards_intact"] for found in report["geometries"])
    findings = report["geometries"][0]["findings"]
    assert findings["wrong_elements"] == 1
    (difference,) = findings["differences"]
    assert difference["expected"] ^ difference["found"] == 0x0100
    del difference["expected"], difference["found"]
    assert difference == {
        "geometry": "Llama-3.1-8B",
        "where": "cache, brought back",
        "slot": touched[0].back[1],
        "block": touched[0].source[1],
        "layer": 2,
        "outer": 1,
        "token": 3,
        "head": 5,
        "dim": 7,
    }


def test_a_wrong_byte_in_the_pool_is_named_on_the_screen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slots: list[Placement] = []

    def damage(_: kf.PhysicalLayout, pool: kf.PhysicalLayout, at: Placement) -> None:
        if is_of(DEEPSEEK, pool):
            slots[:] = [at]
            flip(pool, at.pool[0], 60, 0, (15, 0, 575))

    # The last of an odd number of bring-backs leaves the pool wrong and the cache right.
    after(monkeypatch, "bring_back_step", damage)
    assert main(["demo", "--only", "blocks", "--device", "cpu", "--blocks", str(BLOCKS)]) == 1
    screen = " ".join(capsys.readouterr().out.split())
    at = slots[0]
    assert "DIFFERENCES FOUND" in screen
    assert (
        f"DeepSeek-V3 MLA: pool, slot {at.pool[0]} (block {at.source[0]}), layer 60, outer 0, "
        "token 15, head 0, dim 575:" in screen
    )


def test_a_written_guard_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def damage(cache: kf.PhysicalLayout, _: kf.PhysicalLayout, at: Placement) -> None:
        if is_of(LLAMA_8B, cache):
            np.asarray(cache.region(at.cache_guards[-1], 31, 1))[...] = 0

    after(monkeypatch, "bring_back_step", damage)
    code, report = run_json(capsys)
    assert code == 1
    found = report["geometries"][0]
    assert found["every_byte_same"] is True
    assert found["guards_intact"] is False
    assert found["findings"]["wrong_guard_elements"] == 16 * 8 * 128
    assert len(found["findings"]["differences"]) == _pattern.KEPT_DIFFERENCES
    assert found["findings"]["differences"][0]["block"] is None
    assert found["findings"]["differences"][0]["where"] == "cache guard"


def test_another_ranks_head_in_the_pool_is_a_guard(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def damage(_: kf.PhysicalLayout, pool: kf.PhysicalLayout, at: Placement) -> None:
        if is_of(LLAMA_70B, pool):
            _job._look_into(pool, "universal").planes[79][1][at.pool[2], 15, 7, 127] = 0

    after(monkeypatch, "bring_back_step", damage)
    code, report = run_json(capsys)
    assert code == 1
    (difference,) = report["geometries"][1]["findings"]["differences"]
    assert difference["where"] == "pool, another rank's heads"
    assert [difference[axis] for axis in ("layer", "outer", "token", "head", "dim")] == [79, 1, 15, 7, 127]


def heads_json(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, Any]]:
    code = main(["demo", "--json", "--only", "heads", *options])
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, report["exchange"]


def test_four_processes_exchange_heads_and_lose_one(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = heads_json(capsys, "--seed", "3")
    assert code == 0 and found["good"] is True and found["trouble"] == ""
    assert (found["tokens"], found["heads"]) == ([500, 301, 0, 223], [8, 8, 7, 7])
    # Three tensors of bfloat16: all tokens of a rank's heads, and back all heads of its tokens.
    assert found["checked_bytes"] == 2 * 3 * 1024 * 30 * 64 * 2
    assert found["wrong_elements"] == 0 and found["attention_difference"] <= 1e-6
    assert [death["rank"] for death in found["deaths"]] == [0, 1, 3]
    for death in found["deaths"]:
        assert (death["error"], death["peer"], death["pid"]) == ("PeerDied", 2, found["pid"])
        assert 0 <= death["milliseconds"] < 1000


def test_ranks_that_cannot_run_fail_the_demo(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_exchange, "CAPACITY", 1)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert main(["demo", "--only", "heads"]) == 1
    assert "COULD NOT BE RUN: rank 0 ended" in capsys.readouterr().out


def test_a_wrong_element_after_an_exchange_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def damaged(found: Any, *_: Any) -> None:
        found.wrong_elements = 1

    monkeypatch.setattr(_exchange, "_collect", damaged)
    code, found = heads_json(capsys)
    assert code == 1 and found["good"] is False


def test_a_transfer_that_moves_nothing_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    move = _job.offload_step

    def to_itself(
        ctx: kf.TransferContext, cache: kf.PhysicalLayout, pool: kf.PhysicalLayout, at: Placement
    ) -> kf.TransferResult:
        if not is_of(ODD, cache):
            return move(ctx, cache, pool, at)
        return ctx.transfer(cache, pool, [], []).wait()

    monkeypatch.setattr(_job, "offload_step", to_itself)
    code, report = run_json(capsys)
    assert code == 1
    assert report["geometries"][-1]["every_byte_same"] is False


def test_a_mistake_let_through_fails_the_demo(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refusal = Refusal("ctx.transfer(...)", "", "", "not refused", {})
    monkeypatch.setattr(_job, "_make_mistake", lambda *_: refusal)
    assert main(["demo", "--only", "blocks", "--device", "cpu", "--blocks", "1"]) == 1
    assert "NOT REFUSED" in capsys.readouterr().out


def test_the_screen_is_plain_and_narrow(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--device", "cpu", "--blocks", str(BLOCKS)]) == 0
    screen = capsys.readouterr().out
    lines = screen.splitlines()
    assert lines[0] == OPENING
    assert max(map(len, lines)) <= WIDTH
    assert screen.isascii()
    assert "\033" not in screen
    assert screen.count("every byte same") == screen.count("guards intact") == len(GEOMETRIES)
    for line in _job.the_code(None):
        assert f"  {line}\n" in screen
    assert "8, 8, 7, 7 heads" in screen and "one process: equal" in " ".join(screen.split())
    assert screen.count("PeerDied: rank 2") == 3
    assert lines[-1].startswith("verified: ") and "MB of heads" in lines[-1]


@pytest.mark.parametrize(
    ("tty", "no_color", "painted"), [(True, None, True), (True, "1", False), (False, None, False)]
)
def test_colours_only_on_a_terminal_that_wants_them(
    monkeypatch: pytest.MonkeyPatch, tty: bool, no_color: str | None, painted: bool
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color:
        monkeypatch.setenv("NO_COLOR", no_color)
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: tty)
    Screen(out).opening()
    assert ("\033[" in out.getvalue()) is painted


def test_the_four_lines_run() -> None:
    shape = (2, 6, 16, 8, 128)
    tensors = [np.full(shape, layer, np.uint16) for layer in range(LLAMA_8B.layers)]
    names = {
        "kf": kf,
        "tensors": tensors,
        "config": LLAMA_8B.cache_config(6),
        "pool_config": LLAMA_8B.pool_config(3),
        "source": [0, 4],
        "slots": [2, 1],
        "back": [3, 5],
    }
    for tensor in tensors:
        tensor[:, 4] += 100
    with kf.TransferContext() as ctx:
        exec("\n".join(_job.the_code(None)), names | {"ctx": ctx})
    for layer, tensor in enumerate(tensors):
        assert (tensor[:, 3] == layer).all()
        assert (tensor[:, 5] == layer + 100).all()


def test_without_numpy_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["demo", "--json"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert "pip install numpy" in printed.err


def splitmix64(state: int) -> int:
    """The published generator, one value, in plain integers."""
    mask = (1 << 64) - 1
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
    return state ^ (state >> 31)


def test_the_ground_truth_depends_on_every_coordinate() -> None:
    sizes: dict[str, int] = {"layers": 3, "outer": 2, "page": 5, "total_heads": 4, "head_dim": 10}
    own = _pattern.Pattern("key", **sizes, heads=range(1, 3))
    whole = _pattern.Pattern("key", **sizes, heads=range(4))
    assert np.array_equal(own.chunk(6, 2), whole.chunk(6, 2)[:, :, 1:3])
    chunks = [whole.chunk(block, layer).copy() for block in range(4) for layer in range(3)]
    values = np.stack(chunks)
    # Rows of ten 16-bit values: all different, whichever coordinate differs.
    assert len(np.unique(values.reshape(-1, 10), axis=0)) == 4 * 3 * 2 * 5 * 4
    other = _pattern.Pattern("another key", **sizes, heads=range(4))
    assert (other.chunk(0, 0) != chunks[0]).mean() > 0.99

    key = int.from_bytes(hashlib.blake2b(b"key", digest_size=8).digest(), "little")
    block, layer, outer, token, head, dim = 3, 1, 1, 4, 2, 9
    words = 3
    number = ((((block * 3 + layer) * 2 + outer) * 5 + token) * 4 + head) * words + dim // 4
    word = splitmix64((key + number * 0x9E3779B97F4A7C15) % (1 << 64))
    assert whole.chunk(block, layer)[outer, token, head, dim] == (word >> (16 * (dim % 4))) & 0xFFFF


def test_placements_leave_guards_and_never_reuse_a_slot() -> None:
    at = Placement.scattered(BLOCKS, "any")
    cache = at.source + at.back + at.cache_guards
    assert sorted(cache) == list(range(at.cache_blocks))
    assert sorted(at.pool + at.pool_guards) == list(range(at.pool_blocks))
    assert len(at.source) == len(at.pool) == len(at.back) == BLOCKS
    assert at.cache_guards and at.pool_guards


@pytest.mark.parametrize(
    "options",
    [[], ["nothing"], ["demo", "--blocks", "0"], ["demo", "--blocks", "x"], ["demo", "--device", "gpu"]],
)
def test_wrong_usage_is_refused(capsys: pytest.CaptureFixture[str], options: list[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(options)
    assert refused.value.code == 2
    assert "usage: kvferry" in capsys.readouterr().err


def test_it_runs_as_a_module() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "kvferry", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "demo" in run.stdout
    lean = "import sys, kvferry.cli; sys.exit('numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", lean], timeout=60, check=True)
