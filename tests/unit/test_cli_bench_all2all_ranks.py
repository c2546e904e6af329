"""`kvferry bench all2all` without GPUs: ranks that meet, fail, hang and end."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

np = pytest.importorskip("numpy")

from kvferry.bench.all2all import (  # noqa: E402 - they need NumPy
    launch,
    meeting,
    plan,
)

GPU = plan.Options(device="gpu", world=2)


def threads(folder: Path, world: int, work: Any) -> list[Any]:
    """Ranks as threads of this process."""
    out: list[Any] = [None] * world

    def one(rank: int) -> None:
        try:
            out[rank] = work(meeting.Meeting(folder, rank, world, timeout=20))
        except BaseException as error:  # noqa: BLE001 - looked at below
            out[rank] = error

    running = [threading.Thread(target=one, args=(rank,)) for rank in range(world)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(30)
    return out


def test_ranks_meet(tmp_path: Path) -> None:
    def work(seat: meeting.Meeting) -> Any:
        found = []
        for step in range(20):
            found.append(seat.gather("a", seat.rank * 100 + step))
            assert seat.first("b", seat.rank) == 0
            assert seat.end("") == ""
        return found

    for found in threads(tmp_path, 3, work):
        assert found == [[step, 100 + step, 200 + step] for step in range(20)]
    # What has been read is not kept.
    assert len(list(tmp_path.glob("*.json"))) <= 3 * 3 * 2


def test_a_rank_that_fails_does_not_keep_the_others_waiting(tmp_path: Path) -> None:
    def work(seat: meeting.Meeting) -> Any:
        heard = ""
        if seat.rank == 1:
            heard = "broke"
        else:
            with pytest.raises(meeting.LeftError, match="broke"):
                seat.gather("inside")
        return seat.end(heard), seat.gather("next", seat.rank)

    assert threads(tmp_path, 3, work) == [("rank 1: broke", [0, 1, 2])] * 3


def test_ranks_that_are_apart_stop(tmp_path: Path) -> None:
    apart = (
        threads(tmp_path / "a", 2, lambda seat: seat.gather(f"{seat.rank}")) if _made(tmp_path / "a") else []
    )
    assert all(isinstance(found, meeting.Stopped) for found in apart) and len(apart) == 2
    seat = meeting.Meeting(tmp_path, 0, 2, timeout=0.05)
    with pytest.raises(meeting.Stopped, match="did not come"):
        seat.gather("alone")
    (tmp_path / meeting.STOP).touch()
    with pytest.raises(meeting.Stopped, match="was ended"):
        meeting.Meeting(tmp_path, 0, 2).gather("alone")


def _made(folder: Path) -> bool:
    folder.mkdir()
    return True


def session(folder: Path, code: str, count: int = 2) -> launch.Session:
    """Workers that run a piece of Python; FOLDER and RANK are its arguments."""
    program = folder / "program.py"
    folder.mkdir(exist_ok=True)
    program.write_text("import os, sys, time\nfolder, rank = sys.argv[1], int(sys.argv[2])\n" + code)
    return launch.Session(folder / "ranks", GPU, count, command=(sys.executable, str(program)))


def test_workers_that_end_well(tmp_path: Path) -> None:
    code = 'open(f\'{folder}/rank-{rank}.jsonl\', \'a\').write(\'{"task": "t", "way": "w"}\\n{"task"\')\n'
    code += "assert os.environ['NCCL_NVLS_ENABLE'] == '0' and os.environ['MASTER_ADDR'] == '127.0.0.1'\n"
    running = session(tmp_path, code)
    assert running.wait(time.monotonic() + 30) == "" and running.log() == ""
    # A line that is not whole is left for later.
    assert [len(running.lines(rank)) for rank in (0, 1)] == [1, 1] and running.lines(0) == []


def test_a_hung_worker_is_ended_with_its_children(tmp_path: Path) -> None:
    code = "import subprocess\np = subprocess.Popen(['sleep', '600'])\n"
    code += (
        "open(f'{folder}/child-{rank}', 'w').write(str(p.pid))\nprint('begun', flush=True)\ntime.sleep(600)\n"
    )
    running = session(tmp_path, code)
    while not all((running.folder / f"child-{rank}").exists() for rank in (0, 1)):
        time.sleep(0.01)
    start = time.monotonic()
    assert running.wait(start + 0.5) == "out of time" and time.monotonic() - start < 10
    assert "rank 1: begun" in running.log()
    for rank in (0, 1):
        assert gone(int((running.folder / f"child-{rank}").read_text()))


def gone(pid: int) -> bool:
    """Whether a process has ended, or does within seconds: a signal needs the processor to arrive."""
    stat, end = Path(f"/proc/{pid}/stat"), time.monotonic() + 20
    while time.monotonic() < end:
        try:
            if stat.read_text().rsplit(")", 1)[1].split()[0] in "ZX":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False


def test_a_worker_that_fails_ends_the_others(tmp_path: Path) -> None:
    running = session(tmp_path, "if rank: sys.exit(7)\ntime.sleep(600)\n")
    start = time.monotonic()
    assert running.wait(start + 60) == "rank 1 exited with 7" and time.monotonic() - start < 30
    collector = launch.Collector(running, plan.tasks(GPU)[:2], lambda _: None)
    collector.close("rank 1 exited with 7")
    assert {found.skipped for found in collector.measured.values()} == {"rank 1 exited with 7"}


def test_ranks_end_with_their_launcher(tmp_path: Path) -> None:
    code = f"""
import time
from pathlib import Path
from kvferry.bench.all2all import launch, plan
session = launch.Session(Path({str(tmp_path)!r}), plan.Options(device="cpu", world=2), 1)
print(session.processes[0].pid, flush=True)
time.sleep(600)
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, env=launch.environment(), stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        worker = int(launcher.stdout.readline())
        end = time.monotonic() + 30
        # It waits for a rank that does not come.
        while not (tmp_path / "at-0-1-0.json").exists() and time.monotonic() < end:
            time.sleep(0.01)
        assert Path(f"/proc/{worker}").exists()
        launcher.kill()
    assert gone(worker)
