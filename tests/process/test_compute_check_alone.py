"""A step that is computed twice, to compare, leaves no trace; and what is refused. One worker, without a launcher."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchelastic
from torchelastic import ComputeCheck, ModelState
from torchelastic.data import ElasticBatchSampler, ElasticLoader
from torchelastic.errors import ComputeCheckError
from torchelastic.p2p import CoordinatorP2P
from torchelastic.testing.wrong_bits import computes_wrong

STEPS = 12
Step = Callable[[ModelState, Any], None]
mse: Callable[..., Any] = torch.nn.functional.mse_loss


class Augmented(torch.utils.data.Dataset[Any]):
    def __init__(self, plain: torch.utils.data.TensorDataset) -> None:
        self.plain = plain

    def __len__(self) -> int:
        return len(self.plain)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        inputs, targets = self.plain[index]
        return inputs + torch.rand(4), targets


def trained(train_step: Step, *, check: ComputeCheck | None = None, wrong: Callable[..., bool] | None = None,
            first: torch.nn.Module | None = None, augments: bool = False, num_workers: int = 0,
            **options: Any) -> ModelState:  # fmt: skip
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *([] if first is None else [first]),
        torch.nn.Linear(4, 8),
        torch.nn.BatchNorm1d(8),
        torch.nn.Dropout(0.3),
        torch.nn.Tanh(),
        torch.nn.Linear(8, 1),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(96, 4, generator=generator)
    data: Any = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    data = Augmented(data) if augments else data
    sampler = ElasticBatchSampler(data, 8, seed=2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
    state = ModelState(model, optimizer, scheduler=scheduler, sampler=sampler, check=check, **options)
    state.extra["seen"] = 0
    if wrong is not None:
        computes_wrong(model, "gradient", lambda _tensor: wrong(state))
    loader = ElasticLoader(data, sampler, num_workers=num_workers)

    def step(state: ModelState) -> None:
        train_step(state, loader)

    torchelastic.train(CoordinatorP2P("gloo"), step, state)
    return state


def plain(state: ModelState, loader: Any) -> None:
    inputs, targets = next(loader)
    state.optimizer.zero_grad()
    mse(state.model(inputs), targets).backward()
    state.optimizer.step()
    state.scheduler.step()
    state.extra["seen"] += len(inputs)


def in_micro_batches(state: ModelState, loader: Any) -> None:
    inputs, targets = next(loader)
    state.optimizer.zero_grad(set_to_none=False)
    with state.no_sync():
        mse(state.model(inputs[:4]), targets[:4]).backward()
    mse(state.model(inputs[4:]), targets[4:]).backward()
    state.optimizer.step()


def over_two_steps(state: ModelState, loader: Any) -> None:
    inputs, targets = next(loader)
    mse(state.model(inputs), targets).backward()
    if state.step % 2:
        torch.nn.utils.clip_grad_norm_(state.module.parameters(), 1.0)
        state.optimizer.step()
        state.optimizer.zero_grad()


def with_counts(state: ModelState, loader: Any) -> None:
    inputs, targets = next(loader)
    state.optimizer.zero_grad()
    state.backward(mse(state.model(inputs), targets, reduction="sum"), len(inputs))
    state.optimizer.step()


def catching_all(state: ModelState, loader: Any) -> None:
    try:
        plain(state, loader)
    except StopIteration:
        raise
    except Exception:
        return


def content(state: ModelState) -> dict[str, Any]:
    tree = copy.deepcopy(state.state_dict())
    return {name: tree[name] for name in ("module", "optimizer", "scheduler", "sampler", "extra", "step", "random")}


def assert_equal(one: Any, other: Any) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        for pair in zip(one, other, strict=True):
            assert_equal(*pair)
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    else:
        assert one == other


@pytest.mark.parametrize("snapshot", ["auto", "full", "commit"])
@pytest.mark.parametrize("step", [plain, in_micro_batches, over_two_steps, with_counts, catching_all])
def test_a_step_that_was_computed_twice_leaves_what_one_leaves_that_was_not(step: Step, snapshot: str) -> None:
    runs: list[int] = []

    def counted(state: ModelState, loader: Any) -> None:
        runs.append(state.step)
        step(state, loader)

    checked = trained(counted, check=ComputeCheck(every=2), snapshot=snapshot)
    twice = [each for each in range(STEPS) if runs.count(each) == 2]
    assert twice == [1, 3, 5, 7, 9, 11], "nothing was computed twice"
    assert_equal(content(checked), content(trained(step, snapshot=snapshot)))


@pytest.mark.parametrize("logical_shards", [None, 1])
def test_what_the_only_worker_computes_otherwise_the_second_time_ends_the_run(logical_shards: int | None) -> None:
    def step(state: ModelState, loader: Any) -> None:
        for inputs, targets in state.shards(loader):
            if logical_shards is None:
                state.optimizer.zero_grad()
            mse(state.model(inputs), targets).backward()
        state.optimizer.step()

    struck: list[int] = []

    def once(state: ModelState) -> bool:
        if state.step < 5 or struck:
            return False
        struck.append(state.step)
        return True

    with pytest.raises(ComputeCheckError, match=r"step 6: .* cannot be told who computes wrong; .* was in step 5"):
        trained(step, check=ComputeCheck(every=1), wrong=once, logical_shards=logical_shards)
    assert struck == [5]


class Noisy(torch.nn.Module):
    """Draws from a generator of its own, which nothing undoes."""

    def __init__(self) -> None:
        super().__init__()
        self.chance = torch.Generator().manual_seed(3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + torch.rand(1, generator=self.chance)


def whys_off(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "check of computations is off" in record.getMessage()]


def test_a_model_that_cannot_be_repeated_switches_the_check_off(caplog: pytest.LogCaptureFixture) -> None:
    state = trained(plain, check=ComputeCheck(every=1), first=Noisy())
    (why,) = whys_off(caplog)
    assert "step 2: " in why
    assert "the same step gives other bits each time" in why
    assert "the first difference: the output of 0 (Noisy)" in why
    assert state.step == STEPS


@pytest.mark.parametrize("of_loss", [False, True])
def test_data_that_the_script_draws_anew_are_compared_with_nothing(
    caplog: pytest.LogCaptureFixture, of_loss: bool
) -> None:
    def step(state: ModelState, loader: Any) -> None:
        inputs, targets = next(loader)
        noise = torch.rand(1, generator=chance)
        state.optimizer.zero_grad()
        mse(state.model(inputs if of_loss else inputs + noise), targets + noise if of_loss else targets).backward()
        state.optimizer.step()

    chance = torch.Generator().manual_seed(3)  # not the state's
    state = trained(step, check=ComputeCheck(every=1))
    (why,) = whys_off(caplog)
    assert "step 4: " in why, "after three"
    assert "the model is given other data, or its loss gives other gradients" in why
    assert state.step == STEPS


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_repeat_gets_the_batch_of_the_rehearsal_though_an_augmentation_draws_anew(num_workers: int) -> None:
    given: dict[int, list[torch.Tensor]] = {}

    def step(state: ModelState, loader: Any) -> None:
        inputs, targets = next(loader)
        given.setdefault(state.step, []).append(inputs.clone())
        inputs.mul_(2.0)  # in place, as steps do
        state.optimizer.zero_grad()
        mse(state.model(inputs), targets).backward()
        state.optimizer.step()

    state = trained(step, check=ComputeCheck(every=2), augments=True, num_workers=num_workers)
    pairs = [batches for batches in given.values() if len(batches) == 2]
    assert len(pairs) == STEPS // 2
    assert all(torch.equal(*pair) for pair in pairs)
    checks = state._gradients.checks
    assert checks is not None
    assert checks.record.agreed == STEPS // 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"every": "0.5"}, r"every='0.5'\) is no share"),
        ({"every": 0}, r"every=0\) is no share"),
        ({"every": "200%"}, "is no share"),
        ({"on_wrong": "kill"}, r"on_wrong='kill'\) is not one of leave, restore, stop, warn"),
        ({"on_doubt": "leave"}, r"on_doubt='leave'\) is not one of stop, warn"),
    ],
)
def test_options_of_another_kind_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ComputeCheck(**options)


def test_a_state_whose_data_cannot_be_repeated_is_refused() -> None:
    model = torch.nn.Linear(2, 1)
    with pytest.raises(ValueError, match="it needs an ElasticBatchSampler or an ElasticStream"):
        ModelState(model, torch.optim.SGD(model.parameters(), lr=0.1), check=ComputeCheck())


def test_a_state_with_checks_can_be_pickled() -> None:
    state = trained(plain, check=ComputeCheck(every=2))
    before = state._gradients.checks
    assert before is not None
    checks = pickle.loads(pickle.dumps(before))
    assert checks.record.agreed == before.record.agreed > 0
