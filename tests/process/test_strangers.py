"""Optimizers and schedulers that a train step steps and its state was not given: refused by name, or said."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.utils.prune import l1_unstructured
from torch.optim.lr_scheduler import ConstantLR, LinearLR, LRScheduler, ReduceLROnPlateau, SequentialLR, StepLR

import torchelastic
from tests.contracts.ordinary_programs import Wrapping
from tests.process.local_ranks import crew_of, form_ours, succeeded
from torchelastic.data import ElasticBatchSampler, ElasticLoader
from torchelastic.errors import UnfitError

STEPS = 5


def trained(
    state: torchelastic.ModelState, *after: Callable[[torchelastic.ModelState], Any], steps: int = STEPS
) -> int:
    """Train, and call these behind the optimizer in each step; returns the steps that have counted."""

    def step(state: torchelastic.ModelState) -> None:
        if state.step == steps:
            raise StopIteration
        state.optimizer.zero_grad()
        state.model(torch.ones(4, 3)).square().mean().backward()
        state.optimizer.step()
        for each in after:
            each(state)

    torchelastic.train(torchelastic.CoordinatorP2P("gloo"), step, state)
    return state.step


def made(**more: Any) -> torchelastic.ModelState:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
    return torchelastic.ModelState(module, torch.optim.SGD(module.parameters(), lr=0.1), **more)


def test_an_optimizer_of_the_model_that_was_not_given_is_refused_in_its_second_step() -> None:
    state = made()
    forgotten = torch.optim.Adam(state.module[1].parameters())  # type: ignore[index]  # a Sequential
    with pytest.raises(UnfitError, match=r"of the type Adam, that ModelState was not given.*Give ModelState all"):
        trained(state, lambda _: forgotten.step())
    assert state.step == 1


def test_an_optimizer_around_the_one_that_was_given_is_refused_and_the_other_way_round_is_right() -> None:
    state = made()
    outer = Wrapping(state.optimizer)
    with pytest.raises(UnfitError, match="of the type Wrapping"):
        trained(state, lambda _: outer.step())
    module = torch.nn.Linear(3, 1)
    assert trained(torchelastic.ModelState(module, Wrapping(torch.optim.Adam(module.parameters())))) == STEPS


def test_optimizers_that_live_for_one_step_or_keep_nothing_are_nobodys_business(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def inner_steps(state: torchelastic.ModelState) -> None:  # Reptile, an attack on the inputs, MAML
        inputs = torch.ones(2, 3, requires_grad=True)
        for held in (list(state.module.parameters()), list(copy.deepcopy(state.module).parameters()), [inputs]):
            inner = torch.optim.Adam(held)
            for _ in range(2):
                inner.step()

    state = made()
    without_state = torch.optim.SGD(state.module.parameters(), lr=0.0)
    assert trained(state, inner_steps, lambda _: without_state.step()) == STEPS
    assert "was not given" not in caplog.text


def test_an_optimizer_of_something_else_than_the_model_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    temperature = torch.zeros((), requires_grad=True)
    of_temperature = torch.optim.Adam([temperature])
    assert trained(made(), lambda _: of_temperature.step()) == STEPS
    (said,) = [one.getMessage() for one in caplog.records if "was not given" in one.getMessage()]
    assert "of the type Adam" in said
    assert "parameters that are not the model's" in said


def test_a_scheduler_that_was_not_given_is_named_at_the_start_and_refused_when_it_steps(
    caplog: pytest.LogCaptureFixture,
) -> None:
    state = made()
    forgotten = StepLR(state.optimizer, 2)
    trained(state)  # it is not stepped
    assert "there is a StepLR of the optimizer that ModelState was not given" in caplog.text
    with pytest.raises(UnfitError, match=r"StepLR.*ModelState\(.., scheduler=scheduler\)"):
        trained(state, lambda _: forgotten.step(), steps=2 * STEPS)
    assert state.step == STEPS


class Warming:
    """A scheduler of the user's own, around another one."""

    def __init__(self, inner: Any) -> None:
        self.parts = {"inner": [inner]}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.parts["inner"][0].state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.parts["inner"][0].load_state_dict(state)

    def step(self) -> None:
        self.parts["inner"][0].step()


class Odd:
    """An object that does not like to be looked at."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"asked for {name}")


class Circle:
    """One of the user's own, with a state, in a circle, and with much in it."""

    def __init__(self) -> None:
        self.itself, self.odd, self.many = self, Odd(), [[number] for number in range(10**5)]

    def state_dict(self) -> dict[str, Any]:
        return {"nothing": 1}

    def load_state_dict(self, _: dict[str, Any]) -> None: ...


def test_objects_of_any_kind_are_looked_through_without_being_asked_anything() -> None:
    state = made(extra={"circle": Circle()})
    forgotten = StepLR(state.optimizer, 2)
    with pytest.raises(UnfitError, match="a StepLR"):
        trained(state, lambda _: forgotten.step())


def in_turn(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return SequentialLR(optimizer, [LinearLR(optimizer), StepLR(optimizer, 2)], [2])


@pytest.mark.parametrize("name", ["scheduler", "extra"])
@pytest.mark.parametrize(
    "make", [in_turn, lambda one: Warming(ConstantLR(one)), lambda one: StepLR(one, 2)], ids=["chain", "own", "plain"]
)
def test_schedulers_that_were_given_in_whatever_form_are_no_strangers(
    make: Callable[[torch.optim.Optimizer], Any], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    module = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scheduler = make(optimizer)
    given = {"scheduler": scheduler} if name == "scheduler" else {"extra": {"schedule": scheduler}}
    state = torchelastic.ModelState(module, optimizer, **given)
    assert trained(state, lambda _: scheduler.step()) == STEPS
    assert "was not given" not in caplog.text


def test_one_of_two_schedulers_is_missed_and_one_that_nobody_holds_any_more_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    module = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    dropped = StepLR(optimizer, 2)
    dropped.itself = dropped  # type: ignore[attr-defined]  # so that only a collection frees it
    del dropped
    given, forgotten = ConstantLR(optimizer), ReduceLROnPlateau(optimizer)
    with caplog.at_level(logging.WARNING), pytest.raises(UnfitError, match="a ReduceLROnPlateau"):
        trained(
            torchelastic.ModelState(module, optimizer, scheduler=given),
            lambda _: given.step(),
            lambda _: forgotten.step(1.0),
        )
    assert "StepLR" not in caplog.text


@pytest.mark.parametrize("name", ["optimizer", "scheduler"])
def test_what_the_state_was_given_cannot_be_replaced_and_the_error_says_how_phases_are_written(name: str) -> None:
    state = made()
    setattr(state, name, getattr(state, name))
    with pytest.raises(UnfitError, match=rf"state.{name} cannot be replaced.*Give ModelState every {name}"):
        setattr(state, name, torch.optim.Adam(state.module.parameters()))


def test_parameters_that_a_step_makes_or_renames_are_said_once_where_a_worker_trains_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    state = made()

    def prune(state: torchelastic.ModelState) -> None:
        if state.step == 1:
            l1_unstructured(state.module[0], "weight", amount=1)  # type: ignore[index,no-untyped-call]  # a Sequential

    assert trained(state, prune) == STEPS
    (said,) = [one.getMessage() for one in caplog.records if "renamed" in one.getMessage()]
    assert said.startswith("step 2 has made, or renamed, the parameters 0.weight_orig: a worker that joins")
    assert "torch.nn.utils.prune.identity" in said


def grown(shards: int | None) -> tuple[str, int]:
    """What a run ends with whose model grows in its second step, and after how many steps."""
    _, _ = form_ours()
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
    dataset = torch.utils.data.TensorDataset(torch.randn(16, 3))
    sampler = ElasticBatchSampler(dataset, 4)
    loader = ElasticLoader(dataset, sampler)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    state = torchelastic.ModelState(module, optimizer, sampler=sampler, logical_shards=shards)
    state.sync()
    for _ in range(4):
        state.snapshot()
        if state.step == 1:
            module.append(torch.nn.Linear(1, 1))
            optimizer.add_param_group({"params": list(module[2].parameters())})
        for (inputs,) in state.shards(loader):
            state.model(inputs).square().mean().backward()
        optimizer.step()
        try:
            state.step_course.end()
        except UnfitError as error:
            return str(error), state.step
        state.commit()
    return "", state.step


@pytest.mark.parametrize("shards", [None, 4])
def test_parameters_that_are_made_in_a_group_are_refused_where_nobody_averages_them(shards: int | None) -> None:
    with crew_of(2) as crew:
        (told, steps), other = succeeded(crew.run(grown, shards, ranks=2))
    assert other == (told, steps)
    if shards is None:
        assert steps == 1
        assert "the optimizer trains 2.weight, 2.bias, which the model did not have when this group was formed" in told
    else:
        assert (told, steps) == ("", 4), "logical shards are summed by what is there"
