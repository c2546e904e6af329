"""kvferry moves KV-cache blocks between memories and layouts, and attention heads between ranks.

    import kvferry as kf

    cfg = kf.LayoutConfig(
        num_blocks=64, num_layers=32, page_size=16, num_heads=8, head_dim=128, dtype="bfloat16"
    )
    cache = kf.PhysicalLayout.layer_separate(cfg, kf.system())
    pool = kf.PhysicalLayout.fully_contiguous(cfg, kf.system(), order="universal")
    with kf.TransferContext() as ctx:
        job = ctx.transfer(cache, pool, [3, 5], [0, 1])
        print(job.wait())

    with kf.All2All(rank, world_size, capacity_bytes=1 << 28, rendezvous="tcp://127.0.0.1:29611") as comm:
        q, k, v = comm.send_recv_heads((q, k, v), rank_tokens=[128, 96])
        o = comm.gather_heads(attention(q, k, v), rank_tokens=[128, 96])

Importing needs no GPU, driver, NumPy or torch.
"""

import os

from kvferry import _async as _async  # loaded now, not inside the first await
from kvferry._core import (
    All2All,
    ExchangeArray,
    HostRegistration,
    LayoutConfig,
    Memory,
    PhysicalLayout,
    Region,
    Route,
    Transfer,
    TransferContext,
    TransferPlan,
    TransferResult,
    build_info,
    calibrate,
    describe,
    device,
    devices,
    enable_logging,
    memcpy_batch,
    pinned,
    plan,
    register_host,
    system,
    usable_cpus,
    vectorized_copy,
)
from kvferry._errors import (
    Aborted,
    BlockIdError,
    Busy,
    CapacityError,
    ClosedError,
    ContractMismatch,
    CudaError,
    DuplicateBlockError,
    Error,
    ForkError,
    GuardError,
    HostMemoryError,
    LayoutError,
    MismatchError,
    OptionError,
    OverlapError,
    PeerDied,
    PeerTimeout,
    ProtocolError,
    RendezvousError,
    TransferError,
    Unsupported,
    WaitTimeout,
)

if _level := os.environ.get("KVFERRY_LOG"):
    enable_logging(_level)

__version__: str = build_info()["version"]

__all__ = [
    "Aborted",
    "All2All",
    "BlockIdError",
    "Busy",
    "CapacityError",
    "ClosedError",
    "ContractMismatch",
    "CudaError",
    "DuplicateBlockError",
    "Error",
    "ExchangeArray",
    "ForkError",
    "GuardError",
    "HostMemoryError",
    "HostRegistration",
    "LayoutConfig",
    "LayoutError",
    "Memory",
    "MismatchError",
    "OptionError",
    "OverlapError",
    "PeerDied",
    "PeerTimeout",
    "PhysicalLayout",
    "ProtocolError",
    "Region",
    "RendezvousError",
    "Route",
    "Transfer",
    "TransferContext",
    "TransferError",
    "TransferPlan",
    "TransferResult",
    "Unsupported",
    "WaitTimeout",
    "__version__",
    "build_info",
    "calibrate",
    "describe",
    "device",
    "devices",
    "enable_logging",
    "memcpy_batch",
    "pinned",
    "plan",
    "register_host",
    "system",
    "usable_cpus",
    "vectorized_copy",
]
