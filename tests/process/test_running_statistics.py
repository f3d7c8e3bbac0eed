"""BatchNorm's running statistics over several ranks: what DDP makes of them, and that ModelState makes the same."""

from __future__ import annotations

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import torchelastic
from tests.process.forked_ranks import run_ranks, values

RANKS, STEPS, MOMENTUM = 2, 3, 0.1


def batch_of(rank: int, step: int) -> torch.Tensor:
    """One feature, of another mean on each rank and in each step."""
    return torch.tensor([[-1.0], [1.0]]) + 10 * rank + step


def mean_of(norm: torch.nn.Module) -> float:
    return float(norm.get_buffer("running_mean"))


def of_model_state(rank: int) -> list[float]:
    """The running mean of a rank after each step."""
    norm = torch.nn.BatchNorm1d(1, momentum=MOMENTUM)
    state = torchelastic.ModelState(norm, torch.optim.SGD(norm.parameters(), lr=0.0))
    state.sync(RANKS, rank)
    means = []
    for step in range(STEPS):
        state.snapshot()
        state.model(batch_of(rank, step)).sum().backward()
        state.optimizer.step()
        state.commit()
        means.append(mean_of(norm))
    return means


def of_ddp(rank: int) -> list[float]:
    """The same by DDP as it is out of the box."""
    norm = torch.nn.BatchNorm1d(1, momentum=MOMENTUM)
    wrapped = DistributedDataParallel(norm)
    means = []
    for step in range(STEPS):
        wrapped(batch_of(rank, step)).sum().backward()
        means.append(mean_of(norm))
    return means


def both() -> tuple[list[float], list[float]]:
    rank = torch.distributed.get_rank()
    return of_model_state(rank), of_ddp(rank)


def test_they_are_rank_0s_before_each_step_and_take_in_the_ranks_own_batch_as_under_ddp() -> None:
    found = values(run_ranks(both, ranks=RANKS))
    for rank, (ours, ddps) in enumerate(found):
        rank_0s, expected = 0.0, []
        for step in range(STEPS):
            expected.append((1 - MOMENTUM) * rank_0s + MOMENTUM * (10 * rank + step))
            rank_0s = (1 - MOMENTUM) * rank_0s + MOMENTUM * step
        assert ours == pytest.approx(expected, rel=1e-5, abs=1e-6), f"rank {rank}"
        assert ddps == pytest.approx(expected, rel=1e-5, abs=1e-6), f"rank {rank}"
    assert found[0] != found[1]
