"""Ranks that part ways between two syncs are found, all at the same step, and named; who draws alike goes on so."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import torchelastic
from tests.process.local_ranks import crew_of, form_ours, succeeded
from tests.pure.worlds_of_one import Counter
from torchelastic.p2p import replica_watch, step_agreement
from torchelastic.p2p.replica_watch import FIRST_AFTER, MAX_SHARE, ReplicaWatch, exchanges_between
from torchelastic.p2p.step_agreement import StepAgreement
from torchelastic.state import ReplicaDigests


@given(cost_s=st.floats(0, 10), exchange_s=st.floats(1e-4, 100))
def test_digests_cost_their_share_at_most(cost_s: float, exchange_s: float) -> None:
    between = exchanges_between(cost_s, exchange_s)
    assert between >= 2
    assert cost_s <= MAX_SHARE * between * exchange_s * (1 + 1e-9) or between == 10**9


class Compared(Counter):
    """Has the digests that it is given."""

    def __init__(self, state: int = 1, **random: int) -> None:
        super().__init__()
        self.digests = ReplicaDigests(state, **{"torch": 1, "python": 1, "numpy": 1, **random})
        self.begun = 0

    def begin_replica_comparison(self) -> Any:
        self.begun += 1
        return lambda: self.digests


def exchanged(states: list[Compared], exchanges: int) -> list[set[Any]]:
    """For each exchange what each rank has read."""
    watches = [ReplicaWatch(clock=lambda: 0.0) for _ in states]
    found = []
    for _ in range(exchanges):
        words = [watch.words(state, 0.1) for watch, state in zip(watches, states, strict=True)]
        most = [max(of_ranks) for of_ranks in zip(*words, strict=True)]
        found.append({watch.read(most) for watch in watches})
    return found


@pytest.mark.parametrize(("digests", "is_equal"), [((5, 5, 5), True), ((5, 5, 6), False), ((4, 5, 5), False)])
@pytest.mark.parametrize("of", ["state", "torch", "python", "numpy"])
def test_all_ranks_read_the_same_in_the_same_exchange(digests: tuple[int, ...], is_equal: bool, of: str) -> None:
    states = [Compared(**{of: each}) for each in digests]
    found = exchanged(states, 3 * FIRST_AFTER)
    assert all(len(each) == 1 for each in found)
    verdicts = [verdict for each in found for verdict in each if verdict is not None]
    assert len(verdicts) > 2
    alike = {"torch", "python", "numpy"} - ({of} if not is_equal else set())
    assert set(verdicts) == {(is_equal or of != "state", frozenset(alike))}


def test_a_state_that_compares_nothing_is_asked_once() -> None:
    class Silent(Compared):
        def begin_replica_comparison(self) -> Any:
            self.begun += 1

    states: list[Compared] = [Silent(), Silent()]
    assert exchanged(states, 5 * FIRST_AFTER) == [{None}] * (5 * FIRST_AFTER)
    assert {state.begun for state in states} == {1}


def train_and_part(
    at: int, mode: str, per_rank_seed: bool, what: str = "weight"
) -> tuple[list[int], str, frozenset[str]]:
    """The steps after which this rank knew that they are apart, what it was told, and from what they draw alike."""
    step_agreement.interval_steps = lambda *_: 1  # else it depends on how fast this machine is
    replica_watch.FIRST_AFTER, replica_watch.exchanges_between = 2, lambda *_: 2
    rank, (groups, _) = dist.get_rank(), form_ours()
    torch.manual_seed(rank if per_rank_seed else 0)
    random.seed(0)
    np.random.seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 300), torch.nn.Linear(300, 1))
    state = torchelastic.ModelState(module, torch.optim.SGD(module.parameters(), lr=0.001), on_out_of_sync=mode)
    state.sync()
    if per_rank_seed:
        torch.manual_seed(rank)
    agreement, known, told = StepAgreement(groups.control), [], ""
    for step in range(40):
        state.snapshot()
        state.optimizer.zero_grad()
        state.model(torch.randn(3, 4)).square().mean().backward()
        state.optimizer.step()
        if rank == 1 and step == at:
            weight = module.get_parameter("1.weight")
            if what == "weight":
                weight.data[0, 250] += 1e-4
            else:  # as of a Muon that has the momentum of its own parameters only
                state.optimizer.state[weight]["momentum_buffer"] = torch.zeros(3)
        state.commit()
        try:
            agreement.leave(False, state)
        except torchelastic.NonRetryableException as error:
            told = str(error)
            known.append(step)
            break
        comparison = state.replica_comparison
        if comparison is not None and not comparison.is_in_sync:
            known.append(step)
            told = str(comparison)
    groups.destroy()
    return known, told, frozenset(state._drawn_alike)


@pytest.mark.parametrize("mode", ["log", "raise"])
def test_ranks_that_part_ways_are_named_a_few_steps_later(mode: str) -> None:
    with crew_of(3) as crew:
        found = succeeded(crew.run(train_and_part, 12, mode, False, ranks=3))
    steps = {tuple(known) for known, _, _ in found}
    assert len(steps) == 1, "all at the same step"
    (known,) = steps
    assert 12 <= known[0] <= 20
    for _, told, alike in found:
        assert "module differs on rank 1 (1.weight)" in told
        assert "torch" in alike
    if mode == "raise":
        assert "ranks have parted since the last sync" in found[0][1]


def test_an_optimizer_that_keeps_other_state_on_another_rank_is_named_though_all_weights_are_equal() -> None:
    with crew_of(2) as crew:
        found = succeeded(crew.run(train_and_part, 12, "raise", False, "state", ranks=2))
    for known, told, _ in found:
        assert 12 <= known[0] <= 20
        assert "optimizer differs on rank 1" in told
        assert "module" not in told
        assert "divides its state among the ranks" in told


def test_ranks_that_stay_together_are_never_said_to_have_parted_and_know_that_they_draw_otherwise() -> None:
    with crew_of(2) as crew:
        assert succeeded(crew.run(train_and_part, -1, "raise", True, ranks=2)) == [([], "", {"python", "numpy"})] * 2
