"""stream=None follows the current stream of whoever owns the memory: with stand-ins for torch and CuPy.

The real libraries are in test_torch.py and test_cupy.py. Each case is a process of its own, as kvferry keeps
what it has looked up.
"""

from __future__ import annotations

import pytest
from support import succeeds, with_tests

pytestmark = pytest.mark.gpu

STAND_INS = '''
import sys, time, types
import numpy as np
from driver import Buffer, CudaArray, Hold, Stream, device_array
from gpu_support import Cache, Pair, wrap
from reference import Model
from support import config, small
import kvferry as kf

class State:
    started, stream, asked = True, 0, []

class Library(CudaArray):
    """An array whose class says that it is the library's."""

def torch_stand_in():
    torch = types.ModuleType("torch")
    class Tensor(Library):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.is_cuda, self.dtype = True, {"<i8": "int64", "<i4": "int32"}.get(args[2])
        def stride(self): return (1,)
        @property
        def shape(self): return self.__cuda_array_interface__["shape"]
        def data_ptr(self): return self.addr
    Tensor.__module__ = "torch"
    def current(ordinal):
        State.asked.append(ordinal)
        return State.stream
    torch.Tensor, torch.int64, torch.int32 = Tensor, sys.intern("int64"), sys.intern("int32")
    torch.cuda = types.SimpleNamespace(is_initialized=lambda: State.started)
    torch._C = types.SimpleNamespace(_cuda_getCurrentRawStream=current)
    return torch

def cupy_stand_in():
    cupy = types.ModuleType("cupy")
    class ndarray(Library): pass
    ndarray.__module__ = "cupy._core.core"
    def current(ordinal=-1):
        State.asked.append(ordinal)
        return types.SimpleNamespace(ptr=State.stream)
    cupy.ndarray, cupy.cuda = ndarray, types.SimpleNamespace(get_current_stream=current)
    return cupy

def arrays(kind, model):
    geometry = model.geometry
    shape = tuple(geometry.extents[axis] for axis in model.axes)
    return [kind(Buffer(model.region_bytes, fill=7), shape, "<u2") for _ in range(model.num_regions)]

def held(job, hold):
    time.sleep(0.02)
    assert not job.done(), "the current stream was not waited for"
    hold.release()
    job.wait(20)

model = Model(small(), "lw")
pinned = Cache(Model(small(), "fc"), "pinned")
pinned.poison()
ids = list(range(7))
'''


@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_wrapped_arrays(library: str) -> None:
    succeeds(
        STAND_INS
        + f"""
library = sys.modules["{library}"] = {library}_stand_in()
kind = library.Tensor if "{library}" == "torch" else library.ndarray
theirs, ours = wrap(model, arrays(kind, model)), wrap(model, arrays(CudaArray, model))
with kf.TransferContext(0) as ctx, Stream() as stream, Stream() as other:
    for moved in (theirs, theirs.with_page_size(2)):
        fine = pinned.layout if moved is theirs else pinned.layout.with_page_size(2)
        route, blocks = ctx.route(moved, fine), list(range(moved.num_blocks))
        for submit in (
            lambda: ctx.transfer(moved, fine, blocks, blocks),
            lambda: ctx.transfer(fine, moved, blocks, blocks),
            lambda: route(blocks, blocks),
        ):
            State.stream = stream.handle
            State.asked.clear()
            with Hold(stream) as hold:
                job = submit()
                assert State.asked == [0], State.asked
                held(job, hold)
            # Asked anew at every call.
            State.stream = other.handle
            with Hold(stream) as hold:
                submit().wait(10)
                hold.release()
            # A stream of the caller's is the caller's business.
            State.asked.clear()
    ctx.transfer(theirs, pinned.layout, ids, ids, stream=stream).wait(10)
    assert State.asked == []
    # Arrays of nobody's follow nobody.
    ctx.transfer(ours, pinned.layout, ids, ids).wait(10)
    assert State.asked == []
    assert (pinned.values() == 7).all()
""",
        **with_tests(),
    )


def test_both_libraries_and_the_legacy_stream() -> None:
    succeeds(
        STAND_INS
        + """
sys.modules["torch"], sys.modules["cupy"] = torch_stand_in(), cupy_stand_in()
from driver import DefaultStream
a = wrap(model, arrays(sys.modules["torch"].Tensor, model))
b = wrap(model, arrays(sys.modules["cupy"].ndarray, model))
with kf.TransferContext(0) as ctx:
    for raw in (0, 2):
        State.stream = raw
        with Hold(DefaultStream(raw)) as hold:
            job = ctx.transfer(a, b, ids, ids)
            assert State.asked == [0, 0]
            State.asked.clear()
            held(job, hold)
""",
        **with_tests(),
    )


def test_memory_of_our_own_that_was_handed_out() -> None:
    succeeds(
        STAND_INS
        + """
made = [kf.PhysicalLayout.layer_separate(config(small()), kf.device(0)) for _ in range(3)]
with kf.TransferContext(0) as ctx, Stream() as stream:
    sys.modules["torch"], sys.modules["cupy"] = torch_stand_in(), cupy_stand_in()
    State.stream = stream.handle
    made[0].regions[1].__dlpack__()
    made[1].region(0, 0).__cuda_array_interface__
    for layout in made[:2]:
        State.asked.clear()
        with Hold(stream) as hold:
            job = ctx.transfer(layout, pinned.layout, ids, ids)
            assert State.asked == [0, 0]
            held(job, hold)
    State.asked.clear()
    with Hold(stream) as hold:
        ctx.transfer(made[2], pinned.layout, ids, ids).wait(10)
        hold.release()
    assert State.asked == []
    # Pinned memory that torch may copy to without waiting.
    pinned.layout.regions[0].__dlpack__()
    ctx.transfer(made[2], pinned.layout, ids, ids).wait(10)
    assert State.asked == [0, 0]
""",
        **with_tests(),
    )


def test_a_library_that_has_not_touched_a_gpu() -> None:
    """Asking torch for a stream would start CUDA in it; there is nothing to wait for yet."""
    succeeds(
        STAND_INS
        + """
made = kf.PhysicalLayout.layer_separate(config(small()), kf.device(0))
made.regions[0].__dlpack__()
with kf.TransferContext(0) as ctx, Stream() as stream:
    ctx.transfer(made, pinned.layout, ids, ids).wait(10)  # neither is there
    sys.modules["torch"] = types.ModuleType("torch")  # still being imported
    ctx.transfer(made, pinned.layout, ids, ids).wait(10)
    sys.modules["torch"] = torch_stand_in()
    State.started, State.stream = False, stream.handle
    ctx.transfer(made, pinned.layout, ids, ids).wait(10)
    assert State.asked == []
    State.started = True
    with Hold(stream) as hold:
        held(ctx.transfer(made, pinned.layout, ids, ids), hold)
""",
        **with_tests(),
    )


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_ids_of_torch(dtype: str) -> None:
    """Not by __cuda_array_interface__; after torch's stream although the caches are not torch's."""
    succeeds(
        STAND_INS
        + f"""
library = sys.modules["torch"] = torch_stand_in()
both = Pair(Cache(Model(small(), "lw")), Cache(Model(small(), "fc")))
def tensor(values):
    array = np.array(values, "{dtype}")
    made = library.Tensor(Buffer.of(array), array.shape, array.dtype.str)
    made.dtype = getattr(library, "{dtype}")
    return made
src, dst = tensor([3, 1]), tensor([0, 5])
with kf.TransferContext(0) as ctx, Stream() as stream:
    State.stream = stream.handle
    with Hold(stream) as hold:
        held(ctx.transfer(both.src, both.dst, src, dst), hold)
    both.check([3, 1], [0, 5])
    src.stride = lambda: (2,)
    try:
        ctx.transfer(both.src, both.dst, src, dst)
    except kf.LayoutError as error:
        assert "contiguous" in str(error)
    else:
        raise AssertionError("strided ids were taken")
    matrix, floats = tensor([0]), tensor([0])
    matrix.stride = lambda: (1, 1)
    matrix.__cuda_array_interface__["shape"] = (1, 1)
    floats.dtype = "float32"
    for bad, error, word in ((matrix, kf.LayoutError, "one-dimensional"), (floats, TypeError, "float32")):
        try:
            ctx.transfer(both.src, both.dst, bad, [0])
        except error as found:
            assert "source" in str(found) and word in str(found), found
        else:
            raise AssertionError("ids of another kind were taken")
""",
        **with_tests(),
    )
