"""Two ranks, gloo, and clocks that do not agree."""

from __future__ import annotations

import json
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.few_examples import some_daily
from tests.process.local_ranks import Crew, Failed, crew_of, succeeded
from torchelastic.lifetime import STOPPED_EARLY, DeadlineAt, IterManager, RankMissingError, nearest
from torchelastic.lifetime.manager_state import ManagerState, write_state

SKEW_S = 0.5


CREW_SIZE = 2


def skewed_clock() -> float:
    """The clocks of the two ranks are half a second apart."""
    return time.monotonic() + SKEW_S * (dist.get_rank() if dist.is_initialized() else 0)


def manager_of(folder: str, left_s: float | None, **options: Any) -> IterManager:
    """A manager whose deadline is told as a moment, which its clock reads half a second later on the other rank."""
    at = None if left_s is None else DeadlineAt("test", time.monotonic() + left_s, "given")
    options = {"redundant_time": 0, "save_ckpt_time": 0.05, "timeout_s": 20.0, **options}
    return IterManager(velastic_dir=folder, deadline=nearest([at]), clock=skewed_clock, **options)


def train(manager: IterManager, iterations: int, step_s: float) -> list[int]:
    """Steps that wait for each other, as those of DDP do; returns the iterations in which it was told to save."""
    saved, gradient = [], torch.ones(4)
    for _ in range(iterations):
        manager.iter()
        if manager.should_save_ckpt():
            saved.append(manager.iter_count)
        if manager.should_stop:
            break
        time.sleep(step_s * (1 + dist.get_rank()))
        dist.all_reduce(gradient)
    return saved


def six_deadlines(folder: str, step_s: float) -> list[tuple[list[int], int]]:
    answers = []
    for life in range(6):
        manager = manager_of(folder, SKEW_S + 0.25 + 0.05 * life)
        saved = train(manager, 10_000, step_s)
        answers.append((saved, manager.iter_count))
        manager.cleanup()
        dist.barrier()
    return answers


@pytest.mark.parametrize("step_s", some_daily([0.0005, 0.01, 0.06], lambda step_s: step_s == 0.01))
def test_with_half_a_second_between_the_clocks_both_ranks_save_in_the_same_iteration(
    crew: Crew, tmp_path: Path, step_s: float
) -> None:
    one, other = succeeded(crew.run(six_deadlines, str(tmp_path / "state"), step_s, ranks=2))
    assert one == other
    for saved, count in one:
        assert saved == [count], "each was told once, and stopped there"


def slower_and_slower(folder: str) -> list[tuple[bool, float, float]]:
    """5 ms each, then 0.5 s each, from some seconds before the deadline on; and what a busy machine has added."""
    ends = []
    for life in range(2):
        end_s = time.monotonic() + 6.0
        manager = manager_of(folder, 6.0 + SKEW_S, save_ckpt_time=0.5, redundant_time=0.5)
        began_s, longest_s = time.monotonic(), 0.0
        slow_from_s = began_s + 2.0 + 0.7 * life
        while True:
            longest_s, began_s = max(longest_s, time.monotonic() - began_s), time.monotonic()
            manager.iter()
            if manager.should_save_ckpt() or manager.should_stop or time.monotonic() > end_s:
                break
            time.sleep(0.005 if time.monotonic() < slow_from_s else 0.5)
            dist.all_reduce(torch.ones(1))
        ends.append((manager.should_stop, end_s - time.monotonic(), max(0.0, longest_s - 0.5)))
        dist.barrier()
    return ends


@pytest.mark.long
def test_iterations_that_become_a_hundred_times_as_long_do_not_cost_the_deadline(crew: Crew, tmp_path: Path) -> None:
    for ends in succeeded(crew.run(slower_and_slower, str(tmp_path), ranks=2)):
        assert all(stops and left_s + stalled_s > 0.4 for stops, left_s, stalled_s in ends), ends


def notice_on_one_rank(folder: str) -> tuple[list[int], bool]:
    """Only rank 1 hears of its deadline, in the middle of the run."""
    manager = IterManager(
        velastic_dir=folder, deadline=_Notice(), redundant_time=0, save_ckpt_time=0.05, timeout_s=20.0
    )
    return train(manager, 3000, 0.001), manager.should_stop


class _Notice:
    name, reason = "notice", "a spot notice for one host"

    def __init__(self) -> None:
        self._began_s = time.monotonic()

    def remaining_s(self, now_s: float) -> float | None:
        is_told = dist.get_rank() == 1 and now_s > self._began_s + 0.3
        return self._began_s + 1.5 - now_s if is_told else None


def test_a_deadline_that_only_one_rank_hears_of_stops_all(crew: Crew, tmp_path: Path) -> None:
    one, other = succeeded(crew.run(notice_on_one_rank, str(tmp_path), ranks=2))
    assert one == other
    assert len(one[0]) == 1
    assert one[1]


def sigterm_to_one_rank(folder: str) -> tuple[list[int], int]:
    """Each rank looks for its deadlines by itself, and only rank 1 gets the signal."""
    os.environ["TORCHELASTIC_TERM_GRACE_S"] = "2"
    try:
        manager = IterManager(velastic_dir=folder, redundant_time=0, save_ckpt_time=0.05, timeout_s=20.0)
        saved = train(manager, 20, 0.001)
        if dist.get_rank() == 1:
            signal.raise_signal(signal.SIGTERM)
        saved += train(manager, 10_000, 0.001)
        manager.close()
        return saved, manager.exit_code
    finally:
        del os.environ["TORCHELASTIC_TERM_GRACE_S"]


def test_a_signal_to_one_rank_stops_all_in_the_same_iteration(crew: Crew, tmp_path: Path) -> None:
    one, other = succeeded(crew.run(sigterm_to_one_rank, str(tmp_path), ranks=2))
    assert one == other
    assert (len(one[0]), one[1]) == (1, STOPPED_EARLY)


def count_on(folder: str) -> list[int]:
    """The ranks do not see the same folder."""
    os.environ["TORCHELASTIC_PROGRESS_FILE"] = f"{folder}/progress-{dist.get_rank()}"
    manager = manager_of(f"{folder}/{dist.get_rank()}", None)
    del os.environ["TORCHELASTIC_PROGRESS_FILE"]
    counts = []
    for _ in range(3):
        manager.iter()
        counts.append(manager.iter_count)
    manager.save_manager_state()
    return counts


def test_every_rank_counts_on_also_if_only_one_sees_the_file(crew: Crew, tmp_path: Path) -> None:
    assert succeeded(crew.run(count_on, str(tmp_path), ranks=2)) == [[1, 2, 3]] * 2
    assert json.loads((tmp_path / "0" / "manager_state.json").read_text())["world_size"] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "progress-0"], "the first rank writes"
    assert succeeded(crew.run(count_on, str(tmp_path), ranks=2)) == [[3, 4, 5]] * 2


def after_a_life_that_was_killed(folder: str) -> tuple[list[int], bool]:
    end_s = time.monotonic() + SKEW_S + 2.0
    manager = manager_of(f"{folder}/{dist.get_rank()}", SKEW_S + 2.0)
    saved = train(manager, 10_000, 0.005)
    manager.close()
    return saved, end_s - time.monotonic() > 0.5


def test_only_one_rank_sees_that_the_life_before_was_killed_and_all_save_in_one_iteration(
    crew: Crew, tmp_path: Path
) -> None:
    write_state(tmp_path / "0", ManagerState(world_size=2, unfinished_iter_s=0.75))
    one, other = succeeded(crew.run(after_a_life_that_was_killed, str(tmp_path), ranks=2))
    assert one == other
    saved, is_early = one
    assert len(saved) == 1
    assert is_early


# Who does not come


def stop_coming(folder: str, after: int) -> str:
    manager = manager_of(folder, None, timeout_s=1.0)
    store = distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        for _ in range(after):
            manager.iter()
        store.wait(["rank 0 has given up"], timedelta(seconds=30))
        return ""
    try:
        for _ in range(10_000):
            manager.iter()
    except RankMissingError as error:
        return str(error)
    finally:
        store.set("rank 0 has given up", "1")
    return "it went on"


@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_rank_that_stops_coming_is_named_within_the_time_limit(crew: Crew, tmp_path: Path, after: int) -> None:
    text, _ = succeeded(crew.run(stop_coming, str(tmp_path), after, ranks=2))
    assert text.startswith("rank 1 did not come to agreement")
    assert "within 1 s" in text


def die(folder: str, said: str) -> None:
    manager = manager_of(folder, None, timeout_s=20.0)
    for iteration in range(10_000):
        if iteration == 5 and dist.get_rank() == 1:
            os._exit(9)
        try:
            manager.iter()
        except RankMissingError as error:
            Path(said).write_text(str(error))
            return


def test_a_rank_that_has_died_is_named_at_once(tmp_path: Path) -> None:
    with crew_of(2) as ranks, pytest.raises(EOFError):
        ranks.run(die, str(tmp_path), str(tmp_path / "said"), ranks=2)
    text = (tmp_path / "said").read_text()
    assert text.startswith("rank 1 did not come to agreement")
    assert "a connection was lost" in text


def different_tiers(folder: str) -> None:
    manager_of(folder, None, tiers=("durable", "memory")[: 1 + dist.get_rank()]).iter()


def test_ranks_with_different_tiers_are_told_so(crew: Crew, tmp_path: Path) -> None:
    for answer in crew.run(different_tiers, str(tmp_path), ranks=2):
        assert isinstance(answer, Failed)
        assert "give the IterManager of every rank the same tiers" in answer.text


# The group


def reform(folder: str) -> list[tuple[int, int]]:
    """Two ranks, then the same two in a new group, then each alone: (iterations that count, count)."""
    rank, seen = dist.get_rank(), []
    manager = manager_of(folder, None)
    for life in range(3):
        if life:
            dist.destroy_process_group()
        if life == 1:
            where = f"file://{folder}/second"
            dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2, timeout=timedelta(seconds=30))
        for _ in range(6):
            manager.iter()
        seen.append((len(manager.iter_times), manager.iter_count))
    return seen


def test_times_are_kept_in_a_new_group_and_forgotten_with_another_number_of_ranks(crew: Crew, tmp_path: Path) -> None:
    one, other = succeeded(crew.run(reform, str(tmp_path), ranks=2))
    # the first iteration is set apart, and the one in which the group changed is none; alone it warms up again
    assert one == other == [(4, 6), (9, 12), (4, 18)]


def reform_after_a_stop(folder: str) -> list[bool]:
    """The group changes after the decision; rank 1 is a new process, as far as its manager goes."""
    rank = dist.get_rank()
    manager = manager_of(folder, SKEW_S + 0.3)
    answers = [bool(train(manager, 10_000, 0.001))]
    dist.destroy_process_group()
    where = f"file://{folder}/second"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2, timeout=timedelta(seconds=30))
    manager = manager if rank == 0 else manager_of(folder, 0.0)
    for _ in range(3):
        manager.iter()
        answers.append(manager.should_save_ckpt())
    return answers


def test_a_group_that_is_formed_anew_after_the_decision_takes_it_again_together(crew: Crew, tmp_path: Path) -> None:
    assert succeeded(crew.run(reform_after_a_stop, str(tmp_path), ranks=2)) == [[True, True, False, False]] * 2


def losses(folder: str, is_managed: bool) -> tuple[list[float], list[int]]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
    manager = manager_of(folder, SKEW_S + 0.2) if is_managed else None
    seen = []
    for _ in range(60):
        if manager is not None:
            manager.iter()
            manager.should_save_ckpt()
        loss = wrapped(torch.randn(4, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(float(loss.detach()))
        time.sleep(0.005)
    if manager is not None:
        assert manager.should_stop, "it was near the deadline, and behind it"
    return seen, torch.get_rng_state().tolist()


def test_it_changes_no_loss_and_no_random_number(crew: Crew, tmp_path: Path) -> None:
    without = succeeded(crew.run(losses, str(tmp_path), False, ranks=2))
    assert succeeded(crew.run(losses, str(tmp_path), True, ranks=2)) == without
