from __future__ import annotations

import copy
import errno
import pickle
from typing import Any

import pytest
from reference import Model
from support import config, gpu_reason, owned, small

import kvferry as kf

BASES: dict[type[kf.Error], type[Exception]] = {
    kf.LayoutError: ValueError,
    kf.ProtocolError: TypeError,
    kf.OptionError: ValueError,
    kf.BlockIdError: IndexError,
    kf.MismatchError: AssertionError,
    kf.GuardError: AssertionError,
    kf.DuplicateBlockError: ValueError,
    kf.OverlapError: ValueError,
    kf.CudaError: RuntimeError,
    kf.HostMemoryError: OSError,
    kf.TransferError: RuntimeError,
    kf.WaitTimeout: TimeoutError,
    kf.RendezvousError: ConnectionError,
    kf.PeerTimeout: TimeoutError,
    kf.PeerDied: ConnectionError,
    kf.ContractMismatch: ValueError,
    kf.CapacityError: ValueError,
    kf.Aborted: RuntimeError,
    kf.Busy: RuntimeError,
    kf.ClosedError: RuntimeError,
    kf.ForkError: RuntimeError,
    kf.Unsupported: RuntimeError,
}


def caught(call: Any, *arguments: Any, **options: Any) -> kf.Error:
    with pytest.raises(kf.Error) as info:
        call(*arguments, **options)
    return info.value


def some() -> list[kf.Error]:
    """Errors as the library raises them."""
    layout, other = owned(Model(small(), "fc")), owned(Model(small(), "lw", "HND"))
    with kf.TransferContext() as ctx:
        job = ctx.transfer(layout, other, [0], [0])
        job.wait()
        errors = [
            caught(ctx.transfer, layout, other, [0, 9], [0, 1]),
            caught(ctx.transfer, layout, other, [0, 1], [0, -1]),
            caught(ctx.transfer, layout, other, [0, 1], [2, 2]),
            caught(ctx.transfer, layout, layout, [0, 1], [1, 2]),
            caught(ctx.transfer, layout, other, [0], [0], engine="kernel"),
            caught(ctx.transfer, layout, other, [0], [0], strategy="h2d"),
            caught(ctx.transfer, layout, other, [0], [0], transform="forbid"),
            caught(job.wait, timeout=-1),
            caught(kf.PhysicalLayout.fully_contiguous, huge(), kf.system()),
        ]
    errors.append(caught(ctx.transfer, layout, other, [0], [0]))
    return errors


def huge() -> kf.LayoutConfig:
    return config(small()).replace(num_blocks=(1 << 32) - 1, page_size=1 << 20)


@pytest.mark.parametrize(("error", "base"), BASES.items())
def test_bases(error: type[kf.Error], base: type[Exception]) -> None:
    assert {kf.Error, base} <= set(error.__mro__)
    assert error.__module__.startswith("kvferry") and error.__doc__
    assert getattr(kf, error.__name__) is error


def test_every_exception_is_here() -> None:
    exported = {
        value for value in vars(kf).values() if isinstance(value, type) and issubclass(value, Exception)
    }
    assert exported >= {kf.Error, *BASES}
    for error in exported - {kf.Error}:
        # Every one is also what a caller would catch who does not know kvferry.
        assert issubclass(error, kf.Error)
        assert next(base for base in error.__mro__ if base.__module__ == "builtins") is not Exception, error


def test_fields_of_raised_errors() -> None:
    bad_source, bad_target, twice, overlap, kernel, strategy, forbidden, timeout, memory, closed = some()
    assert [type(bad_source), type(bad_target)] == [kf.BlockIdError, kf.BlockIdError]
    assert vars(bad_source) == {"side": "source", "index": 1, "value": 9, "limit": 7}
    assert vars(bad_target) == {"side": "destination", "index": 1, "value": -1, "limit": 7}
    assert isinstance(twice, kf.DuplicateBlockError) and vars(twice) == {"value": 2, "first": 0, "second": 1}
    assert isinstance(overlap, kf.OverlapError) and (overlap.src_block, overlap.dst_block) == (1, 1)
    assert str(hex(overlap.address)) in str(overlap)
    assert [type(each) for each in (kernel, strategy, forbidden, timeout)] == [
        kf.Unsupported,
        kf.OptionError,
        kf.LayoutError,
        kf.OptionError,
    ]
    assert isinstance(memory, kf.HostMemoryError) and memory.errno == errno.ENOMEM
    assert isinstance(closed, kf.ClosedError)


def test_cuda_errors_have_their_fields() -> None:
    devices = 0
    if gpu_reason() is None:
        devices = len(kf.devices())
    else:
        for call in (kf.devices, lambda: kf.PhysicalLayout.fully_contiguous(config(small()), kf.pinned())):
            with pytest.raises(kf.CudaError) as none:
                call()
            assert str(none.value) and vars(none.value).keys() == {"code", "name", "call"}
    with pytest.raises((kf.CudaError, kf.Unsupported)):
        kf.PhysicalLayout.fully_contiguous(config(small()), kf.device(devices))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_errors_survive_pickling(protocol: int) -> None:
    for error in some():
        for again in (pickle.loads(pickle.dumps(error, protocol)), copy.copy(error), copy.deepcopy(error)):
            assert type(again) is type(error)
            assert (str(again), again.args, vars(again)) == (str(error), error.args, vars(error))
            assert getattr(again, "errno", None) == getattr(error, "errno", None)


@pytest.mark.parametrize("error", BASES)
def test_errors_can_be_made_by_hand(error: type[kf.Error]) -> None:
    made = error("what happened")
    assert str(made) == "what happened" and made.args == ("what happened",)
    again = pickle.loads(pickle.dumps(made))
    assert type(again) is error and str(again) == "what happened"
    assert str(error()) == ""


def test_fields_by_hand() -> None:
    made = kf.TransferError("no", failed_blocks=[3, 4])
    assert pickle.loads(pickle.dumps(made)).failed_blocks == [3, 4]
    assert pickle.loads(pickle.dumps(kf.HostMemoryError("no", errno=12))).errno == 12


def test_messages_say_what_where_and_how_much() -> None:
    messages = [str(error) for error in some()]
    assert "source block id 9 at index 1 is out of range: the layout has 7 blocks" in messages[0]
    assert "destination block id -1 at index 1" in messages[1]
    assert "2 is given at index 0 and again at index 1" in messages[2]
    assert "engine kernel" in messages[4] and "GPU" in messages[4]
