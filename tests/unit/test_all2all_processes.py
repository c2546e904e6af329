"""Ranks that are processes: every rendezvous, and ranks that are killed, stopped or exit at every stage."""

from __future__ import annotations

import os
import random
import socket
import time
from typing import TYPE_CHECKING, Any

import exchange_bodies as bodies
import pytest
from exchange_ranks import nothing_left, processes

import kvferry as kf

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from exchange_ranks import Ranks

# What a death may take to be told on a machine with other things to do.
AT_ONCE = 1.0

DEATHS = ("kill", "exit")


@pytest.fixture(autouse=True)
def leaves_nothing() -> Iterator[None]:
    with nothing_left():
        yield


def a_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def meet(tmp_path: Path) -> str:
    return f"file://{tmp_path}/meet"


@pytest.fixture
def again(tmp_path: Path) -> str:
    return f"file://{tmp_path}/again"


class TestGoodOrder:
    @pytest.mark.parametrize("world", [2, 4])
    def test_over_files(self, meet: str, tmp_path: Path, world: int) -> None:
        with processes(world, bodies.several_calls, meet=meet) as ranks:
            stats = ranks.values()
        assert all(found["transport"] == "shared memory" for found in stats)
        # A rendezvous leaves nothing behind that a later run could take for its own.
        assert [path for path in tmp_path.rglob("*") if path.is_file()] == []

    def test_over_tcp(self) -> None:
        with processes(3, bodies.several_calls, meet=f"tcp://127.0.0.1:{a_port()}") as ranks:
            ranks.values()

    def test_two_runs_one_after_the_other_in_the_same_place(self, meet: str) -> None:
        for _ in range(2):
            with processes(2, bodies.several_calls, meet=meet, calls=2) as ranks:
                ranks.values()

    def test_two_runs_at_once_under_two_names(self, meet: str) -> None:
        with (
            processes(2, bodies.several_calls, meet=meet, name="a") as one,
            processes(2, bodies.several_calls, meet=meet, name="b") as other,
        ):
            one.values()
            other.values()

    def test_leftovers_of_a_killed_run_are_recognised(self, tmp_path: Path, meet: str) -> None:
        """Hazard 20: a file of a dead run is replaced, not met."""
        with processes(3, bodies.several_calls, meet=meet) as ranks:
            # Rank 2 of three never comes: what the others left is stale once they are dead.
            ranks[2].stop()
            end = time.monotonic() + 20
            while not any(path.is_file() for path in tmp_path.rglob("*")):
                assert time.monotonic() < end, "nobody uses the rendezvous"
                time.sleep(0.01)
            for rank in ranks:
                rank.kill()
        assert any(path.is_file() for path in tmp_path.rglob("*"))
        with processes(2, bodies.several_calls, meet=meet, calls=2) as ranks:
            ranks.values()

    def test_a_fork_in_one_rank(self, meet: str) -> None:
        """Hazard 11: the child's descriptors are not the parent's, and the child gets a ForkError."""
        with processes(2, bodies.forks, meet=meet) as ranks:
            assert ranks.values() == [0, 0]


class TestSetUp:
    @pytest.mark.parametrize("after", [1, 2, 3, 4, 5, 6])
    @pytest.mark.parametrize("how", DEATHS)
    def test_a_rank_that_dies_in_it(self, tmp_path: Path, how: str, after: int) -> None:
        """All ranks arm or all raise: whoever is left is told within the set-up's time."""
        options = {"directory": str(tmp_path), "victim": 1, "how": how, "after": after, "patience": 1.0}
        with processes(3, bodies.setting_up, **options) as ranks:
            errors = [ranks[number].outcome().value[0] for number in (0, 2)]
            if errors == [None, None]:
                # The victim had met everybody before it used the rendezvous so often.
                assert ranks[1].outcome().value[0] is None
            else:
                for error in errors:
                    names_the_victim(error)

    def test_a_rank_that_stops_in_it(self, tmp_path: Path) -> None:
        options = {"directory": str(tmp_path), "victim": 1, "how": "stop", "after": 2, "patience": 1.0}
        with processes(3, bodies.setting_up, **options) as ranks:
            for number in (0, 2):
                error, _ = ranks[number].outcome().value
                names_the_victim(error)
            ranks[1].go_on()
            error, _ = ranks[1].outcome().value
            assert isinstance(error, kf.Error)

    def test_a_rank_that_never_comes(self, tmp_path: Path) -> None:
        options = {"directory": str(tmp_path), "victim": 1, "how": "stop", "after": 1, "patience": 0.5}
        start = time.monotonic()
        with processes(2, bodies.setting_up, **options) as ranks:
            error, when = ranks[0].outcome().value
        assert isinstance(error, kf.PeerTimeout)
        assert 0.45 < when - start < 5


def names_the_victim(error: Any) -> None:
    """The victim, or another rank that had noticed first and gave up."""
    assert isinstance(error, (kf.PeerDied, kf.PeerTimeout, kf.ContractMismatch)), repr(error)
    assert "rank" in str(error)


def harm(ranks: Ranks, victim: int, how: str) -> float:
    if how == "exit":
        # From within, without a word to anybody: `told` is read by the waiting rank.
        ranks[victim].kill()
    elif how == "kill":
        ranks[victim].kill()
    else:
        ranks[victim].stop()
    return time.monotonic()


class TestDeath:
    """PeerDied names the dead rank, at once, on every rank, whatever it was doing."""

    @pytest.mark.parametrize("at", ["idle", "call", "calls"])
    @pytest.mark.parametrize("world", [2, 3])
    def test_killed(self, meet: str, again: str, world: int, at: str) -> None:
        """Case 13: no rank hangs; a communicator of those left works."""
        options = {"meet": meet, "victim": 1, "at": at, "again": again}
        with processes(world, bodies.broken_by_a_peer, **options) as ranks:
            for rank in ranks:
                rank.reaches("ready")
            survivors = [rank for number, rank in enumerate(ranks) if number != 1]
            ranks[1].reaches("ready" if at == "idle" else "calling")
            for rank in survivors:
                rank.reaches("ready" if at == "call" else "calling")
            time.sleep(0.05)
            pid, killed = ranks[1].pid, harm(ranks, 1, "kill")
            if at == "call":
                for rank in survivors:
                    rank.tell()
            for rank in survivors:
                outcome = rank.outcome()
                assert outcome.error is None, outcome.value
                found = outcome.value
                for error in (found["error"], *found["later"]):
                    assert isinstance(error, kf.PeerDied), repr(error)
                    assert isinstance(error, ConnectionError)
                    assert (error.peer, error.pid) == (1, pid)
                    assert error.epoch >= 3
                assert found["error"].op in ("send_recv_heads", None)
                assert found["when"] - killed < AT_ONCE
                assert found["filled"], "what was not received must not look like data"
                assert found["anew"] == 10

    def test_killed_with_a_forked_child_alive(self, meet: str) -> None:
        """Hazard 11: the child holds no descriptor that could hide the death."""
        options = {"meet": meet, "victim": 1, "at": "idle", "fork": True}
        child = 0
        with processes(2, bodies.broken_by_a_peer, **options) as ranks:
            try:
                ranks[1].reaches("ready")
                child = next(int(stage.split()[1]) for stage in ranks[1].stages if stage.startswith("child"))
                ranks[0].reaches("calling")
                killed = harm(ranks, 1, "kill")
                found = ranks[0].outcome().value
                assert isinstance(found["error"], kf.PeerDied)
                assert found["when"] - killed < AT_ONCE
                os.kill(child, 0)
            finally:
                if child > 1:
                    os.kill(child, 9)

    def test_killed_in_the_middle_of_large_messages(self, meet: str) -> None:
        chosen = random.Random(5)
        for _ in range(3):
            with processes(2, bodies.moves_much, meet=meet) as ranks:
                for rank in ranks:
                    rank.reaches("ready")
                time.sleep(0.1 + chosen.random() * 0.05)
                killed = harm(ranks, 1, "kill")
                error, when = ranks[0].outcome().value
                assert isinstance(error, kf.PeerDied) and error.peer == 1
                assert when - killed < AT_ONCE

    def test_all_but_one_of_eight(self, meet: str) -> None:
        """Case 13: one of eight is killed; seven raise."""
        with processes(8, bodies.broken_by_a_peer, meet=meet, victim=3, at="idle") as ranks:
            for rank in ranks:
                rank.reaches("ready")
            time.sleep(0.05)
            killed = harm(ranks, 3, "kill")
            for number, rank in enumerate(ranks):
                if number != 3:
                    found = rank.outcome().value
                    assert isinstance(found["error"], kf.PeerDied) and found["error"].peer == 3
                    assert found["when"] - killed < 2 * AT_ONCE


class TestStopped:
    def test_times_out_at_the_set_time(self, meet: str) -> None:
        """SIGSTOP: PeerTimeout within 10 % of what was set, naming the rank, the call and the seconds."""
        with processes(2, bodies.broken_by_a_peer, meet=meet, victim=1, at="idle", timeout=1.0) as ranks:
            ranks[1].reaches("ready")
            start = harm(ranks, 1, "stop")
            ranks[0].reaches("calling")
            found = ranks[0].outcome().value
            error = found["error"]
            assert isinstance(error, kf.PeerTimeout) and isinstance(error, TimeoutError)
            assert (error.peer, error.op, error.epoch) == (1, "send_recv_heads", 4)
            assert 0.9 <= error.seconds <= 1.1
            assert 0.9 <= found["when"] - start <= 1.3
            assert found["filled"]
            assert all(isinstance(later, kf.PeerTimeout) for later in found["later"])

    def test_a_rank_that_comes_back_finds_out_and_disturbs_nobody(self, meet: str, again: str) -> None:
        """Hazard 10: the others have set up anew; what the zombie still does goes to memory nobody uses."""
        options = {"meet": meet, "again": again, "victim": 2, "timeout": 0.5}
        with processes(3, bodies.stops_and_comes_back, **options) as ranks:
            for rank in ranks:
                rank.reaches("ready")
            ranks[2].stop()
            for rank in ranks[:2]:
                rank.reaches("anew")
            ranks[2].go_on()
            for rank in ranks[:2]:
                rank.tell()
            error, _ = ranks[2].outcome().value
            assert isinstance(error, kf.Error), repr(error)
            for rank in ranks[:2]:
                outcome = rank.outcome()
                assert outcome.error is None, outcome.value
                # Who times out first names whom it waited for, which may be a rank that waits itself.
                assert isinstance(outcome.value[0], kf.PeerTimeout), repr(outcome.value[0])


class TestTearDown:
    @pytest.mark.parametrize("how", ["kill", "stop"])
    def test_closing_beside_a_rank_that_does_not(self, meet: str, how: str) -> None:
        """L21, case 25: whoever closes waits for the others, but not for ever; results stay."""
        with processes(3, bodies.closing, meet=meet, victim=2) as ranks:
            for rank in ranks:
                rank.reaches("ready")
            harm(ranks, 2, how)
            for rank in ranks[:2]:
                error, seconds = rank.outcome().value
                assert error is None or isinstance(error, kf.PeerDied), repr(error)
                assert seconds < 4

    def test_a_rank_that_dies_while_it_closes(self, meet: str) -> None:
        with processes(2, bodies.victim_closes, meet=meet, victim=1) as ranks:
            for rank in ranks:
                rank.reaches("ready")
            time.sleep(0.1)
            harm(ranks, 1, "kill")
            ranks[0].tell()
            error = ranks[0].outcome().value
            assert error is None or isinstance(error, kf.PeerDied), repr(error)
