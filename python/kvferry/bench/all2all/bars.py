"""The issue's table of numbers: each row measured, compared and said, whether met, missed or not measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvferry.bench.all2all import cells, plan
from kvferry.bench.gpu.bar import Bar

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvferry.bench.all2all.plan import Options
    from kvferry.bench.all2all.results import Measured, Results

BIG = 33_000_000
"""From so many bytes per rank up the exchange must be twice as fast as NCCL."""
OWN = ("owned", "out")
GRAPHS = ("graph", "graph out")
ENGINES = (*OWN, *(f"push {count}" for count in plan.SMS), "copy")
_FEW, _FEW_CTAS = ("push 64", "push 32", "push 16"), 64


def of(results: Results, options: Options) -> list[Bar]:
    """All rows, for GPUs or for CPUs."""
    if options.device == "cpu":
        return [*_setup(results, "CPU backend, "), *_recovery(results, options), *_cpu(results.measured)]
    rows = [
        *_small(results, options),
        *_large(results, options),
        *_shapes(results, options),
        *_fused(results, options),
        *_nccl(results),
        *_cost(results),
        *_setup(results),
        *_recovery(results, options),
        *_cpu(results.cpu),
    ]
    if options.world != 2:
        for bar in rows:
            bar.detail = f"{bar.detail}; the bars are for 2 ranks, here {options.world}".lstrip("; ")
    return rows


def _core(results: Results, options: Options, tokens: int) -> Measured | None:
    cell = cells.one(options.world, 1, tokens, 32, 128)
    return results.measured.get(f"core {cell.name}")


def why(found: Measured | None, *ways: str) -> str:
    """Why there is no number."""
    if found is None:
        return "not selected"
    reasons = [found.rows[way].why for way in ways if way in found.rows and found.rows[way].why]
    return next(iter(reasons), found.skipped or "not measured")


def wrong(found: Measured, *ways: str) -> str:
    """A number from wrong bytes is none."""
    return next((found.rows[way].wrong for way in ways if way in found.rows and found.rows[way].wrong), "")


def us(seconds: float) -> str:
    """For people."""
    return f"{seconds * 1e6:.1f} us"


def ratio(
    case: str,
    limit: float,
    found: Measured | None,
    ours: Iterable[str],
    theirs: Iterable[str],
    *,
    at_least: bool = False,
    goal: str = "",
) -> Bar:
    """Our fastest way's time over theirs; the other way round where more is better."""
    bar, ours, theirs = Bar(case, limit, at_least=at_least), tuple(ours), tuple(theirs)
    mine = found.best(*ours) if found else None
    other = found.best(*theirs) if found else None
    if found is None or mine is None or other is None:
        bar.why_not = why(found, *(theirs if mine else ours))
        return bar
    if fault := wrong(found, mine[0]):
        bar.why_not = f"wrong bytes: {fault}"
        return bar
    if fault := wrong(found, other[0]):
        bar.why_not = f"wrong bytes of {other[0]}: {fault}"
        return bar
    bar.value = other[1] / mine[1] if at_least else mine[1] / other[1]
    all_ours = ", ".join(f"{way} {us(s)}" for way in ours if (s := found.seconds(way)) is not None)
    bar.detail = f"{all_ours}; {other[0]} {us(other[1])}" + (f"; goal {goal}" if goal else "")
    notes = {way: found.rows[way].note for way in (mine[0], other[0])}
    bar.detail += "".join(f"; {way}: {note}" for way, note in notes.items() if note)
    return bar


def _small(results: Results, options: Options) -> Iterator[Bar]:
    found = _core(results, options, 128)
    yield ratio(
        "1 MB per rank, eager, of the reference's method with copied-out result",
        0.95,
        found,
        OWN,
        ("reference", "reference 16"),
        goal="0.85",
    )
    bar = Bar("1 MB per rank in a CUDA graph, 20 exchanges / 20", 8.5, at_least=False, unit="us")
    best = found.best(*GRAPHS) if found else None
    if found is None or best is None:
        bar.why_not = why(found, *GRAPHS)
    else:
        bar.value = best[1] * 1e6
        bar.detail = ", ".join(f"{way} {us(s)}" for way in GRAPHS if (s := found.seconds(way)) is not None)
    yield bar
    yield ratio(
        "1 MB per rank in a graph, of permute + NCCL + permute in a graph",
        0.5,
        found,
        GRAPHS,
        ("nccl graph",),
    )


def _large(results: Results, options: Options) -> Iterator[Bar]:
    what = "of the both-ways peer memcpy of the same bytes"
    ceiling = ("memcpy both",)
    middle, large, huge = (_core(results, options, tokens) for tokens in (4096, 16_384, 65_536))
    few = (*_FEW, *(way for way in OWN if _few(middle, way)))
    yield ratio(
        f"34 MB per rank, at most 64 CTAs, {what}", 0.80, middle, few, ceiling, at_least=True, goal="0.85"
    )
    yield ratio(f"34 MB per rank, 16 CTAs, {what}", 0.68, middle, ("push 16",), ceiling, at_least=True)
    yield ratio(
        f"134 MB per rank, owned or out=, best, {what}",
        0.90,
        large,
        ENGINES,
        ceiling,
        at_least=True,
        goal="0.93",
    )
    yield ratio(f"134 MB per rank, 16 CTAs, {what}", 0.80, large, ("push 16",), ceiling, at_least=True)
    yield ratio(
        f"537 MB per rank, copy engine into out=, {what}", 0.95, huge, ("copy",), ceiling, at_least=True
    )


def _few(found: Measured | None, way: str) -> bool:
    """Whether the communicator says that it takes few CTAs of itself."""
    ctas = found.rows[way].value("ctas") if found and way in found.rows else None
    return ctas is not None and ctas <= _FEW_CTAS


def _shapes(results: Results, options: Options) -> Iterator[Bar]:
    """Bytes per second against 32x128 even of as many bytes."""
    twin = _core(results, options, plan.TWIN)
    long_cell = cells.whole(options.world, plan.LONG_TWIN * 2, 32, 128)
    long_twin = results.measured.get(f"shapes {long_cell.name}")
    compared = [_named(results, f"core {cells.one(options.world, 2, 8192, 40, 128).name}")]
    compared += [found for found in results.measured.values() if found.task.group == "shapes"]
    for found in compared:
        if found is None or found is long_twin:
            continue
        other = long_twin if found.task.cell.wire > 1.5 * plan.TWIN * 16 * 256 else twin
        case = f"{found.task.name.partition(' ')[2]}, bytes/s of 32x128 even of as many bytes"
        bar = Bar(case, 0.95, at_least=True)
        mine, theirs = found.gb_per_s(*OWN), other.gb_per_s(*OWN) if other else None
        if mine is None or other is None or theirs is None:
            bar.why_not = why(found if mine is None else other, *OWN)
        elif fault := wrong(found, *OWN):
            bar.why_not = f"wrong bytes: {fault}"
        else:
            bar.value = mine / theirs
            bar.detail = f"{mine:.0f} against {theirs:.0f} GB/s ({other.task.cell.name})"
        yield bar
    if len(compared) == 1:
        yield Bar("every other shape, bytes/s of 32x128 even", 0.95, at_least=True, why_not="not selected")


def _named(results: Results, name: str) -> Measured | None:
    return results.measured.get(name)


def _fused(results: Results, options: Options) -> Iterator[Bar]:
    cell = cells.fused(options.world, 128, 32, 32, 128)
    found = results.measured.get(f"fused {cell.name}")
    bar = Bar("q, k, v of 1 MB each in one call, of the sum of three timed alone", 0.5, at_least=False)
    mine = found.seconds("owned") if found else None
    alone = [found.seconds(f"only {tensor}") if found else None for tensor in range(3)]
    singles = [seconds for seconds in alone if seconds is not None]
    if found is None or mine is None or len(singles) < 3:
        bar.why_not = why(found, "owned", "only 0", "only 1", "only 2")
    elif fault := wrong(found, "owned"):
        bar.why_not = f"wrong bytes: {fault}"
    else:
        bar.value = mine / sum(singles)
        turn = found.seconds("in turn")
        bar.detail = f"{us(mine)} against {' + '.join(us(each) for each in singles)}"
        bar.detail += f"; three calls in turn {us(turn)}" if turn else ""
    yield bar


def _nccl(results: Results) -> Iterator[Bar]:
    """The worst shape of all."""
    for title, mine, theirs in (("eager", OWN, "nccl"), ("graph", GRAPHS, "nccl graph")):
        for case, limit, least in (
            (f"every shape, {title}: permute + NCCL + permute over ours, the worst", 1.0, 0),
            (f"from 34 MB up, {title}: the same", 2.0, BIG),
        ):
            bar, found = Bar(case, limit, at_least=True), _worst(results, mine, theirs, least)
            if not found:
                bar.why_not = "no shape was timed both ways"
            else:
                name, bar.value, ran = found[0]
                below = sum(value < limit for _, value, _ in found)
                bar.detail = f"{name}: {ran}; below in {below} of {len(found)} shapes"
            yield bar


def _worst(results: Results, ours: tuple[str, ...], theirs: str, least: int) -> list[tuple[str, float, str]]:
    found = []
    for each in results.measured.values():
        mine, other = each.seconds(*ours), each.seconds(theirs)
        if each.task.kind == "exchange" and mine and other and each.task.cell.rank_bytes >= least:
            found.append((each.task.name, other / mine, f"{us(mine)} against {us(other)}"))
    return sorted(found, key=lambda entry: entry[1])


def _cost(results: Results) -> Iterator[Bar]:
    bar = Bar("Python call, fused q, k, v as torch tensors, CPU time", 15.0, at_least=False, unit="us")
    found = results.measured.get("cost")
    row = found.rows.get("owned") if found else None
    cpu = row.value("cpu_us") if row else None
    if row is None or cpu is None:
        bar.why_not = why(found, "owned")
    else:
        bar.value = cpu
        wall, drop = (row.value(name) or 0.0 for name in ("wall_us", "drop_us"))
        bar.detail = f"wall {wall:.1f} us; dropping the results {drop:.1f} us more"
    yield bar


def _setup(results: Results, where: str = "") -> Iterator[Bar]:
    found = results.measured.get("setup")
    row = found.rows.get("communicator") if found else None
    first = row.value("first_s") if row else None
    bar = Bar(f"{where}set-up of a communicator, the first of the process", 1.0, at_least=False, unit="s")
    if row is None or first is None:
        bar.why_not = why(found, "communicator")
    else:
        bar.value, again = first, row.device_s
        bar.detail = f"median of {len(row.device)}: {(again or 0) * 1e3:.0f} ms"
    yield bar


def _recovery(results: Results, options: Options) -> Iterator[Bar]:
    found: dict[str, Any] = results.recovery
    missing = found.get("why") or ("not selected" if "recovery" not in options.only else "not reached")
    kill = Bar("SIGKILL of a rank, a forked child alive: PeerDied after", 1.0, at_least=False, unit="s")
    stop = Bar("SIGSTOP of a rank: PeerTimeout off the set time by", 0.10, at_least=False)
    on = Bar("after both: context usable, reset() and set-up anew work", 1.0, at_least=True)
    if "delay_s" not in found.get("kill", {}):
        kill.why_not = missing
    elif found["kill"]["error"] != "PeerDied":
        kill.why_not = f"{found['kill']['text']} instead"
    else:
        kill.value = found["kill"]["delay_s"]
        kill.detail = f"{found.get('resident_bytes', 0) / (1 << 20):.0f} MiB resident"
    if "stop" not in found:
        stop.why_not = missing
    elif found["stop"]["error"] != "PeerTimeout":
        stop.why_not = f"{found['stop']['text']} instead"
    else:
        stop.value = abs(found["stop"]["waited_s"] / found["timeout_s"] - 1)
        stop.detail = f"{found['stop']['waited_s']:.2f} s of {found['timeout_s']:g} s"
    if "anew" not in found or "reset" not in found:
        on.why_not = missing
    else:
        faults = [text for text in (*found["reset"], found.get("usable", ""), *found["anew"]) if text]
        on.value, on.detail = float(not faults), "; ".join(faults)
    yield from (kill, stop, on)


def _cpu(measured: dict[str, Measured]) -> Iterator[Bar]:
    """The memcpy is done by all ranks at once, as the exchange is."""
    found = next((each for each in measured.values() if each.task.cell.rank_bytes == 64 << 20), None)
    yield ratio(
        "CPU backend, 64 MB per rank into out=, speed of a plain memcpy of as many bytes by every rank",
        0.6,
        found,
        ("out",),
        ("memcpy",),
        at_least=True,
    )
