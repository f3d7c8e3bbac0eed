"""What a sharded state keeps where model and optimizer are built anew: for the next group, and after a restart."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import torchelastic
from tests.contracts.census import Census, census_of, differences
from tests.contracts.training_states import CHANGES, Layer, Metric
from tests.older_torch import needs_fsdp2_on_cpus
from tests.process.forked_ranks import run_ranks, values
from tests.process.tiered_work import join
from torchelastic.checkpoint import DiskTier, TieredCheckpointManager
from torchelastic.errors import NonRetryableException
from torchelastic.group.peers import Alone

pytestmark = needs_fsdp2_on_cpus

#: What is FSDP2's, and belongs to one group: its hooks, and the meshes. And what each rank has for itself.
OF_GROUP = re.compile(r"_hooks|\.context\b|\.grad(\.|$)|^random\.|^optimizer\._opt_called$")


@pytest.fixture
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class ShardedWorld:
    """As `World` is for a `ModelState`; the objects are those of the present group."""

    def __init__(self) -> None:
        extra = {
            "count": 0,
            "log": [1, 2],
            "metric": Metric(),
            "average": torch.zeros(4),
            "generator": torch.Generator().manual_seed(3),
            "teacher": torch.nn.BatchNorm1d(4).eval(),
        }
        extra["teacher"].register_buffer("table", torch.zeros(0), persistent=False)  # type: ignore[attr-defined]  # a module
        self.state = torchelastic.ShardedState(build, extra=extra)

    @property
    def layer(self) -> Any:
        return self.state.model

    @property
    def optimizer(self) -> Any:
        return self.state.optimizer

    @property
    def scheduler(self) -> Any:
        return self.state.scheduler

    def draw(self) -> torch.Tensor:
        return torch.randn(6, 4)

    def backward(self) -> None:
        self.state.model(self.draw()).square().mean().backward()

    def train(self) -> None:
        self.state.snapshot()
        self.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.state.commit()

    def census(self) -> Census:
        found = census_of(model=self.layer, optimizer=self.optimizer, scheduler=self.scheduler, extra=self.state.extra)
        return {path: text for path, text in found.items() if not OF_GROUP.search(path)}


def build(mesh: DeviceMesh) -> tuple[Any, ...]:
    layer = Layer()
    fully_shard(layer, mesh=mesh)
    trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=0.1)
    return layer, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)


def trained() -> ShardedWorld:
    one = ShardedWorld()
    one.state.sync()
    one.train()
    one.train()
    return one


def changed_by(change: str, one: ShardedWorld) -> Census:
    before = one.census()
    CHANGES[change](one)  # type: ignore[arg-type]  # it has all that a `World` has
    after = one.census()
    assert differences(before, after) or change in UNSEEN
    return after


#: Of each kind one for every day.
DAILY = {
    *("nothing", "eval of one layer", "unfreeze", "buffer that was None", "buffer of another size"),
    *("buffer that is new", "buffer that is gone", "buffer that is not persistent", "extra state of a module"),
    *("attribute", "a group of the model's parameters", "order of the optimizer's parameters", "learning rate"),
    *("state of the optimizer", "extra: a number"),
}
#: What is not kept in what is built anew, and refused.
REFUSED = {
    "another parameter": "the model has got other parameters",
    "another parameter, which is trained": "the model has got other parameters",
    "a group of parameters": "holds a tensor of shape .* that is no parameter of the model",
}
#: What this census leaves out, and what has no effect: the `.data` of a DTensor is another object's.
UNSEEN = {
    "nothing",
    "gradients",
    "hook",
    "weights through .data",
    *(name for name in CHANGES if name.startswith("random numbers")),
}
#: Not in a checkpoint. Each of these fails when it is, so that it is taken from this list.
NOT_STORED = {
    "attribute": "LOCAL, as in a ModelState",
    "attribute that is a list": "the same",
    "attribute that is new": "the same",
    "extra: an object without state": "told at the start: it says that it has nothing",
}


def cases(holes: Mapping[str, str]) -> list[Any]:
    found = []
    for name in CHANGES:
        marks = [pytest.mark.xfail(strict=True, reason=holes[name])] if name in holes else []
        if name not in REFUSED:
            found.append(pytest.param(name, marks=marks if name in DAILY else [*marks, pytest.mark.long], id=name))
    return found


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("change", cases({}))
def test_what_is_built_for_the_next_group_is_as_it_was(change: str) -> None:
    one = trained()
    expected = changed_by(change, one)
    one.state.sync()
    assert differences(expected, one.census()) == {}


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("change", REFUSED)
def test_what_cannot_be_built_anew_is_refused_by_name(change: str) -> None:
    one = trained()
    changed_by(change, one)
    with pytest.raises(NonRetryableException, match=REFUSED[change]):
        one.state.sync()


@pytest.mark.usefixtures("world_of_one")
def test_a_group_of_parameters_that_are_not_the_models_is_refused_after_the_step_that_has_added_it() -> None:
    one = trained()
    one.state.snapshot()
    CHANGES["a group of parameters"](one)  # type: ignore[arg-type]  # as above
    with pytest.raises(NonRetryableException, match=REFUSED["a group of parameters"]):
        one.state.commit()


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("change", cases(NOT_STORED))
def test_a_restart_has_what_was_saved(change: str, tmp_path: Path) -> None:
    one = trained()
    expected = changed_by(change, one)
    manager = TieredCheckpointManager([DiskTier(tmp_path)], run_id="run")
    manager.save_step(one.state, one.state.step, Alone())
    assert manager.wait(30)
    assert not manager.failures
    again = ShardedWorld()
    assert manager.restore(again.state, Alone()) == 2
    again.state.sync()
    manager.close()
    assert differences(expected, again.census()) == {}


#: Not undone. Each of these fails when it is, so that it is taken from this list.
NOT_UNDONE = {
    "weights in place": "weights are not copied before a step: the run goes back to a copy",
    "state of the optimizer": "what the script itself writes there is not copied",
}


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("change", cases(NOT_UNDONE))
def test_a_step_that_failed_leaves_nothing_in_the_next_group(change: str) -> None:
    one = trained()
    before = one.census()
    snapshot = one.state.snapshot()
    CHANGES[change](one)  # type: ignore[arg-type]  # as above
    one.state.apply(snapshot)
    one.state.sync()
    assert differences(before, one.census()) == {}


# --- workers that are lost, and come back -----------------------------------------------------------------------------


def replaced(changes: list[str]) -> dict[str, dict[str, str]]:
    """Rank 1 is lost after each of these changes, which all ranks make; in what who takes its place differs from it."""
    found = {}
    for change in changes:
        one = ShardedWorld()
        one.state.sync()
        for makes_change in (False, True):
            if makes_change:
                (CHANGES | OWN_CHANGES)[change](one)
            one.train()
            one.state._copies.wait_until_received()
        before = one.census()
        if dist.get_rank() == 1:
            one = ShardedWorld()
        one.state.sync()
        found[change] = differences(before, one.census())
    return found


#: Beside what a step does: what a script may have changed in modules of its own.
OWN_CHANGES: dict[str, Any] = {
    "extra: a module's flags": lambda one: one.state.extra["teacher"].train().requires_grad_(False),
    "extra: a module's buffer": lambda one: setattr(one.state.extra["teacher"], "table", torch.ones(7)),
}
#: Not in the next worker: an object that says that it has no state.
NOT_SENT = {"extra: an object without state"}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(sorted({*DAILY, *OWN_CHANGES}), id="of each kind"),
        pytest.param([name for name in CHANGES if name not in REFUSED], id="all", marks=pytest.mark.long),
    ],
)
def test_who_takes_a_lost_workers_place_has_all_that_it_had(changes: list[str]) -> None:
    first, second = values(run_ranks(replaced, changes, ranks=2))
    assert {change: apart for change, apart in first.items() if apart} == {}
    assert {change for change, apart in second.items() if apart} == NOT_SENT & set(changes)


# --- a restart of several ranks ---------------------------------------------------------------------------------------


def saved_by_all(folder: str) -> list[float]:
    torch.manual_seed(dist.get_rank() + 1)
    one = ShardedWorld()
    one.state.sync()
    one.train()
    manager, peers = TieredCheckpointManager([DiskTier(folder)], run_id="run"), join(1)
    manager.enter_group(peers)
    manager.save_step(one.state, 1, peers)
    assert manager.wait(30)
    return torch.rand(2).tolist()


def loaded_by_all(folder: str) -> list[float]:
    torch.manual_seed(dist.get_rank() + 7)
    one = ShardedWorld()
    manager, peers = TieredCheckpointManager([DiskTier(folder)], run_id="run"), join(2)
    manager.enter_group(peers)
    assert manager.restore(one.state, peers) == 1
    one.state.sync()
    return torch.rand(2).tolist()


@pytest.mark.parametrize("ranks", [2, 3])
def test_each_rank_draws_what_it_drew_and_one_more_draws_something_of_its_own(tmp_path: Path, ranks: int) -> None:
    before = values(run_ranks(saved_by_all, str(tmp_path), ranks=2))
    assert before[0] != before[1]
    after = values(run_ranks(loaded_by_all, str(tmp_path), ranks=ranks))
    assert after[:2] == before
    if ranks > 2:
        assert after[2] not in before


# --- a script that was changed ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("world_of_one")
def test_what_a_changed_script_freezes_stays_frozen_and_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = trained()
    one.layer.frozen.requires_grad_(True)
    manager = TieredCheckpointManager([DiskTier(tmp_path)], run_id="run")
    manager.save_step(one.state, one.state.step, Alone())
    assert manager.wait(30)

    def changed(mesh: DeviceMesh) -> tuple[Any, ...]:
        layer, *rest = build(mesh)
        layer.norm.requires_grad_(False)
        layer.norm.eval()
        return (layer, *rest)

    again = torchelastic.ShardedState(changed, extra=one.state.extra)
    assert manager.restore(again, Alone()) == 2
    again.sync()
    manager.close()
    layer: Any = again.model
    assert not any(parameter.requires_grad for parameter in layer.norm.parameters())
    assert not layer.norm.training
    assert layer.frozen.weight.requires_grad, "the run has changed that, and the script builds it as before"
    (said,) = [record.getMessage() for record in caplog.records if "is built otherwise now" in record.getMessage()]
    assert said.endswith(": norm.weight, norm.bias, norm")
