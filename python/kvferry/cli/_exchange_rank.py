"""A rank of the demo's exchange, a process: python -m kvferry.cli._exchange_rank RANK RENDEZVOUS SEED.

Says one JSON object per line on stdout, and is told to go on by a line on stdin.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np

import kvferry as kf
from kvferry.cli._exchange import ATTENTION, CAPACITY, HEADS, SHAPE_DIM, TOKENS, VICTIM, WORLD

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _whole(tokens: int, heads: int, dim: int, key: int) -> Any:
    """[1, tokens, heads, dim] of 16-bit values, which differ by coordinate and key."""
    numbers = np.arange(tokens * heads * dim, dtype=np.uint64) + np.uint64(key << 32)
    with np.errstate(over="ignore"):
        mixed = numbers * _GOLDEN
        mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return (mixed >> np.uint64(40)).astype(np.uint16).reshape(1, tokens, heads, dim)


def _span(rank: int, counts: tuple[int, ...]) -> slice:
    start = sum(counts[:rank])
    return slice(start, start + counts[rank])


def _exchange(comm: kf.All2All, seed: int) -> dict[str, Any]:
    """q, k and v there in one call and back in another; every element compared with the whole."""
    wholes = [_whole(sum(TOKENS), HEADS, SHAPE_DIM, 3 * seed + which) for which in range(3)]
    mine, heads = _span(comm.rank, TOKENS), comm.head_range(HEADS)
    given = tuple(whole[:, mine] for whole in wholes)
    start = time.perf_counter()
    there = comm.send_recv_heads(given, rank_tokens=TOKENS, dtype="bfloat16")
    seconds = time.perf_counter() - start
    back = comm.gather_heads(there, rank_tokens=TOKENS, num_heads=HEADS, dtype="bfloat16")
    wrong = checked = 0
    for whole, one, again in zip(wholes, there, back, strict=True):
        expected = whole[:, :, heads.start : heads.stop]
        wrong += int(np.count_nonzero(one != expected)) + int(np.count_nonzero(again != whole[:, mine]))
        checked += one.nbytes + again.nbytes
    return {"heads": len(heads), "checked_bytes": checked, "wrong_elements": wrong, "seconds": seconds}


def _attention(q: Any, k: Any, v: Any) -> Any:
    """[tokens, heads, dim]; every KV head serves a group of query heads."""
    out = np.empty_like(q)
    group = q.shape[1] // k.shape[1]
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head // group].T / np.sqrt(q.shape[2])
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[:, head] = weights @ v[:, head // group] / weights.sum(axis=1, keepdims=True)
    return out


def _sequence_parallel(comm: kf.All2All, seed: int) -> float:
    """Attention over tokens spread over the ranks; its largest difference from that in one process."""
    tokens, queries, kv, dim = ATTENTION
    counts = tuple(tokens * (rank + 1) // 10 for rank in range(WORLD))
    random = np.random.default_rng(seed)
    q, k, v = (
        random.standard_normal((1, sum(counts), heads, dim), dtype=np.float32) for heads in (queries, kv, kv)
    )
    mine = _span(comm.rank, counts)
    here = comm.send_recv_heads((q[:, mine], k[:, mine], v[:, mine]), rank_tokens=counts)
    own = _attention(*(each[0] for each in here))
    found = comm.gather_heads(own[None], rank_tokens=counts, num_heads=queries)
    expected = _attention(q[0], k[0], v[0])[mine]
    return float(np.abs(found[0] - expected).max())


def _bereaved(comm: kf.All2All) -> dict[str, Any]:
    """Waits in a call for a rank that will not come; what it is told, and when."""
    x = np.zeros((1, 1, WORLD, 1), np.float32)
    _say({"stage": "waiting"})
    try:
        while True:
            comm.send_recv_heads(x)
    except kf.Error as error:
        now = time.monotonic()
        fields = {name: getattr(error, name, None) for name in ("peer", "pid", "op", "epoch")}
        return {"at": now, "error": type(error).__name__, "message": str(error), **fields}


def _say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


def main(rank: int, rendezvous: str, seed: int) -> None:
    """The rank's part in all three pieces."""
    comm = kf.All2All(rank, WORLD, capacity_bytes=CAPACITY, rendezvous=rendezvous, timeout=20.0)
    _say({"exchange": _exchange(comm, seed), "difference": _sequence_parallel(comm, seed)})
    if rank == VICTIM:
        sys.stdin.readline()
        return
    _say({"death": _bereaved(comm)})


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
