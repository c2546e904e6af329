"""`kvferry explain`: what a transfer between two layouts would copy, without making either."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import kvferry as kf

if TYPE_CHECKING:
    from collections.abc import Sequence

SUMMARY = "say what a transfer between two layouts would copy, in how many runs, and by which engine"

Kind = Literal["fully_contiguous", "layer_separate", "split_kv", "block_pool"]
ORDERS = ("NHD", "HND", "universal")
BLOCK_DIMS = ("block_first", "outer_first")
MAX_IDS = 1 << 20

_SHAPE: dict[str, tuple[int | str, str]] = {
    "blocks": (64, "blocks of each layout"),
    "layers": (32, "layers"),
    "outer": (2, "2 for K and V, 1 for MLA"),
    "page": (16, "tokens of a block"),
    "heads": (8, "heads of the whole model"),
    "dim": (128, "elements of a head"),
    "dtype": ("bfloat16", "element type"),
}
"""Flags of layouts given by kind: default and meaning. The defaults are Llama-3.1-8B."""

_EPILOG = """\
A LAYOUT is a kind with options, such as layer_separate:block_first:NHD or fully_contiguous:universal
(kinds: fully_contiguous, layer_separate, split_kv, block_pool), or a JSON descriptor as written by
layout.to_json(): inline, a file, or - for standard input.

  kvferry explain --src layer_separate:outer_first --dst fully_contiguous:universal \\
    --src-ids 3,5,7-9 --dst-ids 0-4
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds explain's options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    for side, meaning in (("src", "source"), ("dst", "destination")):
        parser.add_argument(f"--{side}", required=True, metavar="LAYOUT", help=f"{meaning} layout")
        parser.add_argument(
            f"--{side}-ids",
            type=ids,
            default=[0],
            metavar="IDS",
            help=f"{meaning} blocks, as 3,5,7-9 (default: 0)",
        )
    shape = parser.add_argument_group("shape, of layouts given by kind")
    for name, (default, meaning) in _SHAPE.items():
        kind = type(default)
        shape.add_argument(
            f"--{name}", type=kind, metavar=name.upper(), help=f"{meaning} (default: {default})"
        )
    shape.add_argument(
        "--dst-blocks-total", type=int, metavar="N", help="blocks of the destination, if others"
    )
    shape.add_argument("--dst-page", type=int, metavar="N", help="tokens of a destination block, if others")
    shape.add_argument(
        "--tp", type=_shard, metavar="RANK/WORLD", help="the source holds this share of the heads"
    )
    shape.add_argument("--dst-tp", type=_shard, metavar="RANK/WORLD", help="so does the destination")
    options = parser.add_argument_group("transfer")
    options.add_argument("--layer-range", type=_range, metavar="FIRST:END", help="these layers only")
    options.add_argument(
        "--head-range", type=_range, metavar="FIRST:END", help="these heads of the model only"
    )
    for side in ("src", "dst"):
        help_ = "system (default), pinned or device:N"
        options.add_argument(f"--{side}-memory", type=_memory, metavar="MEMORY", help=help_)
    options.add_argument("--engine", default="auto", help="engine to force (default: auto)")
    options.add_argument("--forbid-transform", action="store_true", help="refuse a change of order")
    parser.add_argument("--json", action="store_true", help="print the counts as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Plans and prints: 0 it can be done, 2 it cannot, with the reason."""
    try:
        _refuse_idle_flags(arguments)
        src = _descriptor(arguments.src, arguments, destination=False)
        dst = _descriptor(arguments.dst, arguments, destination=True)
        plan: kf.TransferPlan = kf.plan(
            src,
            dst,
            arguments.src_ids,
            arguments.dst_ids,
            src_memory=arguments.src_memory,
            dst_memory=arguments.dst_memory,
            layers=arguments.layer_range,
            heads=arguments.head_range,
            engine=arguments.engine,
            transform="forbid" if arguments.forbid_transform else "auto",
        )
    except (kf.Error, ValueError, OverflowError, OSError) as error:
        name = f"{type(error).__name__}: " if isinstance(error, kf.Error) else ""
        print(f"kvferry explain: {name}{error}", file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps(_as_json(plan, src, dst), indent=2))
    else:
        print(plan.explain().rstrip("\n"))
    return 0


def ids(text: str) -> list[int]:
    """Block ids from "3,5,7-9"."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        try:
            low = int(first)
            high = int(last) if dash else low
        except ValueError:
            raise argparse.ArgumentTypeError(f"{part.strip()!r} is neither an id nor FIRST-LAST") from None
        if high < low:
            raise argparse.ArgumentTypeError(f"{part.strip()!r} goes backwards")
        if len(found) + high - low >= MAX_IDS:
            raise argparse.ArgumentTypeError(f"more than {MAX_IDS} ids")
        found.extend(range(low, high + 1))
    return found


def _descriptor(given: str, arguments: argparse.Namespace, *, destination: bool) -> str:
    """The layout's JSON descriptor."""
    if _is_json(given):
        return given
    if given == "-":
        return sys.stdin.read()
    kind, *words = given.split(":")
    if kind in get_args(Kind):
        return _of_kind(kind, words, _config(arguments, destination=destination))
    path = Path(given)
    if not path.exists():
        kinds = ", ".join(get_args(Kind))
        raise ValueError(f"{given!r} is no file, no JSON, and does not begin with a kind of layout ({kinds})")
    return path.read_text()


def _of_kind(kind: Any, words: Sequence[str], config: kf.LayoutConfig) -> str:
    options: dict[str, Any] = {}
    for word in words:
        name = "order" if word in ORDERS else "block_dim" if word in BLOCK_DIMS else ""
        if not name:
            raise ValueError(
                f"{word!r} is neither an order ({', '.join(ORDERS)}) nor {' or '.join(BLOCK_DIMS)}"
            )
        if name in options:
            raise ValueError(f"{options[name]} and {word} exclude each other")
        options[name] = word
    return kf.describe(kind, config, **options)


def _config(arguments: argparse.Namespace, *, destination: bool) -> kf.LayoutConfig:
    shape: dict[str, Any] = {
        name: default if getattr(arguments, name) is None else getattr(arguments, name)
        for name, (default, _) in _SHAPE.items()
    }
    shard = arguments.dst_tp if destination else arguments.tp
    if destination:
        others = {"blocks": arguments.dst_blocks_total, "page": arguments.dst_page}
        shape |= {name: value for name, value in others.items() if value is not None}
    config = kf.LayoutConfig(
        num_blocks=shape["blocks"],
        num_layers=shape["layers"],
        outer_dim=shape["outer"],
        page_size=shape["page"],
        num_heads=shape["heads"],
        head_dim=shape["dim"],
        dtype=shape["dtype"],
    )
    return config.shard_heads(*shard) if shard else config


def _refuse_idle_flags(arguments: argparse.Namespace) -> None:
    """A shape flag that no layout uses is a misunderstanding."""
    of_kind = [given.split(":")[0] in get_args(Kind) for given in (arguments.src, arguments.dst)]
    users: dict[str, bool] = dict.fromkeys(_SHAPE, any(of_kind))
    users |= {"tp": of_kind[0]} | dict.fromkeys(("dst_blocks_total", "dst_page", "dst_tp"), of_kind[1])
    for name, used in users.items():
        if getattr(arguments, name) is not None and not used:
            raise ValueError(
                f"--{name.replace('_', '-')} shapes a layout given by kind; this one is a descriptor"
            )
    if arguments.src == arguments.dst == "-":
        raise ValueError("only one layout can come from standard input")


def _as_json(plan: kf.TransferPlan, src: str, dst: str) -> dict[str, Any]:
    return {
        "src": json.loads(src),
        "dst": json.loads(dst),
        "blocks": plan.blocks,
        "bytes": plan.bytes,
        "elementary_runs": plan.elementary_runs,
        "num_runs": plan.num_runs,
        "run_bytes": list(plan.run_bytes),
        "transforms": plan.transforms,
        "engine": plan.engine,
        "explain": plan.explain(),
    }


def _is_json(given: str) -> bool:
    return given.lstrip().startswith("{")


def _shard(text: str) -> tuple[int, int]:
    rank, _, world = text.partition("/")
    try:
        return int(rank), int(world)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not RANK/WORLD") from None


def _range(text: str) -> range:
    first, _, end = text.partition(":")
    try:
        return range(int(first), int(end))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not FIRST:END") from None


def _memory(text: str) -> kf.Memory:
    kind, _, ordinal = text.partition(":")
    if text in {"system", "pinned"}:
        return kf.system() if text == "system" else kf.pinned()
    if kind == "device" and ordinal.isascii() and ordinal.isdigit():
        return kf.device(int(ordinal))
    raise argparse.ArgumentTypeError(f"{text!r} is not system, pinned or device:N")
