"""OneOrMany optimizers in one state: what a step that fails between them leaves, what is saved, what is refused."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchelastic
from tests.process.forked_ranks import run_ranks
from tests.process.test_model_state import assert_same, picture
from torchelastic.rendezvous.records import StateStatus
from torchelastic.repeated_failures import is_final


class Pair(torch.nn.Module):
    """Two nets, as a generator and a discriminator are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.second(self.first(inputs))
        return outputs


OptimizerOf = Callable[[Any], torch.optim.Optimizer]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def make_state(as_a: type = dict, make: OptimizerOf = sgd, **options: Any) -> torchelastic.ModelState:
    torch.manual_seed(0)
    module = Pair()
    first, second = make(module.first.parameters()), make(module.second.parameters())
    optimizers: Any = {"first": first, "second": second} if as_a is dict else as_a([first, second])
    # without copies of all: what several optimizers do is undone by the rule
    state = torchelastic.ModelState(module, optimizers, **{"snapshot": "commit", **options})
    state.sync()
    return state


def optimizers_of(state: torchelastic.ModelState) -> list[torch.optim.Optimizer]:
    given = state.optimizer
    return list(given.values()) if isinstance(given, dict) else list(given)


def status_of(state: torchelastic.ModelState) -> StateStatus:
    return state.status


def backward(state: torchelastic.ModelState) -> None:
    for optimizer in optimizers_of(state):
        optimizer.zero_grad()
    state.model(torch.randn(5, 4)).square().mean().backward()


def attempt(state: torchelastic.ModelState, order: str, *, commit: bool = True) -> Any:
    """One train step in which the optimizers step in this order, a digit each; returns its snapshot."""
    snapshot = state.snapshot()
    for digit in order:
        backward(state)
        optimizers_of(state)[int(digit)].step()
    if commit:
        state.commit()
    return snapshot


@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize("order", ["0", "1", "00"])
@pytest.mark.parametrize("warm", [0, 2])
def test_a_step_that_fails_between_two_optimizers_leaves_no_trace(make: OptimizerOf, order: str, warm: int) -> None:
    state = make_state(make=make)
    for _ in range(warm):
        attempt(state, "01")
    before = picture(state)
    state.apply(attempt(state, order, commit=False))
    assert state.status is StateStatus.COMPLETE
    assert_same(before, picture(state))
    assert all(parameter.grad is None for parameter in state.module.parameters())


@pytest.mark.parametrize(
    ("make", "lost_at"),
    [(sgd, 1), (adam, 1), (lambda parameters: torch.optim.LBFGS(parameters, lr=0.01, max_iter=4), 2)],
)
@pytest.mark.parametrize("by_name", [False, True])
def test_a_failure_while_the_only_optimizer_evaluates_a_closure_leaves_no_trace(
    make: OptimizerOf, lost_at: int, by_name: bool
) -> None:
    torch.manual_seed(0)
    module = Pair()
    state = torchelastic.ModelState(module, make(module.parameters()))
    state.sync()
    evaluations = 0

    def closure() -> torch.Tensor:
        nonlocal evaluations
        evaluations += 1
        state.module.zero_grad()
        loss: torch.Tensor = state.model(torch.ones(5, 4)).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no types here
        return loss

    def lost_later() -> torch.Tensor:
        loss = closure()
        if evaluations == lost_at:
            raise RuntimeError("a peer is lost")
        return loss

    def step(evaluate: Callable[[], torch.Tensor]) -> Any:
        return state.optimizer.step(closure=evaluate) if by_name else state.optimizer.step(evaluate)

    state.snapshot()
    step(closure)
    state.commit()
    evaluations, before = 0, picture(state)
    snapshot = state.snapshot()
    with pytest.raises(RuntimeError, match="a peer is lost"):
        step(lost_later)
    state.apply(snapshot)
    assert state.status is StateStatus.COMPLETE
    assert_same(before, picture(state))
    state.snapshot()
    assert step(closure) > 0.0, "the optimizer returns what the closure has"


def test_a_step_is_complete_only_when_all_that_usually_step_have_stepped() -> None:
    state = make_state()
    state.apply(attempt(state, "01", commit=False))
    assert status_of(state) is StateStatus.UNCOMMITTED
    state.sync()
    assert (state.step, state.status) == (1, StateStatus.COMPLETE)
    state = make_state()
    attempt(state, "0001")  # three critic steps for one of the generator
    before = picture(state)
    state.apply(attempt(state, "001", commit=False))
    assert status_of(state) is StateStatus.COMPLETE, "one more was to come, so all was copied and is undone"
    assert_same(before, picture(state))
    state.apply(attempt(state, "0001", commit=False))
    assert status_of(state) is StateStatus.UNCOMMITTED


def test_how_often_one_steps_that_has_stepped_more_often_than_before_is_never_taken_for_known() -> None:
    state, newcomer = make_state(), make_state()
    for order in ("01", "0101"):  # epochs over the same samples that end early, or not
        attempt(state, order)
    newcomer.load_state_dict(state.state_dict(), with_random=False)
    for one in (state, newcomer):
        for order in ("01", "0101", "010101", "0"):
            before = picture(one)
            one.apply(attempt(one, order, commit=False))
            assert one.status is StateStatus.COMPLETE
            assert_same(before, picture(one))


def lost_behind_more_steps(passes_before: list[int]) -> tuple[StateStatus, int, bool]:
    """The train step is as long as the one before, and goes on: the peer is lost in a further pass."""
    torch.manual_seed(0)
    module = torch.nn.Linear(4, 2)
    state = torchelastic.ModelState(module, sgd(module.parameters()), snapshot="commit")
    state.sync()

    def one_pass() -> None:
        state.optimizer.zero_grad()
        state.model(torch.ones(5, 4)).square().mean().backward()

    for passes in passes_before:
        state.snapshot()
        for _ in range(passes):
            one_pass()
            state.optimizer.step()
        state.commit()
    before, snapshot = module.weight.detach().clone(), state.snapshot()
    for _ in range(passes_before[-1]):
        one_pass()
        state.optimizer.step()
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError):
        one_pass()
    state.apply(snapshot)
    return state.status, state.step, torch.equal(before, module.weight)


@pytest.mark.parametrize(
    ("passes_before", "left"),
    [
        ([1, 1], (StateStatus.PARTIAL, 2, False)),  # nobody could know, and half a step must not count for a whole one
        ([2, 2], (StateStatus.COMPLETE, 2, True)),
        ([1, 2], (StateStatus.COMPLETE, 2, True)),
    ],
)
def test_a_step_that_goes_on_behind_its_usual_end_never_counts_half(passes_before: list[int], left: Any) -> None:
    *survivors, dead = run_ranks(lost_behind_more_steps, passes_before, ranks=3, others_go_on=True)
    assert dead.was_killed
    for survivor in survivors:
        assert survivor.error is None, survivor.error
        assert survivor.value == left


def test_a_step_in_which_one_of_them_rests_is_never_taken_for_a_complete_one() -> None:
    state = make_state()
    for order in ("0", "0", "01", "0"):  # a generator that steps now and then
        attempt(state, order)
        before = picture(state)
        state.apply(attempt(state, "0", commit=False))
        assert state.status is StateStatus.COMPLETE, "it might have been a step of both, and half of it is missing"
        assert_same(before, picture(state))


def test_a_failure_inside_the_last_optimizer_is_torn() -> None:
    state = make_state()

    def explode(*_: Any) -> None:
        raise RuntimeError("inside the optimizer")

    snapshot = attempt(state, "0", commit=False)
    state.optimizer["second"].register_step_pre_hook(explode)
    backward(state)
    with pytest.raises(RuntimeError, match="inside"):
        state.optimizer["second"].step()
    state.apply(snapshot)
    assert state.status is StateStatus.PARTIAL


def test_how_often_optimizers_step_is_sent_along_with_the_state() -> None:
    state, newcomer = make_state(), make_state()
    attempt(state, "001")
    newcomer.load_state_dict(state.state_dict(), with_random=False)
    newcomer.apply(attempt(newcomer, "01", commit=False))
    assert newcomer.status is StateStatus.COMPLETE, "a newcomer that took this for complete would be a step apart"


# --- saving -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_a", [list, tuple, dict])
def test_what_is_saved_of_several_is_what_is_loaded(as_a: type) -> None:
    state, other = make_state(as_a, adam), make_state(as_a, adam)
    for _ in range(2):
        attempt(state, "01")
    stream = io.BytesIO()
    state.save(stream)
    stream.seek(0)
    other.load(stream)
    assert type(state.optimizer) is as_a, "the user's own"
    assert_same(picture(state), picture(other))
    torch.manual_seed(1)
    attempt(state, "01")
    torch.manual_seed(1)
    attempt(other, "01")
    assert_same(picture(state), picture(other))


def test_the_state_of_other_optimizers_is_refused_by_name() -> None:
    single = make_state(dict).optimizer["first"].state_dict()
    state = make_state(dict)
    with pytest.raises(ValueError, match="first, second was expected, and this one has param_groups, state"):
        state.load_state_dict({**state.state_dict(), "optimizer": single})


def test_the_state_of_another_kind_of_optimizer_is_refused_before_it_can_fail_in_a_step() -> None:
    state, other = make_state(list, sgd), make_state(list, adam)
    before = picture(other)
    told = "fit the optimizer 0: .* lack 'betas', 'eps', which this Adam needs, and have 'dampening', 'momentum'"
    with pytest.raises(ValueError, match=told) as raised:
        other.load_state_dict({**other.state_dict(), "optimizer": state.state_dict()["optimizer"]})
    assert is_final(raised.value), "no restart can help"
    assert_same(before, picture(other))


def test_parameter_groups_of_another_number_or_size_are_refused() -> None:
    state, other = make_state(list), make_state(list)
    state.optimizer[0].add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    with pytest.raises(ValueError, match=r"has 2 parameter group.*this SGD has 1.*that add_param_group has added"):
        other.load_state_dict(state.state_dict())
    del state.optimizer[0].param_groups[0]["params"][0], state.optimizer[0].param_groups[1]
    with pytest.raises(ValueError, match=r"hold \[1\] parameters, and those of this SGD hold \[2\]"):
        other.load_state_dict(state.state_dict())


def test_what_an_older_release_of_an_optimizer_had_not_is_filled_in() -> None:
    state = make_state(make=adam)
    saved = state.state_dict()
    for one in saved["optimizer"].values():
        one["param_groups"][0].pop("decoupled_weight_decay", None)  # which torch 2.6 has not
        del one["param_groups"][0]["maximize"]
    state.load_state_dict(saved)
    attempt(state, "01")


def test_several_schedulers_are_undone_and_saved() -> None:
    state = make_state()
    schedulers = {
        name: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma)
        for (name, optimizer), gamma in zip(state.optimizer.items(), (0.5, 0.1), strict=True)
    }
    state = torchelastic.ModelState(state.module, state.optimizer, scheduler=schedulers)
    state.sync()
    attempt(state, "01")
    before = picture(state)
    snapshot = attempt(state, "0", commit=False)
    for scheduler in schedulers.values():
        scheduler.step()
    assert state.scheduler["first"].get_last_lr() != before["scheduler"]["first"]["_last_lr"]
    state.apply(snapshot)
    assert_same(before, picture(state))
    assert [optimizer.param_groups[0]["lr"] for optimizer in state.optimizer.values()] == [0.1, 0.1]


@pytest.mark.parametrize("optimizer", [[], {}, [3], {"first": object()}])
def test_what_is_no_optimizer_is_refused(optimizer: Any) -> None:
    with pytest.raises(ValueError, match="optimizer"):
        torchelastic.ModelState(torch.nn.Linear(2, 2), optimizer)


# --- a sync that fails after it has brought this process level --------------------------------------------------------


def test_a_sync_that_fails_after_the_state_has_come_leaves_that_state_whole() -> None:
    state, source = make_state(), make_state()
    for _ in range(3):
        attempt(source, "01")
    snapshot = state.snapshot()  # what the train loop takes before it forms a group
    state.load_state_dict(source.state_dict(), with_random=False)
    state.apply(snapshot)  # a peer was lost at the very end of the sync
    assert (state.step, state.status) == (3, StateStatus.COMPLETE)
    assert_same(source.module.state_dict(), state.module.state_dict())


def test_a_sync_that_fails_after_a_step_was_found_to_stand_does_not_bring_its_number_back() -> None:
    state = make_state()
    state.apply(attempt(state, "01", commit=False))
    snapshot = state.snapshot()

    def explode(_change: object) -> None:
        raise RuntimeError("at the very end of the sync")

    state._world._before = 7
    state.on_world_change(explode)
    with pytest.raises(RuntimeError, match="very end"):
        state.sync()
    state.apply(snapshot)
    assert (state.step, state.status) == (1, StateStatus.COMPLETE), "its weights are those after the step"


@pytest.mark.parametrize("has_stepped", [False, True])
def test_a_step_that_adds_a_parameter_group_is_undone_or_committed_as_a_whole(has_stepped: bool) -> None:
    module = Pair()
    state = torchelastic.ModelState(module, sgd(module.first.parameters()), snapshot="commit")
    state.sync()
    before = state.snapshot()
    state.optimizer.add_param_group({"params": list(module.second.parameters()), "lr": 0.5})
    state.model(torch.randn(4, 4)).square().mean().backward()
    if has_stepped:
        state.optimizer.step()
    state.apply(before)
    state.sync()
    assert [group["lr"] for group in state.optimizer.param_groups] == ([0.1, 0.5] if has_stepped else [0.1])
    assert state.step == has_stepped


class OwnForm(torch.optim.SGD):
    """Saves in a form of its own, as wrappers of optimizers do."""

    def state_dict(self) -> dict[str, Any]:
        return {"mine": super().state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict["mine"])


def test_an_optimizer_that_saves_in_a_form_of_its_own_loads_it() -> None:
    module = Pair()
    states = [torchelastic.ModelState(module, OwnForm(module.parameters(), lr=lr)) for lr in (0.1, 0.2)]
    states[1].load_state_dict(states[0].state_dict())
    assert states[1].optimizer.param_groups[0]["lr"] == 0.1


class OfTheUser(torch.optim.Optimizer):
    """Has only the settings that its author has thought of."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                steps = self.state[parameter].setdefault("steps", torch.zeros(()))
                parameter.sub_(parameter.grad, alpha=group["lr"] / float(steps.add_(1)))


def test_an_optimizer_of_the_users_own_is_loaded_as_often_as_it_takes() -> None:
    state, other = make_state(make=OfTheUser), make_state(make=OfTheUser)
    for _ in range(3):
        attempt(state, "01")
        other.load_state_dict(state.state_dict())
        assert_same(picture(state), picture(other))


def test_what_an_optimizer_keeps_in_more_digits_than_its_parameters_is_sent_and_undone_with_all_of_them() -> None:
    def states(**options: Any) -> torchelastic.ModelState:
        module = torch.nn.Linear(2, 2).bfloat16()
        state = torchelastic.ModelState(module, OfTheUser(module.parameters()), **options)
        state.sync()
        return state

    state, other = states(snapshot="full"), states()
    finer = {"sum": torch.full((2, 2), 1 / 3), "history": [{"sum": torch.full((3,), 1 / 3)}]}  # float32
    state.optimizer.state[state.module.weight] = finer
    other.load_state_dict(state.state_dict())
    assert_same(picture(state), picture(other))
    state.apply(state.snapshot())
    assert_same(picture(state), picture(other))
    wider = torchelastic.ModelState(module := torch.nn.Linear(2, 2), OfTheUser(module.parameters()))
    wider.optimizer.state[module.weight] = {"sum": torch.full((2, 2), 1 / 3)}
    other.load_state_dict(wider.state_dict())
    assert other.optimizer.state[other.module.weight]["sum"].dtype is torch.bfloat16, "as torch does for other types"


def strayed_step(state: torchelastic.ModelState, when: str) -> None:
    """A train step that changes weights itself: a momentum encoder, or SAM, before the optimizer, a target after it."""

    weight = state.module.get_parameter("second.weight")

    def change() -> None:
        if when == "by other memory":
            weight.data = weight.data * 0.5
        else:
            with torch.no_grad():
                weight.mul_(0.5)

    if when != "after":
        change()
    if when != "before, and it fails":
        state.optimizer.zero_grad()
        loss: torch.Tensor = state.model(torch.randn(5, 4)).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no types here
        state.optimizer.step()
    if when == "after":
        change()


def first_alone() -> torchelastic.ModelState:
    torch.manual_seed(0)
    module = Pair()
    module.second.requires_grad_(False)
    state = torchelastic.ModelState(module, sgd(module.first.parameters()), snapshot="commit")
    state.sync()
    return state


@pytest.mark.parametrize("when", ["before", "before, and it fails", "by other memory", "after"])
def test_a_failed_step_that_changes_weights_beside_the_optimizer_is_undone(
    when: str, caplog: pytest.LogCaptureFixture
) -> None:
    state = first_alone()
    for _ in range(2):
        state.snapshot()
        strayed_step(state, when.partition(",")[0])
        state.commit()
    assert caplog.text.count("snapshot='full'") == 1
    before = picture(state)
    snapshot = state.snapshot()
    strayed_step(state, when)
    state.apply(snapshot)
    assert state.status is StateStatus.COMPLETE
    assert_same(before, picture(state))


@pytest.mark.parametrize("when", ["before", "before, and it fails", "by other memory", "after"])
def test_weights_that_the_very_first_step_has_changed_itself_are_not_taken_for_those_before_it(when: str) -> None:
    state = first_alone()
    snapshot = state.snapshot()
    strayed_step(state, when)
    state.apply(snapshot)
    assert state.status is StateStatus.PARTIAL
    with pytest.raises(torchelastic.NonRetryableException, match="snapshot='full'"):
        state.sync()
