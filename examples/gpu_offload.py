"""Offload scattered blocks of a GPU's cache to pinned memory, bring them back layer by layer, and check.

Needs a GPU; without one it says so. Run: python examples/gpu_offload.py
"""

import kvferry as kf

LAYERS, BLOCKS, PAGE, HEADS, DIM = 32, 64, 16, 8, 128
cfg = kf.LayoutConfig(
    num_blocks=BLOCKS, num_layers=LAYERS, page_size=PAGE, num_heads=HEADS, head_dim=DIM, dtype="bfloat16"
)


def main() -> None:
    """The job."""
    # One tensor per layer, as vLLM has them. Those of torch are wrapped by from_tensors() instead.
    cache = kf.PhysicalLayout.layer_separate(cfg, kf.device(0), block_dim="outer_first")
    pool = kf.PhysicalLayout.fully_contiguous(cfg.replace(num_blocks=16), kf.pinned())
    blocks, slots, new_blocks = [3, 41, 7, 22], [0, 1, 2, 3], [10, 11, 12, 13]
    cache.fill_pattern(1, blocks)

    with kf.TransferContext(0) as ctx:
        print(ctx.plan(cache, pool, blocks, slots).explain())
        down = ctx.transfer(cache, pool, blocks, slots)
        # Nobody waits: the way back follows on the GPU. The forward pass may start when its layer is there;
        # on a CUDA stream that is up.wait_on(stream, layer=layer).
        up = ctx.transfer(pool, cache, slots, new_blocks, after=down, per_layer=True)
        for layer in range(LAYERS):
            up.wait(layer=layer)
        print(down.result())
        print(up.wait())

    cache.verify_pattern(1, new_blocks, as_blocks=blocks)
    print("every byte is where it belongs")


try:
    gpus = kf.devices()
except kf.CudaError as error:
    print(f"this example needs a GPU: {error}")
else:
    if gpus:
        main()
