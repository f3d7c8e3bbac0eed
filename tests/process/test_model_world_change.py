"""What follows a change of the number of workers: callbacks, learning rates, micro batches."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import torchelastic
from torchelastic.model.world_change import (
    WorldChange,
    WorldWatch,
    accumulation_steps,
    keep_global_batch,
    scale_learning_rate,
)


def changes(*sizes: int) -> list[WorldChange]:
    return [WorldChange(before, now, 0) for before, now in zip((0, *sizes), sizes, strict=False)]


def test_callbacks_hear_of_the_first_group_and_of_other_sizes_and_of_nothing_else() -> None:
    heard: list[WorldChange] = []
    watch = WorldWatch()
    watch.add(heard.append)
    for size, rank in [(3, 1), (3, 0), (2, 0), (3, 2)]:
        watch.changed(size, rank)
    assert heard == [WorldChange(0, 3, 1), WorldChange(3, 2, 0), WorldChange(2, 3, 2)]


READS = """import os
os.environ["WORLD_SIZE"] = os.environ.get("WORLD_SIZE", "1")
size = int(os.getenv("WORLD_SIZE"))
print("WORLD_SIZE")
"""


@pytest.mark.parametrize(("text", "lines"), [(READS, "train.py:2, train.py:3"), ("print('WORLD_SIZE')", "")])
def test_a_script_that_goes_by_the_number_of_workers_at_the_start_is_told_once_when_it_is_another(
    text: str, lines: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    monkeypatch.setenv("WORLD_SIZE", "3")
    watch = WorldWatch()
    watch.changed(3, 0)
    assert not caplog.records
    for size, rank in [(2, 1), (3, 0), (2, 0), (1, 0)]:
        watch.changed(size, rank)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == bool(lines)
    assert not lines or said[0].startswith(
        f"{lines} reads WORLD_SIZE, which is 3 since the start, and there are 2 work"
    )


def test_what_a_callback_raises_is_raised_and_the_change_is_told_again() -> None:
    heard: list[int] = []

    def fail_once(change: WorldChange) -> None:
        heard.append(change.now)
        if len(heard) == 1:
            raise ValueError("the user's")

    watch = WorldWatch()
    watch.add(fail_once)
    with pytest.raises(ValueError, match="the user's"):
        watch.changed(2, 0)
    watch.changed(2, 0)
    assert heard == [2, 2]


# --- learning rate ----------------------------------------------------------------------------------------------------


class LearningRates:
    """The learning rates with which an optimizer really stepped; the gradient is 1 and there is no momentum."""

    def __init__(self, **options: Any) -> None:
        self.parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.optimizer = torch.optim.SGD([self.parameter], **{"lr": 0.5, **options})

    def step(self) -> float:
        before = self.parameter.item()
        self.parameter.grad = torch.ones_like(self.parameter)
        self.optimizer.step()
        return before - self.parameter.item()


@pytest.mark.parametrize(("rule", "factors"), [("linear", [0.5, 1.0, 2.0]), ("sqrt", [0.5**0.5, 1.0, 2.0**0.5])])
def test_the_rate_follows_the_number_of_workers_and_does_not_compound(rule: str, factors: list[float]) -> None:
    rates = LearningRates()
    scale = scale_learning_rate(rates.optimizer, rule=rule, base_world_size=2)
    for change, factor in zip(changes(1, 2, 4), factors, strict=True):
        scale(change)
        scale(change)
        assert rates.step() == pytest.approx(0.5 * factor)
        assert rates.step() == pytest.approx(0.5 * factor)
        assert rates.optimizer.param_groups[0]["lr"] == 0.5, "what is saved and sent stays unscaled"


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch),
    ],
)
def test_it_works_with_schedulers_that_multiply_and_with_those_that_set(make: Any) -> None:
    rates = LearningRates()
    scheduler = make(rates.optimizer)
    scale = scale_learning_rate(rates.optimizer, base_world_size=1)
    for number, change in enumerate(changes(1, 4, 2)):
        scale(change)
        assert rates.step() == pytest.approx(0.5 * 0.5**number * change.now)
        scheduler.step()


def test_a_failure_inside_the_optimizer_and_a_newcomer_change_nothing() -> None:
    rates, newcomer = LearningRates(), LearningRates(lr=9.0)
    states = []
    for one in (rates, newcomer):
        module = torch.nn.Module()
        module.register_parameter("parameter", one.parameter)
        states.append(torchelastic.ModelState(module, one.optimizer, snapshot="full"))
        states[-1].on_world_change(scale_learning_rate(one.optimizer, base_world_size=2))
        states[-1].sync()
    snapshot = states[0].snapshot()

    def explode(*_: Any) -> None:
        raise RuntimeError("inside the optimizer")

    handle = rates.optimizer.register_step_pre_hook(explode)
    with pytest.raises(RuntimeError, match="inside"):
        rates.step()
    assert rates.optimizer.param_groups[0]["lr"] == 0.25, "it failed while the rate was scaled"
    handle.remove()
    states[0].apply(snapshot)
    assert rates.step() == 0.25
    states[1].load_state_dict(states[0].state_dict())
    assert newcomer.step() == 0.25


# --- global batch -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world_size", "steps"), [(1, 8), (2, 4), (3, 3), (4, 2), (5, 2), (6, 1), (8, 1), (100, 1)])
def test_micro_batches_make_up_the_global_batch_as_nearly_as_possible(world_size: int, steps: int) -> None:
    assert accumulation_steps(256, 32, world_size) == steps


def test_the_number_of_micro_batches_follows_the_group_and_an_inexact_one_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    batch = keep_global_batch(24, 4)
    assert (batch.steps, batch.samples) == (6, 24)
    batch(WorldChange(0, 3, 1))
    assert (batch.steps, batch.samples) == (2, 24)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    batch(WorldChange(3, 4, 1))
    assert (batch.steps, batch.samples) == (2, 32)
    assert "cannot make a global batch of 24" in caplog.text
