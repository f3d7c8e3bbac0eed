"""Models and changes that nobody has thought of: drawn, each change undone whole, whatever was changed together."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.parametrizations import orthogonal, weight_norm

import torchelastic
from tests.contracts.census import census_of, differences
from torchelastic.model import undo_choice
from torchelastic.rendezvous.records import StateStatus

WIDTH = 4


class Counted(nn.Module):
    """Has buffers of all kinds, attributes, and state of its own."""

    total: torch.Tensor
    hidden: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(()))
        self.register_buffer("hidden", torch.zeros(WIDTH, dtype=torch.float64), persistent=False)
        self.register_buffer("later", None)
        self.scale = nn.Parameter(torch.ones(1))
        self.history: list[float] = []
        self.calls = 0

    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, state: int) -> None:
        self.calls = state

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.total = self.total + inputs.detach().sum()
        return inputs * self.scale


def tied() -> nn.Module:
    pair = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    pair[1].weight = pair[0].weight
    return pair


LAYERS: dict[str, Callable[[], Any]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "norm": lambda: nn.BatchNorm1d(WIDTH),
    "counted": Counted,
    "tied": tied,
    "weight norm": lambda: weight_norm(nn.Linear(WIDTH, WIDTH)),
    "orthogonal": lambda: orthogonal(nn.Linear(WIDTH, WIDTH)),
    "frozen": lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False),
    "lazy": lambda: nn.LazyLinear(WIDTH),
    "brief": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "dropout": lambda: nn.Dropout(0.2),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.01),
    "rprop": lambda parameters: torch.optim.Rprop(parameters, lr=0.01),
}


def tensors_in(state: Any) -> list[tuple[str, torch.Tensor]]:
    """All that a step can reach, with the kind of place that it is in."""
    found = [("parameter", one) for one in state.module.parameters()]
    found += [("buffer", one) for one in state.module.buffers()]
    found += [("gradient", one.grad) for one in state.module.parameters() if one.grad is not None]
    for values in state.optimizer.state.values():
        found += [("state", value) for value in values.values() if isinstance(value, torch.Tensor)]
    return found


@torch.no_grad()
def _change_a_tensor(state: Any, draw: random.Random) -> None:
    kind, tensor = draw.choice(tensors_in(state))
    how = draw.choice(["in place", "data", "memory", "size", "flag"])
    if how == "in place":
        tensor.add_(1)
    elif how == "data":
        tensor.data.mul_(3).add_(1)
    elif how == "memory":
        tensor.data = tensor.data * 0.5 + 1
    elif how == "size" and kind != "gradient":
        tensor.data = torch.ones(3, dtype=tensor.dtype)
    elif kind == "parameter":
        tensor.requires_grad_(not tensor.requires_grad)


def _change_a_module(state: Any, draw: random.Random) -> None:
    module = draw.choice(list(state.module.modules()))
    slots = [(module._parameters, name) for name in module._parameters]
    slots += [(module._buffers, name) for name in module._buffers]
    how = draw.choice(["mode", "attribute", "delete", "hook", "child", "slot", "none", "buffer"])
    if how == "mode":
        module.training = not module.training
    elif how == "attribute":
        module.mark = draw.random()
    elif how == "delete":
        for name in {"history", "calls", "in_features"} & vars(module).keys():
            delattr(module, name)
    elif how == "hook":
        module.register_forward_pre_hook(lambda *_: None)
    elif how == "child":
        module.add_module("grown", nn.Linear(1, 1))
    elif how == "buffer":
        module.register_buffer("made", torch.ones(2))
    elif slots:
        owner, name = draw.choice(slots)
        old = owner[name]
        if how == "none" or old is None:
            owner[name] = None if old is not None else torch.ones(2)
        else:
            owner[name] = copy.deepcopy(old)


def _change_the_optimizer(state: Any, draw: random.Random) -> None:
    optimizer = state.optimizer
    how = draw.choice(["rate", "group", "state", "forget", "member", "attribute"])
    if how == "rate":
        optimizer.param_groups[0]["lr"] *= 2
    elif how == "group":
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    elif not optimizer.state or not optimizer.param_groups[0]["params"]:
        optimizer.mark = how
    elif how == "state":
        values = draw.choice(list(optimizer.state.values()))
        values["mine"] = draw.random()
    elif how == "forget":
        optimizer.state.pop(draw.choice(list(optimizer.state)))
    elif how == "member":
        optimizer.param_groups[0]["params"].pop()
    else:
        optimizer.mark = draw.random()


def _change_the_rest(state: Any, draw: random.Random) -> None:
    how = draw.choice(["count", "list", "average", "new", "scheduler", "numbers"])
    if how == "count":
        state.extra["count"] += 1
    elif how == "list":
        state.extra["list"].append(draw.random())
    elif how == "average":
        with torch.no_grad():
            state.extra["average"].module[0].weight.add_(1)
    elif how == "new":
        state.extra[f"new {draw.random()}"] = 1
    elif how == "scheduler":
        state.scheduler.step()
    else:
        torch.rand(1)
        random.random()


CHANGES = (_change_a_tensor, _change_a_module, _change_the_optimizer, _change_the_rest)


@pytest.fixture(scope="module", autouse=True)
def _cheap_copies() -> Any:
    """On a busy machine, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(undo_choice, "CHEAP_S", 60.0)
        yield


def trained(layers: list[str], optimizer: str) -> torchelastic.ModelState:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(LAYERS[name]() for name in layers))
    module(torch.randn(3, WIDTH))  # lazy ones are made
    made = OPTIMIZERS[optimizer]([one for one in module.parameters() if one.requires_grad])
    average = torch.optim.swa_utils.AveragedModel(nn.Sequential(nn.Linear(200, 200)))
    state = torchelastic.ModelState(
        module,
        made,
        scheduler=torch.optim.lr_scheduler.StepLR(made, 2),
        extra={"count": 0, "list": [1], "average": average},
    )
    state.sync(1, 0)
    for _ in range(2):
        step(state)
    return state


def step(state: Any) -> None:
    snapshot = state.snapshot()
    state.optimizer.zero_grad()
    state.model(torch.randn(3, WIDTH)).square().mean().backward()
    state.optimizer.step()
    state.scheduler.step()
    state.commit()
    del snapshot


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(
    layers=st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=4),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    changes=st.lists(st.tuples(st.sampled_from(CHANGES), st.integers(0, 10**6)), min_size=1, max_size=6),
    goes_on=st.booleans(),
)
def test_whatever_a_step_changes_in_whatever_model_is_undone(
    layers: list[str], optimizer: str, changes: list[tuple[Callable[..., None], int]], goes_on: bool
) -> None:
    state = trained(layers, optimizer)
    roots = {"model": state.module, "optimizer": state.optimizer, "scheduler": state.scheduler}
    for _ in range(2):  # the second time from what the first one has left
        before = census_of(**roots, extra=state.extra)
        snapshot = state.snapshot()
        for change, seed in changes:
            change(state, random.Random(seed))
        state.apply(snapshot)
        del snapshot
        assert differences(before, census_of(**roots, extra=state.extra)) == {}
        assert state.status is StateStatus.COMPLETE
        state.sync(1, 0)
        if goes_on:
            step(state)
