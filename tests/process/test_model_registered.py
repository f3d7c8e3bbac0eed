"""Objects with a state of their own in `extra`: a GradScaler, an EMA, a user's class, undone, saved and loaded."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import torchelastic
from tests.process.test_model_state import assert_same, picture
from torchelastic.inventory.attributes import SMALL_BYTES
from torchelastic.rendezvous.records import StateStatus


class Tally:
    """A user's own; its state is a reference to what it works on, as careless classes have it."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.sums = torch.zeros(3)

    def add(self, value: int) -> None:
        self.seen.append(value)
        self.sums += value

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "sums": self.sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen, self.sums = state["seen"], state["sums"]


def make_ema(module: torch.nn.Module) -> AveragedModel:
    return AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]  # torch has no types here


def make_state(width: int = 4, optimizers: int = 1, snapshot: str = "commit") -> torchelastic.ModelState:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Linear(width, 2))
    chosen: Any = [torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9) for layer in module][:optimizers]
    extra = {
        "tally": Tally(),
        "scaler": torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2),
        "ema": make_ema(module),
        "note": "plain",
    }
    state = torchelastic.ModelState(module, chosen if optimizers > 1 else chosen[0], extra=extra, snapshot=snapshot)
    state.sync()
    return state


def optimizers_of(state: torchelastic.ModelState) -> list[torch.optim.Optimizer]:
    return state.optimizer if isinstance(state.optimizer, list) else [state.optimizer]


def one_step(state: torchelastic.ModelState) -> None:
    scaler = state.extra["scaler"]
    state.module.zero_grad()
    scaler.scale(state.model(torch.randn(6, 4)).square().mean()).backward()
    for optimizer in optimizers_of(state):
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
    scaler.update()
    state.extra["ema"].update_parameters(state.module)
    state.extra["tally"].add(state.step)


def committed(state: torchelastic.ModelState, steps: int) -> torchelastic.ModelState:
    for _ in range(steps):
        state.snapshot()
        one_step(state)
        state.commit()
    return state


WIDE = SMALL_BYTES // 16  # its EMA is larger than what is copied


@pytest.mark.parametrize("width", [4, WIDE])
@pytest.mark.parametrize("where", ["backward", "unscaled"])
def test_a_step_that_fails_before_the_optimizer_leaves_the_objects_as_they_were(width: int, where: str) -> None:
    state = committed(make_state(width), 3)
    objects, before = dict(state.extra), picture(state)
    snapshot = state.snapshot()
    scaler = state.extra["scaler"]
    scaler.scale(state.model(torch.randn(6, 4)).square().mean()).backward()
    state.extra["tally"].add(99)
    state.extra["note"] = "changed"
    del state.extra["scaler"]
    if where == "unscaled":
        scaler.unscale_(state.optimizer)
    state.apply(snapshot)
    assert_same(before, picture(state))
    assert list(state.extra) == list(objects)
    assert all(state.extra[name] is value for name, value in objects.items() if name != "note")
    state.extra["tally"].add(98)
    state.apply(snapshot)
    assert_same(before, picture(state))
    one_step(state)  # a scaler that had not forgotten that it has unscaled would refuse


@pytest.mark.parametrize("width", [4, WIDE])
def test_an_ema_updated_between_two_optimizers_is_undone_with_the_first(width: int) -> None:
    state = committed(make_state(width, optimizers=2), 2)
    before = picture(state)
    for _ in range(2):  # the second time the copies of the first are used again
        snapshot = state.snapshot()
        state.model(torch.randn(6, 4)).square().mean().backward()
        state.optimizer[0].step()
        state.extra["ema"].update_parameters(state.module)
        state.apply(snapshot)
        assert state.status is StateStatus.COMPLETE
        assert_same(before, picture(state))


def test_what_is_saved_of_objects_is_loaded_into_the_objects_that_are_there() -> None:
    state = committed(make_state(), 3)
    stream = io.BytesIO()
    state.save(stream)
    stream.seek(0)
    other = make_state()
    objects = dict(other.extra)
    other.load(stream)
    assert_same(picture(state), picture(other))
    assert all(other.extra[name] is objects[name] for name in ("tally", "scaler", "ema"))
    assert other.extra["scaler"].get_scale() == 2048.0, "it grew after two good steps"
    torch.manual_seed(1)
    committed(state, 2)
    torch.manual_seed(1)
    committed(other, 2)
    assert_same(picture(state), picture(other))


def test_a_checkpoint_without_an_object_leaves_it_as_built_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    state = make_state()
    tree = state.state_dict()
    del tree["extra"]["ema"]
    other = make_state()
    other.load_state_dict(tree)
    assert isinstance(other.extra["ema"], AveragedModel)
    assert "nothing for ema" in caplog.text


def test_a_value_that_an_older_checkpoint_lacks_stays_as_built_and_one_that_the_others_lack_goes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tree = make_state().state_dict()
    other = make_state()
    other.extra["best_loss"] = 0.5
    other.load_state_dict(tree)
    assert other.extra["best_loss"] == 0.5
    assert "nothing for best_loss" in caplog.text
    other.load_state_dict(tree, with_random=False)  # as a newcomer takes the state of the group
    assert "best_loss" not in other.extra


def test_an_infinite_gradient_skips_the_optimizer_and_a_later_failure_still_has_no_trace() -> None:
    state = committed(make_state(), 1)
    before = picture(state)
    snapshot = state.snapshot()
    scaler = state.extra["scaler"]
    scaler.scale(state.model(torch.randn(6, 4)).square().mean() * torch.inf).backward()
    scaler.step(state.optimizer)
    scaler.update()
    assert scaler.get_scale() == 512.0
    state.apply(snapshot)
    assert_same(before, picture(state))


def test_a_new_worker_that_has_no_loss_to_scale_in_its_first_step_can_step() -> None:
    saved = picture(committed(make_state(), 1))  # as with logical shards, where the first batch has too few for it
    state = make_state()
    state.load_state_dict(saved)
    scaler = state.extra["scaler"]
    for parameter in state.module.parameters():
        parameter.grad = torch.ones_like(parameter)
    scaler.step(state.optimizer)
    scaler.update()
    assert saved["extra"]["scaler"]["scale"] == 1024.0
    assert scaler.get_scale() == 2048.0  # the second good step: it grows as it does for the others
