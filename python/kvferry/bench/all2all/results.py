"""What the ranks measured, put together: for each iteration the slowest rank, then the median."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvferry.bench.all2all.plan import Task
    from kvferry.bench.gpu.bar import Bar


@dataclass
class Record:
    """One rank's measurement of one way; a line of the rank's file."""

    task: str
    way: str
    device: list[float] = field(default_factory=list)
    """Seconds of each exchange between events; of the call itself on CPUs."""
    submit: list[float] = field(default_factory=list)
    """Seconds of each call until it returned."""
    wrong: str = ""
    """What the check found."""
    why: str = ""
    """Why there is no time."""
    note: str = ""
    values: dict[str, Any] = field(default_factory=dict)

    def dump(self) -> str:
        """As a line."""
        return json.dumps(asdict(self)) + "\n"


@dataclass
class Row:
    """One way of one task over all ranks."""

    way: str
    ranks: list[Record]

    @property
    def device(self) -> list[float]:
        """Seconds of each iteration on its slowest rank."""
        return [max(found) for found in zip(*(record.device for record in self.ranks), strict=False)]

    @property
    def device_s(self) -> float | None:
        """Median of the slowest rank."""
        samples = self.device
        return statistics.median(samples) if samples else None

    @property
    def submit_s(self) -> float | None:
        """Median of the host's time, slowest rank."""
        medians = [statistics.median(record.submit) for record in self.ranks if record.submit]
        return max(medians, default=None)

    @property
    def wrong(self) -> str:
        """What the checks found, rank by rank."""
        found = [f"rank {rank}: {record.wrong}" for rank, record in enumerate(self.ranks) if record.wrong]
        return "; ".join(found)

    @property
    def why(self) -> str:
        """Why there is no time."""
        return next((record.why for record in self.ranks if record.why), "")

    @property
    def note(self) -> str:
        """What else is to be known."""
        return next((record.note for record in self.ranks if record.note), "")

    def value(self, name: str) -> float | None:
        """The largest of the ranks that have such a value."""
        found = [record.values[name] for record in self.ranks if record.values.get(name) is not None]
        return max(found, default=None)


@dataclass
class Measured:
    """A task and its rows."""

    task: Task
    rows: dict[str, Row] = field(default_factory=dict)
    skipped: str = ""
    """Why it was not measured."""

    def seconds(self, *ways: str) -> float | None:
        """The fastest of some ways; None if none ran."""
        found = [self.rows[way].device_s for way in ways if way in self.rows]
        return min((seconds for seconds in found if seconds is not None), default=None)

    def best(self, *ways: str) -> tuple[str, float] | None:
        """The fastest of some ways by name."""
        found = [(way, self.seconds(way)) for way in ways]
        ran = [(way, seconds) for way, seconds in found if seconds is not None]
        return min(ran, key=lambda pair: pair[1], default=None)

    def gb_per_s(self, *ways: str) -> float | None:
        """Bytes that cross the busiest rank's border over the fastest way's time."""
        seconds = self.seconds(*ways)
        return self.task.cell.wire / seconds / 1e9 if seconds else None

    @property
    def faults(self) -> list[str]:
        """What was wrong: bytes anywhere, or a way of ours that failed."""
        found = [f"{self.task.name}, {way}: {row.wrong}" for way, row in self.rows.items() if row.wrong]
        failed = [
            f"{self.task.name}, {way}: {row.why}"
            for way, row in self.rows.items()
            if row.why and ours(way) and not row.why.startswith("Unsupported")
        ]
        return found + failed


@dataclass
class Results:
    """Everything of a run."""

    facts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    measured: dict[str, Measured] = field(default_factory=dict)
    recovery: dict[str, Any] = field(default_factory=dict)
    cpu: dict[str, Measured] = field(default_factory=dict)
    """The CPU backend's tasks."""
    bars: list[Bar] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        """Whether every byte was right and nothing of ours failed."""
        return not self.wrong and not any(each.faults for each in self.every)

    @property
    def every(self) -> list[Measured]:
        """Of GPUs and CPUs."""
        return [*self.measured.values(), *self.cpu.values()]

    def of_group(self, *groups: str) -> list[Measured]:
        """Measured tasks of some groups."""
        return [found for found in self.measured.values() if found.task.group in groups and found.rows]


def ours(way: str) -> bool:
    """Whether a way is kvferry's."""
    return not way.startswith(("nccl", "memcpy", "reference"))


def gather(task: Task, lines: list[list[Record]]) -> Measured:
    """One task's records, one list for each rank."""
    rows: dict[str, Row] = {}
    for way in dict.fromkeys(record.way for rank in lines for record in rank):
        ranks = [next((record for record in rank if record.way == way), None) for rank in lines]
        there = [record for record in ranks if record is not None]
        rows[way] = Row(way, there)
        if len(there) < len(lines):
            there.append(Record(task.name, way, why="a rank did not report"))
    return Measured(task, rows)
