"""What is measured in which order: first what the issue's table of numbers asks, then the rest."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Literal

from kvferry.bench.all2all import cells
from kvferry.bench.all2all.cells import Cell, fused, one, whole

Device = Literal["gpu", "cpu", "host"]
Selection = Literal["quick", "default", "full"]
Kind = Literal["setup", "exchange", "cost", "gemm", "skew"]

GROUPS = (
    "setup",
    "core",
    "fused",
    "cost",
    "shapes",
    "latency",
    "bandwidth",
    "sms",
    "overlap",
    "skew",
    "recovery",
    "cpu",
)
"""In the order of importance; the last two are sessions of their own."""
SMS = (8, 16, 32, 64, 128)
SKEWS_MS = (0.1, 1.0, 10.0)
GRAPH_CALLS = 20
TWIN = 20_480
"""Tokens per rank of 32x128 bf16 with the bytes of 2,8192,40,128; what other shapes are compared with."""
LONG_TWIN = 47_250
"""The same for 40x128 x 75,600 tokens over two ranks."""

_GRAPHS = ("graph", "graph out")
_NCCL = ("nccl", "nccl graph")
_LIMITS = ("memcpy both", "memcpy")
_REFERENCES = ("reference", "reference 16")


@dataclass(frozen=True)
class Options:
    """What was asked for. Travels to the workers as JSON."""

    device: Device
    world: int
    selection: Selection = "default"
    budget: float | None = 100.0
    """Seconds for everything."""
    only: tuple[str, ...] = GROUPS
    seed: int = 0
    timeout: float = 10.0
    """Of a communicator."""
    deadline: float | None = None
    """On the machine's monotonic clock: after it no further cell is begun."""

    def dump(self) -> str:
        """As JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def load(cls, text: str) -> Options:
        """From JSON."""
        values = json.loads(text)
        return cls(**(values | {"only": tuple(values["only"])}))


@dataclass(frozen=True)
class Task:
    """One cell and the ways to exchange it, or another measurement."""

    name: str
    group: str
    kind: Kind
    cell: Cell
    ways: tuple[str, ...]


def push(*counts: int) -> tuple[str, ...]:
    """The push engine with so many CTAs."""
    return tuple(f"push {count}" for count in counts)


def tasks(options: Options) -> list[Task]:
    """Everything of the selected groups, the most important first."""
    found = {"cpu": _cpu, "gpu": _gpu, "host": _gpu}[options.device](options)
    chosen = [task for task in found if task.group in options.only]
    if options.device == "host" and options.selection != "quick":
        chosen = [dataclasses.replace(task, cell=_shrunk(task.cell)) for task in chosen]
    # The same cell twice would be the same name twice.
    return list({task.name: task for task in reversed(chosen)}.values())[::-1]


def _shrunk(cell: Cell) -> Cell:
    """To try the plan on CPUs: under their own names."""
    return dataclasses.replace(cell, tokens=tuple(max(tokens // 128, 1) for tokens in cell.tokens))


def capacity(found: list[Task]) -> int:
    """The largest result of all tasks, and room for a smallest pool."""
    return max([task.cell.largest_result for task in found], default=0) + (1 << 20)


def exchange(group: str, cell: Cell, *ways: str) -> Task:
    """A task that times exchanges of one cell."""
    return Task(f"{group} {cell.name}", group, "exchange", cell, ways)


def _gpu(options: Options) -> list[Task]:
    world, full = options.world, options.selection == "full"
    small = one(world, 1, 128, 32, 128)
    qkv = fused(world, 128, 32, 32, 128)
    setup = Task("setup", "setup", "setup", small, ("communicator",))
    cost = Task("cost", "cost", "cost", qkv, ("owned",))
    singles = tuple(f"only {tensor}" for tensor in range(3))
    first = exchange(
        "core", small, "owned", "out", *_GRAPHS, *_REFERENCES, *_NCCL, "nccl bare", "memcpy both"
    )
    together = exchange("fused", qkv, "owned", *singles, "in turn", "graph", *_NCCL)
    if options.selection == "quick":
        return [setup, first, together, cost]
    limits = (*_LIMITS, *(("memcpy ipc",) if full else ()))
    every = ("owned", "out", *push(16, 32, 64, 128), "copy", "graph", *_NCCL, "nccl bare", *limits)
    core = [exchange("core", one(world, 1, n, 32, 128), *every, *_REFERENCES) for n in (4096, 16_384, 65_536)]
    usual = ("owned", "out", "graph", *_NCCL)
    other = [
        exchange("core", one(world, 2, 8192, 40, 128), *usual, "reference", "memcpy both"),
        exchange("core", one(world, 1, TWIN, 32, 128), *usual, "memcpy both"),
    ]
    eight = exchange("core", one(world, 1, 1024, 32, 128), *every, *_REFERENCES)
    gemm = Task("overlap", "overlap", "gemm", one(world, 1, 4096, 32, 128), _overlap())
    found = [setup, first, *core, together, cost, *other, eight, *_shapes(world, usual)]
    found += [*_latency(world), gemm, *_skew(world), *_bandwidth(world, full=full)]
    if full:
        swept = (128, 1024, 4096, 16_384, 65_536)
        ways = (*push(*SMS), "reference", "reference 64", "reference 32", "reference 16")
        found += [exchange("sms", one(world, 1, n, 32, 128), *ways) for n in swept]
    else:
        found.append(exchange("sms", one(world, 1, 4096, 32, 128), *push(*SMS)))
    return found


def _overlap() -> tuple[str, ...]:
    return ("alone", "owned", "push 16", "push 32", "copy", "nccl", "reference")


def _shapes(world: int, usual: tuple[str, ...]) -> list[Task]:
    """Of the twin's bytes where they can be chosen."""
    half = world // 2 or 1
    uneven = tuple(16_384 + (TWIN - 16_384 if rank % 2 else 0) for rank in range(world))
    # 12 of 32 heads on even ranks and 20 on odd ones, for two ranks; alike for more.
    heads = tuple(24 // world + (8 // half if rank % 2 else 0) for rank in range(world))
    shapes = [
        whole(world, 75_600, 40, 128),
        whole(world, 75_827, 40, 128),
        whole(world, LONG_TWIN * 2, 32, 128),
        Cell(1, uneven, (32,), 128),
        Cell(1, (16_384,) * world, (sum(heads),), 128, splits=heads),
        one(world, 1, TWIN, 31, 128),
        one(world, 1, 27_306, 24, 128),
        one(world, 1, 21_845, 30, 128),
        fused(world, 13_653, 32, 8, 128),
        fused(world, 16_384, 32, 4, 128),
        fused(world, 32_768, 16, 2, 128),
        one(world, 4, 5120, 32, 128),
        one(world, 1, 40_960, 32, 64),
        one(world, 1, 32_768, 32, 80),
        one(world, 1, 27_306, 32, 96),
        one(world, 1, 10_240, 32, 256),
        one(world, 1, TWIN, 32, 128, "fp16"),
        one(world, 1, 40_960, 32, 128, "e4m3"),
        one(world, 1, 10_240, 32, 128, "fp32"),
    ]
    found = []
    for cell in shapes:
        ways = tuple(way for way in usual if way != "out" or len(cell.heads) == 1)
        found.append(exchange("shapes", cell, *ways))
    return found


def _latency(world: int) -> list[Task]:
    """1 KiB to 1 MiB per rank: one KiB a token."""
    ways = ("owned", "out", *_GRAPHS, "reference", *_NCCL, "nccl bare")
    sizes = (1, 4, 16, 64, 128, 256, 512, 1024)
    return [exchange("latency", one(world, 1, tokens, 8, 64), *ways) for tokens in sizes]


def _bandwidth(world: int, *, full: bool) -> list[Task]:
    """1 MiB to 1 GiB per rank."""
    ways = ("owned", "out", *(("copy", "push 16") if full else ()), "nccl", "reference", *_LIMITS)
    ways += ("memcpy ipc",) if full else ()
    sizes = (128, 512, 2048, 8192, 32_768, 131_072)
    return [exchange("bandwidth", one(world, 1, tokens, 32, 128), *ways) for tokens in sizes]


def _skew(world: int) -> list[Task]:
    cell = one(world, 1, 1024, 32, 128)
    ways = tuple(f"{way} {delay:g}" for delay in SKEWS_MS for way in ("owned", "nccl", "reference"))
    return [Task("skew", "skew", "skew", cell, ways)]


def _cpu(options: Options) -> list[Task]:
    world, ways = options.world, ("owned", "out", "memcpy")
    setup = Task("setup", "setup", "setup", one(world, 1, 16, 8, 64), ("communicator",))
    if options.selection == "quick":
        return [setup, exchange("bandwidth", one(world, 1, 1024, 8, 64), *ways)]
    large = exchange("bandwidth", one(world, 1, 8192, 32, 128), *ways)
    """64 MiB per rank."""
    found = [setup, large]
    found += [Task("cost", "cost", "cost", fused(world, 16, 8, 8, 64), ("owned",))]
    found += [
        exchange("latency", one(world, 1, tokens, 8, 64), *ways) for tokens in (1, 4, 16, 64, 256, 1024)
    ]
    found += [exchange("bandwidth", one(world, 1, tokens, 32, 128), *ways) for tokens in (512, 2048)]
    found += [exchange("shapes", fused(world, 1024, 32, 4, 128), "owned", "memcpy")]
    found += [exchange("shapes", Cell(1, cells.equal(4001, world), (31,), 80), *ways)]
    return found
