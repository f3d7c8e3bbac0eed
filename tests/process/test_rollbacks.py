"""A worker that was away when a run went back to an older checkpoint: its newer weights are no source."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import torchelastic
from tests.process.forked_ranks import run_ranks, values
from torchelastic import ComputeCheck, ModelState
from torchelastic.checkpoint import FileSystemCheckpointManager
from torchelastic.data import ElasticBatchSampler
from torchelastic.errors import RetryableException
from torchelastic.p2p import CoordinatorP2P
from torchelastic.rendezvous.records import StateStatus


def make_state(on_wrong: str = "restore") -> ModelState:
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    sampler = ElasticBatchSampler(torch.utils.data.TensorDataset(torch.zeros(64, 2)), 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ModelState(model, optimizer, sampler=sampler, check=ComputeCheck(on_wrong=on_wrong))


def after(steps: int, gone_back: int) -> ModelState:
    """A state that has trained alone, and whose weights are its number of steps."""
    state = make_state()
    state.sync(1, 0)
    with torch.no_grad():
        for parameter in state.module.parameters():
            parameter.fill_(float(steps))
    for _ in range(steps):
        state.snapshot()
        state.commit()
    assert state.rollback is not None
    state.rollback.count = gone_back
    return state


def meets(counts: list[int]) -> tuple[int, list[float], int]:
    """Rank 0 has 3 steps, rank 1 has 5 and was away."""
    rank = dist.get_rank()
    state = after([3, 5][rank], counts[rank])
    state.sync(2, rank)
    assert state.rollback is not None
    return state.step, [float(one.sum()) for one in state.module.parameters()], state.rollback.count


def comes_before_the_checkpoint_is_loaded() -> tuple[str, StateStatus]:
    rank = dist.get_rank()
    state = after([3, 5][rank], 0)
    if rank == 0:
        assert state.rollback is not None
        snapshot = state.snapshot()
        state.rollback.begin(2)
        state.apply(snapshot)
    try:
        state.sync(2, rank)
    except RetryableException as error:
        return str(error), state.status
    return "in sync", state.status


def test_the_newer_weights_of_steps_that_do_not_count_any_more_are_no_source() -> None:
    assert values(run_ranks(meets, [1, 0], ranks=2)) == [(3, [6.0, 3.0], 1)] * 2
    assert values(run_ranks(meets, [1, 1], ranks=2)) == [(5, [10.0, 5.0], 1)] * 2


def test_they_are_none_before_the_checkpoint_is_loaded_either() -> None:
    for said, status in values(run_ranks(comes_before_the_checkpoint_is_loaded, ranks=2)):
        assert said == "the run goes back to a checkpoint, and this group was formed without one"
        assert status is StateStatus.PARTIAL


@pytest.mark.parametrize("has_manager", [False, True])
def test_a_run_that_could_not_go_back_is_refused_before_training(tmp_path: Path, has_manager: bool) -> None:
    manager = FileSystemCheckpointManager(str(tmp_path)) if has_manager else None
    with pytest.raises(ValueError, match=r"give train\(\) a TieredCheckpointManager, which finds one by its step"):
        torchelastic.steps(CoordinatorP2P("gloo"), make_state(), checkpoint=manager)


def test_who_leaves_wrong_workers_out_needs_no_manager() -> None:
    assert make_state("leave").rollback is None
