"""The pointer-table path of the reference as a contender: its method, our own code, used nowhere else."""

from __future__ import annotations

import ctypes
from ctypes import c_uint32, c_uint64, c_void_p
from functools import cache
from typing import TYPE_CHECKING

import kvferry as kf
from kvferry.bench.gpu import driver
from kvferry.bench.gpu.arrays import CudaArray
from kvferry.bench.gpu.contenders import Pointers

if TYPE_CHECKING:
    from kvferry.bench.gpu.driver import Stream
    from kvferry.bench.gpu.memory import Ground

_THREADS = 128
_MOST_CTAS = 65_535
_UNIT = 16

# One CTA for each pair, in strides of the grid: 16 bytes a thread, one load in flight.
_PTX = b"""
.version 8.0
.target sm_80
.address_size 64
.visible .entry pair_copy(.param .u64 sources, .param .u64 targets, .param .u64 units, .param .u32 pairs)
{
  .reg .pred %stop;
  .reg .b32 %pair, %count, %ctas, %threads, %thread, %a, %b, %c, %d;
  .reg .b64 %from, %to, %unit, %units, %step, %at, %src, %dst;
  ld.param.u32 %count, [pairs];
  ld.param.u64 %units, [units];
  mov.u32 %pair, %ctaid.x;
  mov.u32 %ctas, %nctaid.x;
  mov.u32 %thread, %tid.x;
  mov.u32 %threads, %ntid.x;
  cvt.u64.u32 %step, %threads;
next_pair:
  setp.ge.u32 %stop, %pair, %count;
  @%stop bra done;
  mul.wide.u32 %at, %pair, 8;
  ld.param.u64 %from, [sources];
  ld.param.u64 %to, [targets];
  add.u64 %from, %from, %at;
  add.u64 %to, %to, %at;
  ld.global.u64 %from, [%from];
  ld.global.u64 %to, [%to];
  cvt.u64.u32 %unit, %thread;
next_unit:
  setp.ge.u64 %stop, %unit, %units;
  @%stop bra end_of_pair;
  shl.b64 %at, %unit, 4;
  add.u64 %src, %from, %at;
  add.u64 %dst, %to, %at;
  ld.v4.u32 {%a, %b, %c, %d}, [%src];
  st.v4.u32 [%dst], {%a, %b, %c, %d};
  add.u64 %unit, %unit, %step;
  bra next_unit;
end_of_pair:
  add.u32 %pair, %pair, %ctas;
  bra next_pair;
done:
  ret;
}
"""


class Reference(Pointers):
    """Pointer tables, uploaded in every call.

    A call makes two stream-ordered allocations, two uploads from pageable memory, an event, a launch of one
    128-thread CTA for each pair and two frees, and the host waits for the uploads. Working the addresses out
    is not timed. `kept`: its own pool, which keeps 64 MiB between calls; else the device's default pool.
    Where the driver cannot compile the kernel, `kf.vectorized_copy` stands in, which is faster.
    """

    name = "reference"

    def __init__(self, ground: Ground, stream: Stream, *, kept: bool = True) -> None:
        super().__init__(ground, stream)
        self.name = "reference" if kept else "reference (default pool)"
        if ground.cell.run_bytes % _UNIT:
            raise ValueError(f"runs of {ground.cell.run_bytes} bytes are no multiple of {_UNIT}")
        driver.use(stream.ordinal)
        self._pool = driver.Pool(stream, kept=kept)
        self._kernel = _kernel(stream.ordinal)
        self._pairs = ground.cell.runs

    def submit(self, call: int) -> None:
        """Puts the work on the stream and waits as the reference does."""
        src, dst = self.table(call)
        stream, pool = self._stream, self._pool
        places = (pool.take(src.nbytes), pool.take(dst.nbytes))
        for place, table in zip(places, (src, dst), strict=True):
            driver.call("cuMemcpyHtoDAsync_v2", place, table.ctypes.data, table.nbytes, stream.handle)
        uploaded = driver.Event()
        uploaded.record(stream)
        self._copy(places)
        for place in places:
            pool.free(place)
        uploaded.synchronize()
        driver.call("cuEventDestroy_v2", uploaded.handle)

    def _copy(self, places: tuple[int, int]) -> None:
        if not self._kernel:
            src, dst = (CudaArray(place, (self._pairs,), "<u8", None) for place in places)
            kf.vectorized_copy(src, dst, self._run_bytes, stream=self._stream.handle)
            return
        values = (
            c_uint64(places[0]),
            c_uint64(places[1]),
            c_uint64(self._run_bytes // _UNIT),
            c_uint32(self._pairs),
        )
        params = (c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        grid = (min(self._pairs, _MOST_CTAS), 1, 1)
        driver.call(
            "cuLaunchKernel", self._kernel, *grid, _THREADS, 1, 1, 0, self._stream.handle, params, None
        )


@cache
def _kernel(ordinal: int) -> int:
    """The kernel in a GPU's context; 0 where the driver cannot compile it."""
    driver.use(ordinal)
    module, entry = c_void_p(), c_void_p()
    try:
        driver.call("cuModuleLoadData", ctypes.byref(module), _PTX)
        driver.call("cuModuleGetFunction", ctypes.byref(entry), module, b"pair_copy")
    except driver.DriverError:
        return 0
    return int(entry.value or 0)
