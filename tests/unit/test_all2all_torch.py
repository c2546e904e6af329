"""torch tensors through the CPU exchange, gradients and torch.compile. Skipped without torch."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from exchange_ranks import each, fresh, join, nothing_left, together
from support import with_tests

import kvferry as kf

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from exchange_reference import Layout, Operation

torch = pytest.importorskip("torch")

import exchange_torch as shared  # noqa: E402 - needs torch

import kvferry.torch as kft  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


@pytest.fixture(autouse=True)
def leaves_nothing() -> Iterator[None]:
    with nothing_left():
        yield


@pytest.mark.parametrize("dtype", shared.DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["BNHD", "BHND"])
def test_bytes_move(dtype: Any, layout: Layout) -> None:
    for operation in ("send_recv_heads", "gather_heads"):
        shared.bytes_move("cpu", dtype, operation, layout)


def test_held_results_are_copied_out() -> None:
    shared.held_results_are_copied_out("cpu")


def test_results_outlive_the_communicator() -> None:
    shared.results_outlive_the_communicator("cpu")


def test_a_tensor_that_requires_grad_is_refused_outside_kvferry_torch() -> None:
    with kf.All2All(0, 1, capacity_bytes=1 << 16) as comm:
        x = torch.ones(1, 2, 3, 4, requires_grad=True)
        with pytest.raises(kf.Unsupported, match=r"kvferry\.torch"):
            comm.send_recv_heads(x)
        with torch.no_grad():
            assert torch.equal(comm.send_recv_heads(x), x)
        assert torch.equal(comm.send_recv_heads(x.detach()), x)


def test_tensors_without_memory_of_their_own() -> None:
    with kf.All2All(0, 1, capacity_bytes=1 << 16) as comm:
        with pytest.raises(kf.LayoutError, match="memory"):
            comm.send_recv_heads(torch.ones(1, 2, 3, 4).to_sparse())
        assert comm.send_recv_heads(torch.ones(1, 0, 3, 4)).shape == (1, 0, 3, 4)
        wide = torch.arange(24.0).reshape(1, 2, 1, 12).expand(1, 2, 5, 12)
        assert torch.equal(comm.send_recv_heads(wide), wide)


@pytest.mark.parametrize("case", shared.GRADIENTS, ids=lambda case: f"{case.operation}-{case.layout}")
def test_gradients(case: Any) -> None:
    """The inverse exchange; heads that went to several ranks come back from each and are summed."""
    case.check("cpu")


@pytest.mark.parametrize("world", [3, 4])
def test_gradients_of_replicated_heads(world: int) -> None:
    shared.Case("send_recv_heads", (2,) * world, (8 if world == 4 else 6, 2 if world == 4 else 3)).check(
        "cpu"
    )


@pytest.mark.parametrize(
    ("operation", "backend"),
    [
        ("send_recv_heads", "inductor"),
        ("send_recv_heads", "aot_eager"),
        ("gather_heads", "aot_eager"),
        ("allgather_tokens", "aot_eager"),
        ("allgather_heads", "aot_eager"),
    ],
)
@pytest.mark.timeout(300)
def test_compiled_gradients_of_a_lone_rank(operation: Operation, backend: str) -> None:
    """Threads cannot compile at once, so ranks that compile are processes: see test_from_group."""
    torch._dynamo.reset()
    case = shared.Case(operation, (5,), (4, 2))
    case.check("cpu", lambda loss: torch.compile(loss, backend=backend, fullgraph=True))


def test_a_compiler_keeps_every_call_and_its_order() -> None:
    """L17: equal calls are not merged, unused ones not dropped."""
    with kf.All2All(0, 1, capacity_bytes=1 << 16) as comm:

        def step(x: Any) -> Any:
            first = kft.send_recv_heads(comm, x)
            second = kft.send_recv_heads(comm, x)
            kft.gather_heads(comm, x)
            return first + second

        x = torch.arange(24.0).reshape(1, 2, 3, 4)
        for backend in ("aot_eager", "inductor"):
            torch._dynamo.reset()
            before = comm.stats()["calls"]
            compiled = torch.compile(step, backend=backend, fullgraph=True)
            assert torch.equal(compiled(x), 2 * x)
            assert comm.stats()["calls"] == before + 3
            assert torch.equal(compiled(x + 1), 2 * x + 2)
            assert comm.stats()["calls"] == before + 6


def test_shapes_under_a_compiler() -> None:
    """L15: fake tensors have the shapes of uneven splits, for every rank."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: PLC0415

    tokens = (3, 0, 4)

    def body(comm: kf.All2All, rank: int) -> None:
        for heads, kv, layout in ((7, None, "BNHD"), (6, 3, "BHND")):

            def shape(n: int, h: int, layout: str = layout) -> tuple[int, ...]:
                return (2, n, h, 5) if layout == "BNHD" else (2, h, n, 5)

            real = [torch.zeros(shape(tokens[rank], heads))]
            if kv is not None:
                real.append(torch.zeros(shape(tokens[rank], kv)))
            found = kft.send_recv_heads(comm, real, rank_tokens=tokens, layout=layout)
            with FakeTensorMode() as mode:
                fakes = [mode.from_tensor(one) for one in real]
                expected = kft.send_recv_heads(comm, fakes, rank_tokens=tokens, layout=layout)
                assert [each.shape for each in expected] == [each.shape for each in found]
                assert [each.stride() for each in expected] == [each.stride() for each in found]

    together(3, body)


def test_own_errors_reach_the_other_ranks() -> None:
    from exchange_ranks import together_outcomes  # noqa: PLC0415

    def body(comm: kf.All2All, rank: int) -> Any:
        x = torch.zeros(1, 3, 4, 5)
        with pytest.raises((kf.OptionError, kf.ContractMismatch)) as info:
            kft.send_recv_heads(comm, x, rank_tokens=[3] if rank else [3, 3])
        return info.value

    zero, one = (outcome.value for outcome in together_outcomes(2, body))
    assert isinstance(one, kf.OptionError) and isinstance(zero, kf.ContractMismatch) and zero.rank == 1


@pytest.mark.parametrize(
    ("kind", "words", "call"),
    [
        (TypeError, "unexpected keyword argument 'heads'", lambda c, x: kft.send_recv_heads(c, x, heads=3)),
        (TypeError, "tensors must be a list, got int", lambda c, x: kft.send_recv_heads(c, 5)),
        (TypeError, "tensor 1 must be a torch tensor, got int", lambda c, x: kft.gather_heads(c, (x, 5))),
        (kf.LayoutError, "tensor 0 .*got 1", lambda c, x: kft.send_recv_heads(c, x.flatten())),
        (kf.LayoutError, "between 1 and 16 tensors, got 17", lambda c, x: kft.send_recv_heads(c, [x] * 17)),
        (kf.LayoutError, "between 1 and 16 tensors, got 0", lambda c, x: kft.send_recv_heads(c, [])),
        (TypeError, "layout", lambda c, x: kft.send_recv_heads(c, x, layout=5)),
        (TypeError, "axis", lambda c, x: kft.allgather(c, x, 5)),  # type: ignore[arg-type]
        (TypeError, "rank_tokens", lambda c, x: kft.send_recv_heads(c, x, rank_tokens=3)),
        (TypeError, "rank_tokens", lambda c, x: kft.send_recv_heads(c, x, rank_tokens=[3, "3"])),
        (TypeError, "rank_tokens", lambda c, x: kft.send_recv_heads(c, x, rank_tokens="33")),
        (kf.OptionError, "rank_tokens", lambda c, x: kft.send_recv_heads(c, x, rank_tokens=[3, 10**40])),
        (TypeError, "num_heads", lambda c, x: kft.send_recv_heads(c, x, num_heads=4.5)),
        (TypeError, "num_heads", lambda c, x: kft.send_recv_heads(c, x, num_heads=[4.5])),
        (TypeError, "num_heads", lambda c, x: kft.send_recv_heads(c, x, num_heads=True)),
        (TypeError, "query_heads", lambda c, x: kft.send_recv_heads(c, x, query_heads="4")),
        (kf.OptionError, "query_heads", lambda c, x: kft.send_recv_heads(c, x, query_heads=-4)),
        (TypeError, "head_splits", lambda c, x: kft.send_recv_heads(c, x, head_splits=3)),
        (TypeError, "head_splits", lambda c, x: kft.send_recv_heads(c, x, head_splits=["a", "b"])),
        (
            kf.OptionError,
            "head_splits",
            lambda c, x: kft.send_recv_heads(c, x, head_splits=[range(0, 4, 2), 0]),
        ),
        (TypeError, "num_sms", lambda c, x: kft.send_recv_heads(c, x, num_sms="all")),
        (kf.OptionError, "num_sms", lambda c, x: kft.send_recv_heads(c, x, num_sms=2**40)),
        (kf.OptionError, "num_sms", lambda c, x: kft.send_recv_heads(c, x, num_sms=-1)),
    ],
)
def test_whatever_is_refused_reaches_the_other_ranks(kind: Any, words: str, call: Any) -> None:
    from exchange_ranks import together_outcomes  # noqa: PLC0415

    def body(comm: kf.All2All, rank: int) -> Any:
        x = torch.zeros(1, 3, 4, 5)
        with pytest.raises(kind if rank else kf.ContractMismatch, match=words if rank else None) as info:
            call(comm, x) if rank else kft.send_recv_heads(comm, x)
        return info.value

    zero, one = together_outcomes(2, body, timeout=60.0)
    assert zero.error is None and one.error is None, (zero.error, one.error)
    assert zero.value.rank == 1 and type(one.value) is kind and zero.seconds < 20


def test_what_is_no_communicator_is_said() -> None:
    for call in (kft.send_recv_heads, kft.gather_heads, kft.allgather):
        with pytest.raises(TypeError, match=r"^comm must be"):
            call(None, torch.zeros(1, 3, 4, 5))  # type: ignore[arg-type]


def test_integers_of_other_libraries() -> None:
    numpy = pytest.importorskip("numpy")
    with kf.All2All(0, 1, capacity_bytes=1 << 16) as comm:
        x = torch.arange(60.0).reshape(1, 3, 4, 5)
        for three in (numpy.int64(3), torch.tensor(3)):
            options = {"rank_tokens": [three], "num_heads": three + 1, "head_splits": [three + 1]}
            assert torch.equal(kft.send_recv_heads(comm, x, **options), x)
        options = {"rank_tokens": numpy.array([3]), "query_heads": numpy.uint8(4)}
        assert torch.equal(kft.send_recv_heads(comm, x, **options), x)


def test_a_store_of_torch() -> None:
    store = torch.distributed.HashStore()
    meet: Any = store

    def body(comm: kf.All2All, rank: int) -> None:
        comm.send_recv_heads(torch.zeros(1, 2, 4, 4))

    together(2, body, rendezvous=meet)
    with pytest.raises(kf.PeerTimeout):
        join(0, 2, rendezvous=torch.distributed.HashStore(), setup_timeout=0.3)


GROUP = """
import sys
import torch
import torch.distributed as dist
import kvferry as kf
import kvferry.torch as kft

rank, path, compiled = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "compiled"
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=3)
whole = torch.arange(2 * 9 * 7 * 4, dtype=torch.float64).reshape(2, 9, 7, 4)
tokens, heads = [(0, 3), (3, 4), (4, 9)], [(0, 3), (3, 5), (5, 7)]

def part(spans, rank, axis):
    return whole.narrow(axis, spans[rank][0], spans[rank][1] - spans[rank][0])

make = kf.All2All.from_group
with make(capacity_bytes=1 << 20) as comm, make(capacity_bytes=1 << 20) as other:
    assert (comm.rank, comm.world_size, comm.device) == (rank, 3, None)
    x = part(tokens, rank, 1).clone().requires_grad_()

    def loss(x):
        y = kft.send_recv_heads(comm, x, rank_tokens=[3, 1, 5])
        z = kft.gather_heads(comm, y * 2, rank_tokens=[3, 1, 5], num_heads=7)
        return y, z, (z * x).sum()

    if compiled:
        loss = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for _ in range(3):
        x.grad = None
        y, z, total = loss(x)
        assert torch.equal(y, part(heads, rank, 2)), "exchange"
        assert torch.equal(z, 2 * x), "and back"
        total.backward()
        assert torch.allclose(x.grad, 4 * x), "gradient"
    assert torch.equal(other.send_recv_heads(x.detach(), rank_tokens=[3, 1, 5]), part(heads, rank, 2))
    # A subgroup, whose ranks are not those of the job.
    pair = dist.new_group([0, 2])
    if rank != 1:
        with kf.All2All.from_group(pair, capacity_bytes=1 << 20) as two:
            assert (two.rank, two.world_size) == (rank // 2, 2)
            ones = torch.full((1, 2, 4, 1), float(rank))
            assert two.send_recv_heads(ones).flatten().tolist() == [0.0] * 4 + [2.0] * 4
    dist.barrier()
dist.destroy_process_group()
print("done")
"""


@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.timeout(300)
def test_from_group(tmp_path: Path, how: str) -> None:
    """Ranks of a process group meet in its store; subgroups and several communicators do not mix."""
    three_processes(GROUP, f"{tmp_path}/group", how)


@pytest.mark.timeout(300)
def test_over_torch_distributed(tmp_path: Path) -> None:
    """The hand-over where ranks share no memory: same calls, same results, same gradients."""
    code = "import sys, exchange_torch; exchange_torch.over_distributed(int(sys.argv[1]), sys.argv[2])"
    three_processes(code, f"{tmp_path}/group")


def three_processes(code: str, *arguments: str) -> None:
    """Runs code in a process per rank, each told its rank; all must say that they are done."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **with_tests()},
        )
        for rank in range(3)
    ]
    try:
        for rank in ranks:
            out, err = rank.communicate(timeout=280)
            assert rank.returncode == 0 and out == "done\n", err[-3000:]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def test_no_group_no_communicator() -> None:
    with pytest.raises(kf.OptionError, match="init_process_group"):
        kf.All2All.from_group(capacity_bytes=1 << 16)


def test_threads_meet_and_torch_runs_between() -> None:
    """q, k and v of a tiny attention, sharded by tokens outside and by heads inside, equal the whole."""
    world, heads = 3, 6
    torch.manual_seed(0)
    tokens = (5, 2, 4)
    q, k, v = torch.randn(3, 1, sum(tokens), heads, 8, dtype=torch.float64)
    whole = torch.nn.functional.scaled_dot_product_attention(*(each.transpose(1, 2) for each in (q, k, v)))
    whole = whole.transpose(1, 2)
    meet = fresh()

    def body(rank: int) -> None:
        start = sum(tokens[:rank])
        mine = slice(start, start + tokens[rank])
        with join(rank, world, rendezvous=meet) as comm:
            here = comm.send_recv_heads((q[:, mine], k[:, mine], v[:, mine]), rank_tokens=tokens)
            out = torch.nn.functional.scaled_dot_product_attention(*(each.transpose(1, 2) for each in here))
            back = comm.gather_heads(out.transpose(1, 2), rank_tokens=tokens)
            torch.testing.assert_close(back, whole[:, mine])

    each(world, body)
