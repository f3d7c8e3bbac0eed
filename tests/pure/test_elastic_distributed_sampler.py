from __future__ import annotations

import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from torchelastic.data import ElasticDistributedSampler
from torchelastic.data.order import epoch_order


def dataset_of(size: int) -> TensorDataset:
    return TensorDataset(torch.arange(size))


def world(size: int, replicas: int, start_index: int = 0, **options: bool | int) -> list[ElasticDistributedSampler]:
    dataset = dataset_of(size)
    return [
        ElasticDistributedSampler(dataset, replicas, rank, start_index, **options)  # type: ignore[arg-type] # mixed on purpose
        for rank in range(replicas)
    ]


def in_turns(samplers: list[ElasticDistributedSampler], rounds: int | None = None) -> list[int]:
    """What all replicas together consume in their first rounds, in order."""
    columns = [list(sampler)[:rounds] for sampler in samplers]
    return [index for row in zip(*columns, strict=True) for index in row]


@given(
    st.integers(1, 80), st.lists(st.tuples(st.integers(1, 9), st.integers(0, 6)), max_size=5), st.integers(), st.data()
)
def test_across_any_resizes_every_index_is_seen_once_before_any_is_repeated(
    size: int, stages: list[tuple[int, int]], seed: int, data: st.DataObject
) -> None:
    epoch = data.draw(st.integers(0, 20))
    consumed: list[int] = []
    for replicas, rounds in [*stages, (data.draw(st.integers(1, 9)), size)]:
        samplers = world(size, replicas, min(len(consumed), size), seed=seed)
        for sampler in samplers:
            sampler.set_epoch(epoch)
        consumed += in_turns(samplers, rounds)
    assert consumed[:size] == epoch_order(size, seed, epoch, shuffle=True).tolist()
    assert len(consumed) - size < 9, "only the last stage pads, to a multiple of its replicas"


@pytest.mark.parametrize(("left", "replicas"), [(1, 4), (2, 5), (3, 7), (3, 2)])
def test_fewer_samples_left_than_replicas_still_give_each_replica_one(left: int, replicas: int) -> None:
    # defect 10 of 0.1: an assertion failed here
    samplers = world(100, replicas, start_index=100 - left)
    shares = [list(sampler) for sampler in samplers]
    assert {len(share) for share in shares} == {len(samplers[0])} == {-(-left // replicas)}
    rest = epoch_order(100, 0, 0, shuffle=True)[100 - left :].tolist()
    assert {index for share in shares for index in share} == set(rest)


def test_the_exact_end_of_an_epoch_is_an_empty_epoch(caplog: pytest.LogCaptureFixture) -> None:
    # defect 10 of 0.1 (issue 90): the constructor raised, and the imagenet example died at its first epoch boundary
    sampler = ElasticDistributedSampler(dataset_of(10), 3, 2, 10)
    with caplog.at_level(logging.WARNING):
        assert list(sampler) == []
    assert len(sampler) == 0
    assert "start_index=0" in caplog.text
    sampler.set_epoch(1, start_index=0)
    assert len(list(sampler)) == len(sampler) == 4


@pytest.mark.parametrize("start_index", [-1, 11])
def test_a_start_outside_of_the_dataset_is_refused_and_changes_nothing(start_index: int) -> None:
    with pytest.raises(ValueError, match=f"start_index is {start_index}, but the dataset has 10 samples"):
        ElasticDistributedSampler(dataset_of(10), 2, 0, start_index)
    sampler = ElasticDistributedSampler(dataset_of(10), 2, 0, 4)
    with pytest.raises(ValueError, match="start_index"):
        sampler.start_index = start_index
    assert sampler.start_index == 4
    assert len(sampler) == 3


@given(st.integers(0, 40), st.integers(1, 8), st.data())
def test_drop_last_gives_whole_rounds_and_repeats_nothing(size: int, replicas: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, size))
    consumed = in_turns(world(size, replicas, start, drop_last=True))
    assert len(consumed) == (size - start) // replicas * replicas
    assert len(set(consumed)) == len(consumed)


def test_it_is_a_distributed_sampler_that_a_data_loader_takes() -> None:
    sampler = ElasticDistributedSampler(dataset_of(10), num_replicas=2, rank=1, start_index=4, shuffle=False)
    assert isinstance(sampler, DistributedSampler)
    loader = DataLoader(dataset_of(10), sampler=sampler, batch_size=2)
    assert [batch[0].tolist() for batch in loader] == [[5, 7], [9]]
