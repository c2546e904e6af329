"""The demo's screen: plain text of at most 100 columns, colour only where it is wanted."""

from __future__ import annotations

import os
import textwrap
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvferry.cli._exchange import Exchange
    from kvferry.cli._machine import Machine
    from kvferry.cli._report import Outcome

WIDTH = 100
OPENING = "kvferry demo: moves KV-cache blocks and attention heads between memories and processes; about 5 s."
NEXT_STEPS = (
    ("make test", "the whole test ladder, from a clone"),
    ("python -m pydoc kvferry", "the ten-line example"),
    ("kvferry demo --json", "these facts for a program"),
    ("kvferry --help", "what else there is"),
)

_COLUMNS = "{:<17}  {:>8}  {:>5} {:>5}  {:>15}  {:<15}  {}"


class Screen:
    """Prints the demo as it goes."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._colour = out.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

    def opening(self) -> None:
        """Says what is about to happen, before anything else is done."""
        self._line(self._paint("1", OPENING))

    def machine(self, machine: Machine, threads: int, device: int | None, why_not: str) -> None:
        """What it runs on."""
        where = f"the caches lie on GPU {device}, the pools in pinned memory"
        if device is None:
            where = f"this job runs in host memory ({why_not})"
        gpus = f"{', '.join(machine.gpus)}; {where}" if machine.gpus else ""
        kernels = f"kernels not built (KVFERRY_CUDA={machine.cuda_mode})"
        if machine.archs:
            kernels = f"kernels for {', '.join(machine.archs)} (toolkit {machine.toolkit})"
        slow = " (its speeds say little)" if machine.profile != "release" else ""
        self._heading("Machine")
        for line in (
            f"{machine.cpu}, {machine.usable_cpus} usable CPUs, {machine.memory_bytes / 1e9:.1f} GB memory",
            gpus or f"no GPU: host memory only ({machine.no_gpu})",
            f"{kernels}; {threads} copy threads, {machine.profile} build{slow}",
            f"kvferry {machine.kvferry}, Python {machine.python}",
        ):
            self._wrapped(line)

    def table_head(self, moves: int, device: int | None) -> None:
        """What the columns mean."""
        where, pool = ("", "") if device is None else (" on the GPU", "pinned ")
        self._heading(
            f"Caches{where} as engines allocate them -> contiguous {pool}pool -> other slots of the cache"
        )
        for line in (
            "Every element of source, pool and target is compared with a value recomputed from its "
            "coordinates, and every guard (blocks not named; in the TP4 pool also the other ranks' heads) "
            "with the poison written before.",
            f"GB/s: payload bytes over the seconds a transfer reports, median of {moves} moves each way.",
        ):
            self._line(textwrap.fill(line, WIDTH, initial_indent="  ", subsequent_indent="  "))
        self._line()
        head = _COLUMNS.format("", "moved", "out", "back", "copies", "", "")
        units = _COLUMNS.format("model", "", "GB/s", "GB/s", "-> merged", "blocks", "guards")
        self._line("  " + head)
        self._line("  " + self._paint("4", units))

    def row(self, outcome: Outcome) -> None:
        """One geometry."""
        found = outcome.findings
        same = "every byte same" if not found.wrong_elements else f"{found.wrong_elements} WRONG"
        guards = (
            "guards intact" if not found.wrong_guard_elements else f"{found.wrong_guard_elements} WRITTEN"
        )
        line = _COLUMNS.format(
            outcome.name,
            f"{outcome.offload.bytes / 1e6:.1f} MB",
            f"{outcome.offload.gb_per_s:.1f}",
            f"{outcome.bring_back.gb_per_s:.1f}",
            f"{outcome.offload.elementary_runs} -> {outcome.offload.runs}",
            same,
            guards,
        )
        colour = "32" if found.good else "31"
        line = line.replace(same, self._paint(colour, same)).replace(guards, self._paint(colour, guards))
        self._line("  " + line)
        first, last, total = outcome.heads
        heads = "" if last - first + 1 == total else f", heads {first}-{last} of {total}"
        shortest, longest = outcome.offload.run_bytes
        run = f"{shortest}" if shortest == longest else f"{shortest} to {longest}"
        detail = (
            f"{outcome.allocated_by}: {outcome.allocated}{heads} -> {outcome.pool_order}, "
            f"{outcome.pool_blocks} blocks; runs of {run} B"
        )
        self._line(self._paint("2", "    " + detail))
        if outcome.offload.engine != "host":
            engines = f"out by the {outcome.offload.engine} engine, back by {outcome.bring_back.engine}"
            self._line(self._paint("2", "    " + engines))

    def exchange(self, found: Exchange) -> None:
        """Heads between four processes, attention, a death."""
        self._heading("Attention heads between four processes of this machine, over shared memory")
        if found.trouble:
            self._wrapped(self._paint("31", f"COULD NOT BE RUN: {found.trouble}"))
            return
        tokens, heads = (", ".join(map(str, counts)) for counts in (found.tokens, found.heads))
        self._wrapped(
            f"q, k and v in one call: tokens {tokens} of ranks 0 to 3, {sum(found.heads)} heads each -> all "
            f"{sum(found.tokens)} tokens, {heads} heads; {found.microseconds / 1e3:.1f} ms"
        )
        same = f"{found.checked_bytes / 1e6:.1f} MB there and back compared with NumPy slices: all the same"
        if found.wrong_elements:
            same = f"{found.wrong_elements} elements WRONG"
        self._verdict(same, good=not found.wrong_elements)
        equal = found.attention_difference <= 1e-6
        self._verdict(
            "attention of the four, each over all tokens for its heads, and that of one process: "
            + ("equal" if equal else "DIFFERENT")
            + f" (largest difference {found.attention_difference:g})",
            good=equal,
        )
        self._wrapped(f"rank {found.victim} (process {found.pid}) killed while the others waited for it:")
        for death in found.deaths:
            told = (death.error, death.peer, death.pid) == ("PeerDied", found.victim, found.pid)
            self._verdict(
                f"  rank {death.rank} after {death.milliseconds:.1f} ms: {death.error}: {death.message}",
                good=told,
            )

    def closing(
        self,
        outcomes: list[Outcome],
        code: Iterable[str],
        device: int | None,
        *,
        exchanged: int,
        verified: bool,
        seconds: float,
    ) -> None:
        """Why, what is refused, how to do it, what next."""
        if outcomes:
            self._explanation(outcomes)
            made = f"kf.TransferContext({'' if device is None else device})"
            self._heading(f"The four lines that did it, after import kvferry as kf; ctx = {made}")
            self._indented(code)
        self._heading("Next")
        self._indented(f"{command:<25}{what}" for command, what in NEXT_STEPS)
        self._line()
        checked = sum(outcome.findings.checked_bytes for outcome in outcomes)
        guards = sum(outcome.findings.guard_bytes for outcome in outcomes)
        verdict = self._paint("1;32", "verified") if verified else self._paint("1;31", "DIFFERENCES FOUND")
        sizes = {"blocks": checked, "guards": guards, "heads": exchanged}
        compared = [f"{count / 1e6:.0f} MB of {what}" for what, count in sizes.items() if count]
        self._line(f"{verdict}: {', '.join(compared)} compared, {seconds:.1f} s in all")

    def _explanation(self, outcomes: list[Outcome]) -> None:
        first = outcomes[0]
        self._differences(outcomes)
        self._heading(f"Why {first.name} went out the way it did: plan.explain()")
        for line in first.explain.splitlines():
            self._wrapped(line.strip(), indent=2 + len(line) - len(line.lstrip()))
        if first.refusal:
            refusal = first.refusal
            self._heading("A mistake, refused before a byte moved")
            self._wrapped(f">>> {refusal.code}")
            if refusal.error:
                self._wrapped(f"{refusal.error}: {refusal.message}")
                fields = ", ".join(f"{name}={value!r}" for name, value in refusal.fields.items())
                self._wrapped(f"its fields: {fields}; also a {refusal.also}")
                self._wrapped("the guards above, that block among them, were compared after this")
            else:
                self._line("  " + self._paint("31", "NOT REFUSED"))

    def _verdict(self, text: str, *, good: bool) -> None:
        for line in textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent=" " * 6):
            self._line(self._paint("32" if good else "31", line))

    def _differences(self, outcomes: list[Outcome]) -> None:
        if all(outcome.findings.good for outcome in outcomes):
            return
        self._heading("Differences, the first of each")
        for outcome in outcomes:
            for difference in outcome.findings.differences:
                self._wrapped(str(difference))

    def _heading(self, text: str) -> None:
        self._line()
        self._line(self._paint("1", text))

    def _indented(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._line("  " + line)

    def _wrapped(self, text: str, indent: int = 2) -> None:
        first, rest = " " * indent, " " * (indent + 4)
        for line in textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=rest):
            self._line(line)

    def _line(self, text: str = "") -> None:
        print(text.rstrip(), file=self._out, flush=True)

    def _paint(self, code: str, text: str) -> str:
        return f"\033[{code}m{text}\033[0m" if self._colour else text
