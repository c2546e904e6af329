"""Medians and verdicts: plain numbers."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Literal

SHORT_SECONDS = 100e-6
TIE, TIE_SHORT = 0.03, 0.10

Verdict = Literal["win", "tie", "lose"]


@dataclass
class Series:
    """What one contender took, in seconds, call by call."""

    name: str
    end: list[float] = field(default_factory=list)
    """From the call to the moment the caller knows that the last byte has arrived."""
    event: list[float] = field(default_factory=list)
    """Between two events on the stream, submission hidden behind work enqueued before."""
    submit: list[float] = field(default_factory=list)
    """Until the call returned."""
    not_run: str = ""
    """Why it could not take part."""

    @property
    def ran(self) -> bool:
        """Whether there is a time."""
        return bool(self.end)

    @property
    def end_s(self) -> float:
        """Median end to end."""
        return statistics.median(self.end)

    @property
    def event_s(self) -> float | None:
        """Median between events, where it can be had."""
        return statistics.median(self.event) if self.event else None

    @property
    def submit_s(self) -> float | None:
        """Median of the submission."""
        return statistics.median(self.submit) if self.submit else None


def verdict(ours: float, theirs: float) -> Verdict:
    """Ours against theirs, in seconds; equal within 3 %, within 10 % where theirs is below 100 us."""
    band = TIE_SHORT if theirs < SHORT_SECONDS else TIE
    if ours <= theirs * (1 - band):
        return "win"
    return "tie" if ours <= theirs * (1 + band) else "lose"


def slope(first: tuple[float, float], second: tuple[float, float]) -> float:
    """Rise of y per x between two points (x, y)."""
    return (second[1] - first[1]) / (second[0] - first[0])


def spread(values: list[float]) -> tuple[float, float, float]:
    """5th percentile, median, 95th percentile."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return ordered[round(last * 0.05)], statistics.median(ordered), ordered[round(last * 0.95)]
