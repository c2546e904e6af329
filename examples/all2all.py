"""Sequence-parallel attention by three processes: heads for tokens, attention, tokens for heads. Checked.

Run: python examples/all2all.py
"""

import multiprocessing
import tempfile

import numpy as np
from numpy.typing import NDArray

import kvferry as kf

WORLD, HEADS, KV_HEADS, DIM = 3, 6, 3, 16
TOKENS = [50, 20, 33]  # of each rank
START = [sum(TOKENS[:rank]) for rank in range(WORLD)]

Floats = NDArray[np.float32]


def attention(q: Floats, k: Floats, v: Floats) -> Floats:
    """[tokens, heads, dim]; a KV head serves a group of query heads."""
    out = np.empty_like(q)
    for head in range(q.shape[1]):
        kv = head * k.shape[1] // q.shape[1]
        weights = np.exp(q[:, head] @ k[:, kv].T / np.sqrt(DIM))
        out[:, head] = weights @ v[:, kv] / weights.sum(axis=1, keepdims=True)
    return out


def run(rank: int, rendezvous: str) -> None:
    """One rank: it has some tokens, and computes some heads of all of them."""
    random = np.random.default_rng(0)
    q, k, v = (
        random.standard_normal((1, sum(TOKENS), heads, DIM), np.float32)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    mine = slice(START[rank], START[rank] + TOKENS[rank])
    capacity = kf.All2All.capacity_for([q.shape, k.shape, v.shape], "float32", WORLD, rank_tokens=TOKENS)
    with kf.All2All(rank, WORLD, capacity_bytes=capacity, rendezvous=rendezvous) as comm:
        # [1, 50, 6, 16] on rank 0 -> [1, 103, 2, 16] on each: all tokens, its heads. One call for the three.
        here = comm.send_recv_heads((q[:, mine], k[:, mine], v[:, mine]), rank_tokens=TOKENS)
        out = attention(*(each[0] for each in here))
        # And back: its tokens, all heads.
        back = comm.gather_heads(out[None], rank_tokens=TOKENS)
        whole = attention(q[0], k[0], v[0])
        assert np.allclose(back[0], whole[mine])
        print(f"rank {rank}: {here[0].shape} -> {back.shape}, as in one process", flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        spawn = multiprocessing.get_context("spawn")
        ranks = [spawn.Process(target=run, args=(rank, f"file://{place}/meet")) for rank in range(WORLD)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        assert all(process.exitcode == 0 for process in ranks)
