"""The head exchange as torch operators: with gradients, under torch.compile, and across machines.

    import kvferry.torch as kft

    comm = kft.from_group(capacity_bytes=1 << 28)
    q, k, v = kft.send_recv_heads(comm, (q, k, v), rank_tokens=[128, 96])
    o = kft.gather_heads(comm, attention(q, k, v), rank_tokens=[128, 96])

The functions take what the methods of kf.All2All take, but for `out`, `stream`, `engine` and `dtype`. The
gradient of an exchange is another exchange: all ranks run the backward passes of the same calls, in the same
order. Where a gradient is recorded, and in a CUDA graph, results are copied out of the communicator, whose
buffers an autograd graph would hold for long. Compilers keep the calls and their order.

Nothing else in kvferry imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvferry.torch._distributed import Distributed, from_group
from kvferry.torch._operator import exchange
from kvferry.torch._options import check_axis, check_communicator
from kvferry.torch._splits import GATHER, HEADS, SEND, TOKENS

if TYPE_CHECKING:
    from kvferry.torch._operator import Tensors
    from kvferry.torch._registry import Communicator

__all__ = ["Distributed", "allgather", "from_group", "gather_heads", "send_recv_heads"]


def send_recv_heads(comm: Communicator, tensors: Tensors, **options: Any) -> Any:
    """All2All.send_recv_heads() with a gradient: one tensor gives one, several give a tuple."""
    return exchange(comm, tensors, SEND, **options)


def gather_heads(comm: Communicator, tensors: Tensors, **options: Any) -> Any:
    """All2All.gather_heads() with a gradient.

    Of heads that several ranks hold only the first one's are sent; the others get a gradient of zero.
    """
    return exchange(comm, tensors, GATHER, **options)


def allgather(comm: Communicator, tensors: Tensors, axis: str = "tokens", **options: Any) -> Any:
    """All2All.allgather() with a gradient: the sum of all ranks'."""
    check_communicator(comm)
    try:
        check_axis(axis)
    except Exception as error:
        comm._refuse(TOKENS, str(error))
        raise
    return exchange(comm, tensors, TOKENS if axis == "tokens" else HEADS, **options)
