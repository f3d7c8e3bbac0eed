"""Training states as people write them, and what their steps do to them beside the optimizer's step."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import torchelastic


class Metric:
    """Counts, as metrics do whose state is no part of a checkpoint."""

    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


class Layer(nn.Module):
    """What layers have beside weights: buffers of all kinds, flags, attributes, state of its own making."""

    running: torch.Tensor
    hidden: torch.Tensor
    history: torch.Tensor
    late: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.linear.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.parametrized = weight_norm(nn.Linear(4, 4))
        self.register_buffer("running", torch.zeros(4))
        self.register_buffer("hidden", torch.zeros(4), persistent=False)
        self.register_buffer("history", torch.zeros(0))
        self.register_buffer("late", None)
        self.temperature = 1.0
        self.seen: list[int] = []
        self._version = 1

    def get_extra_state(self) -> dict[str, int]:
        return {"version": self._version}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self._version = state["version"]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.parametrized(self.linear(inputs))) * self.temperature
        return torch.relu(self.frozen(hidden) + self.tied(hidden))


@dataclass
class World:
    """A `ModelState` and all that a script has beside it."""

    state: torchelastic.ModelState
    layer: Layer
    optimizer: torch.optim.Optimizer
    scheduler: Any
    extra: dict[str, Any]

    @property
    def roots(self) -> dict[str, Any]:
        """Where the census begins."""
        return {
            "model": self.layer,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "extra": self.state.extra,
        }

    def draw(self) -> torch.Tensor:
        """A batch: of the training's random numbers, as augmentation is."""
        return torch.randn(6, 4)

    def train(self) -> None:
        """A whole step, committed."""
        self.state.snapshot()
        self.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.state.commit()

    def backward(self) -> None:
        self.state.model(self.draw()).square().mean().backward()


def world(snapshot: str = "commit", *, seed: int = 1, is_alone: bool = True) -> World:
    """As a script builds it; and in sync, if it trains alone."""
    torch.manual_seed(seed)
    layer = Layer()
    trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
    extra = {
        "count": 0,
        "log": [1, 2],
        "metric": Metric(),
        "average": torch.zeros(4),
        "generator": torch.Generator().manual_seed(3),
    }
    state = torchelastic.ModelState(layer, optimizer, scheduler=scheduler, extra=extra, snapshot=snapshot)
    if is_alone:
        state.sync(1, 0)
    return World(state, layer, optimizer, scheduler, extra)


Change = Callable[[World], Any]


def _swap_data(one: World) -> None:
    for parameter in one.layer.parameters():
        parameter.data = parameter.data * 0.5


@torch.no_grad()
def _scale_in_place(one: World) -> None:
    for parameter in one.layer.parameters():
        parameter.mul_(0.5)


def _other_parameter(one: World) -> None:
    one.layer.frozen.weight = nn.Parameter(torch.ones(4, 4), requires_grad=False)


def _other_parameter_trained(one: World) -> None:
    new = nn.Parameter(torch.ones(4))
    group = one.optimizer.param_groups[0]
    group["params"] = [new if old is one.layer.linear.bias else old for old in group["params"]]
    one.layer.linear.bias = new


def _replace_buffer(one: World) -> None:
    one.layer.running = one.layer.running * 0.9 + 1


def _hook(one: World) -> None:
    one.layer.linear.register_forward_hook(lambda *_: None)


def _state_of_optimizer(one: World) -> None:
    parameter = next(iter(one.optimizer.state))
    one.optimizer.state[parameter]["mine"] = torch.ones(1)


def _add_group(one: World) -> None:
    one.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))], "lr": 0.5})


def _add_group_of_model(one: World) -> None:
    one.layer.frozen.requires_grad_(True)
    one.optimizer.add_param_group({"params": list(one.layer.frozen.parameters()), "lr": 0.5})


def _add_to_group(one: World) -> None:
    one.layer.frozen.requires_grad_(True)
    one.optimizer.param_groups[0]["params"].append(one.layer.frozen.weight)


#: What a step may do before its optimizer has stepped. Each is undone when the step fails.
CHANGES: dict[str, Change] = {
    "nothing": lambda _: None,
    "gradients": World.backward,
    "eval": lambda one: one.layer.eval(),
    "eval of one layer": lambda one: one.layer.norm.eval(),
    "freeze": lambda one: one.layer.linear.requires_grad_(False),
    "unfreeze": lambda one: one.layer.frozen.requires_grad_(True),
    "weights in place": _scale_in_place,
    "weights through .data": _swap_data,
    "another parameter": _other_parameter,
    "another parameter, which is trained": _other_parameter_trained,
    "buffer in place": lambda one: one.layer.running.add_(1),
    "buffer replaced": _replace_buffer,
    "buffer that was None": lambda one: setattr(one.layer, "late", torch.ones(3)),
    "buffer resized": lambda one: one.layer.history.resize_(5).fill_(1.0),
    "buffer of another size": lambda one: setattr(one.layer, "history", torch.ones(8)),
    "buffer that is new": lambda one: one.layer.register_buffer("new", torch.ones(2)),
    "buffer of another type": lambda one: setattr(one.layer, "running", torch.ones(4, dtype=torch.complex64)),
    "buffer that becomes None": lambda one: setattr(one.layer, "running", None),
    "buffer that is gone": lambda one: delattr(one.layer, "hidden"),
    "buffer that is not persistent": lambda one: one.layer.hidden.add_(1),
    "extra state of a module": lambda one: setattr(one.layer, "_version", 2),
    "attribute": lambda one: setattr(one.layer, "temperature", 0.3),
    "attribute that is a list": lambda one: one.layer.seen.append(1),
    "attribute that is new": lambda one: setattr(one.layer, "fresh", 1),
    "hook": _hook,
    "learning rate": lambda one: one.optimizer.param_groups[0].update(lr=7.0),
    "state of the optimizer": _state_of_optimizer,
    "a group of parameters": _add_group,
    "a group of the model's parameters": _add_group_of_model,
    "a parameter more in a group": _add_to_group,
    "order of the optimizer's parameters": lambda one: one.optimizer.param_groups[0]["params"].reverse(),
    "scheduler": lambda one: setattr(one.scheduler, "gamma", 0.7),
    "extra: a number": lambda one: one.state.extra.update(count=5),
    "extra: a list": lambda one: one.state.extra["log"].append(3),
    "extra: a tensor": lambda one: one.state.extra["average"].add_(1),
    "extra: a new value": lambda one: one.state.extra.update(more=1),
    "extra: an object without state": lambda one: setattr(one.state.extra["metric"], "seen", 4),
    "extra: a generator": lambda one: torch.rand(3, generator=one.state.extra["generator"]),
    "random numbers of torch": lambda _: torch.rand(3),
    "random numbers of Python": lambda _: random.random(),
    "random numbers of numpy": lambda _: np.random.rand(3),
}
