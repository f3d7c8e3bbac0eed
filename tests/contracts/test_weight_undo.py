"""Weights, gradients and optimizers as a failed step leaves them; and when they are copied."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchelastic
from tests.contracts.census import census_of, differences
from tests.contracts.coded_momentum import Coded, CodedMomentum
from tests.contracts.training_states import world
from torchelastic.inventory.copies import CopyMemory
from torchelastic.inventory.weights import WeightCopier
from torchelastic.model import undo_choice
from torchelastic.model.undo_choice import MEASURED_STEPS, WARM_UP_STEPS
from torchelastic.rendezvous.records import StateStatus

TRIAL_STEPS = WARM_UP_STEPS + MEASURED_STEPS


class Scaled(torch.Tensor):
    """A tensor that is made of two: values and their scale, as optimizers of 8 bits keep their state."""

    @staticmethod
    def __new__(cls, values: torch.Tensor, scale: torch.Tensor) -> Scaled:
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=scale.dtype)

    def __init__(self, values: torch.Tensor, scale: torch.Tensor) -> None:
        self.inside, self.scale = values, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inside", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if function is torch.ops.aten.detach.default:
            return cls(args[0].inside, args[0].scale)
        if function is torch.ops.aten.clone.default:
            return cls(args[0].inside.clone(), args[0].scale.clone())
        if function is torch.ops.aten.copy_.default:
            args[0].inside.copy_(args[1].inside)
            args[0].scale.copy_(args[1].scale)
            return args[0]
        raise NotImplementedError(f"{function}")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.image = nn.Conv2d(2, 3, 3)
        self.image.weight.data = self.image.weight.data.to(memory_format=torch.channels_last)
        self.recurrent = nn.LSTM(4, 4)
        self.brief = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
        self.small = nn.Parameter(torch.ones(8).to(torch.float8_e4m3fn), requires_grad=False)
        self.waves = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        self.none = nn.Parameter(torch.ones(0))
        self.spread = nn.Parameter(torch.ones(1).expand(6), requires_grad=False)
        self.tied = self.linear.weight


def model_and_optimizer() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
            optimizer.state[parameter] = {"first": torch.zeros_like(parameter), "count": 0, "lists": [torch.ones(2)]}
    optimizer.state[model.brief]["scaled"] = Scaled(torch.ones(3, dtype=torch.int8), torch.ones(1))
    return model, optimizer


@torch.no_grad()
def _in_place(model: Any, optimizer: Any) -> None:
    for one in (*model.parameters(), *(values["first"] for values in optimizer.state.values())):
        if one is not model.spread:
            one.view(torch.uint8).add_(1) if one.dtype is torch.float8_e4m3fn else one.add_(1)


def _other_memory(model: Any, optimizer: Any) -> None:
    for one in (*model.parameters(), *(values["first"] for values in optimizer.state.values())):
        one.data = one.detach().clone()


def _other_shapes(model: Any, _: Any) -> None:
    model.linear.weight.data = torch.ones(7)
    model.brief.data = torch.ones(2, dtype=torch.bfloat16)


def _state_exchanged(_: Any, optimizer: Any) -> None:
    for values in optimizer.state.values():
        values["first"] = values["first"] + 1
        values["count"] += 1
        values["lists"].append(torch.ones(1))
        values["lists"][0].add_(1)
        values["new"] = 1


def _state_emptied(_: Any, optimizer: Any) -> None:
    optimizer.state.clear()


def _of_a_subclass(model: Any, optimizer: Any) -> None:
    scaled = optimizer.state[model.brief]["scaled"]
    scaled.inside.add_(1)
    scaled.scale.mul_(2)


def _gradients_in_place(model: Any, _: Any) -> None:
    model.linear.weight.grad.add_(1)
    model.image.weight.grad.zero_()


def _gradients_dropped(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    model.linear.weight.grad = torch.full((4, 4), 2.0)
    model.small.grad = None


def _gradients_new(model: Any, _: Any) -> None:
    model.none.grad = torch.ones(0)


CHANGES: dict[str, Callable[[Any, Any], None]] = {
    "in place": _in_place,
    "other memory": _other_memory,
    "other shapes": _other_shapes,
    "state exchanged": _state_exchanged,
    "state emptied": _state_emptied,
    "tensor subclass": _of_a_subclass,
    "gradients in place": _gradients_in_place,
    "gradients dropped": _gradients_dropped,
    "gradients that are new": _gradients_new,
}


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("change", CHANGES)
def test_weights_gradients_and_optimizers_of_all_kinds_are_put_back(change: str, times: int) -> None:
    model, optimizer = model_and_optimizer()
    if change == "gradients that are new":
        model.none.grad = None
    copier = WeightCopier()
    for _ in range(times):  # the second time in memory that is there
        copier.copy(list(model.parameters()), [optimizer]).put()
    before = census_of(model=model, optimizer=optimizer)
    kept = copier.copy(list(model.parameters()), [optimizer])
    CHANGES[change](model, optimizer)
    assert differences(before, census_of(model=model, optimizer=optimizer))
    assert kept.put()
    assert differences(before, census_of(model=model, optimizer=optimizer)) == {}


@pytest.mark.parametrize("moves", [0, 4])
def test_weights_that_were_exchanged_for_averages_do_not_take_these_along(moves: int) -> None:
    """`p.data = average` makes one memory of two: what is put back must not be written into the average's."""
    one = world("full")
    for _ in range(1 + moves):  # weights that have other memory in each step are copied in another way
        snapshot = one.state.snapshot()
        one.train()
        for parameter in one.layer.parameters() if moves else ():
            parameter.data = parameter.data.clone()
        del snapshot
    averages = [parameter.detach().clone() + 1 for parameter in one.layer.parameters()]
    expected = [average.clone() for average in averages]
    before = census_of(**one.roots)
    snapshot = one.state.snapshot()
    for parameter, average in zip(one.layer.parameters(), averages, strict=True):
        parameter.data = average
    one.state.apply(snapshot)
    assert differences(before, census_of(**one.roots)) == {}
    assert all(map(torch.equal, averages, expected))


def test_what_a_tensor_is_made_of_is_put_back_whatever_its_class_does_with_a_copy() -> None:
    model = nn.Linear(4, 2)
    optimizer, copier, inputs = CodedMomentum(model.parameters()), WeightCopier(), torch.arange(4.0)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().sum().backward()
        optimizer.step()

    def bits() -> list[list[Any]]:
        momenta = [optimizer.state[parameter]["momentum"] for parameter in model.parameters()]
        return [[type(one), one.codes.tolist(), one.worth.item()] for one in momenta]

    step()
    for exchanged in (False, False, True):  # the second copy is made in the memory of the first
        before, copies = bits(), copier.copy(model.parameters(), [optimizer])
        step()
        assert bits() != before
        if exchanged:
            optimizer.state[model.weight]["momentum"].codes = torch.zeros(2, 4, dtype=torch.int8)
        copies.put()
        assert bits() == before
        del copies
        step()


def test_a_copy_of_a_tensor_that_is_made_of_others_is_one_of_its_class() -> None:
    memory, state = CopyMemory(), Coded(torch.zeros(3, dtype=torch.int8), torch.zeros(()), has_sign=True)
    memory.of([state])
    state.codes.fill_(1)
    state.worth.fill_(1)
    copies = memory.of([state])
    state.encode(torch.zeros(3))
    kept = copies.by_tensor()[id(state)]
    assert isinstance(kept, Coded)
    assert (kept.codes.tolist(), kept.worth.item(), kept.has_sign) == ([1] * 3, 1.0, True)


def test_copies_that_are_held_are_not_overwritten_by_later_ones() -> None:
    model, optimizer = model_and_optimizer()
    copier = WeightCopier()
    values = []
    kept = []
    for _ in range(3):
        values.append(model.linear.weight.detach().clone())
        kept.append(copier.copy(list(model.parameters()), [optimizer]))
        with torch.no_grad():
            model.linear.weight.add_(1)
    for value, one in zip(values, kept, strict=True):
        one.put()
        assert torch.equal(model.linear.weight, value)


def test_the_memory_of_a_copy_is_used_again_when_nobody_holds_it() -> None:
    model, optimizer = model_and_optimizer()
    copier = WeightCopier()
    addresses = set()
    for _ in range(5):
        kept = copier.copy(list(model.parameters()), [optimizer])
        settled = kept.tensors._settled
        assert settled is not None
        addresses.add(id(settled.copies[torch.device("cpu")]))
        del kept
    assert len(addresses) == 1


# --- what is decided --------------------------------------------------------------------------------------------------


def state_of(**options: Any) -> torchelastic.ModelState:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    state = torchelastic.ModelState(model, torch.optim.Adam(model.parameters(), lr=0.1), **options)
    state.sync(1, 0)
    return state


def step(state: torchelastic.ModelState, *, accumulates: bool = False) -> None:
    if not accumulates:
        state.optimizer.zero_grad()
    state.model(torch.randn(3, 4)).square().mean().backward()
    state.optimizer.step()


def train(state: torchelastic.ModelState, steps: int, **options: Any) -> None:
    for _ in range(steps):
        snapshot = state.snapshot()
        step(state, **options)
        state.commit()
        del snapshot


@pytest.fixture
def dear_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every copy is too dear to be made before each step."""
    monkeypatch.setattr(undo_choice, "CHEAP_S", 0.0)
    monkeypatch.setattr(undo_choice, "CHEAP_PART", 0.0)


def copies_weights(state: torchelastic.ModelState) -> bool:
    return state.snapshot().large is not None


def test_cheap_copies_are_made_for_ever(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(undo_choice, "CHEAP_S", 60.0)
    state = state_of()
    with caplog.at_level(logging.INFO):
        train(state, 2 * TRIAL_STEPS)
    assert copies_weights(state)
    assert "copied before each" not in caplog.text


@pytest.mark.usefixtures("dear_copies")
def test_dear_copies_are_made_in_the_first_steps_only_and_the_log_says_what_that_means(
    caplog: pytest.LogCaptureFixture,
) -> None:
    state = state_of()
    with caplog.at_level(logging.INFO):
        train(state, TRIAL_STEPS - 1)
        assert copies_weights(state)
        assert "snapshot='full'" not in caplog.text
        train(state, 5)
    assert not copies_weights(state)
    assert caplog.text.count("weights are not copied before each step (a copy takes ") == 1


@pytest.mark.usefixtures("dear_copies")
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_step_that_changes_weights_through_data_in_the_first_steps_is_copied_for_ever(
    when: str, caplog: pytest.LogCaptureFixture
) -> None:
    state = state_of()
    for number in range(TRIAL_STEPS):
        snapshot = state.snapshot()
        if when == "before" and number == 5:
            state.module.get_parameter("weight").data.mul_(0.9)
        step(state)
        if when == "after" and number == 5:
            state.module.get_parameter("weight").data.mul_(0.9)
        state.commit()
        del snapshot
    assert caplog.text.count("the train step changes weights itself") == 1
    assert copies_weights(state)


def test_copies_are_not_made_where_there_is_no_memory_for_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("torchelastic.model.weight_undo.free_memory_bytes", lambda _: 100)
    state = state_of()
    with caplog.at_level(logging.INFO):
        assert not copies_weights(state)
    assert "and 100 B of memory are free" in caplog.text


def test_a_state_that_cannot_be_copied_is_trained_by_the_rule(caplog: pytest.LogCaptureFixture) -> None:
    class Stubborn(Scaled):
        @classmethod
        def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
            raise NotImplementedError("no copies of this")

    state = state_of()
    train(state, 1)
    state.optimizer.state[state.module.weight]["odd"] = Stubborn(torch.ones(1), torch.ones(1))
    with caplog.at_level(logging.INFO):
        snapshot = state.snapshot()
    assert snapshot.large is None
    assert "they cannot be copied: NotImplementedError: no copies of this" in caplog.text
    state.optimizer.zero_grad()
    state.model(torch.randn(3, 4)).square().mean().backward()
    state.apply(snapshot)
    assert state.status is StateStatus.COMPLETE


@pytest.mark.parametrize("since", ["the first step", "after the trial"])
def test_gradients_that_are_kept_from_step_to_step_are_undone(
    since: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(undo_choice, "CHEAP_S", 60.0)
    state = state_of()
    train(state, TRIAL_STEPS + 2, accumulates=since == "the first step")
    if since == "after the trial":
        train(state, 1, accumulates=True)  # seen at its end: copied from the next step on
    before = census_of(module=state.module, optimizer=state.optimizer)
    snapshot = state.snapshot()
    step(state, accumulates=True)
    state.apply(snapshot)
    assert differences(before, census_of(module=state.module, optimizer=state.optimizer)) == {}
    assert "accumulated over several steps" not in caplog.text


def test_gradients_that_were_never_kept_before_are_dropped_by_the_step_that_fails_with_them_and_that_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(undo_choice, "CHEAP_S", 60.0)
    state = state_of()
    train(state, TRIAL_STEPS + 2)
    snapshot = state.snapshot()
    step(state, accumulates=True)
    state.apply(snapshot)
    assert state.module.weight.grad is None
    assert caplog.text.count("accumulated over several steps") == 1


def test_a_large_average_in_extra_is_undone_with_the_weights() -> None:
    torch.manual_seed(0)
    model = nn.Linear(200, 200)
    average = torch.optim.swa_utils.AveragedModel(model)
    state = torchelastic.ModelState(model, torch.optim.SGD(model.parameters(), lr=0.1), extra={"average": average})
    state.sync(1, 0)
    before = census_of(average=average, model=model)
    for _ in range(2):
        snapshot = state.snapshot()
        state.model(torch.randn(3, 200)).square().mean().backward()
        state.optimizer.step()
        average.update_parameters(model)
        assert differences(before, census_of(average=average, model=model))
        state.apply(snapshot)
        assert differences(before, census_of(average=average, model=model)) == {}
        assert state.snapshot().large is None, "no step comes before the sync"
        state.sync(1, 0)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_large_average_that_is_updated_before_the_optimizer_is_copied_from_then_on_and_one_behind_it_is_not(
    when: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(200, 200)
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = torchelastic.ModelState(model, optimizer, extra={"average": average}, snapshot="commit")
    state.sync(1, 0)

    def one_step() -> None:
        if when == "before":
            average.update_parameters(model)
        state.optimizer.zero_grad()
        state.model(torch.randn(3, 200)).square().mean().backward()
        state.optimizer.step()
        if when == "after":
            average.update_parameters(model)

    for _ in range(2):
        snapshot = state.snapshot()
        one_step()
        state.commit()
    assert (snapshot.large is not None) is (when == "before"), "from the second step on"
    assert ("a large object of `extra` before it" in caplog.text) is (when == "before")
    if when == "before":
        before = census_of(average=average, model=model)
        snapshot = state.snapshot()
        average.update_parameters(model)
        assert differences(before, census_of(average=average, model=model))
        state.apply(snapshot)
        assert differences(before, census_of(average=average, model=model)) == {}
