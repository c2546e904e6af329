"""Load a prefix layer by layer while layers that have arrived are used, and poll many tagged jobs.

Run: python examples/pipeline.py
"""

import asyncio

import kvferry as kf

CONFIG = kf.LayoutConfig(
    num_blocks=64, num_layers=8, page_size=16, num_heads=8, head_dim=128, dtype="bfloat16"
)


def attend(cache: kf.PhysicalLayout, layer: int) -> None:
    """Stands for the attention of one layer."""
    cache.verify_pattern(1, range(32), as_blocks=range(32), layers=range(layer, layer + 1))


async def main() -> None:
    """Runs both parts."""
    pool = kf.PhysicalLayout.fully_contiguous(CONFIG, kf.system())
    cache = kf.PhysicalLayout.layer_separate(CONFIG, kf.system(), block_dim="outer_first")
    pool.fill_pattern(1)

    with kf.TransferContext() as ctx:
        job = ctx.transfer(pool, cache, range(32), range(32), per_layer=True)
        for layer in range(CONFIG.num_layers):
            job.wait(layer=layer)
            attend(cache, layer)
        print("layer by layer:", job.wait())  # the whole ends a moment after its last layer

        # Many requests at once: await them together, or poll the context.
        jobs = [ctx.transfer(pool, cache, [i], [63 - i], tag=f"request {i}") for i in range(16)]
        results = await asyncio.gather(*jobs)
        print("awaited:", sum(result.bytes for result in results), "bytes")
        print("polled:", sorted(tag for tag, _ in ctx.completed())[:3], "…")


if __name__ == "__main__":
    asyncio.run(main())
