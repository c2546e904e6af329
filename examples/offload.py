"""Offload scattered blocks of a vLLM-shaped cache to a pool of another order, bring them back, and check.

Run: python examples/offload.py
"""

import numpy as np

import kvferry as kf

LAYERS, BLOCKS, PAGE, HEADS, DIM = 8, 64, 16, 8, 128

# One tensor per layer, K and V outermost, as vLLM allocates them. NumPy lacks bfloat16: uint16 is relabelled.
tensors = [np.zeros((2, BLOCKS, PAGE, HEADS, DIM), np.uint16) for _ in range(LAYERS)]
cache = kf.PhysicalLayout.from_tensors(tensors, axes="outer block page head dim", dtype="bfloat16")
pool = kf.PhysicalLayout.fully_contiguous(cache.config.replace(num_blocks=16), kf.system(), order="universal")
cache.fill_pattern(seed=1)

with kf.TransferContext() as ctx:
    blocks, slots = [3, 41, 7, 22], [0, 1, 2, 3]
    print(ctx.plan(cache, pool, blocks, slots).explain())
    print(ctx.transfer(cache, pool, blocks, slots).wait())

    # The engine reuses the blocks, then the sequence comes back to other ones.
    new_blocks = [10, 11, 12, 13]
    print(ctx.transfer(pool, cache, slots, new_blocks).wait())

pool.verify_pattern(1, slots, as_blocks=blocks)
cache.verify_pattern(1, new_blocks, as_blocks=blocks)
assert pool.checksum(slots) == cache.checksum(new_blocks)
print("every byte is where it belongs")
