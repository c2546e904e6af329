"""A stand-in for kf.All2All over files, for tests of the bench: slow, but right, and with the same errors.

Run as `python fake_all2all.py FOLDER RANK [ROLE]` it is a worker of the bench whose kvferry has it. What
`FAKE_FAULT` names goes wrong: "bytes" in every result of rank 1, "raise" in every call of rank 0, "hang" in
rank 1's third.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np

import kvferry as kf


class PeerTimeout(kf.Error, TimeoutError):  # noqa: N818 - kvferry's name
    pass


class PeerDied(kf.Error, ConnectionError):  # noqa: N818 - kvferry's name
    pass


def equal(count: int, world: int) -> list[range]:
    least, more = divmod(count, world)
    starts = [rank * least + min(rank, more) for rank in range(world + 1)]
    return [range(first, last) for first, last in pairwise(starts)]


class All2All:
    def __init__(self, rank: int, world: int, **options: Any) -> None:
        self._rank, self._world, self._timeout = rank, world, options["timeout"]
        self._folder = Path(options["rendezvous"].removeprefix("file://") + "-fake")
        self._folder.mkdir(exist_ok=True)
        self._epoch, self._broken = 0, ""
        self._fault = os.environ.get("FAKE_FAULT", "")
        self._write("pid", np.array(os.getpid()))
        self._pids = [int(self._read("pid", peer)) for peer in range(world)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, key: str, value: Any) -> None:
        draft = self._folder / f"draft-{self._rank}.npy"
        np.save(draft, value)
        draft.rename(self._folder / f"{key}-{self._rank}.npy")

    def _read(self, key: str, peer: int) -> Any:
        path, end = self._folder / f"{key}-{peer}.npy", time.monotonic() + self._timeout
        while not path.exists():
            if key != "pid":
                state = Path(f"/proc/{self._pids[peer]}/stat")
                if not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z":
                    raise PeerDied(f"rank {peer} died")
            if time.monotonic() > end:
                raise PeerTimeout(f"no {key} of rank {peer}")
            time.sleep(100e-6)
        return np.load(path)

    def send_recv_heads(self, given: Any, **options: Any) -> Any:
        several = isinstance(given, tuple)
        inputs = list(given) if several else [given]
        self._epoch += 1
        if self._fault == "hang" and self._rank == 1 and self._epoch == 3:
            time.sleep(600)
        if self._fault == "raise" and self._rank == 0:
            raise kf.Error("made to fail")
        try:
            outs = [self._one(number, each, inputs, options) for number, each in enumerate(inputs)]
        except kf.Error as error:
            self._broken = type(error).__name__
            raise
        return tuple(outs) if several else outs[0]

    def _one(self, number: int, x: Any, inputs: list[Any], options: dict[str, Any]) -> Any:
        heads, most = x.shape[2], max(each.shape[2] for each in inputs)
        mine = (options.get("head_splits") or equal(most, self._world))[self._rank]
        group = most // heads if not options.get("head_splits") else 1
        part = range(mine.start // group, (mine.stop - 1) // group + 1)
        bare = x if isinstance(x, np.ndarray) else x.view(_torch().uint8).numpy()
        key = f"call-{self._epoch}-{number}"
        self._write(key, bare)
        parts = [self._read(key, peer)[:, :, part.start : part.stop] for peer in range(self._world)]
        (self._folder / f"call-{self._epoch - 2}-{number}-{self._rank}.npy").unlink(missing_ok=True)
        whole = np.concatenate(parts, 1)
        if self._fault == "bytes" and self._rank == 1:
            whole = whole.copy()
            whole.reshape(-1)[-1] += 1
        result = whole if isinstance(x, np.ndarray) else _torch().from_numpy(whole).view(x.dtype)
        out = options.get("out")
        if out is None:
            return result
        if isinstance(out, np.ndarray):
            out[...] = result
        else:
            out.copy_(result)
        return out

    def empty_output(self, shape: Any, dtype: Any) -> Any:
        return np.empty(shape, dtype) if isinstance(dtype, np.dtype) else _torch().empty(shape, dtype=dtype)

    def check(self) -> None:
        if self._broken:
            raise kf.Error(self._broken)

    def reset(self) -> None:
        self._epoch, self._broken = self._epoch + 1_000_000, ""
        self._epoch -= self._epoch % 1_000_000

    def stats(self) -> dict[str, Any]:
        return {"copied_out": 0, "transport": "files"}

    def close(self) -> None:
        pass


def _torch() -> Any:
    return importlib.import_module("torch")


if __name__ == "__main__":
    vars(kf)["All2All"] = All2All
    from kvferry.bench.all2all import worker

    code = worker.main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)
