"""Order: nothing moves before a stream's earlier work, nothing that follows is early, on any stream."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from driver import (
    Buffer,
    CupyLike,
    DefaultStream,
    Event,
    Hold,
    Mark,
    Stream,
    TorchLike,
    current_context,
    read,
    until,
)
from gpu_support import STREAMED, Cache, Pair, pair
from reference import Model, content
from support import small

import kvferry as kf

pytestmark = pytest.mark.gpu

WAYS = [("pinned", "device"), ("device", "pinned"), ("device", "device")]
BOTH = pytest.mark.parametrize(("src", "dst"), WAYS, ids=["-".join(way) for way in WAYS])
SRC, DST = [2, 3, 6, 0, 1], [6, 0, 5, 2, 3]
# As a user may show a stream; the legacy default stream is 0 to most, 1 to some, and 2 is the per-thread one.
SHOWN: dict[str, Any] = {
    "int": lambda stream: stream.handle,
    "torch": TorchLike,
    "cupy": CupyLike,
    "protocol": lambda stream: stream,
}


def can(engine: Any, src: str, dst: str) -> bool:
    return engine != "staged" or src != dst


def stream_of(kind: str) -> Stream:
    defaults = {"legacy-0": 0, "legacy-1": 1, "per-thread": 2}
    return DefaultStream(defaults[kind]) if kind in defaults else Stream(blocking=kind == "blocking")


class Later:
    """What a cache shall hold once a stream gets there, and what it held when it did."""

    def __init__(self, cache: Cache, values: Any = None) -> None:
        self.cache = cache
        # All memory is there before a stream is held: pinning may wait for the device, and freeing does.
        images = cache.model.allocate()
        if values is not None:
            cache.model.store(values, images)
        self._images = [Buffer.of(image) for image in images]

    def put(self, stream: Stream) -> None:
        for buffer, (addr, _) in zip(self._images, self.cache.spans, strict=True):
            stream.copy(addr, buffer.addr, self.cache.model.region_bytes)

    def get(self, stream: Stream) -> None:
        for buffer, (addr, _) in zip(self._images, self.cache.spans, strict=True):
            stream.copy(buffer.addr, addr, self.cache.model.region_bytes)

    def seen(self) -> Any:
        return self.cache.model.load([read(buffer.addr, buffer.nbytes) for buffer in self._images])


@pytest.mark.parametrize("engine", STREAMED)
@pytest.mark.parametrize("kind", ["own", "blocking", "legacy-0", "legacy-1", "per-thread"])
@BOTH
def test_a_held_stream_orders_both_sides(
    shared: kf.TransferContext, src: str, dst: str, kind: str, engine: Any
) -> None:
    """Held, new source contents, transfer, destination read, source overwritten: each sees the one before."""
    if not can(engine, src, dst):
        return
    both = pair(small(), src, dst)
    shared.transfer(both.src, both.dst, SRC, DST, engine=engine).wait(60)  # rings and modules are there
    both.target.put(both.before)
    old, new, junk = both.values, content(both.source.model.geometry, 2), content(small(), 3)
    source, overwrite, target = Later(both.source, new), Later(both.source, junk), Later(both.target)
    with stream_of(kind) as stream, Hold(stream) as hold:
        source.put(stream)
        job = shared.transfer(both.src, both.dst, SRC, DST, stream=stream.handle, engine=engine)
        target.get(stream)
        overwrite.put(stream)
        mark = Mark(stream)
        time.sleep(0.03)
        assert not job.done() and not mark.reached
        assert shared.in_flight == 1
        both.source.check(old)
        both.target.check(both.before)
        hold.release()
        result = job.wait(60)
        assert until(lambda: mark.reached)
        both.values = new
        want = both.expected(SRC, DST)
        assert (target.seen() == want).all(), "what followed on the stream came early"
        both.target.check(want, "the transfer read")
        both.source.check(junk)
        assert engine in ("auto", result.engine)


@pytest.mark.parametrize("shown", SHOWN)
@BOTH
def test_streams_in_every_form(shared: kf.TransferContext, src: str, dst: str, shown: str) -> None:
    both = pair(small(), src, dst)
    with Stream() as stream, Hold(stream) as hold:
        job = shared.transfer(both.src, both.dst, SRC, DST, stream=SHOWN[shown](stream))
        time.sleep(0.01)
        assert not job.done()
        hold.release()
        job.wait(60)
    both.check(SRC, DST)


@pytest.mark.parametrize("bad", ["7", 1.5, object(), -1, 1 << 70, b"", [1]])
def test_what_is_no_stream(shared: kf.TransferContext, bad: Any) -> None:
    both = pair(small(), "device", "device")
    for options in ({"stream": bad}, {"after": bad} if bad != [1] else {"stream": bad}):
        with pytest.raises((kf.OptionError, TypeError), match=r"stream|after"):
            shared.transfer(both.src, both.dst, [0], [1], **options)
    both.check([], [])


class TestAfter:
    @pytest.mark.parametrize("shown", SHOWN)
    @BOTH
    def test_a_stream(self, shared: kf.TransferContext, src: str, dst: str, shown: str) -> None:
        both = pair(small(), src, dst)
        with Stream() as stream, Hold(stream) as hold:
            job = shared.transfer(both.src, both.dst, SRC, DST, after=SHOWN[shown](stream))
            mark = Mark(stream)
            time.sleep(0.01)
            assert not job.done()
            both.target.check(both.before)
            hold.release()
            job.wait(60)
            assert until(lambda: mark.reached)
        both.check(SRC, DST)

    def test_an_event(self, shared: kf.TransferContext) -> None:
        both = pair(small(), "device", "pinned")
        with Stream() as stream, Hold(stream) as hold:
            event = Event().record(stream)
            job = shared.transfer(both.src, both.dst, SRC, DST, after=event)
            time.sleep(0.01)
            assert not job.done()
            hold.release()
            job.wait(60)
        both.check(SRC, DST)

    def test_a_list_of_everything(self, shared: kf.TransferContext) -> None:
        first, both = pair(small(), "pinned", "device"), pair(small(), "device", "pinned")
        with Stream() as a, Stream() as b, Stream() as c, Hold(a) as x, Hold(b) as y, Hold(c) as z:
            earlier = shared.transfer(first.src, first.dst, [0], [1], stream=c)
            job = shared.transfer(both.src, both.dst, SRC, DST, after=[a, Event().record(b), earlier])
            for hold in (x, y, z):
                time.sleep(0.01)
                assert not job.done()
                hold.release()
            job.wait(60)
            assert earlier.done()
        both.check(SRC, DST)

    @pytest.mark.parametrize("engine", ["auto", "kernel", "batch", "staged"])
    def test_a_round_trip_through_jobs(self, shared: kf.TransferContext, engine: Any) -> None:
        """Down and up again, and a copy on the device of what came back: no wait between."""
        down = pair(small(), "device", "pinned")
        back = Cache(Model(small(), "lw", "HND"))
        back.poison()
        last = Cache(Model(small(), "fc", "universal"))
        last.poison()
        with Stream() as stream, Hold(stream) as hold:
            a = shared.transfer(down.src, down.dst, range(7), range(7), stream=stream, engine=engine)
            b = shared.transfer(down.dst, back.layout, range(7), range(7), after=a, engine=engine)
            c = shared.transfer(back.layout, last.layout, range(7), range(7), after=[b])
            time.sleep(0.02)
            assert not (a.done() or b.done() or c.done())
            hold.release()
            c.wait(60)
        back.check(down.values)
        last.check(down.values)

    @pytest.mark.parametrize("engine", ["auto", "kernel", "batch", "staged"])
    def test_host_and_gpu_jobs_follow_one_another(self, shared: kf.TransferContext, engine: Any) -> None:
        pageable = Pair(Cache(Model(small(), "fc"), "system"), Cache(Model(small(), "fc"), "pinned"))
        device = Cache(Model(small(), "lw"))
        device.poison()
        home = Cache(Model(small(), "lw", "HND"), "pinned")
        home.poison()
        away = Cache(Model(small(), "pool"), "system")
        away.poison()
        ids = range(7)
        gate = pair(small(), "device", "device")
        with Stream() as stream, Hold(stream) as hold:
            # A host job that cannot start before a GPU job has ended, and a GPU job after that.
            held = shared.transfer(gate.src, gate.dst, ids, ids, stream=stream)
            a = shared.transfer(pageable.src, pageable.dst, ids, ids, after=held)
            b = shared.transfer(pageable.dst, device.layout, ids, ids, after=a, engine=engine)
            c = shared.transfer(device.layout, home.layout, ids, ids, after=b, engine=engine)
            d = shared.transfer(home.layout, away.layout, ids, ids, after=c)
            time.sleep(0.02)
            assert not any(job.done() for job in (a, b, c, d))
            hold.release()
            assert d.wait(60).engine == "host"
        away.check(pageable.values)

    def test_a_job_of_another_context(self, shared: kf.TransferContext) -> None:
        first, second = pair(small(), "pinned", "device"), Cache(Model(small(), "fc"), "pinned")
        second.poison()
        with kf.TransferContext(0) as other, Stream() as stream, Hold(stream) as hold:
            a = other.transfer(first.src, first.dst, range(7), range(7), stream=stream)
            b = shared.transfer(first.dst, second.layout, range(7), range(7), after=a)
            time.sleep(0.01)
            assert not b.done()
            hold.release()
            b.wait(60)
            second.check(first.values)

    def test_pageable_memory_after_a_stream(self, shared: kf.TransferContext) -> None:
        for src, dst in (("system", "device"), ("device", "system")):
            both = pair(small(), src, dst)
            with Stream() as stream, Hold(stream) as hold:
                job = shared.transfer(both.src, both.dst, SRC, DST, after=stream)
                time.sleep(0.02)
                assert not job.done()
                both.target.check(both.before)
                hold.release()
                assert job.wait(60).engine == "bounce"
            both.check(SRC, DST)


class TestWaitOn:
    @pytest.mark.parametrize("shown", SHOWN)
    @BOTH
    def test_a_stream_goes_on_after_the_job(
        self, shared: kf.TransferContext, src: str, dst: str, shown: str
    ) -> None:
        both = pair(small(), src, dst)
        target = Later(both.target)
        with Stream() as first, Stream() as second, Hold(first) as hold:
            job = shared.transfer(both.src, both.dst, SRC, DST, after=first)
            job.wait_on(SHOWN[shown](second))
            target.get(second)
            mark = Mark(second)
            time.sleep(0.02)
            assert not mark.reached
            hold.release()
            assert until(lambda: mark.reached)
            assert (target.seen() == both.expected(SRC, DST)).all()
            job.wait(60)
        both.check(SRC, DST)

    @pytest.mark.parametrize("kind", ["legacy-0", "legacy-1", "per-thread", "blocking"])
    def test_default_streams(self, shared: kf.TransferContext, kind: str) -> None:
        both = pair(small(), "pinned", "device")
        target = Later(both.target)
        with Stream() as first, stream_of(kind) as second, Hold(first) as hold:
            job = shared.transfer(both.src, both.dst, SRC, DST, after=first)
            job.wait_on(second.handle)
            target.get(second)
            mark = Mark(second)
            time.sleep(0.02)
            assert not mark.reached
            hold.release()
            assert until(lambda: mark.reached)
            assert (target.seen() == both.expected(SRC, DST)).all()

    @pytest.mark.parametrize("engine", ["auto", "kernel", "batch", "staged"])
    @pytest.mark.parametrize(("src", "dst"), WAYS[:2], ids=["-".join(way) for way in WAYS[:2]])
    def test_layer_by_layer(self, shared: kf.TransferContext, src: str, dst: str, engine: Any) -> None:
        both = pair(small(layers=5), src, dst, dst_kind=("lw", "NHD", "block_first"))
        seen = [Buffer(nbytes) for _, nbytes in both.target.spans]
        with Stream() as held, Stream() as stream, Hold(held) as hold:
            job = shared.transfer(
                both.src, both.dst, SRC, DST, per_layer=True, after=held, engine=engine, layers=range(1, 5)
            )
            for layer in range(1, 5):
                job.wait_on(stream, layer=layer)
                stream.copy(seen[layer].addr, both.target.spans[layer][0], seen[layer].nbytes)
            mark = Mark(stream)
            time.sleep(0.02)
            assert not mark.reached and not job.done(layer=1)
            hold.release()
            for layer in range(1, 5):
                job.wait(60, layer=layer)
            assert until(lambda: mark.reached)
            job.wait(60)
        both.check(SRC, DST, layers=range(1, 5))
        for layer in range(1, 5):
            assert (read(seen[layer].addr, seen[layer].nbytes) == both.target.regions()[layer]).all(), layer
        for layer in (0, 5):
            with pytest.raises(kf.OptionError, match=f"layer {layer}"):
                job.wait_on(2, layer=layer)

    def test_a_job_that_has_ended(self, shared: kf.TransferContext) -> None:
        both = pair(small(), "pinned", "device")
        job = shared.transfer(both.src, both.dst, SRC, DST)
        job.wait(60)
        with Stream() as stream:
            job.wait_on(stream)
            mark = Mark(stream)
            assert until(lambda: mark.reached)

    def test_what_is_no_stream(self, shared: kf.TransferContext) -> None:
        both = pair(small(), "pinned", "device")
        job = shared.transfer(both.src, both.dst, SRC, DST)
        bad: Any
        for bad in (None, "0", object(), -1):
            with pytest.raises((kf.OptionError, TypeError), match="stream"):
                job.wait_on(bad)
        job.wait(60)


class TestOrdered:
    def test_each_direction_is_first_in_first_out(self) -> None:
        first, second = pair(small(), "device", "pinned"), pair(small(), "device", "pinned", key=2)
        other = pair(small(), "pinned", "device")
        with kf.TransferContext(0, ordered=True) as ctx, Stream() as stream, Hold(stream) as hold:
            held = ctx.transfer(first.src, first.dst, SRC, DST, after=stream)
            behind = [ctx.transfer(second.src, second.dst, [at], [at]) for at in range(7)]
            free = ctx.transfer(other.src, other.dst, SRC, DST)
            assert free.wait(20).direction == "h2d"
            time.sleep(0.02)
            assert not held.done() and not any(job.done() for job in behind)
            hold.release()
            for job in behind:
                job.wait(60)
            assert held.done()
            second.check(range(7), range(7))

    @pytest.mark.parametrize("engine", ["auto", "kernel", "batch", "staged"])
    def test_the_last_writer_wins(self, engine: Any) -> None:
        target = Cache(Model(small(), "fc"))
        target.poison()
        sources = [Cache(Model(small(), "lw"), "pinned") for _ in range(20)]
        values = [source.fill(key) for key, source in enumerate(sources)]
        with kf.TransferContext(0, ordered=True) as ctx:
            for source in sources:
                job = ctx.transfer(source.layout, target.layout, range(7), range(7), engine=engine)
            job.wait(60)
            target.check(values[-1])

    def test_jobs_of_unordered_contexts_pass_one_another(self, shared: kf.TransferContext) -> None:
        first, second = pair(small(), "device", "pinned"), pair(small(), "device", "pinned")
        with Stream() as stream, Hold(stream) as hold:
            held = shared.transfer(first.src, first.dst, SRC, DST, after=stream)
            shared.transfer(second.src, second.dst, SRC, DST).wait(20)
            assert not held.done()
            hold.release()
            held.wait(60)


class TestRefusals:
    @pytest.mark.parametrize("engine", ["auto", "bounce"])
    @pytest.mark.parametrize(("src", "dst"), [("system", "device"), ("device", "system")])
    def test_pageable_memory_on_a_callers_stream(
        self, shared: kf.TransferContext, src: str, dst: str, engine: Any
    ) -> None:
        both = pair(small(), src, dst)
        with Stream() as stream, pytest.raises(kf.Unsupported, match=r"bounce|pageable") as caught:
            shared.transfer(both.src, both.dst, SRC, DST, stream=stream, engine=engine)
        assert "stream" in str(caught.value)
        both.check([], [])

    def test_host_memory_on_a_callers_stream(self, shared: kf.TransferContext) -> None:
        both = pair(small(), "pinned", "system")
        with Stream() as stream, pytest.raises(kf.Unsupported, match="stream"):
            shared.transfer(both.src, both.dst, SRC, DST, stream=stream)

    def test_a_context_without_a_gpu(self, ctx: kf.TransferContext) -> None:
        both = pair(small(), "pinned", "device")
        with Stream() as stream:
            for given in (None, stream):
                with pytest.raises(kf.Unsupported):
                    ctx.transfer(both.src, both.dst, SRC, DST, stream=given)


class TestThreads:
    def test_a_thread_that_has_no_context(self, shared: kf.TransferContext) -> None:
        """Nothing needs a current context, and nothing leaves one behind."""
        both = pair(small(), "pinned", "device")
        seen: list[Any] = []

        def body() -> None:
            seen.append(current_context())
            shared.transfer(both.src, both.dst, SRC, DST).wait(60)
            seen.append(current_context())

        thread = threading.Thread(target=body)
        thread.start()
        thread.join(60)
        assert seen == [0, 0]
        both.check(SRC, DST)

    def test_per_thread_streams_are_the_callers(self, shared: kf.TransferContext) -> None:
        """Handle 2 names another stream in every thread: holding this thread's holds no other's."""
        here, there = pair(small(), "device", "pinned"), pair(small(), "device", "pinned")
        stream = DefaultStream(2)
        with Hold(stream) as hold:
            held = shared.transfer(here.src, here.dst, SRC, DST, stream=2)
            done: list[bool] = []

            def body() -> None:
                job = shared.transfer(there.src, there.dst, SRC, DST, stream=2)
                job.wait(15)
                done.append(job.done())

            thread = threading.Thread(target=body)
            thread.start()
            thread.join(20)
            assert done == [True] and not held.done()
            hold.release()
            held.wait(60)
        here.check(SRC, DST)
        there.check(SRC, DST)

    def test_eight_threads(self, shared: kf.TransferContext) -> None:
        failures: list[BaseException] = []

        def body(key: int) -> None:
            try:
                for turn in range(6):
                    where = WAYS[(key + turn) % 3]
                    both = pair(small(), *where, key=key)
                    with Stream() as stream:
                        options: dict[str, Any] = {"stream": stream} if turn % 2 else {}
                        job = shared.transfer(both.src, both.dst, SRC, DST, **options)
                        job.wait(60)
                        both.check(SRC, DST)
            except BaseException as error:  # noqa: BLE001 reported below
                failures.append(error)

        threads = [threading.Thread(target=body, args=(key,)) for key in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(110)
        assert not failures, failures[0]
