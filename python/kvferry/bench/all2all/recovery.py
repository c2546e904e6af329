"""A rank stopped and a rank killed on purpose: what the other is told, how soon, and that all can go on.

Three processes: ranks 0 and 1, and a spare that becomes rank 1 of a new communicator after the kill.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvferry.bench.all2all import cells, data
from kvferry.bench.all2all.contenders import tensors
from kvferry.bench.all2all.device import NAME
from kvferry.bench.all2all.meeting import Meeting, Stopped
from kvferry.bench.all2all.ranks import all2all, said

if TYPE_CHECKING:
    from kvferry.bench.all2all.launch import Session
    from kvferry.bench.all2all.plan import Options

MEMBERS = 3
TIMEOUT_S = 2.0
"""What PeerTimeout is set to."""
_PATIENT_S = 30.0
_CALLS = 50
_CHILD_S = 60.0
_WAIT_S = 40.0


class _Member:
    """What a process of this section does."""

    def __init__(self, folder: Path, number: int, options: Options) -> None:
        self.meeting = Meeting(folder, number, MEMBERS, timeout=120.0)
        self.number, self.options = number, options
        self.rank = min(number, 1)
        self._torch: Any = None
        self._cell = cells.one(2, 1, 128, 32, 128)
        if options.device != "cpu":
            import torch  # noqa: PLC0415 - optional

            self._torch = torch

    def start(self) -> None:
        """Memory, when it is this section's turn."""
        maths: data.Maths = data.Numpy()
        self._device: Any = "cpu"
        if self._torch is not None:
            on_gpu = self.options.device == "gpu"
            if on_gpu:
                self._device = self.rank
                self._torch.cuda.set_device(self.rank)
            maths = data.Torch(self._torch, NAME.format(self.rank) if on_gpu else "cpu")
        self.ground = data.Ground(maths, self._cell, self.rank, 0)
        self.settle()

    def settle(self) -> None:
        """Waits for the device."""
        if self._torch is not None and self.options.device == "gpu":
            self._torch.cuda.synchronize()

    def connect(self, name: str, timeout: float) -> Any:
        """A communicator of two."""
        return all2all()(
            self.rank,
            2,
            capacity_bytes=4 << 20,
            rendezvous=f"file://{self.meeting.folder}/meet-{name}",
            device=self._device,
            timeout=timeout,
            name=name,
        )

    def checked(self, comm: Any) -> str:
        """One exchange compared; what is wrong."""
        results = tensors(comm.send_recv_heads(self.ground.inputs[0]))
        self.settle()
        comm.check()
        return self.ground.check(results)

    def until_failure(self, comm: Any, ready: str) -> dict[str, Any]:
        """Exchanges until one fails: what was raised, when, and how long that call took."""
        calls = 0
        while True:
            began = time.monotonic()
            try:
                result = comm.send_recv_heads(self.ground.inputs[0])
                self.settle()
                comm.check()
                del result
            except Exception as error:  # noqa: BLE001 - what it is, is the result
                at = time.monotonic()
                return {"at": at, "waited_s": at - began, "error": type(error).__name__, "text": said(error)}
            calls += 1
            if calls == _CALLS:
                self.meeting.set(f"{ready}-{self.number}", True)

    def attempt(self, key: str, work: Any) -> None:
        """Says how something went: empty if well."""
        try:
            fault = work() or ""
        except Exception as error:  # noqa: BLE001 - a result too
            fault = said(error)
        self.meeting.set(f"{key}-{self.number}", fault)

    def stopped(self) -> None:
        """Rank 1 is stopped; both set the communicator back afterwards."""
        comm = self.connect("stop", TIMEOUT_S)
        self.meeting.set(f"stopped-{self.number}", self.until_failure(comm, "stop-me"))
        self.meeting.get("reset")

        def reset() -> str:
            comm.reset()
            return self.checked(comm)

        self.attempt("was-reset", reset)
        self.meeting.get("close")
        with contextlib.suppress(Exception):
            comm.close()

    def killed(self) -> None:
        """Rank 1 is killed while a child of it lives."""
        comm = self.connect("kill", _PATIENT_S)
        if self.number == 1:
            self.meeting.set("child-1", _child())
        self.meeting.set(f"killed-{self.number}", self.until_failure(comm, "kill-me"))
        self.attempt("usable", self.ground.intact)
        with contextlib.suppress(Exception):
            comm.close()

    def again(self) -> None:
        """A new communicator with the spare in the dead rank's place."""
        self.meeting.get("again")

        def anew() -> str:
            with self.connect("again", _PATIENT_S) as comm:
                return self.checked(comm)

        self.attempt("anew", anew)


def _child() -> int:
    """A process that inherits everything and does nothing."""
    with warnings.catch_warnings():
        # Forking a process of several threads is just what is tried here.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        time.sleep(_CHILD_S)
        os._exit(0)
    return pid


def member(folder: Path, number: int, options: Options) -> None:
    """What each of the three does."""
    one = _Member(folder, number, options)
    one.meeting.set(f"here-{number}", os.getpid())
    one.meeting.get("begin", timeout=900.0)
    one.start()
    if number < 2:
        one.stopped()
        one.killed()
    one.again()


def drive(session: Session) -> dict[str, Any]:
    """The launcher's part: signals at the right moments; what came out, and `why` if it ended early."""
    meeting = Meeting(session.folder, MEMBERS, MEMBERS)
    found: dict[str, Any] = {"timeout_s": TIMEOUT_S}
    victim, child = session.processes[1].pid, None

    def of(number: int, key: str, patience: float = _WAIT_S) -> Any:
        """What a member says, unless it has ended."""
        end = time.monotonic() + patience
        while (said := meeting.peek(f"{key}-{number}")) is None:
            ended = session.processes[number].poll()
            if ended is not None or time.monotonic() > end:
                why = f"exited with {ended}" if ended is not None else f"said nothing for {patience:g} s"
                raise Stopped(f"member {number} {why}, {key} awaited")
            time.sleep(200e-6)
        return said

    try:
        for number in range(MEMBERS):
            of(number, "here", 120.0)
        meeting.set("begin", True)
        for number in (0, 1):
            of(number, "stop-me", 60.0)
        os.kill(victim, signal.SIGSTOP)
        try:
            found["stop"] = of(0, "stopped")
        finally:
            os.kill(victim, signal.SIGCONT)
        found["stop_other"] = of(1, "stopped")
        meeting.set("reset", True)
        found["reset"] = [of(number, "was-reset") for number in (0, 1)]
        meeting.set("close", True)
        child = of(1, "child")
        for number in (0, 1):
            of(number, "kill-me")
        found["resident_bytes"] = resident(victim)
        killed = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        found["kill"] = of(0, "killed")
        found["kill"]["delay_s"] = found["kill"]["at"] - killed
        found["child_alive"] = Path(f"/proc/{child}").exists()
        found["usable"] = of(0, "usable")
        meeting.set("again", True)
        found["anew"] = [of(number, "anew") for number in (0, 2)]
    except (Stopped, ProcessLookupError) as stopped:
        found["why"] = said(stopped)
    finally:
        if child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
    return found


def resident(pid: int) -> int:
    """Bytes of memory that a process has in use."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    return 0


def faults(found: dict[str, Any]) -> list[str]:
    """What did not go as it must, the times apart."""
    if not found:
        return []
    wrong = [f"ended early: {found['why']}"] if found.get("why") else []
    for key, name in (("stop", "PeerTimeout"), ("kill", "PeerDied")):
        if key in found and found[key]["error"] != name:
            wrong.append(f"{key}: {found[key]['text']} instead of {name}")
    for key in ("reset", "anew"):
        wrong += [f"{key}: {text}" for text in found.get(key, []) if text]
    if found.get("usable"):
        wrong.append(f"after the kill: {found['usable']}")
    return wrong
