"""What scripts from elsewhere have in them, and what they are told here."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.utils.data import DistributedSampler

import torchelastic
from torchelastic.model.reduction import Reduction


def test_a_step_that_calls_the_module_itself_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """With `model(x)` for `wrapped(x)` nothing is averaged, and nothing fails."""
    reduction = Reduction(torch.nn.Linear(2, 2), None)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            reduction.begin_step()
            reduction.check_reduced(rank=1)
            reduction.commit()
    (record,) = caplog.records
    assert "rank 1" in record.getMessage()
    assert "call `state.model`" in record.getMessage()


def test_a_sampler_that_knows_one_world_is_refused() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler: DistributedSampler[int] = DistributedSampler(torch.utils.data.TensorDataset(torch.zeros(4)), 2, 0)
    with pytest.raises(ValueError, match="DistributedSampler without state_dict"):
        torchelastic.ModelState(model, optimizer, sampler=sampler)


def test_a_wrapped_module_is_refused() -> None:
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]  # torch does not export it
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        wrapped = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        with pytest.raises(ValueError, match="give ModelState the plain module"):
            torchelastic.ModelState(wrapped, optimizer)
    finally:
        torch.distributed.destroy_process_group()
