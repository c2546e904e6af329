"""Processes of a bench: one for each rank, their lines read as they come, none of them left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import kvferry
from kvferry.bench.all2all.meeting import STOP
from kvferry.bench.all2all.ranks import DONE, SKIPPED
from kvferry.bench.all2all.results import Measured, Record, gather

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvferry.bench.all2all.plan import Options, Task

_POLL_S = 0.05
_GRACE_S = 5.0
_TAIL = 1500


class Session:
    """Some workers in a folder of their own."""

    def __init__(
        self, folder: Path, options: Options, count: int, role: str = "", command: Sequence[str] = ()
    ) -> None:
        self.folder, self.count = folder, count
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "options.json").write_text(options.dump())
        run = list(command) or [sys.executable, "-m", "kvferry.bench.all2all.worker"]
        env = environment()
        self._read = [0] * count
        self.processes: list[subprocess.Popen[bytes]] = []
        for rank in range(count):
            with (folder / f"log-{rank}.txt").open("wb") as log:
                self.processes.append(
                    subprocess.Popen(
                        [*run, str(folder), str(rank), *([role] if role else [])],
                        env=env | {"RANK": str(rank), "WORLD_SIZE": str(count)},
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )

    def lines(self, rank: int) -> list[Record]:
        """What a rank has written since the last look."""
        path = self.folder / f"rank-{rank}.jsonl"
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(self._read[rank])
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read[rank] += len(whole)
        return [Record(**json.loads(line)) for line in whole.splitlines()]

    def wait(self, end: float, look: Callable[[], None] = lambda: None) -> str:
        """Until all have ended well, one has not, or the time has come. Then none is left. What was amiss."""
        amiss = ""
        try:
            while not amiss and any(process.poll() is None for process in self.processes):
                look()
                codes = [process.poll() for process in self.processes]
                bad = [f"rank {rank} exited with {code}" for rank, code in enumerate(codes) if code]
                if bad:
                    amiss = ", ".join(bad)
                elif time.monotonic() > end:
                    amiss = "out of time"
                time.sleep(_POLL_S)
            codes = [process.poll() for process in self.processes]
            amiss = amiss or ", ".join(f"rank {r} exited with {code}" for r, code in enumerate(codes) if code)
            if amiss and amiss != "out of time":
                # The others may still have something to say.
                (self.folder / STOP).touch()
                grace = min(time.monotonic() + _GRACE_S, end)
                while time.monotonic() < grace and any(each.poll() is None for each in self.processes):
                    look()
                    time.sleep(_POLL_S)
        finally:
            self.kill()
        look()
        return amiss

    def kill(self) -> None:
        """Ends what still runs, and what it has started."""
        (self.folder / STOP).touch()
        for process in self.processes:
            # The group may outlive its leader: a rank's child.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def log(self) -> str:
        """The ends of what the workers printed."""
        parts = []
        for rank in range(self.count):
            text = (self.folder / f"log-{rank}.txt").read_text(errors="replace").strip()
            if text:
                parts.append(
                    f"rank {rank}: ...{text[-_TAIL:]}" if len(text) > _TAIL else f"rank {rank}: {text}"
                )
        return "\n".join(parts)


class Collector:
    """Puts the ranks' lines together, task by task."""

    def __init__(self, session: Session, tasks: list[Task], told: Callable[[Measured], None]) -> None:
        self._session, self._told = session, told
        self._tasks = {task.name: task for task in tasks}
        self._records: list[list[Record]] = [[] for _ in range(session.count)]
        self.measured: dict[str, Measured] = {}
        self.crashes: list[str] = []

    def look(self) -> None:
        """Reads what is new."""
        for rank, records in enumerate(self._records):
            for record in self._session.lines(rank):
                if record.task:
                    records.append(record)
                else:
                    self.crashes.append(f"rank {rank}: {record.why}")
        for name, task in self._tasks.items():
            if name in self.measured:
                continue
            of_task = [[r for r in records if r.task == name] for records in self._records]
            ends = [next((r for r in ranks if r.way in (DONE, SKIPPED)), None) for ranks in of_task]
            if None not in ends:
                self._finish(task, of_task, next((r.why for r in ends if r and r.way == SKIPPED), ""))

    def close(self, why: str) -> None:
        """What has not ended: with what it has, and why there is no more."""
        for name, task in self._tasks.items():
            if name not in self.measured:
                of_task = [[r for r in records if r.task == name] for records in self._records]
                self._finish(task, of_task, why or "not reached")

    def _finish(self, task: Task, lines: list[list[Record]], skipped: str) -> None:
        found = [[r for r in records if r.way not in (DONE, SKIPPED)] for records in lines]
        measured = gather(task, found)
        measured.skipped = skipped
        self.measured[task.name] = measured
        self._told(measured)


def environment() -> dict[str, str]:
    """A worker's: this kvferry, NCCL among processes of one machine, no multicast."""
    root = str(Path(kvferry.__file__).resolve().parent.parent)
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "PYTHONUNBUFFERED": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NVSHMEM_DISABLE_NVLS": "1",
    }
