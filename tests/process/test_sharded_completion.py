"""A rank whose group ended before its optimizer began completes the step of the others, with the same numbers."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.process.local_ranks import Crew, succeeded
from torchelastic.sharded import HybridShard, ShardedState, handover
from torchelastic.sharded.copies import Copies

CREW_SIZE = 2


def build(mesh: DeviceMesh) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(3, 2)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def interrupted(rank_that_fails: int, sync_fails: bool = False) -> tuple[int, list[float], list[float]]:
    """One step, in which this rank is interrupted after the vote or is not; returns step, weights before and after.

    With `sync_fails` the first sync after that fails on both ranks, when the step was completed already.
    """
    state = ShardedState(build, mesh=HybridShard(1), replicas=0)  # each rank has all parts
    state.sync()
    before, snapshot = weights_of(state), state.snapshot()
    state.optimizer.param_groups[0]["lr"] = 0.01  # of this step, set in it
    state.model(torch.ones(1, 3)).sum().backward()
    gone = RuntimeError("the others are gone")
    if torch.distributed.get_rank() == rank_that_fails:
        with (
            mock.patch.object(Copies, "all_have_finished", side_effect=gone),
            pytest.raises(RuntimeError, match="gone"),
        ):
            state.optimizer.step()
    else:
        state.optimizer.step()
    state.apply(snapshot)
    if sync_fails:
        snapshot = state.snapshot()  # as the train loop does before it asks for a group
        with mock.patch.object(handover, "move", side_effect=gone), pytest.raises(RuntimeError, match="gone"):
            state.sync()
        state.apply(snapshot)
    state.sync()
    return state.step, before, weights_of(state)


def weights_of(state: ShardedState) -> list[float]:
    whole = [parameter.full_tensor() for parameter in state.model.parameters() if isinstance(parameter, DTensor)]
    return torch.cat([tensor.detach().reshape(-1) for tensor in whole]).tolist()


@pytest.mark.parametrize("sync_fails", [False, True])
@pytest.mark.parametrize("rank_that_fails", [0, 1])
def test_a_step_that_others_complete_counts_with_the_rate_that_was_set_in_it(
    crew: Crew, rank_that_fails: int, sync_fails: bool
) -> None:
    for step, before, after in succeeded(crew.run(interrupted, rank_that_fails, sync_fails, ranks=2)):
        assert step == 1
        assert after == pytest.approx([value - 0.01 for value in before])
