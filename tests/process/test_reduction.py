"""A peer that dies between two buckets spoils no gradient: all buckets are taken back, or none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch._dynamo import config as dynamo_config

import torchelastic
from tests.process.pairs import dies_at_reduction, survivor_of
from torchelastic.data import ElasticBatchSampler
from torchelastic.errors import UnfitError
from torchelastic.model import wrapping
from torchelastic.model.reduction import KeptSums, Reduction
from torchelastic.p2p.abortable import AbortableGroup, GroupAbortedError

WIDTH = 640  # a layer is larger than DDP's first bucket


def make_model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)))


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def backward(model: torch.nn.Module, rank: int) -> None:
    torch.manual_seed(10 + rank)
    loss = model(torch.randn(4, WIDTH)).square().mean()
    loss.backward()


@pytest.fixture
def alone_in_a_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def survivor(_folder: Path) -> dict[str, Any]:
    alone = make_model()
    backward(alone, rank=0)
    model = make_model()
    reduction = Reduction(model, sampler=None)
    reduction.world_size = 2
    reduction._most = 1  # as after a step
    wrapped = wrapping.wrap(model, reduction.hook)
    reduction.begin_step()
    error = ""
    try:
        backward(wrapped, rank=0)
    except RuntimeError as raised:
        error = str(raised)
    first_bucket_done = reduction._running[0][0].is_success()
    untouched = all(torch.equal(*pair) for pair in zip(gradients(model), gradients(alone), strict=True))
    kept = reduction.take(samples=4)
    assert kept is not None
    return {
        "error": error,
        "first bucket done": first_bucket_done,
        "buckets": len(reduction._running),
        "untouched": untouched,
        "sums": all(torch.equal(s, 4 * g) for s, g in zip(kept.sums, gradients(alone), strict=True) if s is not None),
        "taken off": gradients(model) == [],
    }


def victim(_folder: Path) -> None:
    model = make_model()
    reduction = Reduction(model, sampler=None)
    reduction.world_size = 2
    wrapped = wrapping.wrap(model, reduction.hook)
    dies_at_reduction(2)
    backward(wrapped, rank=1)


def test_a_peer_that_dies_between_two_buckets_spoils_no_gradient(tmp_path: Path) -> None:
    found = survivor_of(tmp_path, survivor, victim)
    assert found.pop("error")
    assert found.pop("buckets") >= 2
    assert found == {"first bucket done": True, "untouched": True, "sums": True, "taken off": True}


def test_what_was_brought_is_added_to_what_is_reduced(tmp_path: Path) -> None:
    """A group of one: 3 samples brought, 1 computed."""

    class Sampler:
        weight = 1 / 4

        class Share:
            global_samples = 4

        pending = (Share,)

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        model = make_model()
        backward(model, rank=0)
        mean_of_three = gradients(model)
        model.zero_grad(set_to_none=True)
        backward(model, rank=1)
        mean_of_one = gradients(model)
        model.zero_grad(set_to_none=True)
        reduction = Reduction(model, Sampler())
        reduction.bring(KeptSums([3 * gradient for gradient in mean_of_three]))
        backward(wrapping.wrap(model, reduction.hook), rank=1)
        for found, three, one in zip(gradients(model), mean_of_three, mean_of_one, strict=True):
            torch.testing.assert_close(found, 0.75 * three + 0.25 * one)
    finally:
        dist.destroy_process_group()


def test_padding_that_overflows_counts_nothing_all_the_same(tmp_path: Path) -> None:
    class Padding:
        weight = 0.0

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        model = make_model()
        reduction = Reduction(model, Padding())
        wrapped = wrapping.wrap(model, reduction.hook)
        (wrapped(torch.full((2, WIDTH), 1e30)) * 1e30).sum().backward()
        assert reduction._done == 1
        assert all(not gradient.any() for gradient in gradients(model))
    finally:
        dist.destroy_process_group()


def test_a_rank_that_skips_its_reduction_is_named_before_it_changes_its_weights() -> None:
    reduction = Reduction(make_model(), sampler=None)
    reduction.check_reduced(rank=1)  # nothing is usual yet
    reduction._begun = reduction._done = 1
    reduction.commit()
    reduction.begin_step()
    with pytest.raises(torchelastic.RetryableException, match="rank 1 steps its optimizer without"):
        reduction.check_reduced(rank=1)


class TwoHeads(torch.nn.Module):
    """A body and two heads, of which a call uses those that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.left, self.right = (torch.nn.Linear(4, 4) for _ in range(3))

    def forward(self, inputs: torch.Tensor, *heads: str) -> torch.Tensor:
        return sum((getattr(self, head)(self.body(inputs)) for head in heads), torch.zeros(()))


@pytest.mark.usefixtures("alone_in_a_group")
def test_a_backward_pass_that_leaves_parameters_out_never_steps_the_optimizer() -> None:
    model = TwoHeads()
    reduction = Reduction(model, sampler=None)
    wrapped = wrapping.wrap(model, reduction.hook)
    reduction.watch(wrapped)
    reduction.begin_step()
    wrapped(torch.ones(2, 4), "left").sum().backward()
    with pytest.raises(torchelastic.NonRetryableException, match=r"right.bias, right.weight|right.weight, right.bias"):
        reduction.check_reduced(rank=1)


@pytest.mark.usefixtures("alone_in_a_group")
@pytest.mark.parametrize("done_before", [False, True], ids=["first step", "later"])
def test_parameters_that_are_frozen_in_a_step_have_it_repeated_in_a_new_group(done_before: bool) -> None:
    model = TwoHeads()
    reduction = Reduction(model, sampler=None)
    wrapped = wrapping.wrap(model, reduction.hook)
    reduction.watch(wrapped)
    if done_before:
        reduction.begin_step()
        wrapped(torch.ones(2, 4), "left", "right").sum().backward()
        reduction.check_reduced(rank=1)
        reduction.commit()
        model.zero_grad()
    reduction.begin_step()
    model.right.requires_grad_(False)
    wrapped(torch.ones(2, 4), "left").sum().backward()
    with pytest.raises(torchelastic.RetryableException, match="frozen that required"):
        reduction.check_reduced(rank=1)
    wrapping.unwrap(wrapped)
    again = wrapping.wrap(model, reduction.hook)
    reduction.watch(again)
    reduction.begin_step()
    model.zero_grad()
    again(torch.ones(2, 4), "left").sum().backward()
    reduction.check_reduced(rank=1)


@pytest.mark.usefixtures("alone_in_a_group")
def test_a_step_that_evaluates_and_one_that_reduces_by_itself_go_on(caplog: pytest.LogCaptureFixture) -> None:
    model = TwoHeads()
    reduction = Reduction(model, sampler=None)
    wrapped = wrapping.wrap(model, reduction.hook)
    reduction.watch(wrapped)
    reduction.begin_step()
    with torch.no_grad():
        wrapped(torch.ones(2, 4), "left")
    with wrapped.no_sync():
        wrapped(torch.ones(2, 4), "left").sum().backward()
    reduction.check_reduced(rank=1)
    assert "not averaged" in caplog.text
    assert "Gradients of torch.autograd.grad" in caplog.text


class Bucket:
    """The first of two, of a model whose group was given up in the meantime."""

    def buffer(self) -> torch.Tensor:
        return torch.ones(4)

    def is_last(self) -> bool:
        return False


@pytest.mark.parametrize("ends_early", [False, True])
def test_a_backward_pass_goes_on_after_a_failure_where_its_gradients_count(
    ends_early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = AbortableGroup(HashStore(), 0, 1)
    group.abort()
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, **_: group.allreduce([tensor]))
    reduction = Reduction(make_model(), sampler=None)
    reduction.ends_early = ends_early
    reduction.begin_step()
    bucket: Any = Bucket()
    if ends_early:
        with pytest.raises(GroupAbortedError):
            reduction.hook(None, bucket)
    else:
        reduction.hook(None, bucket)


@pytest.mark.parametrize(("salvage", "ends_early"), [("discard", True), ("drop", False), ("recompute", False)])
def test_the_mode_of_salvage_says_whether_a_backward_pass_ends_early(salvage: str, ends_early: bool) -> None:
    model = make_model()
    sampler = ElasticBatchSampler(8, 4)
    state = torchelastic.ModelState(
        model, torch.optim.SGD(model.parameters(), lr=0.1), sampler=sampler, salvage=salvage
    )
    source = state._gradients._source
    assert isinstance(source, Reduction)
    assert source.ends_early is ends_early


@pytest.mark.usefixtures("alone_in_a_group")
@pytest.mark.parametrize("mode", ["python_reducer", "python_reducer_without_compiled_forward"])
def test_a_reducer_without_buckets_is_refused_before_the_first_step(mode: str) -> None:
    model = make_model()
    told = f"optimize_ddp = '{mode}' does not go with ModelState.*leave it at True"
    with dynamo_config.patch(optimize_ddp=mode), pytest.raises(UnfitError, match=told):
        wrapping.wrap(model, Reduction(model, sampler=None).hook)


@pytest.mark.usefixtures("alone_in_a_group")
def test_gradients_that_ddp_cannot_reduce_are_refused_with_what_can() -> None:
    model = torch.nn.Linear(1, 1).bfloat16()
    model.bias.grad_dtype = torch.float32
    told = r"bias is torch.bfloat16 .* torch.float32 \(grad_dtype\).*give ModelState logical_shards"
    has_other_types = hasattr(torch.Tensor, "grad_dtype")  # since torch 2.10
    with pytest.raises(UnfitError, match=told) if has_other_types else nullcontext():
        wrapping.wrap(model, Reduction(model, sampler=None).hook)
    model.bias.requires_grad_(False)
    wrapping.wrap(model, Reduction(model, sampler=None).hook)
