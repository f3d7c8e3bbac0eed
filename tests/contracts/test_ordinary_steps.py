"""Programs as people write them, each with steps that fail and are repeated: they end where an undisturbed run ends."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torchelastic
from tests.contracts.census import census_of, differences
from tests.contracts.ordinary_programs import PROGRAMS as PUBLISHED
from torchelastic.model import undo_choice

STEPS = 12
Fail = Callable[[int], None]


class Mixture(nn.Module):
    """Layers that keep losses in a list, loads in a plain tensor, and a temperature that falls in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.utils.weight_norm(nn.Linear(200, 200))  # its `weight` is an attribute, made anew each time
        self.narrow = nn.utils.spectral_norm(nn.Linear(200, 4))
        self.dropout = nn.Dropout(0.3)
        self.recurrent = nn.LSTM(4, 4, batch_first=True)
        self.losses: list[torch.Tensor] = []
        self.load = torch.zeros(4)
        self.temperature = 1.0
        self.sums: dict[int, float] = {}

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.temperature *= 0.97
        outputs: torch.Tensor = self.dropout(self.narrow(torch.relu(self.wide(inputs)))) * self.temperature
        self.losses.append(outputs.square().mean() * 0.01)
        self.load = self.load * 0.9 + outputs.detach().mean(0)
        self.sums[len(self.sums)] = float(outputs.detach().sum())
        recurrent: torch.Tensor = self.recurrent(outputs.unsqueeze(1))[0].squeeze(1)
        return recurrent + outputs


def mixture_step(state: Any, fail: Fail) -> None:
    model = state.module
    noise = random.random() + float(np.random.randn())
    if state.step == 5:
        model.recurrent.requires_grad_(False)
    loss = state.model(torch.randn(8, 200) + noise).square().mean() + sum(model.losses)
    model.losses.clear()
    model.eval()
    fail(state.step)
    model.train()
    loss.backward()
    fail(state.step)
    state.optimizer.step()


class Adversaries(nn.Module):
    """A generator and a discriminator, of which a step freezes one while the other learns."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        self.discriminator = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.discriminator(self.generator(inputs))
        return scores


def adversaries_step(state: Any, fail: Fail) -> None:
    model = state.module
    model.discriminator.requires_grad_(False)
    (-state.model(torch.randn(8, 3)).mean()).backward()
    fail(state.step)
    model.discriminator.requires_grad_(True)
    model.generator.requires_grad_(False)
    state.model(torch.randn(8, 3)).mean().backward()
    fail(state.step)
    model.generator.requires_grad_(True)
    state.optimizer.step()


PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Fail], None]]] = {
    "mixture": (Mixture, mixture_step),
    "adversaries": (Adversaries, adversaries_step),
}


def ran(program: str, *, is_disturbed: bool) -> tuple[dict[str, str], int]:
    """The census of a run at its end, and how often it was disturbed: each step fails once at each of two places."""
    build, body = PROGRAMS[program]
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(0)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = torchelastic.ModelState(model, optimizer)
    failed: set[tuple[int, int]] = set()

    def step(state: Any) -> None:
        if state.step == STEPS:
            raise StopIteration
        state.optimizer.zero_grad()
        places = iter(range(2))

        def fail(number: int) -> None:
            place = (number, next(places))
            if is_disturbed and place not in failed:
                failed.add(place)
                raise torchelastic.RetryableException("on purpose")

        body(state, fail)

    torchelastic.train(torchelastic.CoordinatorP2P("gloo"), step, state)
    return census_of(model=model), len(failed)


@pytest.mark.parametrize("program", PROGRAMS)
def test_an_ordinary_program_whose_steps_fail_ends_as_an_undisturbed_one(
    program: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected, _ = ran(program, is_disturbed=False)
    found, failures = ran(program, is_disturbed=True)
    assert failures == 2 * STEPS
    apart = differences(expected, found)
    assert {path: text for path, text in apart.items() if "hooks." not in path} == {}
    assert "stays. Keep it" not in caplog.text


def published(name: str, *, is_disturbed: bool) -> tuple[dict[str, str], set[tuple[int, int]]]:
    """The census at the end of a published program, and where it was disturbed: each step once at each place."""
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(0)
    program = PUBLISHED[name]()
    state = torchelastic.ModelState(program.module, program.optimizer, extra=program.extra)
    failed: set[tuple[int, int]] = set()

    def step(state: Any) -> None:
        if state.step == STEPS:
            raise StopIteration
        places = iter(range(program.places))

        def fail() -> None:
            place = (state.step, next(places))
            if is_disturbed and place not in failed:
                failed.add(place)
                raise torchelastic.RetryableException("on purpose")

        program.step(state, fail)

    torchelastic.train(torchelastic.CoordinatorP2P("gloo"), step, state)
    return census_of(model=program.module, optimizer=program.optimizer, extra=state.extra), failed


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_program_whose_steps_fail_ends_as_an_undisturbed_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(undo_choice, "CHEAP_S", 60.0)  # on a busy machine, too
    expected, _ = published(name, is_disturbed=False)
    found, failed = published(name, is_disturbed=True)
    assert {step for step, _ in failed} == set(range(STEPS))
    assert len({place for _, place in failed}) >= 2
    apart = differences(expected, found)
    assert {path: text for path, text in apart.items() if "hooks." not in path} == {}  # a process numbers its hooks
