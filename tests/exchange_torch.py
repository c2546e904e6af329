"""What must hold for torch tensors of any device; ranks are threads. Imported only where torch is."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from exchange_calls import call, contract
from exchange_ranks import together
from exchange_reference import Tensor, even, of_groups

import kvferry as kf
import kvferry.torch as kft

if TYPE_CHECKING:
    from collections.abc import Callable

    from exchange_reference import Layout, Operation

DTYPES = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float8_e4m3fn: "float8_e4m3fn",
    torch.float8_e5m2: "float8_e5m2",
    torch.uint8: "uint8",
    torch.int16: "int16",
    torch.int64: "int64",
    torch.uint16: "int16",
    torch.complex64: "int64",
}


def place(device: str, rank: int) -> str:
    """The device of a rank: all CPU ranks share one, GPU ranks have one each."""
    return device if device == "cpu" else f"{device}:{rank}"


def ranks(device: str, world: int, body: Callable[[kf.All2All, int], Any], **options: Any) -> list[Any]:
    """Thread ranks on the CPU, or each on a GPU of its own, with that current."""
    from exchange_ranks import each, fresh, join  # noqa: PLC0415

    if world == 1:
        # In this thread: compilers do not take well to others.
        with join(0, 1, **options, **({} if device == "cpu" else {"device": 0})) as comm:
            return [body(comm, 0)]
    if device == "cpu":
        return together(world, body, **options)
    meet = options.pop("rendezvous", None) or fresh()

    def on_gpu(rank: int) -> Any:
        with (
            torch.cuda.device(rank),
            join(rank, world, **{"rendezvous": meet, "device": rank, **options}) as comm,
        ):
            try:
                return body(comm, rank)
            finally:
                with contextlib.suppress(Exception):
                    torch.cuda.synchronize(rank)

    return each(world, on_gpu, deadline=120)


def tensor_of(array: Any, dtype: torch.dtype, where: str) -> torch.Tensor:
    """The bytes of an array as a tensor."""
    if not array.size:
        return torch.empty(array.shape, dtype=dtype, device=where)
    raw = torch.from_numpy(np.ascontiguousarray(array).view(np.uint8).reshape(*array.shape, -1).copy())
    return raw.view(dtype).reshape(array.shape).to(where)


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found.dtype, found.shape, found.device) == (expected.dtype, expected.shape, expected.device)
    bits = found.contiguous().view(torch.uint8).cpu(), expected.contiguous().view(torch.uint8).cpu()
    assert torch.equal(*bits), "bytes differ"


def bytes_move(device: str, dtype: torch.dtype, operation: Operation, layout: Layout) -> None:
    """torch in, torch out: type, device, layout and every byte."""
    tensor = Tensor(2, (3, 4), 6, 4, DTYPES[dtype])

    def body(comm: kf.All2All, rank: int) -> None:
        where = place(device, rank)
        order = (0, 1, 2, 3) if layout == "BNHD" else (0, 2, 1, 3)
        x = tensor_of(tensor.before(operation, rank), dtype, where).permute(order)
        result = call(comm, operation, x, **contract(operation, [tensor], layout=layout))
        assert isinstance(result, torch.Tensor) and result.is_contiguous() and not result.requires_grad
        same(result, tensor_of(tensor.after(operation, rank), dtype, where).permute(order))

    ranks(device, 2, body)


def held_results_are_copied_out(device: str) -> None:
    """Hazard 55: torch gets memory of torch's when every buffer is held; nothing held changes."""
    tensors = [Tensor(1, (3, 4), 6, 4, key=key) for key in range(9)]

    def body(comm: kf.All2All, rank: int) -> None:
        where = place(device, rank)
        held = []
        for tensor in tensors:
            x = tensor_of(tensor.before("send_recv_heads", rank), torch.float16, where)
            held.append(comm.send_recv_heads(x, rank_tokens=tensor.tokens))
        assert comm.stats()["copied_out"] == len(tensors) - 4
        for tensor, result in zip(tensors, held, strict=True):
            same(result, tensor_of(tensor.after("send_recv_heads", rank), torch.float16, where))

    ranks(device, 2, body)


def results_outlive_the_communicator(device: str) -> None:
    tensor = Tensor(1, (3, 4), 6, 4)
    kept: list[Any] = [None, None]

    def body(comm: kf.All2All, rank: int) -> None:
        x = tensor_of(tensor.before("send_recv_heads", rank), torch.float16, place(device, rank))
        kept[rank] = comm.send_recv_heads((x, x), rank_tokens=tensor.tokens)

    ranks(device, 2, body)
    for rank in range(2):
        expected = tensor_of(tensor.after("send_recv_heads", rank), torch.float16, place(device, rank))
        for result in kept[rank]:
            same(result, expected)
            result.zero_()


class Case:
    """An exchange of doubles with uneven everything, and its gradient by autograd over the whole."""

    def __init__(
        self,
        operation: Operation,
        tokens: tuple[int, ...],
        heads: tuple[int, ...],
        layout: Layout = "BNHD",
        dim: int | None = 3,
    ) -> None:
        self.operation, self.tokens, self.heads, self.layout, self.dim = operation, tokens, heads, layout, dim
        self.world, most = len(tokens), max(heads)
        if operation == "allgather_heads":
            self.tokens = (sum(tokens),) + (0,) * (self.world - 1)
        self.splits = [
            of_groups(count, most, self.world) if count < most else even(count, self.world) for count in heads
        ]

    def _span(self, rank: int) -> slice:
        start = sum(self.tokens[:rank])
        return slice(start, start + self.tokens[rank])

    def _seen(self, tensor: Any) -> Any:
        tensor = tensor if self.layout == "BNHD" else tensor.transpose(1, 2)
        return tensor if self.dim is not None else tensor[..., 0]

    def leaves(self, index: int) -> list[Any]:
        """Inputs of every rank, in the order [B, N, H, D], each a leaf."""
        shape = (2, sum(self.tokens), self.heads[index], self.dim or 1)
        whole = torch.arange(int(np.prod(shape)), dtype=torch.float64).reshape(shape).sin()
        found = []
        for rank in range(self.world):
            mine = self.splits[index][rank]
            if self.operation in ("send_recv_heads", "allgather_tokens"):
                part = whole[:, self._span(rank)]
            else:
                part = whole[:, :, mine.start : mine.stop]
            found.append(part.clone().requires_grad_())
        return found

    def _joined_heads(self, index: int, leaves: list[Any]) -> Any:
        """Every head from the lowest rank that has it."""
        columns = []
        for head in range(self.heads[index]):
            owner = next(rank for rank, split in enumerate(self.splits[index]) if head in split)
            at = head - self.splits[index][owner].start
            columns.append(leaves[owner][:, :, at])
        return torch.stack(columns, dim=2)

    def results(self, index: int, leaves: list[Any]) -> list[Any]:
        """Results of every rank, computed here."""
        if self.operation in ("send_recv_heads", "allgather_tokens"):
            whole = torch.cat(leaves, dim=1)
        else:
            whole = self._joined_heads(index, leaves)
        if self.operation == "send_recv_heads":
            return [whole[:, :, split.start : split.stop] for split in self.splits[index]]
        if self.operation == "gather_heads":
            return [whole[:, self._span(rank)] for rank in range(self.world)]
        return [whole] * self.world

    def weight(self, result: Any, rank: int) -> Any:
        """So that every element of every rank's result counts differently."""
        count = result.numel()
        return (torch.arange(count, dtype=torch.float64) + 0.5 * rank + 1).cos().reshape(result.shape)

    def gradients(self) -> list[list[Any]]:
        """By tensor and rank."""
        found = []
        for index in range(len(self.heads)):
            leaves = self.leaves(index)
            results = self.results(index, leaves)
            sum((one * self.weight(one, rank)).sum() for rank, one in enumerate(results)).backward()
            found.append([torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves])
        return found

    def options(self) -> dict[str, Any]:
        said: dict[str, Any] = {"layout": self.layout}
        if self.operation != "allgather_heads":
            said["rank_tokens"] = self.tokens
        if self.operation in ("gather_heads", "allgather_heads"):
            said["num_heads"] = list(self.heads)
        return said

    def forward(self, comm: kf.All2All, given: Any) -> Any:
        if self.operation == "send_recv_heads":
            return kft.send_recv_heads(comm, given, **self.options())
        if self.operation == "gather_heads":
            return kft.gather_heads(comm, given, **self.options())
        axis = self.operation.removeprefix("allgather_")
        return kft.allgather(comm, given, axis, **self.options())

    def loss(self, comm: kf.All2All, rank: int, inputs: Any, weights: Any) -> Any:
        results = self.forward(comm, inputs)
        return sum((one * weight).sum() for one, weight in zip(results, weights, strict=True))

    def check(self, device: str, compiled: Callable[[Any], Any] | None = None) -> None:
        """Forward and backward of every rank against the whole."""
        expected = self.gradients()
        wanted = [self.results(index, self.leaves(index)) for index in range(len(self.heads))]

        def body(comm: kf.All2All, rank: int) -> None:
            where = place(device, rank)
            inputs = [
                self._seen(self.leaves(index)[rank].detach()).to(where).clone().requires_grad_()
                for index in range(len(self.heads))
            ]
            weights = [
                self._seen(self.weight(results[rank], rank)).to(where).contiguous() for results in wanted
            ]
            plain = self.forward(comm, [each.detach() for each in inputs])
            for one, results in zip(plain, wanted, strict=True):
                assert torch.equal(one.cpu(), self._seen(results[rank].detach()))

            def loss(*given: Any) -> Any:
                return self.loss(comm, rank, given, weights)

            total = compiled(loss)(*inputs) if compiled is not None else loss(*inputs)
            total.backward()
            for index, one in enumerate(inputs):
                torch.testing.assert_close(one.grad.cpu(), self._seen(expected[index][rank]))
            assert comm.stats()["buffers_free"] >= 3, "an autograd graph holds buffers"
            del total

        ranks(device, self.world, body)


GRADIENTS = (
    Case("send_recv_heads", (3, 4), (6,)),
    Case("send_recv_heads", (3, 4), (7, 7), "BHND"),
    Case("send_recv_heads", (3, 5), (5,), dim=None),
    Case("send_recv_heads", (3, 4), (4, 1)),
    Case("gather_heads", (3, 4), (7,)),
    Case("gather_heads", (2, 5), (4, 1), "BHND"),
    Case("allgather_tokens", (3, 4), (5,)),
    Case("allgather_tokens", (1, 4), (3,), "BHND"),
    Case("allgather_heads", (3, 4), (5,)),
    Case("allgather_heads", (3, 4), (5,), "BHND"),
)


THREE = (
    Case("send_recv_heads", (2, 1, 3), (6, 3)),
    Case("send_recv_heads", (2, 0, 3), (7,), "BHND"),
    Case("gather_heads", (2, 0, 3), (6, 3)),
    Case("allgather_tokens", (2, 0, 3), (7,), "BHND"),
    Case("allgather_heads", (2, 0, 3), (7,)),
)


def over_distributed(rank: int, path: str) -> None:
    """A process rank of three: the calls over torch.distributed give what those over shared memory do."""
    import torch.distributed as dist  # noqa: PLC0415

    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=3)
    comm: Any = kft.Distributed()
    assert (comm.rank, comm.world_size) == (rank, 3)
    for case in THREE:
        expected = case.gradients()
        wanted = [case.results(index, case.leaves(index)) for index in range(len(case.heads))]
        inputs = [
            case._seen(case.leaves(index)[rank].detach()).clone().requires_grad_()
            for index in range(len(case.heads))
        ]
        weights = [case._seen(case.weight(results[rank], rank)).contiguous() for results in wanted]
        plain = case.forward(comm, [each.detach() for each in inputs])
        for one, results in zip(plain, wanted, strict=True):
            assert torch.equal(one, case._seen(results[rank].detach())), case.operation
        case.loss(comm, rank, inputs, weights).backward()
        for index, one in enumerate(inputs):
            torch.testing.assert_close(one.grad, case._seen(expected[index][rank]))
    tensors = {
        torch.float8_e4m3fn: Tensor(1, (3, 0, 4), 7, 4, "float8_e4m3fn"),
        torch.int64: Tensor(2, (3, 0, 4), 7, 3, "int64", key=2),
    }
    given = [tensor_of(t.before("send_recv_heads", rank), dtype, "cpu") for dtype, t in tensors.items()]
    for result, (dtype, tensor) in zip(
        comm.send_recv_heads(given, rank_tokens=[3, 0, 4]), tensors.items(), strict=True
    ):
        same(result, tensor_of(tensor.after("send_recv_heads", rank), dtype, "cpu"))
    # On one machine a group gets the real thing; where a rank cannot take part, all get the other.
    real = kft.from_group(fallback="distributed", capacity_bytes=1 << 20)
    assert isinstance(real, kf.All2All)
    x = torch.full((1, 2, 3, 4), float(rank))
    assert torch.equal(kft.allgather(real, x), kft.allgather(comm, x))
    real.close()
    device = "cuda:99" if rank == 1 else "cpu"
    other = kft.from_group(fallback="distributed", capacity_bytes=1 << 20, device=device, setup_timeout=5.0)
    assert isinstance(other, kft.Distributed)
    assert torch.equal(kft.allgather(other, x), kft.allgather(comm, x))
    dist.barrier()
    dist.destroy_process_group()
    print("done")
