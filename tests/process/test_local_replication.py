"""Copies by hand, with the names of NVRx."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.process.local_ranks import Crew, Failed, succeeded
from torchelastic.checkpoint.compat.nvrx.local.group_wrapper import GroupWrapper
from torchelastic.checkpoint.compat.nvrx.local.strategies import (
    CliqueReplicationStrategy,
    LazyCliqueReplicationStrategy,
    LazyReplicationStrategyBuilder,
    ReplicationStrategy,
    default_jump,
)
from torchelastic.checkpoint.local import BasicTensorAwareStateDict, CkptID
from torchelastic.checkpoint.replicas.placement import ExchangePlan

CREW_SIZE = 4


def state_of(rank: int) -> dict[str, Any]:
    base = torch.arange(40 + 10 * rank) + rank
    return {
        "fp8": base.to(torch.float8_e4m3fn),
        "int16": base.to(torch.int16),
        "nested": [(torch.full((3,), float(rank)), rank)],
        "empty": torch.empty(0, 2),
    }


def equal(a: Any, b: Any) -> bool:
    pairs = [(a[key], b[key]) for key in ("fp8", "int16", "empty")] + [(a["nested"][0][0], b["nested"][0][0])]
    same = all(x.dtype == y.dtype and x.shape == y.shape and torch.equal(x.float(), y.float()) for x, y in pairs)
    return same and a["nested"][0][1] == b["nested"][0][1]


@pytest.mark.parametrize(("jump", "expected"), [(1, [[0, 1], [0, 1], [2, 3], [2, 3]]), (2, [[0, 2], [1, 3]] * 2)])
def test_replicate_gives_copies_of_the_whole_clique_and_leaves_the_state(
    crew: Crew, jump: int, expected: list[list[int]]
) -> None:
    answers = succeeded(crew.run(replicate, jump, ranks=4))
    assert [ranks for ranks, _ in answers] == expected
    assert all(all_right for _, all_right in answers)


def replicate(jump: int) -> tuple[list[int], bool]:
    rank = dist.get_rank()
    strategy: ReplicationStrategy = LazyCliqueReplicationStrategy(jump, 2)
    given = BasicTensorAwareStateDict(state_of(rank))
    before = list(given.tensors)
    states, ids = strategy.replicate(given, CkptID(7, rank, "s"))
    right = all(equal(state.to_tree(), state_of(id_.rank)) for state, id_ in zip(states, ids, strict=True))
    untouched = not given.is_hollow and all(a is b for a, b in zip(before, given.tensors, strict=True))
    copies = not {t.data_ptr() for t in before if t.numel()} & {t.data_ptr() for s in states for t in s.tensors}
    named = all(isinstance(id_, CkptID) and (id_.iteration, id_.session_id) == (7, "s") for id_ in ids)
    return [id_.rank for id_ in ids], right and untouched and copies and named


def test_what_a_rank_lost_is_given_back_by_its_clique(crew: Crew) -> None:
    assert succeeded(crew.run(retrieve, 1, ranks=4)) == [True] * 4
    failures = crew.run(retrieve, 4, ranks=4)
    assert all(isinstance(answer, Failed) and answer.kind == "NoReplicasAvailableError" for answer in failures)


def retrieve(losers: int) -> bool:
    """Of a clique of four, some have lost everything, and nobody else has the states of the lost ranks if all have."""
    rank = dist.get_rank()
    strategy = CliqueReplicationStrategy.from_replication_params(1, 4)
    ids = [CkptID(7, each, "s") for each in range(4)]
    held = {each: ids if each >= losers else [] for each in range(4)}
    plan = strategy.retrieve_plan(held, [ids[rank]])
    mine = {id_: BasicTensorAwareStateDict(state_of(id_.rank)) for id_ in held[rank]}
    received = strategy.retrieve_execute(plan, mine)
    return list(received) == [ids[rank]] and equal(received[ids[rank]].to_tree(), state_of(rank))


def test_a_rank_that_cannot_give_what_was_planned_fails_the_exchange_on_all_ranks(crew: Crew) -> None:
    answers = crew.run(promise_too_much, ranks=2)
    assert all(isinstance(answer, Failed) and answer.kind == "CheckpointError" for answer in answers)
    assert all("rank 1 is to give ['b'], and my_data lacks them" in answer.text for answer in answers)


def promise_too_much() -> None:
    plan: ExchangePlan[str] = ExchangePlan()
    plan.plan(0, 1, "a")
    plan.plan(1, 0, "b")
    GroupWrapper(ranks=[0, 1]).execute_plan(plan, {"a": BasicTensorAwareStateDict(state_of(0))})


def test_the_jump_is_the_number_of_ranks_on_a_host_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    lazy = LazyCliqueReplicationStrategy()
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert (default_jump(), lazy.clique(0, list("aabb"))) == (1, [0, 1])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    lazy = LazyCliqueReplicationStrategy()
    assert (default_jump(), lazy.clique(0, list("aabb"))) == (2, [0, 2])
    assert [lazy.clique(rank, list("aabbb")) for rank in (0, 4)] == [[0, 2], [0, 4]]  # no multiple of 4: across hosts


def test_a_lazy_strategy_of_ones_own_names_what_it_builds_as_nvrx_has_it() -> None:
    class Pairs(LazyReplicationStrategyBuilder[CliqueReplicationStrategy]):
        def _eager_build(self) -> CliqueReplicationStrategy:
            return CliqueReplicationStrategy.from_replication_params(1, 2)

    assert Pairs().clique(3, ["a", "b", "c", "d"]) == [2, 3]
