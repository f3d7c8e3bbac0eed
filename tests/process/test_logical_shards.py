"""Logical shards on one process: what is cut, what is drawn, what a step must look like."""

from __future__ import annotations

import random
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch

import torchelastic
from torchelastic.data import ElasticBatchSampler, ElasticLoader
from torchelastic.errors import UnfitError
from torchelastic.model.logical_shards import shard_seed, split_batch

#: What `grad_dtype` of a bfloat16 parameter may be: anything since torch 2.10.
GRADIENT_TYPES = (torch.bfloat16, *((torch.float32, None) if hasattr(torch.Tensor, "grad_dtype") else ()))
Pair = namedtuple("Pair", ["inputs", "targets"])


def make_state(shards: int | None, batch: int = 8, samples: int = 24) -> tuple[torchelastic.ModelState, ElasticLoader]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)).double()
    sampler = ElasticBatchSampler(samples, batch, shuffle=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = torchelastic.ModelState(model, optimizer, sampler=sampler, logical_shards=shards)
    state.sync(1, 0)
    inputs = torch.arange(samples * 4, dtype=torch.float64).reshape(samples, 4).sin()
    loader = ElasticLoader(torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True)), sampler)
    return state, loader


def norm_of(state: torchelastic.ModelState) -> torch.nn.BatchNorm1d:
    (norm,) = [module for module in state.module.modules() if isinstance(module, torch.nn.BatchNorm1d)]
    return norm


def running_mean(state: torchelastic.ModelState) -> torch.Tensor:
    mean = norm_of(state).running_mean
    assert mean is not None
    return mean


def one_step(state: torchelastic.ModelState, loader: ElasticLoader) -> list[int]:
    state.snapshot()
    sizes = []
    for inputs, targets in state.shards(loader):
        sizes.append(len(inputs))
        loss = torch.nn.functional.mse_loss(state.model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no types here
    state.optimizer.step()
    state.commit()
    return sizes


def test_gradients_are_those_of_the_global_mean_and_buffers_the_mean_over_the_shards() -> None:
    state, loader = make_state(3)  # shards of 3, 3 and 2 samples
    before = running_mean(state).clone()
    inputs = torch.stack([loader.dataset[i][0] for i in range(8)])
    targets = torch.stack([loader.dataset[i][1] for i in range(8)])
    other, _ = make_state(None)
    means = []
    for part in (slice(0, 3), slice(3, 6), slice(6, 8)):
        weight = (part.stop - part.start) / 8
        running_mean(other).copy_(before)
        loss = torch.nn.functional.mse_loss(other.module(inputs[part]), targets[part]) * weight
        loss.backward()  # type: ignore[no-untyped-call]  # as above
        means.append(weight * running_mean(other))
    assert one_step(state, loader) == [3, 3, 2]
    for found, expected in zip(state.module.parameters(), other.module.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)
    torch.testing.assert_close(running_mean(state), sum(means))
    assert norm_of(state).num_batches_tracked == torch.tensor(1)


@pytest.mark.parametrize(
    "constant",
    [
        torch.polar(torch.ones(4), torch.arange(4.0)),
        torch.linspace(0.1, 1.0, 8, dtype=torch.bfloat16),
        torch.tensor([2**61 + 1]),
        torch.tensor([[0.1, float("-inf")]]),
    ],
    ids=lambda constant: str(constant.dtype),
)
def test_a_buffer_that_no_shard_changes_keeps_its_bits(constant: torch.Tensor) -> None:
    state, loader = make_state(3, batch=7, samples=21)  # of 3, 2 and 2 samples
    state.module.register_buffer("constant", constant.clone())
    for _ in range(3):
        one_step(state, loader)
    assert torch.equal(dict(state.module.named_buffers())["constant"], constant)
    assert norm_of(state).num_batches_tracked == torch.tensor(3)


@pytest.mark.parametrize("change", ["another size", "another type", "one more", "one less"])
def test_buffers_that_become_others_in_a_forward_pass_are_refused_by_name(change: str) -> None:
    state, loader = make_state(4)
    norm = norm_of(state)

    def go_through() -> None:
        for _ in state.shards(loader):
            if change == "one more":
                norm.register_buffer("extremes", torch.zeros(2))
            elif change == "one less":
                del norm.num_batches_tracked
            else:
                norm.running_mean = torch.zeros(9) if change == "another size" else torch.zeros(4, dtype=torch.int32)

    with pytest.raises(UnfitError, match=r"with logical_shards buffers keep .* forward pass before ModelState is made"):
        go_through()


def test_a_parameter_that_no_shard_uses_is_left_alone_and_one_that_a_single_shard_uses_is_not() -> None:
    state, loader = make_state(4)
    unused, once = (torch.nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2))
    state.module.register_parameter("unused", unused)
    state.module.register_parameter("once", once)
    optimizer = torch.optim.AdamW(state.module.parameters(), lr=0.1, weight_decay=0.5)
    state.snapshot()
    for number, (inputs, targets) in enumerate(state.shards(loader)):
        loss = torch.nn.functional.mse_loss(state.model(inputs), targets)
        (loss + once.sum() if number == 2 else loss).backward()  # type: ignore[no-untyped-call]  # as above
    optimizer.step()
    assert unused.grad is None
    assert torch.equal(unused, torch.ones_like(unused))
    assert once.grad is not None
    assert torch.equal(once.grad, torch.full_like(once, 0.25))


@pytest.mark.parametrize("dtype", GRADIENT_TYPES)
def test_gradients_of_another_type_than_their_parameter_are_summed_in_theirs(dtype: torch.dtype | None) -> None:
    model = torch.nn.Linear(4, 1).bfloat16()
    unused = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    model.register_parameter("unused", unused)
    for parameter in model.parameters():
        parameter.grad_dtype = dtype
    sampler = ElasticBatchSampler(24, 8, shuffle=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = torchelastic.ModelState(model, optimizer, sampler=sampler, logical_shards=4)
    state.sync(1, 0)
    state.snapshot()
    for number, _ in enumerate(state.shards(ElasticLoader(torch.utils.data.TensorDataset(torch.ones(24, 1)), sampler))):
        wide = torch.full((1, 4), 1 + 2.0**-12 * number)  # as a kernel with a wide accumulator gives it
        model.weight.grad, model.bias.grad = wide.to(dtype or torch.float32), torch.ones(1, dtype=dtype)
    assert model.weight.grad is not None
    mean = torch.full((1, 4), 1 + 2.0**-12 * 1.5, dtype=dtype)
    assert torch.equal(model.weight.grad, mean), "rounded to the parameter's type"
    assert unused.grad is None


def test_the_end_of_the_data_ends_the_step() -> None:
    state, loader = make_state(4)
    for _ in range(3):
        one_step(state, loader)
    with pytest.raises(StopIteration):
        state.shards(loader)


def test_a_step_that_does_not_go_through_the_shards_is_told_how() -> None:
    state, loader = make_state(4)
    state.snapshot()
    inputs, targets = next(loader)
    torch.nn.functional.mse_loss(state.model(inputs), targets).backward()  # type: ignore[no-untyped-call]  # as above
    before = [parameter.detach().clone() for parameter in state.module.parameters()]
    with pytest.raises(torchelastic.NonRetryableException, match=r"for batch in state\.shards"):
        state.optimizer.step()
    assert all(torch.equal(*pair) for pair in zip(before, state.module.parameters(), strict=True))


def trained_with_failures(faults: list[tuple[int, Any]]) -> list[torch.Tensor]:
    """The weights after a run of one worker with two optimizers, whose steps fail there: behind a shard, or between."""
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(32, 4))
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1))
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]
    sampler = ElasticBatchSampler(data, 8)
    loader = ElasticLoader(data, sampler)
    state = torchelastic.ModelState(model, optimizers, sampler=sampler, logical_shards=4, salvage="recompute")

    def reach(place: Any) -> None:
        if faults and faults[0] == (state.step, place):
            faults.pop(0)
            raise RuntimeError(f"a peer is lost at {place}")

    def train_step(state: torchelastic.ModelState) -> None:
        for number, (inputs,) in enumerate(state.shards(loader)):
            state.model(inputs).square().mean().backward()
            reach(number)
        optimizers[0].step()
        reach("between")
        optimizers[1].step()

    torchelastic.train(torchelastic.CoordinatorP2P("gloo"), train_step, state)
    assert not faults
    return list(model.parameters())


def test_a_second_attempt_that_fails_between_two_optimizers_is_repeated_with_the_same_bits() -> None:
    undisturbed, found = trained_with_failures([]), trained_with_failures([(2, 2), (2, "between")])
    assert all(torch.equal(one, other) for one, other in zip(undisturbed, found, strict=True))


def draw_from_all() -> tuple[float, float, float]:
    return float(torch.rand(())), random.random(), float(np.random.beta(0.4, 0.4))


def test_random_numbers_of_torch_python_and_numpy_belong_to_the_shard_and_behind_all_to_the_step() -> None:
    drawn = []
    for worker in range(2):  # each has drawn other numbers before
        state, loader = make_state(4)
        random.seed(worker)
        np.random.seed(worker)
        torch.manual_seed(worker)
        drawn.append([*(draw_from_all() for _ in state.shards(loader)), draw_from_all()])
    assert drawn[0] == drawn[1]
    assert all(len(set(of_one)) == 5 for of_one in zip(*drawn[0], strict=True))
    assert len({shard_seed(seed, step, shard) for seed in range(5) for step in range(5) for shard in range(5)}) == 125


def test_more_shards_than_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="logical_shards=9 must lie between 1 and global_batch_size=8"):
        make_state(9)


@pytest.mark.parametrize(
    ("batch", "parts"),
    [
        (torch.arange(5), [torch.tensor([0, 1]), torch.tensor([2, 3, 4])]),
        ({"a": torch.arange(5)}, [{"a": torch.tensor([0, 1])}, {"a": torch.tensor([2, 3, 4])}]),
        ([torch.arange(5)], [[torch.tensor([0, 1])], [torch.tensor([2, 3, 4])]]),
        (Pair(torch.arange(5), {"b": torch.arange(5)}), None),
        (["u", "v", "w", "x", "y"], [["u", "v"], ["w", "x", "y"]]),
    ],
)
def test_whatever_a_loader_makes_is_cut_along_the_samples(batch: Any, parts: list[Any] | None) -> None:
    found = split_batch(batch, [2, 3])
    if parts is None:
        assert isinstance(found[1], Pair)
        assert torch.equal(found[1].targets["b"], torch.tensor([2, 3, 4]))
    else:
        assert str(found) == str(parts)


@pytest.mark.parametrize("batch", [torch.arange(4), torch.tensor(1), 7, ["u"]])
def test_what_cannot_be_cut_is_named(batch: Any) -> None:
    with pytest.raises(TypeError, match="5 samples altogether"):
        split_batch(batch, [2, 3])
