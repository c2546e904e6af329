"""CUDA graphs: what a captured transfer moves on every replay, what it owns, and what cannot be captured."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
from driver import (
    GLOBAL,
    RELAXED,
    THREAD_LOCAL,
    Buffer,
    CudaArray,
    Stream,
    capture,
    device_array,
    read,
    until,
    write,
)
from gpu_support import KINDS, Cache, Pair, pair, scaled, shuffled
from reference import Geometry, Model
from support import small

import kvferry as kf

pytestmark = pytest.mark.gpu

WAYS = [("pinned", "device"), ("device", "pinned"), ("device", "device")]
BOTH = pytest.mark.parametrize(("src", "dst"), WAYS, ids=["-".join(way) for way in WAYS])
SRC, DST = [2, 3, 6, 0, 1], [6, 0, 5, 2, 3]


def captured(ctx: kf.TransferContext, stream: Stream, both: Pair, src: Any, dst: Any, **options: Any) -> Any:
    """A graph of one transfer, and its handle."""
    jobs: list[kf.Transfer] = []
    mode = options.pop("mode", THREAD_LOCAL)

    def body() -> None:
        jobs.append(ctx.transfer(both.src, both.dst, src, dst, stream=stream, **options))

    return capture(stream, body, mode), jobs[0]


@BOTH
class TestReplay:
    @pytest.mark.parametrize("engine", ["auto", "kernel"])
    @pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL, RELAXED], ids=["global", "thread", "relaxed"])
    def test_contents_are_read_anew(
        self, shared: kf.TransferContext, src: str, dst: str, engine: Any, mode: int
    ) -> None:
        both = pair(small(), src, dst, KINDS[4], KINDS[2])
        with Stream() as stream:
            graph, job = captured(shared, stream, both, SRC, DST, engine=engine, mode=mode)
            both.target.check(both.before)  # capturing moves nothing
            assert job.captured and shared.in_flight == 0
            for key in (1, 2, 3):
                both.values = both.source.fill(key)
                both.target.put(both.before)
                graph.replay(stream)
                both.check(SRC, DST, key)
            graph.close()

    def test_a_captured_handle_cannot_be_waited_for(
        self, shared: kf.TransferContext, src: str, dst: str
    ) -> None:
        both = pair(small(), src, dst)
        with Stream() as stream:
            graph, job = captured(shared, stream, both, SRC, DST)
            with pytest.raises(kf.Error, match="captured"):
                job.wait(1)
            with pytest.raises(kf.Error, match="captured"):
                job.result()
            with pytest.raises(kf.Unsupported, match="graph"):
                job.wait_on(stream)
            with pytest.raises(kf.Error, match="captured"):
                shared.transfer(both.src, both.dst, SRC, DST, after=job)
            assert shared.in_flight == 0 and shared.completed() == []
            graph.close()
        eager = shared.transfer(both.src, both.dst, SRC, DST)
        eager.wait(60)
        assert not eager.captured

    @pytest.mark.parametrize("option", [{"tag": "never"}, {"per_layer": True}])
    def test_what_needs_an_end_is_refused(
        self, shared: kf.TransferContext, src: str, dst: str, option: dict[str, Any]
    ) -> None:
        both = pair(small(), src, dst)
        with Stream() as stream:

            def body() -> None:
                with pytest.raises(kf.Unsupported, match="under capture"):
                    shared.transfer(both.src, both.dst, SRC, DST, stream=stream.handle, **option)

            capture(stream, body).close()
        assert shared.in_flight == 0 and shared.completed() == []

    @pytest.mark.parametrize("count", [100, 384, 385, 1000, 3799, 3801, 9000])
    def test_ids_are_the_graph_s(self, shared: kf.TransferContext, src: str, dst: str, count: int) -> None:
        """Ids beyond what parameters hold lie in the graph's memory: eager jobs never change them (23)."""
        count = min(count, scaled(count, 1000))
        geometry = Geometry(count + 3, 1, 1, 1, 1, 24, "uint8")
        both = pair(geometry, src, dst)
        ids = shuffled(count, count + 3), shuffled(count, count + 3, 2)
        with Stream() as stream:
            graph, _ = captured(shared, stream, both, *ids)
            for turn in range(4):
                other = shuffled(count, count + 3, 10 + turn), shuffled(count, count + 3, 20 + turn)
                shared.transfer(both.src, both.dst, *other, stream=stream).wait(60)
            both.target.put(both.before)
            graph.replay(stream)
            both.check(*ids)
            graph.close()

    def test_the_graph_keeps_the_layouts(self, shared: kf.TransferContext, src: str, dst: str) -> None:
        both = pair(small(), src, dst)
        spans = both.source.spans, both.target.spans
        model = both.target.model
        with Stream() as stream:
            graph, job = captured(shared, stream, both, SRC, DST)
            want = both.expected(SRC, DST)
            del both, job
            gc.collect()
            kf.usable_cpus()
            # Whatever had been freed would be handed out again now.
            junk = [Cache(Model(small(), "fc"), place) for place in ("device", "pinned") for _ in range(4)]
            for each in junk:
                each.poison()
            graph.replay(stream)
            found = [read(addr, nbytes) for addr, nbytes in spans[1]]
            assert (model.load(found) == want).all()
            for each in junk:
                each.check(each.values())
                assert (each.values() == 0xEE).all()
            graph.close()


class TestOwnership:
    def test_a_destroyed_graph_lets_go(self, shared: kf.TransferContext) -> None:
        """Layouts of wrapped arrays live as long as the graph; then the arrays are released."""
        geometry = small()
        model = Model(geometry, "fc")
        shape = tuple(geometry.extents[axis] for axis in model.axes)
        target = Cache(model, "pinned")
        target.poison()
        stream = Stream()

        def captured_and_dropped() -> tuple[Any, Any]:
            array = CudaArray(Buffer(model.region_bytes, fill=1), shape, "<f2")
            source = kf.PhysicalLayout.from_tensors(array, axes=" ".join(model.axes))
            graph = capture(stream, lambda: shared.transfer(source, target.layout, [0], [0], stream=stream))
            return graph, weakref.ref(array)

        graph, alive = captured_and_dropped()
        gc.collect()
        assert alive() is not None
        graph.replay(stream)
        assert (target.values()[0] == 1).all()
        graph.close()
        stream.close()

        def released() -> bool:
            shared.transfer(target.layout, target.layout, [], []).wait(
                10
            )  # any call drains what waits for one
            return alive() is None

        assert until(released)

    def test_a_closed_context_s_graphs_still_run(self) -> None:
        both = pair(small(), "pinned", "device")
        stream = Stream()
        with kf.TransferContext(0) as ctx:
            graph, _ = captured(ctx, stream, both, SRC, DST)
        gc.collect()
        graph.replay(stream)
        both.check(SRC, DST)
        graph.close()
        stream.close()

    def test_layout_memory_in_a_graph_is_not_freed_early(self, shared: kf.TransferContext) -> None:
        """Two graphs of one pair: destroying one leaves the other whole."""
        both = pair(small(), "pinned", "device")
        with Stream() as stream:
            first, _ = captured(shared, stream, both, SRC, DST)
            second, _ = captured(shared, stream, both, DST, SRC)
            first.close()
            second.replay(stream)
            both.check(DST, SRC)
            second.close()


class TestManyInOneGraph:
    def test_a_chain(self, shared: kf.TransferContext) -> None:
        down, back = pair(small(), "device", "pinned"), Cache(Model(small(), "lw", "HND"))
        back.poison()
        with Stream() as stream:

            def body() -> None:
                a = shared.transfer(down.src, down.dst, range(7), range(7), stream=stream)
                b = shared.transfer(down.dst, back.layout, range(7), range(7), stream=stream)
                assert a.captured and b.captured

            graph = capture(stream, body)
            for key in (5, 6):
                values = down.source.fill(key)
                graph.replay(stream)
                back.check(values)
            graph.close()

    def test_layers_in_turn(self, shared: kf.TransferContext) -> None:
        both = pair(small(), "pinned", "device")
        with Stream() as stream:

            def body() -> None:
                for layer in range(3):
                    shared.transfer(
                        both.src, both.dst, SRC, DST, stream=stream, layers=range(layer, layer + 1)
                    )

            graph = capture(stream, body)
            graph.replay(stream)
            both.check(SRC, DST)
            graph.close()


class TestDeviceIds:
    @BOTH
    @pytest.mark.parametrize("dtype", [np.int32, np.int64])
    def test_ids_are_read_anew(self, shared: kf.TransferContext, src: str, dst: str, dtype: Any) -> None:
        geometry = small(blocks=40)
        both = pair(geometry, src, dst)
        a, b = device_array(np.zeros(12), dtype), device_array(np.zeros(12), dtype)
        with Stream() as stream:
            graph, job = captured(shared, stream, both, a, b)
            assert job.captured
            for turn in range(4):
                from_, to = shuffled(12, 40, turn), shuffled(12, 40, 50 + turn)
                write(a.addr, np.asarray(from_, dtype))
                write(b.addr, np.asarray(to, dtype))
                both.target.put(both.before)
                graph.replay(stream)
                both.check(from_, to, turn)
            graph.close()

    def test_bad_ids_in_a_replay_move_nothing_of_their_own(self, shared: kf.TransferContext) -> None:
        both = pair(small(), "device", "device")
        a, b = device_array([0, 1, 2]), device_array([4, 5, 6])
        with Stream() as stream:
            graph, _ = captured(shared, stream, both, a, b)
            write(a.addr, np.array([0, 99, 2]))
            write(b.addr, np.array([4, 5, -1]))
            graph.replay(stream)
            both.check([0], [4])
            graph.close()

    def test_the_graph_keeps_the_ids(self, shared: kf.TransferContext) -> None:
        both = pair(small(), "device", "device")
        with Stream() as stream:
            ids = device_array([0, 1, 2]), device_array([4, 5, 6])
            graph, _ = captured(shared, stream, both, *ids)
            del ids
            gc.collect()
            junk = [device_array([77, 77, 77]) for _ in range(8)]
            graph.replay(stream)
            both.check([0, 1, 2], [4, 5, 6])
            del junk
            graph.close()


class TestRefusals:
    @pytest.mark.parametrize("engine", ["batch", "staged"])
    @pytest.mark.parametrize(("src", "dst"), WAYS[:2], ids=["-".join(way) for way in WAYS[:2]])
    def test_engines_that_cannot_be_captured(
        self, shared: kf.TransferContext, src: str, dst: str, engine: Any
    ) -> None:
        both = pair(small(), src, dst)
        with Stream() as stream:
            with pytest.raises(kf.Unsupported, match=engine) as caught:
                captured(shared, stream, both, SRC, DST, engine=engine)
            assert "captur" in str(caught.value)
            both.check([], [])
            # A refusal leaves the stream usable.
            shared.transfer(both.src, both.dst, SRC, DST, stream=stream).wait(60)
            both.check(SRC, DST)

    def test_a_refusal_leaves_the_capture_whole(self, shared: kf.TransferContext) -> None:
        both = pair(small(), "pinned", "device")
        with Stream() as stream:

            def body() -> None:
                with pytest.raises(kf.Unsupported):
                    shared.transfer(both.src, both.dst, SRC, DST, stream=stream, engine="batch")
                with pytest.raises(kf.BlockIdError):
                    shared.transfer(both.src, both.dst, [99], [0], stream=stream)
                shared.transfer(both.src, both.dst, SRC, DST, stream=stream)

            graph = capture(stream, body)
            graph.replay(stream)
            both.check(SRC, DST)
            graph.close()

    def test_pageable_memory(self, shared: kf.TransferContext) -> None:
        both = pair(small(), "system", "device")
        with Stream() as stream, pytest.raises(kf.Unsupported):
            captured(shared, stream, both, SRC, DST)

    def test_auto_captures_whatever_it_would_choose_otherwise(self, shared: kf.TransferContext) -> None:
        """Whole blocks of half a mebibyte go to the copy engine, but under capture to the kernel."""
        geometry = Geometry(scaled(8, 3), 8, 2, 16, 8, scaled(32, 4), "float64")
        both = pair(geometry, "pinned", "device", KINDS[0], KINDS[0])
        with Stream() as stream:
            graph, job = captured(shared, stream, both, [0, 2], [1, 0])
            assert job.captured
            graph.replay(stream)
            both.check([0, 2], [1, 0])
            graph.close()


class TestOtherPeoplesCaptures:
    @pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL, RELAXED], ids=["global", "thread", "relaxed"])
    @pytest.mark.parametrize("engine", ["auto", "kernel", "batch", "staged"])
    def test_eager_jobs_on_other_streams_go_on(
        self, shared: kf.TransferContext, mode: int, engine: Any
    ) -> None:
        """Our calls during somebody's capture, on this thread and on ours, do not break it (hazard 28)."""
        both, inside = pair(small(), "pinned", "device"), pair(small(), "device", "device")
        shared.transfer(both.src, both.dst, SRC, DST, engine=engine).wait(60)
        both.target.put(both.before)
        with Stream() as stream, Stream() as other:

            def body() -> None:
                shared.transfer(inside.src, inside.dst, SRC, DST, stream=stream)
                shared.transfer(both.src, both.dst, SRC, DST, engine=engine, stream=other).wait(60)
                shared.transfer(both.src, both.dst, [4], [1], engine=engine).wait(60)

            graph = capture(stream, body, mode)
            both.check([*SRC, 4], [*DST, 1])
            graph.replay(stream)
            inside.check(SRC, DST)
            graph.close()

    def test_a_new_context_during_a_capture(self) -> None:
        both = pair(small(), "pinned", "device")
        with Stream() as stream:

            def body() -> None:
                with kf.TransferContext(0) as ctx:
                    ctx.transfer(both.src, both.dst, SRC, DST).wait(60)

            graph = capture(stream, body, GLOBAL)
            both.check(SRC, DST)
            graph.close()

    def test_pageable_transfers_during_a_capture(self, shared: kf.TransferContext) -> None:
        both = pair(small(), "system", "device")
        with Stream() as stream:

            def body() -> None:
                shared.transfer(both.src, both.dst, SRC, DST).wait(60)

            graph = capture(stream, body, GLOBAL)
            both.check(SRC, DST)
            graph.close()
