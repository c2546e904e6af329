"""What a run of the demo found, as plain data: the text screen and the JSON are two renderings of it."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Difference:
    """One element that is not what it must be. `block` is None for a guard; `head` is global."""

    geometry: str
    where: str
    slot: int
    block: int | None
    layer: int
    outer: int
    token: int
    head: int
    dim: int
    expected: int
    found: int

    def __str__(self) -> str:
        block = "guard" if self.block is None else f"block {self.block}"
        return (
            f"{self.geometry}: {self.where}, slot {self.slot} ({block}), layer {self.layer}, "
            f"outer {self.outer}, token {self.token}, head {self.head}, dim {self.dim}: "
            f"{self.found:#06x}, not {self.expected:#06x}"
        )


@dataclass
class Findings:
    """What was compared, and how it came out."""

    checked_bytes: int = 0
    guard_bytes: int = 0
    wrong_elements: int = 0
    wrong_guard_elements: int = 0
    differences: list[Difference] = field(default_factory=list)
    """The first few."""

    @property
    def good(self) -> bool:
        """Whether every byte compared was right."""
        return self.wrong_elements == self.wrong_guard_elements == 0


@dataclass(frozen=True)
class Leg:
    """Moves one way. `seconds` are those of each TransferResult."""

    bytes: int
    elementary_runs: int
    runs: int
    run_bytes: tuple[int, int]
    engine: str
    seconds: list[float]

    @property
    def gb_per_s(self) -> float:
        """Payload bytes over the median time, in 10^9 bytes/s."""
        return self.bytes / statistics.median(self.seconds) / 1e9


@dataclass(frozen=True)
class Refusal:
    """A mistake made on purpose. `error` is empty if nothing refused it."""

    code: str
    error: str
    also: str
    message: str
    fields: dict[str, int | str]


@dataclass(frozen=True)
class Outcome:
    """One geometry's run."""

    name: str
    config: str
    allocated_by: str
    allocated: str
    axes: str
    heads: tuple[int, int, int]
    """First and last of this rank, and how many the model has."""
    pool_order: str
    cache_blocks: int
    pool_blocks: int
    moved_blocks: int
    offload: Leg
    bring_back: Leg
    findings: Findings
    explain: str
    refusal: Refusal | None
    """Of the first geometry only."""

    @property
    def good(self) -> bool:
        """Whether every byte was right and the mistake, if one was made, was refused."""
        return self.findings.good and (self.refusal is None or bool(self.refusal.error))
