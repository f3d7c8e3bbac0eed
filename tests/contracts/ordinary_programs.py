"""Train steps as people publish them that change weights beside the optimizer, or keep state in odd places."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

#: Called where a step may fail.
Fail = Callable[[], None]


@dataclass
class Program:
    """What a script builds, and its step.

    Attributes:
        module: given to `ModelState`.
        optimizer: the same.
        step: called with the state and `fail`.
        extra: the same.
        places: how often `fail` is called in a step.
    """

    module: nn.Module
    optimizer: Any
    step: Callable[[Any, Fail], None]
    places: int
    extra: dict[str, Any] = field(default_factory=dict)


def net() -> Any:
    return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2))


def loss_of(state: Any) -> Any:
    inputs = torch.randn(8, 4)
    return (state.model(inputs) - inputs[:, :2].abs()).square().mean()


def sharpness_aware() -> Program:
    """SAM: weights are moved uphill, and moved back behind a second backward pass."""
    module = net()

    def step(state: Any, fail: Fail) -> None:
        random_numbers = torch.get_rng_state()
        loss_of(state).backward()
        moves = []
        for parameter in module.parameters():
            move = 0.05 * parameter.grad / (parameter.grad.norm() + 1e-12)
            parameter.data.add_(move)
            moves.append(move)
        fail()
        state.optimizer.zero_grad()
        torch.set_rng_state(random_numbers)
        loss_of(state).backward()
        for parameter, move in zip(module.parameters(), moves, strict=True):
            parameter.data.sub_(move)
        fail()
        state.optimizer.step()
        fail()
        state.optimizer.zero_grad()

    return Program(module, torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9), step, 3)


class Wrapping(torch.optim.Optimizer):
    """Steps another optimizer, whose state is in no `state` of its own, and follows it slowly (SAM, Lookahead)."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self.steps = inner, 0
        self.param_groups = inner.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step(closure)
        self.steps += 1
        for parameter in self.param_groups[0]["params"] if self.steps % 2 == 0 else ():
            slow = self.state[parameter].setdefault("slow", parameter.detach().clone())
            slow.lerp_(parameter.detach(), 0.5)
            parameter.copy_(slow)


def optimizer_in_an_optimizer() -> Program:
    module = net()

    def step(state: Any, fail: Fail) -> None:
        state.optimizer.zero_grad()
        loss_of(state).backward()
        fail()
        state.optimizer.step()
        fail()

    optimizer = Wrapping(torch.optim.Adam(module.parameters(), lr=0.01))
    return Program(module, optimizer, step, 2)


class Merging(nn.Linear):
    """LoRA as loralib has it: `eval()` adds the low-rank part to the weight through `.data`, `train()` takes it off."""

    def __init__(self) -> None:
        super().__init__(4, 2)
        self.weight.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.zeros(2, 2))
        self.is_merged = False

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        if mode is self.is_merged:
            self.weight.data.add_(self.up.data @ self.down.data, alpha=-1 if mode else 1)
            self.is_merged = not mode
        return self

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = super().forward(inputs)
        return outputs if self.is_merged else outputs + inputs @ self.down.T @ self.up.T


def merged_for_a_validation() -> Program:
    module = Merging()

    def step(state: Any, fail: Fail) -> None:
        loss_of(state).backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        module.eval()
        fail()
        state.extra["validation"].append(float(module(torch.ones(1, 4)).sum()))
        fail()
        module.train()

    trained = [module.down, module.up]
    return Program(module, torch.optim.AdamW(trained, lr=0.01), step, 2, {"validation": []})


class Siamese(nn.Module):
    """A network, and one that follows it (MoCo, BYOL): no gradient, and a queue of keys in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.query = net()
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.queue: torch.Tensor
        self.register_buffer("queue", torch.zeros(0, 2))
        self.pointer = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for slow, fast in zip(self.key.parameters(), self.query.parameters(), strict=True):
            slow.data = slow.data * 0.9 + fast.data * 0.1
        keys = self.key(inputs)
        self.queue = torch.cat([self.queue, keys])[-20:]
        self.pointer = (self.pointer + len(keys)) % 20
        outputs: torch.Tensor = self.query(inputs) - self.queue.mean(0) + 0.1 * keys
        return outputs


def momentum_encoder() -> Program:
    module = Siamese()

    def step(state: Any, fail: Fail) -> None:
        state.optimizer.zero_grad()
        loss = loss_of(state)
        fail()
        loss.backward()
        fail()
        state.optimizer.step()
        fail()

    return Program(module, torch.optim.AdamW(module.query.parameters(), lr=0.01), step, 3)


class ScheduleFree(torch.optim.SGD):
    """`eval()` puts averages in the place of the weights, `train()` undoes it; counts in an attribute of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.05)
        self.is_training = True
        self.steps: list[int] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.steps.append(len(self.steps))
        for parameter in self.param_groups[0]["params"]:
            average = self.state[parameter].setdefault("average", parameter.detach().clone())
            average.lerp_(parameter.detach(), 1 / len(self.steps))

    @torch.no_grad()
    def swap(self, is_training: bool) -> None:
        for parameter in self.param_groups[0]["params"] if is_training != self.is_training else ():
            average = self.state[parameter].setdefault("average", parameter.detach().clone())
            parameter.data, self.state[parameter]["average"] = average, parameter.data
        self.is_training = is_training


def averages_for_a_validation() -> Program:
    module = net()
    optimizer = ScheduleFree(module.parameters())

    def step(state: Any, fail: Fail) -> None:
        if state.step % 3 == 0:
            optimizer.swap(is_training=False)
            module.eval()
            fail()
            state.extra["validation"].append(float(module(torch.ones(2, 4)).sum()))
            module.train()
            optimizer.swap(is_training=True)
        loss_of(state).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.swap(is_training=False)
        fail()
        optimizer.swap(is_training=True)

    return Program(module, optimizer, step, 2, {"validation": []})


def accumulation_over_steps() -> Program:
    """The optimizer steps in each third train step, with the gradients of all three."""
    module = net()

    def step(state: Any, fail: Fail) -> None:
        fail()
        loss_of(state).backward()
        fail()
        if state.step % 3 == 2:
            state.optimizer.step()
            fail()
            state.optimizer.zero_grad()

    return Program(module, torch.optim.Adam(module.parameters(), lr=0.01), step, 3)


def quasi_newton() -> Program:
    """LBFGS keeps lists, numbers and tensors, and evaluates several times in a step."""
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer: Any = torch.optim.LBFGS(module.parameters(), lr=0.5, max_iter=4, history_size=3)

    def step(state: Any, fail: Fail) -> None:
        inputs = torch.randn(8, 4)
        evaluations = 0

        def closure() -> torch.Tensor:
            nonlocal evaluations
            evaluations += 1
            if evaluations == 2:
                fail()
            optimizer.zero_grad()
            loss: torch.Tensor = (state.model(inputs) - inputs[:, :2].abs()).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]  # torch has no types here
            return loss

        optimizer.step(closure)
        fail()

    return Program(module, optimizer, step, 2)


def several_epochs_over_the_same_samples() -> Program:
    """PPO: a varying number of optimizer steps, until the policy has moved far enough; a replay buffer in `extra`."""
    module = net()
    target = copy.deepcopy(module)

    def step(state: Any, fail: Fail) -> None:
        replay = state.extra["replay"]
        replay.append(torch.randn(8, 4))
        before = module(replay[-1]).detach()
        for _ in range(4):
            inputs = random.choice(replay)
            state.optimizer.zero_grad()
            (state.model(inputs) - inputs[:, :2].abs()).square().mean().backward()
            fail()
            state.optimizer.step()
            if (module(replay[-1]).detach() - before).abs().mean() > 0.03:
                break
        fail()
        if state.step % 4 == 0:
            target.load_state_dict(module.state_dict())

    extra = {"replay": deque([torch.randn(8, 4)], maxlen=5), "target": target}
    return Program(module, torch.optim.Adam(module.parameters(), lr=0.01), step, 5, extra)


def clipped_weights_and_a_mask() -> Program:
    """A critic whose weights are clipped, and a layer that is pruned, both through `.data` behind the optimizer."""
    module = net()
    mask = torch.ones(2, 16)
    mask[:, ::3] = 0
    optimizers = {
        "body": torch.optim.SGD(module[:3].parameters(), 0.1),
        "head": torch.optim.Adam(module[3].parameters()),
    }

    def step(state: Any, fail: Fail) -> None:
        for optimizer in state.optimizer.values():
            optimizer.zero_grad()
        loss_of(state).backward()
        state.optimizer["body"].step()
        fail()
        state.optimizer["head"].step()
        module[3].weight.data.mul_(mask)
        fail()
        for parameter in module.parameters():
            parameter.data.clamp_(-0.3, 0.3)
        fail()

    return Program(module, optimizers, step, 3)


def weights_that_grow() -> Program:
    """A head that gets more classes in the run: other parameters, another group, by the step itself."""
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)

    def step(state: Any, fail: Fail) -> None:
        optimizer.zero_grad()
        if state.step in (3, 6):
            bias = nn.Parameter(module[3].bias.detach() + 0.1)
            for group in optimizer.param_groups:
                group["params"] = [one for one in group["params"] if one is not module[3].bias]
            optimizer.state.pop(module[3].bias, None)
            module[3].bias = bias
            optimizer.add_param_group({"params": [bias], "lr": 0.01})
        fail()
        loss_of(state).backward()
        fail()
        optimizer.step()
        fail()

    return Program(module, optimizer, step, 3)


PROGRAMS: dict[str, Callable[[], Program]] = {
    build.__name__: build
    for build in (
        sharpness_aware,
        optimizer_in_an_optimizer,
        merged_for_a_validation,
        momentum_encoder,
        averages_for_a_validation,
        accumulation_over_steps,
        quasi_newton,
        several_epochs_over_the_same_samples,
        clipped_weights_and_a_mask,
        weights_that_grow,
    )
}
