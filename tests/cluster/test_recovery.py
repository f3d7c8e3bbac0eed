"""Faults on real workers under a real agent and a real etcd: after each, the result is that of an undisturbed run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tests.cluster.harness import Job, run_standalone
from torchelastic.testing.faults import Fault

MakeJob = Callable[..., Job]

#: What runs must have in common whose bits are compared: which rank has which weights and random numbers.
SAME_BITS: dict[str, Any] = {"seed": 5, "dropout": 0.2, "epochs": 2}
LAST_STEP = 39


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    """The final weights of three workers whom nothing happened."""
    job = run_standalone(Job(tmp_path_factory.mktemp("undisturbed"), **SAME_BITS))
    return job.check_identity(finishers=3)


def assert_all_struck(job: Job, faults: Sequence[Fault]) -> None:
    assert job.plan.struck() == list(range(len(faults))), f"not every fault struck:\n{job.output()[-3000:]}"


# --- kills ------------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.daily
def test_each_worker_killed_in_turn_costs_no_sample_and_no_newcomer_overwrites_the_survivors(
    jobs: MakeJob, tmp_path_factory: pytest.TempPathFactory
) -> None:
    kills = [Fault("kill", "backward", rank=rank, step=5 + 10 * rank, incarnation=None) for rank in (0, 1, 2)]
    # the newest checkpoint is always older than what the survivors hold: it must not be loaded
    checkpoints = tmp_path_factory.mktemp("checkpoints")
    job = jobs(kills, wait_for_newcomer_at=[8, 18, 28], checkpoint_dir=checkpoints, checkpoint_every=4)
    run_standalone(job)
    assert_all_struck(job, kills)
    job.check_identity(finishers=3)
    assert {event["world"] for event in job.of("drawn")} == {2, 3}, "they went on as two, and were three again"
    assert len(job.of("started")) == 6
    recoveries = [line for line in job.output().splitlines() if "recovered: " in line]
    assert recoveries
    assert all("has ended (fact)" in line for line in recoveries), recoveries
    assert job.of("saved")
    assert not job.of("loaded"), "a checkpoint was loaded over the state of survivors"
    ranks_zero = {event["round"]: event["pid"] for event in job.of("synced", rank=0)}
    newcomers = {event["pid"]: event["round"] for event in reversed(job.of("synced"))}  # their first round
    assert all(newcomers[pid] < number for number, pid in ranks_zero.items() if number > 1), "a newcomer was the source"


@pytest.mark.long
@pytest.mark.parametrize("then", ["skip", "step"])
def test_a_step_that_catches_the_error_of_a_lost_peer_does_not_count(jobs: MakeJob, then: str) -> None:
    kills = [Fault("kill", "backward", rank=1, step=6)]
    job = run_standalone(jobs(kills, after_errors=then, **SAME_BITS | {"dropout": 0.0}))
    assert_all_struck(job, kills)
    assert {event["step"] for event in job.of("caught")} == {6}
    job.check_identity(finishers=None)


@pytest.mark.slow
def test_two_workers_killed_in_the_same_step_leave_one_that_goes_on(jobs: MakeJob) -> None:
    kills = [Fault("kill", "backward", rank=rank, step=6) for rank in (0, 2)]
    job = run_standalone(jobs(kills, wait_for_newcomer_at=[9, 12]))
    assert_all_struck(job, kills)
    job.check_identity(finishers=3)
    assert 1 in {event["world"] for event in job.of("drawn")}


@pytest.mark.long
def test_kills_on_the_way_into_a_group_and_while_it_forms_only_cost_another_round(jobs: MakeJob) -> None:
    faults = [
        # the first group of all: its round is published, its rank 0 dies with the store
        Fault("kill", "form", rank=0, step=0),
        # a survivor dies before it asks for the next round
        Fault("raise", "backward", rank=1, step=8, incarnation=None),
        Fault("kill", "rendezvous", rank=2, step=8, incarnation=None),
        # a later group: rank 0 holds the state, and the store again
        Fault("raise", "backward", rank=1, step=16, incarnation=None),
        Fault("kill", "form", rank=0, step=16, incarnation=None),
    ]
    job = run_standalone(jobs(faults, wait_for_newcomer_at=[5, 12, 20]))
    assert_all_struck(job, faults)
    job.check_identity(finishers=3)
    assert len(job.of("started")) == 6


@pytest.mark.long
def test_a_receiver_and_a_source_that_die_in_the_middle_of_a_sync_leave_nobody_torn(jobs: MakeJob) -> None:
    faults = [
        Fault("kill", "backward", worker=2, step=5),
        # each tensor is a message: the newcomer dies with half of the state received ..
        Fault("kill", "round-3-message-5", worker=2, incarnation=1),
        # .. and when it comes again, its source dies with half of the state sent
        Fault("kill", "round-5-message-5", rank=0),
    ]
    job = run_standalone(jobs(faults, wait_for_newcomer_at=[8, 14, 20], chunk_bytes=64))
    assert_all_struck(job, faults)
    job.check_identity(finishers=3)
    assert not job.of("synced", round=5)
    (source,) = job.of("synced", round=6, rank=0)
    assert source["pid"] in {event["pid"] for event in job.of("committed", step=5)}


@pytest.mark.long
def test_a_survivor_whose_source_dies_while_it_is_brought_level_goes_on_from_its_own_state(jobs: MakeJob) -> None:
    faults = [
        # after the gradients were exchanged: rank 0 commits the step, rank 1 goes back
        Fault("raise", "optimizer", rank=1, step=12),
        # half of what rank 1 lacks has been sent; now it is the best there is, so it must not be torn
        Fault("kill", "round-2-message-5", rank=0, step=13),
    ]
    job = run_standalone(jobs(faults, chunk_bytes=64), nproc=2)
    assert_all_struck(job, faults)
    job.check_identity()
    (source,) = job.of("synced", round=3, rank=0)
    assert (source["step"], source["pid"]) == (12, job.of("error", kind="RuntimeError")[0]["pid"])


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.daily
def test_steps_and_formations_that_fail_are_repeated_with_the_same_bits(
    jobs: MakeJob, undisturbed: torch.Tensor
) -> None:
    faults = [
        Fault("raise", "form", rank=2, step=0),
        Fault("raise", "backward", rank=1, step=7),
        Fault("raise", "form", rank=0, step=7),
    ]
    job = run_standalone(jobs(faults, **SAME_BITS))
    assert_all_struck(job, faults)
    assert torch.equal(job.check_identity(finishers=3), undisturbed)
    # only the step was undone, once by each: where no group was formed there was nothing to undo
    assert sorted(event["worker"] for event in job.of("rolled_back")) == [0, 1, 2]
    assert {event["step"] for event in job.of("rolled_back")} == {7}
    # the others were blocked in the step's all-reduce with the one that raised: it cut their connections
    times_out_s = int(job.job_options.get("timeout_ms", 20000)) / 1000
    repeated_s = max(event["t"] for event in job.of("committed", step=7)) - job.plan.struck_at_s(1)
    assert repeated_s < times_out_s / 2, "somebody waited for the collective's time-out"


@pytest.mark.long
def test_a_rank_that_fails_where_others_commit_draws_the_same_random_numbers_afterwards(
    jobs: MakeJob, undisturbed: torch.Tensor
) -> None:
    fault = Fault("raise", "optimizer", rank=1, step=7)
    job = run_standalone(jobs([fault], **SAME_BITS))
    assert_all_struck(job, [fault])
    assert torch.equal(job.check_identity(finishers=3), undisturbed)


@pytest.mark.long
def test_it_does_so_also_where_the_first_sync_after_that_fails(jobs: MakeJob, undisturbed: torch.Tensor) -> None:
    faults = [Fault("raise", "optimizer", rank=1, step=7), Fault("raise", "round-2-message-5", rank=0)]
    job = run_standalone(jobs(faults, chunk_bytes=64, **SAME_BITS))
    assert_all_struck(job, faults)
    assert not job.of("synced", round=2)
    assert torch.equal(job.check_identity(finishers=3), undisturbed)


@pytest.mark.slow
def test_with_full_snapshots_even_a_failure_after_the_optimizer_is_repeated_with_the_same_bits(
    jobs: MakeJob, undisturbed: torch.Tensor
) -> None:
    faults = [Fault("raise", "tail", rank=1, step=7), Fault("raise", "optimizer", rank=0, step=12)]
    job = run_standalone(jobs(faults, snapshot="full", tail_all_reduce=True, **SAME_BITS))
    assert_all_struck(job, faults)
    assert torch.equal(job.check_identity(finishers=3), undisturbed)
    assert len(job.of("rolled_back")) == 6


@pytest.mark.long
def test_a_step_that_failed_after_everybodys_optimizer_stands(jobs: MakeJob) -> None:
    faults = [
        Fault("kill", "tail", rank=1, step=6, incarnation=None),
        Fault("raise", "tail", rank=1, step=12, incarnation=None),
    ]
    job = run_standalone(jobs(faults, tail_all_reduce=True, wait_for_newcomer_at=[9]))
    assert_all_struck(job, faults)
    job.check_identity(finishers=3)
    for step in (6, 12):
        assert len({event["round"] for event in job.of("drawn", step=step)}) == 1, f"step {step} was trained twice"


@pytest.mark.long
def test_a_single_worker_whose_step_failed_after_the_optimizer_goes_on_from_there(jobs: MakeJob) -> None:
    faults = [Fault("raise", "tail", step=6), Fault("raise", "optimizer", step=9)]
    # and a metric handler that throws at each metric disturbs nobody
    job = run_standalone(jobs(faults, metrics="throwing"), nproc=1)
    assert_all_struck(job, faults)
    job.check_identity(finishers=1)
    assert len(job.of("drawn", step=6)) == 1
    assert len(job.of("drawn", step=9)) == 2
    assert "a metric handler that throws" in job.output()


@pytest.mark.long
def test_the_same_step_failing_for_ever_ends_with_one_clear_error(jobs: MakeJob) -> None:
    faults = [Fault("raise", "backward", step=3, incarnation=None, times=1000)]
    job = jobs(faults, max_failures=2)  # else the third failure in the same place ends it: test_repeated_errors.py
    job.start("--standalone", "--max-restarts=0", nproc=1)
    assert job.wait(60) == [1]
    assert len(job.of("drawn", step=3)) == 2
    ending = job.output()[job.output().rindex("worker 0 failed") :]
    assert "The above exception was the direct cause" in ending, "the cause is chained"
    assert "RuntimeError: injected" in ending
    assert ending.rstrip().splitlines()[-1].startswith("RuntimeError: 2 failures in a row")


# --- workers that live and do not come --------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    ("verb", "rank"),
    [
        ("hang", 0),  # stopped, and the group's store with it
        pytest.param("spin", 1, marks=pytest.mark.slow),
    ],
)
def test_a_worker_that_hangs_is_ended_within_the_bound_and_comes_back(jobs: MakeJob, verb: str, rank: int) -> None:
    timeout_s, margin_s, step = 1.0, 5.0, 5
    fault = Fault(verb, "step", rank=rank, step=step)
    job = jobs([fault], timeout_ms=int(1000 * timeout_s), wait_for_newcomer_at=[8], full_world=2)
    run_standalone(job, nproc=2)
    assert_all_struck(job, [fault])
    job.check_identity(finishers=2)
    (first, *_) = job.of("committed", step=step)
    waited_s = first["t"] - job.plan.struck_at_s(0)
    # the time-out of the collective, then as long again and a margin for the one who hangs; 5 s for a busy machine
    assert waited_s < 2 * timeout_s + margin_s + 5.0, f"the other went on after {waited_s:.1f} s"
    assert len(job.of("started")) == 3, "it was ended and started again, once"
    assert sorted({event["round"] for event in job.of("synced")}) == [1, 2, 3], "who was ended was in no other group"
    phase_function = {"hang": "in reach", "spin": "in _spin"}[verb]
    assert phase_function in job.output(), "the stack of the one that hung was not dumped"


# --- the end ----------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_who_dies_in_the_very_last_step_leaves_the_others_level(jobs: MakeJob) -> None:
    faults = [Fault("kill", "backward", rank=1, step=LAST_STEP)]
    job = run_standalone(jobs(faults), nproc=2)
    assert_all_struck(job, faults)
    assert job.check_identity() is not None


def test_who_loses_the_last_step_after_the_others_have_finished_is_brought_level_by_them(jobs: MakeJob) -> None:
    # the pause lets rank 0 finish first; both strike one after the other
    faults = [
        Fault("pause", "tail", rank=1, step=LAST_STEP, seconds=1.0),
        Fault("raise", "tail", rank=1, step=LAST_STEP),
    ]
    job = run_standalone(jobs(faults), nproc=2)
    assert_all_struck(job, faults)
    job.check_identity(finishers=2)
    output = job.output()
    assert 0 < output.find("round 1 is closing") < output.find("round 2 is running"), "it finished before it was needed"
    assert {event["step"] for event in job.of("finished")} == {LAST_STEP + 1}


@pytest.mark.slow
def test_the_last_step_done_by_one_failed_by_one_and_fatal_to_one_ends_level(jobs: MakeJob) -> None:
    faults = [Fault("kill", "tail", rank=0, step=LAST_STEP), Fault("raise", "tail", rank=1, step=LAST_STEP)]
    job = run_standalone(jobs(faults))
    assert_all_struck(job, faults)
    job.check_identity()
    assert len(job.final_weights()) >= 2
