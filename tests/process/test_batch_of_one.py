"""Layers that cannot normalize one sample: no rank gets one where the global batch has more, else all is said early."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import torchelastic
from tests.older_torch import needs_fsdp2_on_cpus
from tests.process.forked_ranks import run_ranks, values
from torchelastic.data import ElasticBatchSampler, ElasticLoader, ElasticStream
from torchelastic.errors import UnfitError
from torchelastic.model.batch_norms import least_local_batch
from torchelastic.sharded import ShardedState

Found = tuple[list[int], list[float]]


def inputs_of(samples: int) -> torch.Tensor:
    return torch.randn(samples, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def make_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)).double()


def place() -> tuple[int, int]:
    return (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)


def indexed(samples: int, batch: int, **options: Any) -> tuple[ElasticBatchSampler, Any]:
    sampler = ElasticBatchSampler(samples, batch, seed=3, **options)
    return sampler, ElasticLoader(torch.utils.data.TensorDataset(inputs_of(samples)), sampler)


def streamed(samples: int, batch: int) -> tuple[ElasticStream, Any]:
    def source(shard: int, shards: int, position: int) -> Iterator[tuple[torch.Tensor]]:
        return ((one,) for one in inputs_of(samples)[shard::shards][position:])

    stream = ElasticStream(source, batch, global_batch_size=batch)
    return stream, stream


def train(state: torchelastic.ModelState | ShardedState, loader: Any) -> list[int]:
    """To the end of the data; returns how many samples this rank has put through the model in each step."""
    sizes: list[int] = []
    while True:
        state.snapshot()
        state.optimizer.zero_grad()
        try:
            (inputs,) = next(loader)
        except StopIteration:
            return sizes
        sizes.append(len(inputs))
        state.model(inputs).square().mean().backward()
        state.optimizer.step()
        state.commit()


def trained(make: Callable[..., Any], samples: int, batch: int, **options: Any) -> Found:
    model, (sampler, loader) = make_model(), make(samples, batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = torchelastic.ModelState(model, optimizer, sampler=sampler, **options)
    state.sync(*place())
    return train(state, loader), [value for one in model.parameters() for value in one.flatten().tolist()]


def trained_in_logical_shards(samples: int, batch: int) -> Found:
    model, (sampler, loader) = make_model(), indexed(samples, batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = torchelastic.ModelState(model, optimizer, sampler=sampler, logical_shards=batch)
    state.sync(*place())
    sizes = []
    while not sampler.finished:
        state.snapshot()
        for (inputs,) in state.shards(loader):
            sizes.append(len(inputs))
            state.model(inputs).square().mean().backward()
        state.optimizer.step()
        state.commit()
    return sizes, [value for one in model.parameters() for value in one.flatten().tolist()]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("make", [indexed, streamed])
def test_each_rank_has_two_samples_or_none_also_in_the_last_batch(make: Callable[..., Any], ranks: int) -> None:
    """Global batches of 4, 4 and 2: three ranks had 2, 1 and 1 samples, then 1, 1 and none."""
    found = values(run_ranks(trained, make, 10, 4, ranks=ranks))
    for sizes, weights in found:
        assert len(sizes) == 3
        assert min(sizes) >= 2
        assert weights == found[0][1]


def test_logical_shards_have_two_samples_or_none_with_the_same_bits_at_any_world_size() -> None:
    found = [one for ranks in (1, 3) for one in values(run_ranks(trained_in_logical_shards, 11, 4, ranks=ranks))]
    assert min(size for sizes, _ in found for size in sizes) >= 2
    assert all(weights == found[0][1] for _, weights in found)


# --- where that cannot be ---------------------------------------------------------------------------------------------


def said(make: Callable[..., Any], samples: int, batch: int) -> str:
    try:
        trained(make, samples, batch)
    except UnfitError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("samples", "batch"), [(9, 4), (4, 1)], ids=["the last of an epoch", "all"])
def test_a_global_batch_of_one_is_refused_in_the_first_forward_pass(samples: int, batch: int, ranks: int) -> None:
    for text in values(run_ranks(said, indexed, samples, batch, ranks=ranks)):
        assert text.startswith("1 (BatchNorm1d) cannot normalize a batch of one sample, and this run has")
        assert "drop_last=True" in text


def test_the_last_batch_of_a_stream_that_has_one_sample_is_named_when_it_comes() -> None:
    for text in values(run_ranks(said, streamed, 9, 4, ranks=1)):
        assert text.startswith(
            "1 cannot normalize a batch of one sample, and this worker has got one: give the sampler"
        )


def test_a_batch_of_one_image_is_fine_and_one_that_is_left_out_too() -> None:
    class Image(torch.nn.BatchNorm1d):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return super().forward(values.reshape(-1, 2, 2)).reshape(-1, 4)

    image = torch.nn.Sequential(torch.nn.Unflatten(1, (2, 2)), torch.nn.BatchNorm1d(2), torch.nn.Flatten())
    for norm, drop_last in ((image, False), (Image(2), False), (torch.nn.BatchNorm1d(4), True)):
        model = make_model()
        model[1] = norm.double()
        sampler, loader = indexed(9, 4, drop_last=drop_last)
        state = torchelastic.ModelState(model, torch.optim.SGD(model.parameters(), lr=0.1), sampler=sampler)
        state.sync(1, 0)
        assert len(train(state, loader)) == 2 + (not drop_last)


def test_which_layers_need_two_samples() -> None:
    model = make_model()
    assert least_local_batch(model) == 2
    assert least_local_batch(model.eval()) == 2, "it is being evaluated"
    model.train()[1].eval()
    assert least_local_batch(model) == 1, "it is kept as it is"
    model[1] = torch.nn.SyncBatchNorm(4)
    assert least_local_batch(model) == 1, "it has the samples of all"
    assert least_local_batch(torch.nn.Sequential(torch.nn.LayerNorm(4))) == 1


# --- groups that change -----------------------------------------------------------------------------------------------


def goes_on_with_another_one(folder: Path) -> tuple[list[int], int]:
    """Rank 0 trains alone with a frozen layer; then another one comes whose layer is trained, and both agree."""
    rank = dist.get_rank()
    dist.barrier()  # all are connected
    dist.destroy_process_group()
    model, (sampler, loader) = make_model(), indexed(12, 3)
    state = torchelastic.ModelState(model, torch.optim.SGD(model.parameters(), lr=0.1), sampler=sampler)

    def step() -> None:
        state.snapshot()
        (inputs,) = next(loader)
        state.model(inputs).square().mean().backward()
        state.optimizer.step()
        state.commit()

    if rank == 0:
        model[1].eval()
        state.sync(1, 0)
        step()
        assert sampler.min_local_batch == 1
    dist.init_process_group("gloo", init_method=f"file://{folder / 'two'}", rank=rank, world_size=2)
    state.sync(2, rank)
    sizes = []
    for _ in range(2):
        step()
    sizes = [sampler.min_local_batch, sampler.shares(3).counted.local_samples]
    dist.destroy_process_group()
    if rank == 0:
        state.sync(1, 0)
        step()
    return sizes, state.step


def test_ranks_whose_flags_differ_deal_alike(tmp_path: Path) -> None:
    (first, steps), (second, _) = values(run_ranks(goes_on_with_another_one, tmp_path, ranks=2))
    assert steps == 4
    assert first == [2, 3]
    assert second == [2, 0]


# --- sharded models ---------------------------------------------------------------------------------------------------


def build(mesh: DeviceMesh) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = make_model()
    fully_shard(model, mesh=mesh)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def trained_sharded(samples: int, batch: int) -> list[int] | str:
    sampler, loader = indexed(samples, batch)
    state = ShardedState(build, replicas=0, sampler=sampler)
    state.sync()
    try:
        return train(state, loader)
    except UnfitError as error:
        return str(error)


@needs_fsdp2_on_cpus
def test_ranks_of_a_sharded_model_have_two_samples_or_none_or_are_told() -> None:
    for sizes in values(run_ranks(trained_sharded, 10, 4, ranks=3)):
        assert len(sizes) == 3
        assert min(sizes) >= 2
    for text in values(run_ranks(trained_sharded, 9, 4, ranks=2)):
        assert text.startswith("1 (BatchNorm1d) cannot normalize a batch of one sample, and this run has")
