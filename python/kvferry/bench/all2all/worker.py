"""One rank: `python -m kvferry.bench.all2all.worker FOLDER RANK`. Goes through the plan and writes lines."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvferry.bench.all2all import clock, cpu, data, extra, plan, recovery
from kvferry.bench.all2all.exchange import Exchanges
from kvferry.bench.all2all.meeting import Meeting, Stopped
from kvferry.bench.all2all.plan import Options
from kvferry.bench.all2all.ranks import SKIPPED, Seat, said
from kvferry.bench.all2all.results import Record

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvferry.bench.all2all.device import Device
    from kvferry.bench.all2all.plan import Task


_PR_SET_PDEATHSIG = 1


class Bench:
    """A rank that measures."""

    def __init__(self, folder: Path, rank: int, options: Options) -> None:
        self._options, self._tasks = options, plan.tasks(options)
        self._meeting = Meeting(folder, rank, options.world)
        self._seat = Seat(folder, options, self._meeting, None)
        self._seat.capacity = plan.capacity(self._tasks)
        self._device: Device | None = None

    def run(self) -> None:
        """The plan."""
        seat, measure = self._seat, self._prepare()
        for number, task in enumerate(self._tasks):
            late = self._options.deadline is not None and time.monotonic() > self._options.deadline
            if self._meeting.first(f"begin {number}", late):
                seat.ended(task, SKIPPED, "no time left")
                continue
            measure(task)
            seat.ended(task)
        seat.drop()
        self._finish()

    def _prepare(self) -> Callable[[Task], None]:
        seat, options = self._seat, self._options
        if options.device == "cpu":
            seat.device = "cpu"
            return lambda task: cpu.run(seat, task)
        device = self._open()
        self._device = device
        maths = data.Torch(device.torch, device.name)
        watch = clock.Clock(device, self._meeting, clock.EFFORTS[options.selection])
        exchanges, beside = Exchanges(seat, device, maths, watch), extra.Beside(seat, device, maths, watch)

        def measure(task: Task) -> None:
            if task.kind == "exchange":
                exchanges.run(task)
            elif task.kind == "setup":
                extra.setup(seat, task)
            elif task.kind == "cost":
                ground = data.Ground(maths, task.cell, self._meeting.rank, options.seed)
                device.settle()
                with device.on():
                    extra.cost(seat, task, ground, device.settle)
            elif task.kind == "gemm":
                beside.gemm(task)
            else:
                beside.skew(task)

        return measure

    def _open(self) -> Device:
        from kvferry.bench.all2all import device as devices  # noqa: PLC0415 - torch

        meeting, options = self._meeting, self._options
        facts: dict[str, Any] = {}
        if options.device == "host":
            found: Device = devices.Host(meeting)
            self._seat.device = "cpu"
            self._group(found, "gloo")
        else:
            need = plan.capacity(self._tasks)
            gpu, fault = self._seat.together(lambda: devices.Gpu(meeting, need))
            if fault:
                raise Stopped(fault)
            self._seat.device = meeting.rank
            found = gpu
            _, facts["peer memory"] = self._seat.together(gpu.join)
            _, facts["torch.distributed"] = self._seat.together(lambda: self._group(gpu, "nccl"))
            if facts["peer memory"] and facts["torch.distributed"]:
                raise Stopped(f"neither peer memory nor NCCL: {facts}")
            gpu.mapped = not facts["peer memory"]
        facts = {name: text for name, text in facts.items() if text}
        facts |= {"torch": found.torch.__version__, "sms": found.sms}
        if options.device == "gpu":
            facts["nccl"] = ".".join(map(str, found.torch.cuda.nccl.version()))
        if meeting.rank == 0:
            meeting.set("facts", facts)
        return found

    def _group(self, device: Device, backend: str) -> None:
        """torch.distributed over all ranks, its store a file."""
        import torch.distributed as dist  # noqa: PLC0415 - optional

        where: dict[str, Any] = {"timeout": timedelta(seconds=90)}
        where |= {} if backend == "gloo" else {"device_id": device.torch.device(device.name)}
        dist.init_process_group(backend, rank=self._meeting.rank, world_size=self._options.world, **where)
        dist.barrier()

    def _finish(self) -> None:
        if self._device is not None:
            import torch.distributed as dist  # noqa: PLC0415 - optional

            self._device.settle()
            self._meeting.gather("finished")
            if dist.is_initialized():
                dist.destroy_process_group()


def _tied_to_launcher() -> None:
    """Ends with it, however it ends: a rank left over would keep its GPU busy."""
    launcher = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        os.kill(os.getpid(), signal.SIGKILL)


def main(arguments: list[str]) -> int:
    """The rank's exit code."""
    _tied_to_launcher()
    folder, rank = Path(arguments[0]), int(arguments[1])
    options = Options.load((folder / "options.json").read_text())
    role = arguments[2] if len(arguments) > 2 else "bench"
    try:
        if role == "recovery":
            recovery.member(folder, rank, options)
        else:
            Bench(folder, rank, options).run()
    except Stopped as stopped:
        sys.stderr.write(f"{stopped}\n")
        return 3
    except Exception as error:  # noqa: BLE001 - the launcher must hear of it
        traceback.print_exc()
        with (folder / f"rank-{rank}.jsonl").open("a") as lines:
            lines.write(Record("", "", why=said(error)).dump())
        return 1
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Libraries of a failed run may wait at exit for ranks that are gone.
    os._exit(code)
