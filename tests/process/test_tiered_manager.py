"""TieredCheckpointManager on one rank: what happens on which thread, what the background says, and the API of 0.1."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torchelastic
from tests.process.small_tmpfs import small_tmpfs
from tests.process.tiered_work import digest, make_state, steps_of
from tests.waiting import wait_until
from torchelastic import metrics
from torchelastic.checkpoint import TieredCheckpointManager
from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.failures import MAX_FAILURES
from torchelastic.checkpoint.format import pool
from torchelastic.checkpoint.format.disk import Disk
from torchelastic.checkpoint.format.slot import Slot
from torchelastic.checkpoint.policy import EverySteps, KeepLast
from torchelastic.checkpoint.store import DiskTier, MemoryTier, SealedShard, Tier
from torchelastic.checkpoint.store.fence import OwnedError
from torchelastic.checkpoint.store.reading import open_checkpoint
from torchelastic.group.peers import Alone

Make = Callable[..., TieredCheckpointManager]


@pytest.fixture
def managers() -> Iterator[Make]:
    """Makes managers of one run, and closes them."""
    made: list[TieredCheckpointManager] = []

    def make(*tiers: Any, **options: Any) -> TieredCheckpointManager:
        made.append(TieredCheckpointManager(tiers, run_id="test", **options))
        return made[-1]

    yield make
    for manager in made:
        manager.close()


class Held(DiskTier):
    """Stores nothing before it is let go."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, KeepLast(10))
        self.go, self.began = threading.Event(), threading.Semaphore(0)

    def put(self, shard: SealedShard) -> Any:
        self.began.release()
        assert self.go.wait(30)
        return super().put(shard)


class Recorded(metrics.MetricHandler):
    """Keeps the names of what was published."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def emit(self, metric_data: metrics.MetricData) -> None:
        self.names.append(metric_data.name)


@pytest.fixture
def published() -> Iterator[Recorded]:
    handler = Recorded()
    metrics.configure(handler, group="torchelastic")
    yield handler
    metrics.configure(metrics.NullMetricHandler(), group="torchelastic")


def test_two_saves_run_beside_the_training_and_the_third_says_that_it_waits(
    managers: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture, published: Recorded
) -> None:
    tier, peers, state = Held(tmp_path), Alone(), make_state(1, 1)
    manager = managers(tier)
    manager.save_step(state, 1, peers)
    assert tier.began.acquire(timeout=30)
    assert (manager.is_saving, manager.is_full) == (True, False)
    manager.save_step(state, 2, peers)
    assert manager.is_full
    assert "all slots are busy" not in caplog.text
    third = threading.Thread(target=manager.save_step, args=(state, 3, peers))
    third.start()
    while "all slots are busy" not in caplog.text and third.is_alive():
        third.join(0.01)
    tier.go.set()
    third.join(30)
    assert "step-000000003.e1.r0.g3 waits: all slots are busy" in caplog.text
    assert manager.wait(30)
    assert steps_of(manager) == [3, 2, 1]
    assert "checkpoint.slot_wait.duration.ms" in published.names
    assert "checkpoint.stall.duration.ms" in published.names
    assert "checkpoint.durable.disk.duration.ms" in published.names


def test_a_place_that_does_not_answer_holds_up_no_save_to_the_memory_of_the_host(
    managers: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    memory, disk, peers = MemoryTier(tmp_path / "memory"), Held(tmp_path / "disk"), Alone()
    manager = managers(memory, disk)
    for step in range(1, 7):
        manager.save_step(make_state(step, step), step, peers)
        wait_until(lambda at=step: steps_in(memory) == [at], 30, f"step {step} is in memory")  # type: ignore[misc]
        assert step > 1 or disk.began.acquire(timeout=30)
    assert not manager.wait(0.0), "the disk has not the last one yet"
    assert caplog.text.count("the disk tier is slower than saves come: step-000000002.e1.r0.g2 is skipped there") == 1
    disk.go.set()
    assert manager.wait(30)
    assert not manager.failures
    assert steps_in(disk) == [6, 1]
    for entry in disk.inventory():  # no other save has used the memory of step 1 meanwhile
        step, restored = entry.name.step, make_state(99, 1)
        with open_checkpoint(tmp_path / "disk" / entry.name.folder_name) as stored:
            restored.load_checkpoint_tree(stored.read_tree())
        assert digest(restored) == digest(make_state(step, step))


def test_two_places_that_do_not_answer_hold_up_no_save_to_the_memory_of_the_host(
    managers: Make, tmp_path: Path
) -> None:
    memory, peers = MemoryTier(tmp_path / "memory"), Alone()
    odd, even = Held(tmp_path / "odd"), Held(tmp_path / "even")
    odd.name, odd.every = "odd", EverySteps(2, offset=1)
    even.name, even.every = "even", EverySteps(2)
    manager = managers(memory, odd, even, slot_wait_s=1.0)
    for step in range(1, 9):
        manager.save_step(make_state(step, step), step, peers)
        wait_until(lambda at=step: steps_in(memory) == [at], 30, f"step {step} is in memory")  # type: ignore[misc]
    odd.go.set()
    even.go.set()
    assert manager.wait(30)
    assert not manager.failures
    assert (steps_in(odd), steps_in(even)) == ([7, 1], [8, 2])


def test_what_waits_for_a_place_that_hangs_is_given_up_with_its_group(managers: Make, tmp_path: Path) -> None:
    memory, disk, peers = MemoryTier(tmp_path / "memory"), Held(tmp_path / "disk"), Alone()
    manager = managers(memory, disk, slot_wait_s=5.0)
    for step in (1, 2):
        manager.save_step(make_state(step, step), step, peers)
        wait_until(lambda at=step: steps_in(memory) == [at], 30, f"step {step} is in memory")  # type: ignore[misc]
        assert step > 1 or disk.began.acquire(timeout=30)
    again = Alone(1)
    for step in range(3, 6):
        manager.save_step(make_state(step, step), step, again)
        wait_until(lambda at=step: steps_in(memory) == [at], 30, f"step {step} is in memory")  # type: ignore[misc]
    assert ["step-000000002" in failure for failure in manager.failures] == [True]
    disk.go.set()
    assert manager.wait(30)
    assert 2 not in steps_in(disk)


def steps_in(tier: Tier) -> list[int]:
    return [entry.name.step for entry in tier.inventory()]


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_a_second_run_is_refused_in_a_folder_of_one_host_that_a_run_uses(
    managers: Make, tmp_path: Path, kind: str
) -> None:
    def make_tier() -> Tier:
        return MemoryTier(tmp_path) if kind == "memory" else DiskTier(tmp_path, KeepLast(1), shared=False)

    first, tier = managers(make_tier()), make_tier()
    first.save_step(make_state(1, 1), 1, Alone())
    assert first.wait(30)
    second = TieredCheckpointManager([tier], run_id="another")
    with pytest.raises(OwnedError, match=r"belongs to run 'test' .* give this run a folder of its own"):
        second.save_step(make_state(2, 2), 2, Alone())
    second.close()
    assert steps_in(tier) == [1]


def test_the_state_may_change_as_soon_as_save_step_returns(managers: Make, tmp_path: Path) -> None:
    tier, peers, state = Held(tmp_path), Alone(), make_state(1, 3)
    manager, before = managers(tier), digest(state)
    manager.save_step(state, 3, peers)
    with torch.no_grad():
        for parameter in state.module.parameters():
            parameter.zero_()
    state.extra["losses"].append(7.0)
    tier.go.set()
    restored = make_state(9, 1)
    assert manager.restore(restored, peers) == 3
    assert digest(restored) == before


class Spied(Disk):
    """Notes on which thread files are worked on; `store` writes into memory."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in ("calls", "store") and callable(found) and not name.startswith("_"):
            self.calls.append((threading.current_thread().name, name))
        return found


def test_after_the_first_save_the_training_thread_touches_no_file(managers: Make, tmp_path: Path) -> None:
    disk, peers, state = Spied(), Alone(), make_state(1, 1)
    manager = managers(MemoryTier(tmp_path / "memory", disk=disk), DiskTier(tmp_path / "disk", disk=disk))
    manager.save_step(state, 1, peers)
    assert manager.wait(30)
    disk.calls.clear()
    for step in range(2, 6):
        manager.save_step(state, step, peers)
        assert manager.wait(30)
    threads = {thread for thread, _ in disk.calls}
    assert threads == {"torchelastic-checkpoints"}, [
        call for call in disk.calls if call[0] != "torchelastic-checkpoints"
    ]
    created = [name for _, name in disk.calls if name == "allocate"]
    assert len(created) <= 1, "no memory is allocated save after save"


def test_memory_without_a_memory_tier_is_used_again_and_again(
    managers: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def counted(*arguments: Any, **options: Any) -> Any:
        made.append(1)
        return Slot(*arguments, **options)

    monkeypatch.setattr(pool, "Slot", counted)
    manager, peers, state = managers(DiskTier(tmp_path)), Alone(), make_state(1, 1)
    for step in range(1, 6):
        manager.save_step(state, step, peers)
        assert manager.wait(30)
    assert len(made) == 1


def test_what_has_outgrown_its_slots_is_saved_again_soon_where_memory_has_room_for_two(
    managers: Make, tmp_path: Path
) -> None:
    module = torch.nn.Linear(1024, 1024)  # 4 MiB
    state = torchelastic.ModelState(module, torch.optim.SGD(module.parameters(), lr=0.1), extra={"losses": []})
    with small_tmpfs(tmp_path / "memory", 10 * 2**20) as folder:
        manager, peers, complete = managers(MemoryTier(folder / "run")), Alone(), []
        for step in range(1, 8):
            state.extra["losses"] = [0.5] * (50_000 if step > 2 else 0)
            manager.save_step(state, step, peers)
            assert manager.wait(30)
            complete += steps_of(manager)
        manager.close()
    assert complete == [1, 2, 2, 4, 4, 6, 7], "each of the two slots was outgrown once"


def test_a_tier_that_fails_is_reported_and_the_others_have_the_checkpoint(
    managers: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture, published: Recorded
) -> None:
    class Broken(DiskTier):
        def put(self, shard: SealedShard) -> Any:
            raise ValueError("not what one expects of a tier")

    manager = managers(Broken(tmp_path / "broken", name="broken"), DiskTier(tmp_path / "disk"))
    manager.save_step(make_state(1, 1), 1, Alone())
    assert manager.wait(30)
    (failure,) = manager.failures
    assert "in the broken tier" in failure
    assert "not what one expects of a tier" in caplog.text
    assert "Traceback" in caplog.text
    assert "checkpoint.failed" in published.names
    assert len(manager.list_checkpoints()) == 1


def test_a_commit_of_streams_that_fails_says_so_however_many_have_failed_before(managers: Make, tmp_path: Path) -> None:
    class Full(DiskTier):
        def put(self, shard: SealedShard) -> Any:
            raise CheckpointError(f"no room for {shard.name}")

    manager = managers(Full(tmp_path))
    for number in range(1, MAX_FAILURES + 3):
        with pytest.raises(CheckpointError, match=rf"not saved everywhere: .*no room for step-\S+\.g{number}$"):
            manager.create_checkpoint().commit()


def test_an_older_checkpoint_is_not_restored_without_a_word_where_a_place_cannot_be_read(
    managers: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Unreadable(DiskTier):
        def inventory(self) -> Any:
            raise CheckpointError("Input/output error")

    rare = DiskTier(tmp_path / "rare", every=EverySteps(2), name="rare")
    first = managers(DiskTier(tmp_path / "disk"), rare)
    for step in (2, 3):
        first.save_step(make_state(step, step), step, Alone())
        assert first.wait(30)
    second, again = managers(Unreadable(tmp_path / "disk"), rare), Alone(1)
    second.enter_group(again)
    assert second.restore(make_state(9, 1), again) == 2
    assert "may lie where nothing can be read: rank 0, disk tier: Input/output error" in caplog.text


def test_something_that_cannot_be_saved_is_named_at_once(managers: Make, tmp_path: Path) -> None:
    manager, peers, state = managers(DiskTier(tmp_path)), Alone(), make_state(1, 1)
    state.extra["what"] = object()
    with pytest.raises(TypeError, match="extra"):
        manager.save_step(state, 1, peers)
    del state.extra["what"]
    manager.save_step(state, 1, peers)
    assert manager.wait(30)
    assert len(manager.list_checkpoints()) == 1


def test_a_child_of_fork_does_not_save(managers: Make, tmp_path: Path) -> None:
    manager, peers, state = managers(DiskTier(tmp_path)), Alone(), make_state(1, 1)
    manager.save_step(state, 1, peers)
    assert manager.wait(30)
    pid = os.fork()
    if pid == 0:
        try:
            manager.save_step(state, 2, peers)
        except CheckpointError:
            os._exit(7)
        finally:  # whatever else it is: there must be no second process that runs tests
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    assert steps_of(manager) == [1]


@pytest.mark.parametrize("named", ["policy", "keep of 'disk'", "every of 'disk'"])
def test_a_number_in_place_of_a_policy_is_refused(tmp_path: Path, named: str) -> None:
    options: dict[str, Any] = {} if named == "policy" else {named.split()[0]: 3}
    with pytest.raises(TypeError, match=f"{named} is 3: give a policy"):
        TieredCheckpointManager([DiskTier(tmp_path, **options)], policy=3 if named == "policy" else None)  # type: ignore[arg-type]


@pytest.mark.parametrize("tiers", ["folder", ["folder"], DiskTier("folder"), None])
def test_a_path_in_place_of_a_tier_is_refused(tiers: Any) -> None:
    with pytest.raises(TypeError, match=r"tiers is .*: give a list of tiers, such as \[MemoryTier"):
        TieredCheckpointManager(tiers)


@pytest.mark.parametrize(("tiers", "text"), [([], "at least one"), (["a", "a"], "name of its own")])
def test_tiers_without_distinct_names_are_refused(tmp_path: Path, tiers: list[str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        TieredCheckpointManager([DiskTier(tmp_path, name=name) for name in tiers])


# --- in the train loop ------------------------------------------------------------------------------------------------


def test_train_saves_by_the_policy_in_the_background_and_waits_at_the_end(
    managers: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from tests.pure.test_train_loop import ScriptedCoordinator

    caplog.set_level(logging.INFO)
    tier = Held(tmp_path)
    manager = managers(tier, policy=EverySteps(2))
    threading.Timer(0.3, tier.go.set).start()
    state = make_state(1, 0)
    torchelastic.train(ScriptedCoordinator(), trained_to(5), state, checkpoint=manager)
    assert steps_of(manager) == [4, 2], "train has waited for the last one"
    assert "step 2: saving: step 2 is due (every 2 steps)" in caplog.text
    manager.close()
    again = managers(DiskTier(tmp_path, KeepLast(10)), policy=EverySteps(2))
    seen: list[int] = []
    torchelastic.train(ScriptedCoordinator(), trained_to(7, seen), make_state(2, 0), checkpoint=again)
    assert seen == [4, 5, 6, 7], "it goes on from the last checkpoint"
    assert state.step == 5
    assert str(again.list_checkpoints()[0].name) == "step-000000006.e2.r0.g1"


def trained_to(limit: int, seen: list[int] | None = None) -> Callable[[torchelastic.ModelState], None]:
    def step(state: torchelastic.ModelState) -> None:
        if seen is not None:
            seen.append(state.step)
        if state.step == limit:
            raise StopIteration
        state.optimizer.zero_grad()
        state.model(torch.ones(4, 64)).sum().backward()
        state.optimizer.step()

    return step


# --- the API of 0.1 ---------------------------------------------------------------------------------------------------
