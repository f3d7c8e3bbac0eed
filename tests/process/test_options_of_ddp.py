"""DDP's own options, and what cannot be trained over several workers: the same bits, or one error with the remedy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchelastic
from tests.process.forked_ranks import run_ranks, values
from tests.pure.test_train_loop import ScriptedCoordinator
from torchelastic.errors import UnfitError
from torchelastic.model.buffer_broadcast import check_same_forms, check_sent_by_nccl

STEPS = 4


class Twice(nn.Module):
    """Goes through one layer twice, if it is to: with re-entrant checkpoints, or with the others, or without any."""

    def __init__(self, reentrant: bool | None, times: int = 2) -> None:
        super().__init__()
        self.first, self.layer, self.norm = nn.Linear(6, 6), nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.reentrant, self.times = reentrant, times

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = self.norm(self.first(inputs))
        for _ in range(self.times):
            if self.reentrant is None:
                values = self.layer(values)
            else:
                values = checkpoint(self.layer, values, use_reentrant=self.reentrant)
        return values


def state_of(module: nn.Module, **options: Any) -> torchelastic.ModelState:
    return torchelastic.ModelState(module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9), **options)


def trained(ddp: dict[str, Any] | None, reentrant: bool | None, again_at: int) -> list[float]:
    """The weights after some steps; at one of them the group is made anew, as after a loss."""
    torch.manual_seed(0)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    module = Twice(reentrant)
    state = state_of(module, ddp=ddp)
    state.sync(world_size, rank)
    for step in range(STEPS):
        if step == again_at:
            state.apply(state.snapshot())
            state.sync(world_size, rank)
        state.snapshot()
        inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * step + rank))
        state.model(inputs).square().mean().backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.commit()
    return [float(value) for parameter in module.parameters() for value in parameter.detach().flatten()]


@pytest.mark.parametrize(
    ("ddp", "reentrant"),
    [
        ({"static_graph": True}, None),
        ({"static_graph": True}, True),
        ({"gradient_as_bucket_view": True}, None),
        ({"bucket_cap_mb": 0.0001}, False),
        ({"find_unused_parameters": True}, None),
    ],
)
def test_weights_are_the_same_bits_with_options_of_ddp_and_in_a_new_group(
    ddp: dict[str, Any], reentrant: bool | None
) -> None:
    usual = values(run_ranks(trained, None, None, -1, ranks=2))
    assert values(run_ranks(trained, ddp, reentrant, 2, ranks=2)) == usual
    assert usual[0] == usual[1]


def own_buffers() -> list[float]:
    module = nn.BatchNorm1d(1)
    state = state_of(module, ddp={"broadcast_buffers": False})
    state.sync(dist.get_world_size(), dist.get_rank())
    for _ in range(2):
        state.model(torch.tensor([[-1.0], [1.0]]) + 10 * dist.get_rank())
    return [round(float(module.get_buffer("running_mean")), 4)]


def test_each_rank_keeps_its_own_buffers_where_it_is_asked_to() -> None:
    assert values(run_ranks(own_buffers, ranks=2)) == [[0.0], [1.9]]


def other_options() -> None:
    cap = {"bucket_cap_mb": 1.0} if dist.get_rank() else None
    state_of(nn.Linear(2, 1), ddp=cap).sync(dist.get_world_size(), dist.get_rank())


def test_ranks_with_other_options_are_told_apart_before_gloo_ends_them() -> None:
    first, second = run_ranks(other_options, ranks=2)
    assert first.error is None or "Connection" in first.error
    assert second.error is not None
    assert "UnfitError: this worker's ModelState has logical_shards=None, salvage='discard', ddp=" in second.error


def test_an_option_that_would_break_a_promise_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ddp=\{'process_group': ..\}: ModelState sets it for each group anew"):
        state_of(nn.Linear(2, 1), ddp={"process_group": None})
    sampler = torchelastic.ElasticBatchSampler(8, 4)
    with pytest.raises(ValueError, match="with logical_shards there is no DDP"):
        state_of(nn.Linear(2, 1), sampler=sampler, logical_shards=2, ddp={"static_graph": True})


# --- what is refused at the start, or by its name ---------------------------------------------------------------------


def test_a_lazy_module_is_refused_with_what_to_write() -> None:
    module = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
    with pytest.raises(
        ValueError, match=r"^0.weight, 0.bias, 1.weight and 3 more: a lazy .* Run one before ModelState"
    ):
        state_of(module)
    module(torch.zeros(2, 3))
    assert state_of(module).step == 0


def stepping_in_hooks() -> str:
    module = nn.Linear(2, 1)
    state = state_of(module)
    state.sync()
    for parameter in module.parameters():
        hooked: Any = parameter
        hooked.register_post_accumulate_grad_hook(lambda _: state.optimizer.step())
    state.snapshot()
    with pytest.raises(UnfitError) as caught:
        state.model(torch.ones(3, 2)).sum().backward()
    return str(caught.value)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_optimizer_that_steps_in_a_backward_hook_is_refused_alone_and_together(ranks: int) -> None:
    for said in values(run_ranks(stepping_in_hooks, ranks=ranks)):
        assert "inside a backward pass" in said
        assert "step it behind backward()" in said


class OneGroup(ScriptedCoordinator):
    """A coordinator of the ranks that there are."""

    def rendezvous_barrier(self) -> Any:
        return None, dist.get_rank(), dist.get_world_size()

    def fails_for_good(self) -> None:
        self._note("fails_for_good")


def refused(reentrant: bool, ddp: dict[str, Any] | None, accumulates: bool) -> list[str]:
    """How often a step began, and how the loop has ended."""
    state, coordinator, begun = state_of(Twice(reentrant), ddp=ddp), OneGroup(), 0

    def step(state: Any) -> None:
        nonlocal begun
        begun += 1
        if accumulates:
            with state.model.no_sync():
                state.model(torch.randn(4, 6)).square().mean().backward()
        state.model(torch.randn(4, 6)).square().mean().backward()
        state.optimizer.step()

    try:
        torchelastic.train(coordinator, step, state)
    except UnfitError as error:
        return [str(begun), *coordinator.calls[-3:-1], str(error)]
    raise AssertionError


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        ((True, None, False), "use_reentrant=False"),
        ((False, {"static_graph": True}, True), "does not go with no_sync"),
    ],
    ids=["re-entrant checkpoints", "a static graph and no_sync"],
)
def test_what_torch_advises_in_vain_is_said_with_a_remedy_and_not_tried_again(arguments: Any, remedy: str) -> None:
    for begun, first, second, said in values(run_ranks(refused, *arguments, ranks=2)):
        assert (begun, first, second) == ("1", "on_error", "fails_for_good")
        assert remedy in said


def other_forms() -> None:
    size = 3 + dist.get_rank()
    check_same_forms({"same": torch.zeros(2), "table": torch.zeros(size)}, dist.get_world_size(), torch.device("cpu"))


def test_buffers_of_other_sizes_are_named_where_torch_would_send_them() -> None:
    first, second = run_ranks(other_forms, ranks=2)
    for one, size in ((first, 3), (second, 4)):
        assert one.error is not None
        assert f"between rank 0 and rank 1: table (here float32 of [{size}]); build the same" in one.error


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint16, torch.float16, torch.int64, torch.complex64])
def test_buffers_of_types_that_nccl_does_not_have_are_named(dtype: torch.dtype) -> None:
    module = nn.Linear(2, 1)
    module.register_buffer("table", torch.zeros(3, dtype=dtype))
    if dtype not in (torch.int16, torch.uint16):
        check_sent_by_nccl(module, 1, torch.device("cpu"))
        return
    with pytest.raises(UnfitError, match=r"NCCL cannot send table \(u?int16\), .*'broadcast_buffers': False"):
        check_sent_by_nccl(module, 1, torch.device("cpu"))
