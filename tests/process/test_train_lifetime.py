"""`train(lifetime=)` in one process, on a real clock; and how two ranks hear of a deadline at the same step."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.process.local_ranks import crew_of, form_ours, succeeded
from tests.pure.worlds_of_one import Counter, InMemory, World
from torchelastic.checkpoint import DiskTier, TieredCheckpointManager
from torchelastic.checkpoint.store import list_checkpoints
from torchelastic.lifetime import STOPPED_EARLY, DeadlineAt, Lifetime, Requeue, StoppedEarly, loop_lifetime, nearest
from torchelastic.p2p import step_agreement, watchdog
from torchelastic.p2p.step_agreement import StepAgreement
from torchelastic.train_loop import train


def train_for(
    manager: Any, lifetime: Any, world: World | None = None, step_s: float = 0.005, until: int = 2000
) -> Callable[[], Counter]:
    def train_step(state: Counter) -> None:
        if state.step == until:
            raise StopIteration
        time.sleep(step_s)
        state.step += 1

    def run() -> Counter:
        state = train(world or World(), train_step, Counter(), checkpoint=manager, lifetime=lifetime)
        assert isinstance(state, Counter)
        return state

    return run


def stopped(run: Callable[[], Any]) -> StoppedEarly:
    with pytest.raises(StoppedEarly) as caught:
        run()
    return caught.value


def test_the_progress_is_told_where_somebody_wants_to_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_PROGRESS_FILE", str(tmp_path / "progress"))
    deadline = DeadlineAt("test", time.monotonic() + 0.4, "told")
    manager = InMemory()
    stop = stopped(train_for(manager, Lifetime(reserve_s=0.1, deadline=deadline)))
    told = json.loads((tmp_path / "progress").read_text())
    assert told == {"resumed_step": 0, "committed_step": stop.step, "saved_step": stop.step}


def test_a_worker_that_is_ended_because_it_hangs_is_not_taken_for_one_that_stopped_early() -> None:
    assert watchdog.EXIT_CODE != STOPPED_EARLY, "the launcher starts it again"


def test_garbage_in_a_variable_is_refused_before_anything_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_TERMINATION_TIME", "tomorrow")
    world = World()
    with pytest.raises(ValueError, match="TORCHELASTIC_TERMINATION_TIME is 'tomorrow'"):
        train_for(None, "auto", world)()
    assert world.calls == []


def test_a_slurm_job_is_requeued_once_after_the_save(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    asked: list[tuple[int, list[int]]] = []
    manager = InMemory()

    def requeue_job(*, max_restarts: int, patience_s: float) -> Requeue:
        assert 10.0 <= patience_s < 25.0, "until the deadline, and most of KillWait"
        asked.append((max_restarts, manager.steps))
        return Requeue(True, "asked")

    monkeypatch.setattr(loop_lifetime, "requeue_job", requeue_job)
    deadline = DeadlineAt("test", time.monotonic() + 0.4, "told")
    stop = stopped(train_for(manager, Lifetime(reserve_s=0.1, deadline=deadline, max_restarts=7)))
    ((restarts, steps_saved_then),) = asked
    assert restarts == 7
    assert steps_saved_then[-1] == stop.step


class TwoPeers:
    """Rank 0 of two; the other one says the same, but has not heard of a deadline yet."""

    rank, world_size, round_number, address = 0, 2, 1, "127.0.0.1"

    def __init__(self, other_host: str) -> None:
        self.other_host = other_host

    def all_gather(self, own: Any) -> list[Any]:
        if isinstance(own[0], list) and len(own) == 3:
            return [own, [[float("-inf"), *own[0][1:]], "", self.other_host or own[2]]]
        return [own, own]

    def rank_0_says(self, value: bool) -> bool:
        return value

    def wait_for_rank_0(self, purpose: str, bound_s: float | None) -> None: ...

    def close(self) -> None: ...


class WorldOfTwo(World):
    other_host = "another host"

    def peers(self) -> Any:
        return TwoPeers(self.other_host)


def test_a_worker_whose_deadline_is_near_leaves_while_the_other_goes_on() -> None:
    deadline = DeadlineAt("test", time.monotonic() + 5.6, "told")
    world = WorldOfTwo()
    stop = stopped(train_for(InMemory(), Lifetime(reserve_s=0.1, deadline=deadline), world))
    assert world.calls == ["rendezvous", "leave", "rendezvous"]
    assert (stop.others_go_on, stop.saved_in, stop.code) == (True, (), STOPPED_EARLY)
    assert "the others go on" in str(stop)


def test_workers_of_one_host_stop_together_though_only_one_has_heard_of_its_end() -> None:
    """Sources are asked now and then, so not all hear of it at the same moment."""
    deadline = DeadlineAt("test", time.monotonic() + 1.0, "told")
    world = WorldOfTwo()
    world.other_host = ""  # the same
    stop = stopped(train_for(InMemory(), Lifetime(reserve_s=0.1, deadline=deadline), world))
    assert world.calls == ["rendezvous", "stop early"]
    assert not stop.others_go_on


def test_without_enough_others_it_stops_with_all() -> None:
    deadline = DeadlineAt("test", time.monotonic() + 1.0, "told")
    world = WorldOfTwo()
    world.min_workers = 2
    stop = stopped(train_for(InMemory(), Lifetime(reserve_s=0.1, deadline=deadline), world))
    assert world.calls == ["rendezvous", "stop early"]
    assert not stop.others_go_on


def test_a_worker_that_is_drained_for_another_reason_returns_as_ever() -> None:
    world = World()

    def train_step(state: Counter) -> None:
        state.step += 1
        world.drain = state.step == 3

    state = train(world, train_step, Counter(), lifetime=Lifetime(deadline=nearest([])))
    assert isinstance(state, Counter)
    assert state.step == 3


class SlowTier(DiskTier):
    """A place that does not answer before the test is over."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, name="slow")
        self.may_go_on = threading.Event()
        self.is_waiting = False

    def put(self, shard: Any) -> Any:
        self.is_waiting = True
        self.may_go_on.wait(30)
        self.is_waiting = False
        return super().put(shard)


def test_a_tier_that_does_not_answer_costs_neither_the_other_tier_nor_the_end_in_time(tmp_path: Path) -> None:
    slow = SlowTier(tmp_path / "slow")
    manager = TieredCheckpointManager([DiskTier(tmp_path / "disk"), slow], policy=None, run_id="one")
    end_s = time.monotonic() + 2.0
    stop = stopped(train_for(manager, Lifetime(reserve_s=0.5, deadline=DeadlineAt("test", end_s, "told"))))
    assert stop.saved_in == ("disk",)
    assert slow.is_waiting, "nobody has waited for it"
    slow.may_go_on.set()
    manager.close()
    found = [checkpoint.step for checkpoint in list_checkpoints(tmp_path / "disk")]
    assert found == [stop.step], "saved once, for there was no time for more"
    again = TieredCheckpointManager([DiskTier(tmp_path / "disk")], policy=None, run_id="one")
    assert train_for(again, None, until=stop.step)().step == stop.step, "it goes on from there"
    again.close()


def tell_of_it_at(steps_of_rank_1: int) -> list[int]:
    """Which of its steps a rank hears of the deadline that rank 1 has from some step on, and of its end."""
    step_agreement.interval_steps = lambda *_: 3  # else it depends on how fast this machine is
    rank, (groups, _) = dist.get_rank(), form_ours()
    said = StepAgreement(groups.control)
    heard = []
    for step in range(60):
        own = rank == 1 and steps_of_rank_1 <= step < steps_of_rank_1 + 20
        if said.deadline_is_near(own):
            heard.append(step)
        said.leave(False, Counter())
        time.sleep(0.001 * (1 + rank))
    groups.destroy()  # the last agreement may be under way
    return heard


def test_both_ranks_hear_of_a_deadline_and_of_its_end_at_the_same_steps() -> None:
    with crew_of(2) as crew:
        one, other = succeeded(crew.run(tell_of_it_at, 7, ranks=2))
    assert one == other
    assert one, "it was heard of"
    assert 7 < one[0] <= 7 + 2 * 3
    assert one == list(range(one[0], one[0] + 21)), "from one agreement to another"
