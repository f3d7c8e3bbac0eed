"""What a checkpoint has: all that the state had, proved by a census of both; and what a changed script makes of it."""

from __future__ import annotations

import io
import logging
import random
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import torchelastic
from tests.contracts.census import Census, census_of, differences
from tests.contracts.ordinary_programs import PROGRAMS, Program
from tests.contracts.test_newcomers import DAILY, NOT_SENT, OWN_CHANGES, REFUSED
from tests.contracts.training_states import CHANGES, World, world
from tests.process.forked_ranks import run_ranks, values
from tests.process.tiered_work import join
from torchelastic.checkpoint import DiskTier, TieredCheckpointManager
from torchelastic.errors import UnfitStateError
from torchelastic.group.peers import Alone, Peers
from torchelastic.inventory.generators import generators

#: Not in a checkpoint: what is not sent either. Each of these fails when it is, so that it is taken from this list.
NOT_STORED = NOT_SENT
#: Gradients, and whether an optimizer has stepped in this process; and of a parameter that no group has any more.
OWN = re.compile(r"\.grad(\.|$)|^optimizer\._opt_called$|^optimizer\.state\.\[torch\.nn\.parameter")


def by_file(saved: World, loaded: World, _folder: Path) -> None:
    stream = io.BytesIO()
    saved.state.save(stream)
    stream.seek(0)
    loaded.state.load(stream)


def by_tiers(saved: World, loaded: World, folder: Path) -> None:
    manager = TieredCheckpointManager([DiskTier(folder)], run_id="run")
    manager.enter_group(Alone())
    manager.save_step(saved.state, saved.state.step, Alone())
    assert manager.wait(30)
    assert not manager.failures
    assert manager.restore(loaded.state, Alone()) == saved.state.step


WAYS: dict[str, Callable[[World, World, Path], None]] = {"file": by_file, "tiers": by_tiers}


def built(seed: int) -> World:
    one = world(seed=seed, is_alone=False)
    one.state.extra["teacher"] = teacher = torch.nn.BatchNorm1d(4).eval()
    teacher.register_buffer("table", torch.zeros(0), persistent=False)
    return one


def hooks_alike(census: Census) -> Census:
    """Each process numbers its hooks."""
    return dict(re.sub(r"hooks\.\d+", "hooks.N", f"{path}\n{text}").split("\n", 1) for path, text in census.items())


def cases() -> list[Any]:
    found = []
    for way in WAYS:
        for name in (*CHANGES, *OWN_CHANGES):
            if name in REFUSED:
                continue
            reason = NOT_STORED.get(name)
            marks = [pytest.mark.xfail(strict=True, reason=reason)] if reason else []
            marks += [] if name in DAILY else [pytest.mark.long]
            found.append(pytest.param(way, name, marks=marks, id=f"{way}, {name}"))
    return found


@pytest.mark.parametrize(("way", "change"), cases())
def test_what_is_loaded_is_what_was_saved(way: str, change: str, tmp_path: Path) -> None:
    one, other = built(1), built(2)
    one.state.sync(1, 0)
    for _ in range(2):
        one.train()
    before = census_of(**one.roots)
    (CHANGES | OWN_CHANGES)[change](one)
    assert differences(before, census_of(**one.roots)) or change == "nothing"
    drawn = generators()  # a restart of the manager draws, too
    WAYS[way](one, other, tmp_path)
    found = hooks_alike(census_of(**other.roots))
    drawn.put()
    found = differences(hooks_alike(census_of(**one.roots)), found)
    assert {path: text for path, text in found.items() if not OWN.search(path)} == {}


def test_an_attribute_that_the_run_has_changed_is_told(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    one, other = built(1), built(1)
    one.state.sync(1, 0)
    one.layer.temperature = 0.3
    by_file(one, other, tmp_path)
    told = [record.getMessage() for record in caplog.records if "attributes of the model" in record.getMessage()]
    assert len(told) == 1
    assert "temperature is 0.3 there and 1.0 here (there: in the checkpoint)" in told[0]


# --- what the script has changed since is kept ------------------------------------------------------------------------


def restarted(change: Callable[[World], Any], in_run: Callable[[World], Any], tmp_path: Path) -> World:
    """A run changes something and is saved; the script that is started again was changed meanwhile."""
    one, other = built(1), built(1)
    one.state.sync(1, 0)
    one.train()
    in_run(one)
    change(other)
    by_tiers(one, other, tmp_path)
    return other


def nothing(_: World) -> None:
    pass


def told_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "built otherwise now" in record.getMessage()]


def test_layers_that_the_script_freezes_anew_stay_frozen_and_that_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = restarted(
        lambda one: one.layer.linear.requires_grad_(False), lambda one: one.layer.frozen.requires_grad_(True), tmp_path
    )
    assert not other.layer.linear.weight.requires_grad, "the script has changed that"
    assert other.layer.frozen.weight.requires_grad, "the run has changed that, and the script builds it as before"
    (told,) = told_in(caplog)
    assert "linear.weight, linear.bias" in told


def test_a_mode_that_the_script_has_changed_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = restarted(lambda one: one.layer.norm.eval(), nothing, tmp_path)
    assert not other.layer.norm.training
    assert other.layer.training
    (told,) = told_in(caplog)
    assert told.endswith(": norm")


def test_a_buffer_that_the_script_computes_otherwise_now_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def longer(one: World) -> None:
        one.layer.hidden = torch.ones(9)

    other = restarted(longer, lambda one: one.layer.hidden.add_(3), tmp_path)
    assert torch.equal(other.layer.hidden, torch.ones(9))
    (told,) = told_in(caplog)
    assert "not persistent" in told
    assert told.endswith(": hidden")


def test_nothing_is_told_of_a_script_that_builds_the_same(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def change(one: World) -> None:
        one.layer.hidden.add_(3)
        one.layer.norm.eval()
        one.layer.frozen.requires_grad_(True)

    with caplog.at_level(logging.WARNING, logger="torchelastic"):
        other = restarted(nothing, change, tmp_path)
    assert other.layer.hidden.tolist() == [3.0] * 4
    assert not other.layer.norm.training
    assert told_in(caplog) == []
    assert "attributes" not in caplog.text


@pytest.mark.parametrize("rate", [0.1, 0.01])
def test_a_learning_rate_that_the_script_builds_otherwise_is_the_runs_and_named(
    rate: float, caplog: pytest.LogCaptureFixture
) -> None:
    def built(rate: float, decay: float) -> tuple[torchelastic.ModelState, torch.optim.Optimizer]:
        module = torch.nn.Linear(2, 1)
        optimizer = torch.optim.AdamW(module.parameters(), lr=rate, weight_decay=decay)
        return torchelastic.ModelState(module, optimizer), optimizer

    state, optimizer = built(0.1, 0.5)
    state.sync(1, 0)
    optimizer.param_groups[0]["lr"] = 0.05  # as a schedule does: that is no change of the script
    stream = io.BytesIO()
    state.save(stream)
    again, other = built(rate, 0.5)
    stream.seek(0)
    again.load(stream)
    assert other.param_groups[0]["lr"] == 0.05
    told = [text for text in caplog.messages if "builds its optimizer with other values" in text]
    assert len(told) == (rate != 0.1)
    assert all(
        "goes on with its own, and with its schedule: lr of group 0 (0.1 there, 0.01 in the" in text for text in told
    )


@pytest.mark.parametrize("steps", [10, 20])
def test_a_schedule_that_the_script_builds_otherwise_is_the_runs_and_named(
    steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    def built(steps: int) -> tuple[torchelastic.ModelState, Any]:
        module = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=steps)
        return torchelastic.ModelState(module, optimizer, scheduler=scheduler), scheduler

    state, scheduler = built(10)
    state.sync(1, 0)
    scheduler.optimizer.step()
    scheduler.step()
    stream = io.BytesIO()
    state.save(stream)
    again, other = built(steps)
    stream.seek(0)
    again.load(stream)
    assert (other.total_iters, other.last_epoch) == (10, 1)
    told = [text for text in caplog.messages if "builds its schedule otherwise" in text]
    assert len(told) == (steps != 10)
    assert all("LinearLR.total_iters (10 there, 20 in the script)" in text for text in told)


# --- wrappers that are put on and taken off ---------------------------------------------------------------------------


class Versioned(torch.nn.Module):
    """Of its second version: what its first one has saved is doubled as it is loaded."""

    _version = 2
    table: torch.Tensor
    hidden: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.norm = torch.nn.BatchNorm1d(3)
        self.register_buffer("table", torch.ones(3))
        self.register_buffer("hidden", torch.zeros(3), persistent=False)

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        if metadata.get("version") != 2:
            state[f"{prefix}table"] = state[f"{prefix}table"] * 2
        super()._load_from_state_dict(state, prefix, metadata, *rest)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.norm(self.linear(inputs)) * self.table + self.hidden
        return outputs


def plain(block: Versioned) -> torch.nn.Module:
    return torch.nn.Sequential(block)


def compiled(block: Versioned) -> torch.nn.Module:
    return cast("torch.nn.Module", torch.compile(torch.nn.Sequential(block), backend="eager"))


def with_checkpointing(block: Versioned) -> torch.nn.Module:
    return torch.nn.Sequential(checkpoint_wrapper(block))


WRAPPED = (plain, compiled, with_checkpointing)


@pytest.mark.parametrize("loads", WRAPPED)
@pytest.mark.parametrize("saves", WRAPPED)
@pytest.mark.parametrize("way", ["file", "tiers"])
def test_what_is_saved_with_a_wrapper_is_loaded_without_it(saves: Any, loads: Any, way: str, tmp_path: Path) -> None:
    def made(wrapped: Any) -> tuple[torchelastic.ModelState, Versioned]:
        block = Versioned()
        model = wrapped(block)
        return torchelastic.ModelState(model, torch.optim.Adam(model.parameters(), lr=0.1)), block

    one, block = made(saves)
    one.sync(1, 0)
    one.module(torch.randn(4, 3)).sum().backward()
    one.optimizer.step()
    one.commit()
    block.norm.eval()
    block.linear.bias.requires_grad_(False)
    block.hidden.add_(5)
    block.table.add_(1)
    other, found = made(loads)
    if way == "file":
        stream = io.BytesIO()
        one.save(stream)
        stream.seek(0)
        other.load(stream)
    else:
        manager = TieredCheckpointManager([DiskTier(tmp_path)], run_id="run")
        manager.enter_group(Alone())
        manager.save_step(one, 1, Alone())
        assert manager.wait(30)
        assert manager.restore(other, Alone()) == 1
    assert found.training
    assert not found.norm.training
    assert [p.requires_grad for p in found.linear.parameters()] == [True, False]
    assert found.hidden.tolist() == [5.0] * 3
    assert found.table.tolist() == [2.0] * 3, "no migration runs on what this version has saved"
    for here, there in zip(block.parameters(), found.parameters(), strict=True):
        assert torch.equal(here, there)
        assert torch.equal(one.optimizer.state[here]["exp_avg"], other.optimizer.state[there]["exp_avg"])


# --- random numbers of every rank -------------------------------------------------------------------------------------


def drawn() -> list[float]:
    return torch.rand(2).tolist()


def group(round_number: int) -> Peers:
    return join(round_number) if dist.is_initialized() else Alone(round_number)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def saved_by_all(folder: str) -> list[float]:
    one = world(seed=rank() + 1, is_alone=False)
    one.state.sync()
    drawn()
    manager, peers = TieredCheckpointManager([DiskTier(folder)], run_id="run"), group(1)
    manager.enter_group(peers)
    manager.save_step(one.state, 0, peers)
    assert manager.wait(30)
    return drawn()


def loaded_by_all(folder: str) -> list[float]:
    one = world(seed=rank() + 7, is_alone=False)
    manager, peers = TieredCheckpointManager([DiskTier(folder)], run_id="run"), group(2)
    manager.enter_group(peers)
    assert manager.restore(one.state, peers) == 0
    one.state.sync()
    return drawn()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_rank_draws_what_it_drew_and_one_more_draws_something_of_its_own(tmp_path: Path, ranks: int) -> None:
    before = values(run_ranks(saved_by_all, str(tmp_path), ranks=2))
    assert before[0] != before[1]
    after = values(run_ranks(loaded_by_all, str(tmp_path), ranks=ranks))
    assert after[:2] == before[:ranks]
    if ranks > 2:
        assert after[2] not in before
        assert values(run_ranks(loaded_by_all, str(tmp_path), ranks=ranks)) == after, "and the same at each restart"


# --- programs as people write them ------------------------------------------------------------------------------------

STEPS, SAVED_AT = 8, 4
#: Whose restarts end elsewhere: why.
NOT_RESUMED = {
    "accumulation_over_steps": "gradients are in no checkpoint: a warning says so once",
}


def programs() -> list[Any]:
    reasons = {name: [pytest.mark.xfail(strict=True, reason=reason)] for name, reason in NOT_RESUMED.items()}
    return [pytest.param(name, marks=reasons.get(name, []), id=name) for name in PROGRAMS]


def trained(state: torchelastic.ModelState, program: Program, until: int) -> None:
    state.sync(1, 0)
    while state.step < until:
        state.snapshot()
        program.step(state, lambda: None)
        state.commit()


@pytest.mark.parametrize("name", programs())
def test_a_published_program_that_is_started_again_ends_as_an_undisturbed_one(name: str) -> None:
    def made() -> tuple[torchelastic.ModelState, Program]:
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(0)
        program = PROGRAMS[name]()
        return torchelastic.ModelState(program.module, program.optimizer, extra=program.extra), program

    undisturbed, program = made()
    trained(undisturbed, program, SAVED_AT)
    stream = io.BytesIO()
    undisturbed.save(stream)
    trained(undisturbed, program, STEPS)
    resumed, program = made()
    stream.seek(0)
    resumed.load(stream)
    trained(resumed, program, STEPS)
    assert resumed.step == undisturbed.step
    for name, value in undisturbed.module.state_dict().items():
        assert torch.equal(value, resumed.module.state_dict()[name]), name


def saved_twice(program: Program, until: int, caplog: pytest.LogCaptureFixture) -> int:
    """How often it is said that gradients are in no checkpoint."""
    state = torchelastic.ModelState(program.module, program.optimizer)
    trained(state, program, until)
    for _ in range(2):
        state.checkpoint_tree()
    return caplog.text.count("has left its gradients for the next one, and they are in no checkpoint")


def test_gradients_that_are_kept_over_steps_are_said_once_to_be_in_no_checkpoint(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert saved_twice(PROGRAMS["accumulation_over_steps"](), 13, caplog) == 1


def test_nor_is_it_said_of_what_an_optimizer_has_used_when_the_next_step_has_begun(
    caplog: pytest.LogCaptureFixture,
) -> None:
    module = torch.nn.Linear(4, 2)
    state = torchelastic.ModelState(module, torch.optim.SGD(module.parameters(), lr=0.1))
    state.sync(1, 0)
    state.snapshot()
    state.model(torch.randn(3, 4)).square().mean().backward()
    state.optimizer.step()
    state.commit()
    state.snapshot()
    assert module.weight.grad is not None
    state.checkpoint_tree()
    state.commit()  # a step that computes nothing: a log, an evaluation
    state.snapshot()
    state.checkpoint_tree()
    assert "has left its gradients" not in caplog.text

    state.model(torch.randn(3, 4)).square().mean().backward()  # the first of several whose gradients add up
    state.commit()
    state.checkpoint_tree()
    assert "step 3 has left its gradients" in caplog.text


@pytest.mark.parametrize("until", [3, 12])
@pytest.mark.parametrize("to_none", [True, False])
def test_nothing_is_said_of_gradients_that_the_next_step_drops(
    caplog: pytest.LogCaptureFixture, to_none: bool, until: int
) -> None:
    module = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def step(state: Any, _fail: Any) -> None:
        optimizer.zero_grad(set_to_none=to_none)
        state.model(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()

    assert saved_twice(Program(module, optimizer, step, 0), until, caplog) == 0


# --- what was saved before --------------------------------------------------------------------------------------------

#: By `ModelState.save` and by a `TieredCheckpointManager` of the last commit before form 2: two optimizers, two steps.
FORM_1 = Path(__file__).with_name("saved_in_form_1.zip")


def in_form_1() -> torchelastic.ModelState:
    linear, norm = torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)
    optimizers = {
        "first": torch.optim.Adam([linear.bias, linear.weight], lr=0.5),
        "second": torch.optim.SGD(norm.parameters(), lr=0.5, momentum=0.9),
    }
    return torchelastic.ModelState(torch.nn.Sequential(linear, norm), optimizers, extra={"count": 0})


@pytest.mark.parametrize("way", ["file", "tiers"])
def test_what_was_saved_in_form_1_is_loaded(way: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(FORM_1) as archive:
        archive.extractall(tmp_path)
    saved = torch.load(tmp_path / "file", weights_only=True)
    state = in_form_1()
    if way == "file":
        with (tmp_path / "file").open("rb") as stream:
            state.load(stream)
    else:
        manager = TieredCheckpointManager([DiskTier(tmp_path / "tiers")], run_id="run")
        manager.enter_group(Alone())
        assert manager.restore(state, Alone()) == 2
    assert (state.step, state.extra) == (2, {"count": 2})
    assert torch.equal(torch.get_rng_state(), saved["random"])
    for name, value in state.module.state_dict().items():
        assert torch.equal(value, saved["module"][name]), name
    for name, optimizer in state.optimizer.items():
        assert optimizer.param_groups[0]["lr"] == 0.1
        for number, kept in optimizer.state_dict()["state"].items():
            for key, value in kept.items():
                assert torch.equal(value, saved["optimizer"][name]["state"][number][key]), (name, number, key)


# --- what cannot be loaded --------------------------------------------------------------------------------------------


def test_a_checkpoint_of_a_newer_release_is_refused_before_anything_is_loaded() -> None:
    one, other = built(1), built(2)
    before = census_of(**other.roots)
    with pytest.raises(UnfitStateError, match="has form 3, and this release of torchelastic reads forms 1 and 2"):
        other.state.load_checkpoint_tree({**one.state.checkpoint_tree(), "form": 3})
    assert differences(before, census_of(**other.roots)) == {}


def test_a_part_that_nobody_knows_is_named(caplog: pytest.LogCaptureFixture) -> None:
    one, other = built(1), built(2)
    other.state.load_checkpoint_tree({**one.state.checkpoint_tree(), "sparsity": {"mask": 1}})
    assert "has parts that nobody here knows, and they are skipped: ['sparsity']" in caplog.text


class WithMore(torchelastic.ModelState):
    """A user's own, that adds to what is saved."""

    more = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "more": self.more}

    def load_state_dict(self, tree: dict[str, Any], *, with_random: bool = True) -> None:
        super().load_state_dict(tree, with_random=with_random)
        self.more = tree["more"]


def test_what_a_subclass_adds_to_the_state_dict_is_saved(caplog: pytest.LogCaptureFixture) -> None:
    def made() -> WithMore:
        model = torch.nn.Linear(2, 1)
        return WithMore(model, torch.optim.SGD(model.parameters(), lr=0.1))

    one, other, third = made(), made(), made()
    one.more = 3
    other.load_checkpoint_tree(one.checkpoint_tree())
    stream = io.BytesIO()
    one.save(stream)
    stream.seek(0)
    third.load(stream)
    assert (other.more, third.more) == (3, 3)
    assert "nobody here knows" not in caplog.text


def test_the_optimizer_of_a_checkpoint_is_what_torch_loads() -> None:
    one = built(1)
    one.state.sync(1, 0)
    one.train()
    other = built(2)
    other.optimizer.load_state_dict(one.state.checkpoint_tree()["optimizer"])
    (first, *_), (same, *_) = one.optimizer.state.values(), other.optimizer.state.values()
    assert torch.equal(first["exp_avg"], same["exp_avg"])


def test_a_group_that_the_run_has_added_comes_with_its_state(tmp_path: Path) -> None:
    one, other = built(1), built(2)
    one.state.sync(1, 0)
    CHANGES["a group of the model's parameters"](one)
    one.train()
    by_file(one, other, tmp_path)
    assert [len(group["params"]) for group in other.optimizer.param_groups] == [
        len(group["params"]) for group in one.optimizer.param_groups
    ]
    assert other.optimizer.param_groups[1]["lr"] == 0.5
    of_frozen = other.optimizer.state[other.layer.frozen.weight]["exp_avg"]
    assert torch.equal(of_frozen, one.optimizer.state[one.layer.frozen.weight]["exp_avg"])


def test_a_model_that_is_another_one_is_refused() -> None:
    one = built(1)
    model = torch.nn.Linear(2, 1)
    other = torchelastic.ModelState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(UnfitStateError, match="does not fit this model"):
        other.load_checkpoint_tree(one.state.checkpoint_tree())
