"""Bad and odd input: what users of other libraries ran into, case by case, and the test of each.

Python files are in tests/unit or tests/property. Rust files are in crates/kvferry/tests, those of `layout/`
in crates/kvferry-layout/tests, those of `host/` in crates/kvferry/src/transfer/host. Cases that need a GPU
(slow kernels on the caller's stream, pageable sources) or a disk are not listed.

Users' reports
- ids permuted between disjoint buffers:
    transfer_paths.rs::many_blocks_to_a_task
    property/test_transfers.py::test_transfers_do_what_the_oracle_says
- ids permuted within one buffer (overlap):
    validation.rs::overlap_within_one_layout
    layout/overlap.rs::verdicts_match_byte_sets
    test_block_ids.py::TestIds::test_overlap
    test_block_ids.py::TestIds::test_overlap_between_layouts
- destination [5, 5]:
    layout/ids.rs::duplicates_at_every_position_and_size
    test_block_ids.py::TestIds::test_duplicates
- source [5, 5] fans out:
    transfer_paths.rs::no_blocks_and_repeated_sources
    test_block_ids.py::TestIds::test_duplicates
- id = num_blocks, id = -1, beyond any width:
    layout/ids.rs::ids_out_of_range_are_named_with_their_position
    validation.rs::ids
    validation.rs::an_id_late_in_the_list_is_found_before_anything_moves
    test_block_ids.py::TestIds::test_out_of_range
    property/test_transfers.py::test_bad_ids_move_nothing
- no ids:
    transfer_paths.rs::no_blocks_and_repeated_sources
    after.rs::an_empty_job_follows_too
    test_block_ids.py::TestIds::test_none_at_all
- block bytes 1, 3, 7, 15, 17, 132, 257, 576, 584, 656, 1152, 4104 at bases off by 0, 1, 2, 4, 8, with
  guards:
    bad_input.rs::odd_block_sizes_at_odd_bases
    bad_input.rs::odd_rows_whose_order_changes
    here::test_odd_pages_at_odd_bases
- mixed alignment in one call of thousands of blocks:
    bad_input.rs::mixed_alignment_in_one_call
- layers of 65,536 and 32,768 bytes:
    here::test_layers_of_two_page_sizes
- offsets beyond 4 GiB, ids beyond 2^31:
    bad_input.rs::offsets_beyond_4_gib
    bad_input.rs::ids_beyond_31_bits
    layout/hostile.rs::large_pages_in_parts
    here::test_ids_beyond_31_bits
- fp4: an odd count, and 128 values with 8 bytes of scales:
    here::test_fp4_is_bytes_and_scales
- handle, buffers, context dropped in flight:
    bad_input.rs::memory_let_go_while_a_job_is_pending_stays_until_its_end
    completion.rs::dropped_handles_still_complete
    concurrency.rs::dropping_the_context_waits_too
    test_lifetime.py::TestDropping
    here::test_an_array_deleted_in_flight
    here::test_ids_changed_in_flight
- interpreter exit with jobs in flight:
    test_lifetime.py::TestExit
- fork, then use:
    fork.rs::a_forked_child_is_refused_and_ends
    test_lifetime.py::TestFork
- a window of 4,096 tokens in blocks of 32 touches 129:
    bad_input.rs::a_window_that_starts_within_a_block_touches_129
- axis orders guessed from (2, 2, ...) and (2, 1, ...):
    here::test_axes_are_never_guessed
- two layouts of different sizes in one process:
    here::test_layers_of_two_page_sizes
- stride apart from payload (padded pages):
    test_from_tensors.py::TestStrides::test_padding_between_rows_is_not_written
    layout/payload.rs::intervals_and_their_inverse
- interleaved K and V:
    validation.rs::interleaved_k_and_v_views_are_apart_and_shifted_ones_are_not
    layout/overlap.rs::k_and_v_of_one_tensor_do_not_overlap

The reference's errors
- duplicate, missing, excess and unknown ids: as above; counts:
    layout/plan_errors.rs::ids_that_do_not_pair_up
    test_transfer.py::TestPages::test_counts_must_pair_up
- layer range at its end, start, and empty:
    validation.rs::ranges_and_orders
    test_transfer.py::TestRanges::test_ranges_outside_the_layout
- missing dtype, heads, or both ways to say a width:
    layout/config_errors.rs::missing_and_exclusive_fields
    test_config.py::test_what_is_required
- wrong locality, missing backend, bounce buffers that host memory has no use for:
    validation.rs::device_memory
    validation.rs::strategies_and_engines
    test_transfer.py::TestCompatibility::test_strategy
    test_transfer.py::TestCompatibility::test_engines
- no kernel for a pair of orders: every pair has one here:
    transfer_paths.rs::every_pair_of_kinds_whole_and_pooled
- a failure midway names its blocks:
    host/failure_tests.rs::a_failed_job_names_its_blocks_and_only_those

Sizes, arrays and states
- zero and negative extents:
    layout/config_errors.rs::sizes_out_of_range
    test_config.py::test_sizes_out_of_range
    test_from_tensors.py::TestStrides::test_empty_dimensions
- products near 2^63:
    layout/config_errors.rs::products_stop_at_63_bits
    layout/hostile.rs::sizes_near_63_bits
    layout/hostile.rs::strides_near_63_bits_need_no_product
    test_config.py::test_products_are_checked
- wrong number, size and base of regions:
    bad_input.rs::regions_of_wrong_number_size_and_base
    validation.rs::regions_that_do_not_fit
    layout/layout_errors.rs::regions_that_do_not_fit
    test_from_tensors.py::TestStructure::test_declared_alignment_is_checked
- arrays not contiguous, of negative and of shared strides:
    test_from_tensors.py::TestStrides
    layout/foreign_errors.rs::strides_that_cannot_be
    test_block_ids.py::TestIds::test_whatever_holds_integers
- read-only destinations:
    validation.rs::a_read_only_destination
    test_from_tensors.py::TestAccess
- a tensor given twice:
    layout/alias.rs
    test_handles.py::test_a_tensor_given_twice_can_be_read_but_not_written
- wrong widths:
    validation.rs::shapes
    test_array_kinds.py::TestKinds
    test_transfer.py::TestCompatibility
- closed contexts:
    validation.rs::contexts
    test_context.py::TestContext::test_closing
- ten thousand tiny jobs from eight threads, a million in `make soak`:
    soak.rs
    here::test_soak
- memory freed under a living array (`resize(refcheck=False)`, `untyped_storage().resize_(0)`): cannot be
  seen, so that the README's pitfalls name it
"""

from __future__ import annotations

import asyncio
import gc
import mmap
import os
import re
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference import GUARD, Model
from support import Cache, large, small

import kvferry as kf

ROOT = Path(__file__).resolve().parents[2]
wrap = kf.PhysicalLayout.from_tensors
pages = kf.PhysicalLayout.from_pages


def test_the_list_is_true() -> None:
    assert __doc__ is not None
    rust = ROOT / "crates"
    if not rust.is_dir():
        pytest.skip("not in a checkout")
    places = {
        "layout/": rust / "kvferry-layout" / "tests",
        "host/": rust / "kvferry" / "src" / "transfer" / "host",
        "property/": ROOT / "tests" / "property",
    }
    for file, *names in (entry.split("::") for entry in re.findall(r"^    (\S+)$", __doc__, re.MULTILINE)):
        folder = next((prefix for prefix in places if file.startswith(prefix)), "")
        default = rust / "kvferry" / "tests" if file.endswith(".rs") else ROOT / "tests" / "unit"
        path = Path(__file__) if file == "here" else places.get(folder, default) / file.removeprefix(folder)
        text = path.read_text(encoding="utf-8")
        for name in names:
            assert re.search(rf"\b(fn|def|class) {name}\b", text), f"{file} has no {name}"


def off_by(base: int, shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Bytes of a shape that begin `base` bytes behind a cache line, and the guarded buffer around them."""
    size = int(np.prod(shape))
    buffer = np.full(size + 256, GUARD, np.uint8)
    start = -buffer.ctypes.data % 64 + 64 + base
    return buffer[start : start + size].reshape(shape), buffer


@pytest.mark.parametrize("nbytes", [1, 3, 7, 15, 17, 132, 257, 576, 584, 656, 1152, 4104])
def test_odd_pages_at_odd_bases(nbytes: int, ctx: kf.TransferContext) -> None:
    rng = np.random.default_rng(nbytes)
    for src_base in (0, 1, 2, 4, 8):
        for dst_base in (0, 1, 2, 4, 8):
            source, _ = off_by(src_base, (9, nbytes))
            source[...] = rng.integers(0, 256, source.shape, np.uint8)
            target, buffer = off_by(dst_base, (9, nbytes))
            ctx.transfer(pages(source), pages(target), [0, 1, 8, 4, 4], [7, 8, 0, 2, 3]).wait()
            assert (target[[7, 8, 0, 2, 3]] == source[[0, 1, 8, 4, 4]]).all()
            target[[7, 8, 0, 2, 3]] = GUARD
            assert (buffer == GUARD).all()


def test_layers_of_two_page_sizes(ctx: kf.TransferContext) -> None:
    # 50 layers of 65,536 bytes and 10 of 32,768: one library counted sizes twice and crashed.
    axes = "block page head dim"
    big = [np.full((3, 16, 16, 128), layer, np.float16) for layer in range(50)]
    little = [np.full((3, 16, 8, 128), 100 + layer, np.float16) for layer in range(10)]
    assert (big[0][0].nbytes, little[0][0].nbytes) == (65_536, 32_768)
    named = {f"layers.{index}": tensor for index, tensor in enumerate(big + little)}
    with pytest.raises(kf.LayoutError, match=r"tensors\['layers.50'\].*head is 8, expected 16"):
        wrap(named, axes=axes)
    with pytest.raises(kf.LayoutError, match=r"tensors\[50\]"):
        pages([tensor.reshape(3, -1) for tensor in big + little])
    targets: list[Any] = []
    for group in (big, little):
        copies = [np.zeros((4, *tensor.shape[1:]), np.float16) for tensor in group]
        targets.append(copies)
        result = ctx.transfer(wrap(group, axes=axes), wrap(copies, axes=axes), [2, 0], [1, 3]).wait()
        assert result.bytes == 2 * sum(tensor[0].nbytes for tensor in group)
    for group, copies in zip((big, little), targets, strict=True):
        for tensor, copied in zip(group, copies, strict=True):
            assert (copied[[1, 3]] == tensor[[2, 0]]).all() and (copied[[0, 2]] == 0).all()


@pytest.mark.parametrize("shape", [(2, 2, 4, 2, 8), (2, 1, 4, 2, 8), (1, 2, 4, 2, 8)])
def test_axes_are_never_guessed(shape: tuple[int, ...], ctx: kf.TransferContext) -> None:
    rng = np.random.default_rng(1)
    for axes in ("outer block page head dim", "block outer page head dim", "layer block page head dim"):
        source = rng.integers(0, 1 << 15, shape, np.int16)
        target = np.zeros_like(source)
        first, second = axes.split()[:2]
        a, b = wrap(source, axes=axes), wrap(target, axes=axes)
        extents = {"block": a.num_blocks, "layer": a.config.num_layers, "outer": a.config.outer_dim}
        assert (extents[first], extents[second]) == shape[:2]
        last = a.num_blocks - 1
        ctx.transfer(a, b, [last], [0]).wait()
        moved = np.moveaxis(source, axes.split().index("block"), 0)[last]
        assert (np.moveaxis(target, axes.split().index("block"), 0)[0] == moved).all()
    # Two readings of the same memory do not fit each other.
    if shape[0] != shape[1]:
        source = np.zeros(shape, np.int16)
        one, other = (wrap(source, axes=f"{axes} page head dim") for axes in ("outer block", "block outer"))
        with pytest.raises(kf.LayoutError, match="outer dimensions differ"):
            ctx.transfer(one, other, [0], [0])
    unnamed: Any = wrap
    with pytest.raises(TypeError, match="axes"):
        unnamed(np.zeros(shape, np.int16))
    with pytest.raises(kf.LayoutError, match="5 dimensions, but 4 axes"):
        wrap(np.zeros(shape, np.int16), axes="block page head dim")


def test_ids_beyond_31_bits(ctx: kf.TransferContext) -> None:
    count = 3 << 30
    reserve_nothing = 0x4000
    try:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | reserve_nothing
        memory = mmap.mmap(-1, 2 * count, flags=flags)
    except OSError as error:
        pytest.skip(f"no 6 GiB of address space: {error}")
    raw = np.frombuffer(memory, np.uint8).reshape(count, 2)
    far = [count - 1, (1 << 31) - 1, 1 << 31, (1 << 31) + 1]
    raw[far] = [[1, 2], [3, 4], [5, 6], [7, 8]]
    target = np.zeros((5, 2), np.uint8)
    huge, tiny = pages(raw), pages(target)
    ids: Any
    for ids in (far, np.array(far, np.uint32), np.array(far, np.int64), np.array(far, ">u8")):
        target[...] = 0
        ctx.transfer(huge, tiny, ids, [4, 0, 2, 1]).wait()
        assert target.tolist() == [[3, 4], [7, 8], [5, 6], [0, 0], [1, 2]]
    ctx.transfer(tiny, huge, [0, 1], [count - 3, (1 << 31) + 3]).wait()
    assert raw[[count - 4, count - 3, count - 2]].tolist() == [[0, 0], [3, 4], [0, 0]]
    assert raw[[(1 << 31) + 2, (1 << 31) + 3, (1 << 31) + 4]].tolist() == [[0, 0], [7, 8], [0, 0]]
    with pytest.raises(kf.BlockIdError) as caught:
        ctx.transfer(huge, tiny, [0, count], [0, 1])
    assert (caught.value.index, caught.value.value, caught.value.limit) == (1, count, count)
    # Read as 32 signed bits these are negative, and are refused as what they are.
    with pytest.raises(kf.BlockIdError) as caught:
        ctx.transfer(huge, tiny, np.array(far, np.uint32).view(np.int32), [0, 1, 2, 3])
    assert caught.value.value == count - 1 - (1 << 32)


def test_fp4_is_bytes_and_scales(ctx: kf.TransferContext) -> None:
    # Half a byte has no address, so no layout counts fp4 values: 128 are 64 bytes, with 8 bytes of scales.
    for name in ("float4_e2m1fn", "float4_e2m1fn_x2", "fp4", "nvfp4", "int4", "uint4"):
        with pytest.raises(kf.LayoutError, match="unknown dtype"):
            kf.LayoutConfig(num_blocks=1, num_layers=1, page_size=1, inner_dim=127, dtype=name)
    ml = pytest.importorskip("ml_dtypes")
    with pytest.raises(kf.LayoutError, match="element type"):
        wrap(np.zeros((4, 127), ml.float4_e2m1fn), axes="block dim")
    rng = np.random.default_rng(4)
    axes = "block page head dim"
    planes = {"values": (6, 16, 2, 64), "scales": (6, 16, 2, 8)}
    source = {name: rng.integers(0, 256, shape, np.uint8) for name, shape in planes.items()}
    target = {name: np.zeros(shape, np.uint8) for name, shape in planes.items()}
    first: kf.Transfer | None = None
    for name in planes:
        a, b = wrap(source[name], axes=axes), wrap(target[name], axes=axes)
        first = ctx.transfer(a, b, [5, 1], [0, 3], after=first)
    assert first is not None
    first.wait()
    for name in planes:
        assert (target[name][[0, 3]] == source[name][[5, 1]]).all()
        assert (target[name][[1, 2, 4, 5]] == 0).all()
    # A layout of one plane does not fit one of the other.
    with pytest.raises(kf.LayoutError, match="head_dim"):
        ctx.transfer(wrap(source["values"], axes=axes), wrap(target["scales"], axes=axes), [0], [0])


class Owner(np.ndarray):
    """An array that can be watched."""


def test_an_array_deleted_in_flight(lazy: kf.TransferContext) -> None:
    src, dst, ids = large()
    job = lazy.transfer(src, dst, ids, ids)
    for _ in range(30):
        job = lazy.transfer(src, dst, ids, ids, after=job)
    source = np.full((8, 4096), 7, np.uint8).view(Owner)
    gone, target = weakref.ref(source), np.zeros((8, 4096), np.uint8)
    last = lazy.transfer(pages(source), pages(target), range(8), range(8), after=job)
    del source
    gc.collect()
    # Where freed memory would be handed out again.
    scribble = [np.full((8, 4096), 9, np.uint8) for _ in range(100)]
    pending = not last.done()
    kept = gone() is not None
    assert kept or not pending
    last.wait(60)
    assert pending, "31 copies of 64 MiB were over before the array was deleted"
    assert (target == 7).all()
    del last
    deadline = time.monotonic() + 30
    while gone() is not None and time.monotonic() < deadline:
        kf.usable_cpus()
    assert gone() is None and len(scribble) == 100


def test_ids_changed_in_flight(lazy: kf.TransferContext) -> None:
    src, dst, every = large()
    blocker = lazy.transfer(src, dst, every, every)
    source, target = Cache(Model(small(), "fc")), Cache(Model(small(), "fc", "HND"))
    values = source.fill(1)
    target.poison()
    ids: Any
    for ids in (np.arange(7), list(range(7)), bytearray(range(7))):
        job = lazy.transfer(source.layout, target.layout, ids, ids, after=blocker)
        ids[0], ids[6] = 3, 3
        job.wait(60)
    target.check(values)


def usage() -> tuple[int, int, int]:
    """Open descriptors, threads and resident KiB of this process."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    resident = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), int(resident.split()[1])


JOBS = 840


def test_soak() -> None:
    """20,160 jobs from eight threads, half of them awaited: every byte is right, and nothing is left."""
    cfg = kf.LayoutConfig(
        num_blocks=JOBS, num_layers=2, page_size=2, num_heads=2, head_dim=8, dtype="bfloat16"
    )
    source = kf.PhysicalLayout.layer_separate(cfg, kf.system())
    source.fill_pattern(1)
    targets = [
        kf.PhysicalLayout.fully_contiguous(cfg, kf.system(), order="universal" if at % 2 else "NHD")
        for at in range(8)
    ]
    failures: list[BaseException] = []

    async def awaits(ctx: kf.TransferContext, target: kf.PhysicalLayout, blocks: list[int]) -> None:
        async def one(job: kf.Transfer) -> kf.TransferResult:
            return await job

        for at in range(0, len(blocks), 50):
            jobs = [
                ctx.transfer(source, target, [block], [block], per_layer=block % 2 == 0)
                for block in blocks[at : at + 50]
            ]
            assert [result.blocks for result in await asyncio.gather(*map(one, jobs))] == [1] * len(jobs)

    def waits(ctx: kf.TransferContext, target: kf.PhysicalLayout, blocks: list[int], first: int) -> None:
        route = ctx.route(source, target, per_layer=True)
        previous: kf.Transfer | None = None
        for at, block in enumerate(blocks):
            match at % 5:
                case 0:
                    route([block], [block]).wait(60)
                case 1:
                    previous = ctx.transfer(source, target, [block], [block], after=previous, tag=first + at)
                case 2:
                    ctx.transfer(source, target, [block], [block], after=previous)
                case 3:
                    previous = route([block], [block])
                case _:
                    job = ctx.transfer(source, target, [block], [block])
                    assert job.done() and job.result().blocks == 1

    def work(number: int, ctx: kf.TransferContext) -> None:
        try:
            blocks = np.random.default_rng(number).permutation(JOBS).tolist()
            if number % 2:
                asyncio.run(awaits(ctx, targets[number], blocks))
            else:
                waits(ctx, targets[number], blocks, number * JOBS)
        except BaseException as error:  # noqa: BLE001 shown by the main thread
            failures.append(error)

    before: list[tuple[int, int, int]] = []
    for _ in range(3):
        for target in targets:
            target.fill(0)
        ctx = kf.TransferContext(threads=2)
        threads = [threading.Thread(target=work, args=(number, ctx)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures
        deadline = time.monotonic() + 60
        while ctx.in_flight and time.monotonic() < deadline:
            time.sleep(0.001)
        assert ctx.in_flight == 0
        tags = [tag for tag, _ in ctx.completed()]
        assert sorted(tags) == [at * JOBS + job for at in range(0, 8, 2) for job in range(1, JOBS, 5)]
        ctx.close()
        for target in targets:
            target.verify_pattern(1)
        gc.collect()
        before.append(usage())
    (fds, threads_left, resident), (last_fds, last_threads, last_resident) = before[1], before[2]
    assert (last_fds, last_threads) == (fds, threads_left)
    assert last_resident < resident + (8 << 10), before
