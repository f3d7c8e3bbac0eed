"""Whether a state can be sent is tried as soon as it has new content, and reported by name: not when it is needed."""

from __future__ import annotations

from collections.abc import Callable
from ipaddress import IPv4Address

import pytest
import torch

from torchelastic import ModelState
from torchelastic.model.transfer import Own, check_sendable

CANNOT = "no worker that joins, or is started again, could receive this state"


class Tracked(torch.optim.SGD):
    """Keeps something of its own beside each momentum, as the code of some optimizers does."""

    def __init__(self, model: torch.nn.Module, own: object) -> None:
        super().__init__(model.parameters(), lr=0.1, momentum=0.9)
        self.own = own

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        super().step(closure)
        for state in self.state.values():
            state["own"] = self.own


def make(own: object = 1.0) -> ModelState:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    state = ModelState(model, Tracked(model, own), extra={"seen": 0})
    state.sync(1, 0)
    return state


def train(state: ModelState, steps: int) -> None:
    for _ in range(steps):
        state.snapshot()
        state.optimizer.zero_grad()
        state.model(torch.ones(1, 2)).sum().backward()
        state.optimizer.step()
        state.commit()


def count_trials(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """As many as there were trials from now on."""
    trials: list[None] = []

    def counting(tree: object, own: Own) -> None:
        trials.append(None)
        check_sendable(tree, own)

    monkeypatch.setattr("torchelastic.model_state.check_sendable", counting)
    return trials


def reports(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if CANNOT in record.getMessage()]


@pytest.mark.parametrize(
    ("own", "why"),
    [
        (lambda: 0.1, "optimizer['state']['0.weight']['own'] cannot be pickled"),
        (IPv4Address(1), "optimizer['state']['0.weight']['own'], optimizer['state']['0.bias']['own']"),
    ],
    ids=["what cannot be pickled", "what no other worker would unpickle"],
)
def test_what_cannot_be_sent_is_named_after_the_first_step_that_has_it_and_training_goes_on(
    caplog: pytest.LogCaptureFixture, own: object, why: str
) -> None:
    state = make(own)
    assert not reports(caplog), "there is no optimizer state yet"
    train(state, 3)
    (report,) = reports(caplog)
    assert report.startswith("step 1: ")
    assert why in report
    assert state.step == 3


def test_it_is_tried_again_for_new_content_alone(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials, state = count_trials(monkeypatch), make()
    train(state, 5)
    assert len(trials) == 1
    for value in (1, 1.5, 1, 1.5):  # of one type now and then
        state.extra["rule"] = value
        train(state, 1)
    assert len(trials) == 3
    state.extra["rule"] = IPv4Address(1)
    train(state, 3)
    assert len(trials) == 4
    (report,) = reports(caplog)
    assert report.startswith("step 10: ")
    assert "extra['rule']" in report
    head = torch.nn.Linear(1, 1)
    state.module.add_module("2", head)
    state.optimizer.add_param_group({"params": list(head.parameters())})
    train(state, 3)
    assert len(trials) == 5


def test_names_that_are_new_in_each_step_do_not_have_it_tried_in_each(monkeypatch: pytest.MonkeyPatch) -> None:
    trials, state = count_trials(monkeypatch), make()
    for number in range(100):
        state.extra[f"loss of {number}"] = 1.0
        train(state, 1)
    assert len(trials) < 10
