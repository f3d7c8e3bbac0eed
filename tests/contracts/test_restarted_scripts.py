"""What a script asks for at its restart beside what was saved: each difference is told, refused or taken."""

from __future__ import annotations

import importlib
import logging
import re
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.contracts.census import census_of, differences
from tests.contracts.test_restarts import apart, bcp_state, built, census, restarted
from tests.contracts.training_states import CHANGES, Change
from tests.older_torch import needs_fsdp2_on_cpus
from tests.process.forked_ranks import run_ranks, values
from torchelastic.checkpoint import BCPState, CheckpointError
from torchelastic.checkpoint.command.converting import convert
from torchelastic.checkpoint.command.stored_saves import StoredSaves
from torchelastic.checkpoint.compat.velastic import shard


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings of what was loaded, without the name of the checkpoint."""
    texts = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    return [text.partition(": ")[2] for text in texts if text.startswith("resumed from")]


def test_a_resumed_job_that_nobody_has_changed_is_told_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    restarted(CHANGES["weights in place"], tmp_path)
    assert told(caplog) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            "freeze",
            r"2 parameters \(linear.bias, linear.weight\) are frozen, as .* has not frozen them; to have others",
        ),
        ("unfreeze", r"2 parameters \(frozen.bias, frozen.weight\) are not frozen, as when this was saved"),
        ("eval of one layer", r"1 module \('norm'\) are in training or evaluation mode as when this was saved"),
        ("buffer that is not persistent", r"1 buffer that no state_dict has \(hidden\) were saved with other values"),
        ("a group of the model's parameters", "the parameter groups of Adam are those that the run had"),
    ],
)
def test_each_difference_from_what_the_script_has_built_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: str, words: str
) -> None:
    restarted(CHANGES[change], tmp_path)
    assert len([text for text in told(caplog) if re.search(words, text)]) == 1, told(caplog)


def test_a_script_that_evaluates_what_was_trained_goes_on_evaluating(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(nn.Sequential(nn.Linear(2, 1), nn.Dropout()), tmp_path)
    model = nn.Sequential(nn.Linear(2, 1), nn.Dropout()).eval().requires_grad_(False)
    loaded(model, tmp_path)
    assert not any(module.training for module in model.modules())
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert told(caplog) == []


class Table(nn.Module):
    """A table that a setting of the script has the size of, persistent or not."""

    table: torch.Tensor

    def __init__(self, size: int, *, persistent: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("table", torch.arange(float(size)), persistent=persistent)


def loaded(module: nn.Module, folder: Path) -> Any:
    state = BCPState(module, None, default_ckpt_path=folder)
    state.load()
    state.close()
    return module


def saved(module: nn.Module, folder: Path, change: Change = lambda _: None) -> None:
    state = BCPState(module, None, default_ckpt_path=folder)
    change(module)  # type: ignore[arg-type]
    state.save()
    state.close()


def test_a_table_that_the_script_makes_longer_now_stays_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(Table(4), tmp_path)
    assert loaded(Table(8), tmp_path).table.tolist() == list(range(8))
    assert "1 buffer that no state_dict has (table) are of another size" in told(caplog)[0]


def test_a_buffer_of_another_model_is_refused_and_nothing_is_loaded(tmp_path: Path) -> None:
    saved(Table(4, persistent=True), tmp_path)
    other = Table(8, persistent=True)
    before = census_of(model=other)
    with pytest.raises(CheckpointError, match=r"'table' was a float32 of shape \(4,\) .* \(8,\). Nothing was loaded"):
        loaded(other, tmp_path)
    assert differences(before, census_of(model=other)) == {}


class Bank(nn.Module):
    """Grows, and says how it is loaded, as torch's observers do."""

    bank: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.register_buffer("bank", torch.zeros(0, 2))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.bank = torch.empty_like(state_dict[prefix + "bank"])
        super()._load_from_state_dict(state_dict, prefix, *rest)


def test_a_buffer_that_grew_before_the_state_was_made_is_loaded_as_its_module_says(tmp_path: Path) -> None:
    bank = Bank()
    bank.bank = torch.ones(3, 2)
    saved(nn.Sequential(bank), tmp_path)
    again = loaded(nn.Sequential(Bank()), tmp_path)
    assert differences(census_of(model=bank), census_of(model=again[0])) == {}


@pytest.mark.parametrize(
    "change",
    ["buffer of another size", "buffer that is new", "buffer that was None", "a group of the model's parameters"],
)
def test_a_job_goes_back_to_what_it_was_before_a_change(tmp_path: Path, change: str) -> None:
    one = built(1)
    state = bcp_state(one, tmp_path)
    one.train()
    state.save()
    before = census(one)
    CHANGES[change](one)
    one.train()
    assert apart(before, census(one))
    state.load()
    state.close()
    assert apart(before, census(one)) == {}


def test_observers_of_quantization_aware_training_are_loaded(tmp_path: Path) -> None:
    q: Any = importlib.import_module("torch.ao.quantization")

    def model() -> Any:
        torch.manual_seed(0)
        one: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).train()
        per_channel = q.PerChannelMinMaxObserver.with_args(dtype=torch.qint8, qscheme=torch.per_channel_symmetric)
        one.qconfig = q.QConfig(activation=q.default_observer, weight=q.FakeQuantize.with_args(observer=per_channel))
        q.prepare_qat(one, inplace=True)
        return one

    one = model()
    saved(one, tmp_path, lambda _: one(torch.ones(2, 4)))
    again = loaded(model(), tmp_path)
    expected, found = one.state_dict(), again.state_dict()
    assert expected.keys() == found.keys()
    assert all(torch.equal(value, found[name]) for name, value in expected.items() if isinstance(value, torch.Tensor))


class Migrated(nn.Linear):
    """Its second version has another sign, and brings states of the first one up to date."""

    _version = 2

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        if local_metadata.get("version", 1) < 2:
            state_dict[prefix + "weight"] = -state_dict[prefix + "weight"]
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_state_of_the_present_version_is_not_brought_up_to_date(tmp_path: Path, is_compiled: bool) -> None:
    model: Any = nn.Sequential(nn.ReLU(), nn.Sequential(Migrated(2, 1)))
    if is_compiled:
        model[1] = torch.compile(model[1])
    saved(model, tmp_path)
    again = loaded(nn.Sequential(nn.ReLU(), nn.Sequential(Migrated(2, 1))), tmp_path)
    assert torch.equal(again[1][0].weight, model.state_dict()["1._orig_mod.0.weight" if is_compiled else "1.0.weight"])


def test_a_converted_state_has_the_versions(tmp_path: Path) -> None:
    saved(nn.Sequential(nn.ReLU(), Migrated(2, 1)), tmp_path / "saved")
    assert convert(StoredSaves(tmp_path / "saved"), tmp_path / "state.pt", "torch", allow_pickles=False) == 0
    model = nn.Sequential(nn.ReLU(), Migrated(2, 1))
    state = torch.load(tmp_path / "state.pt")["model"]
    model.load_state_dict(state)
    assert torch.equal(model.state_dict()["1.weight"], state["1.weight"])


class OfItsOwnForm(torch.optim.SGD):
    """Its `state_dict` is not as torch's are."""

    seen = 0

    def state_dict(self) -> Any:
        return {"fast": super().state_dict(), "seen": self.seen, "slow": torch.ones(2)}

    def load_state_dict(self, state_dict: Any) -> None:
        self.seen = state_dict["seen"] + int(state_dict["slow"].sum())
        super().load_state_dict(state_dict["fast"])


def test_an_optimizer_with_a_form_of_its_own_is_loaded_as_it_says(tmp_path: Path) -> None:
    def made(kind: type[torch.optim.SGD]) -> tuple[Any, BCPState]:
        model = nn.Linear(2, 1)
        optimizer = kind(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.ones(1, 2)).sum().backward()
        return optimizer, BCPState(model, optimizer, default_ckpt_path=tmp_path)

    first, state = made(OfItsOwnForm)
    first.step()
    first.seen = 1
    state.save()
    second, state = made(OfItsOwnForm)
    state.load()
    assert (second.seen, len(second.state)) == (3, 2)
    with pytest.raises(CheckpointError, match="the state_dict of this SGD is of another form than the saved one"):
        made(torch.optim.SGD)[1].load()


def test_groups_that_the_script_makes_itself_now_are_taken_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = built(1)
    state = bcp_state(one, tmp_path)
    one.train()
    CHANGES["a group of the model's parameters"](one)
    state.save()
    again = built(2)
    CHANGES["a group of the model's parameters"](again)
    state = bcp_state(again, tmp_path)
    state.load()
    assert apart(census(one), census(again)) == {}
    assert told(caplog) == []


def test_a_checkpoint_of_a_newer_release_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard, "VERSION", 3)
    saved(nn.Linear(2, 1), tmp_path)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"'training state', 3\): it was saved by .* a newer release"):
        loaded(nn.Linear(2, 1), tmp_path)


# --- several ranks ----------------------------------------------------------------------------------------------------


def version_1(folder: str, ranks: int) -> tuple[Any, ...]:
    """What a job gets of a checkpoint that two ranks have saved before 2026-11-29."""
    rank = torch.distributed.get_rank() if ranks > 1 else 0
    torch.manual_seed(9)
    layers = (nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 1))
    model: Any = nn.Sequential(*layers)
    others = [*model[1].parameters(), *model[3].parameters()]
    optimizer = torch.optim.Adam([{"params": model[0].parameters()}, {"params": others, "lr": 0.01}])
    wrapped: Any = DistributedDataParallel(model, broadcast_buffers=False) if ranks > 1 else model
    state = BCPState(wrapped, optimizer, default_ckpt_path=folder)
    extra = state.load()
    kept = optimizer.state[model[3].bias]
    of_model = [model[3].bias.item(), model[1].running_mean[0].item()]
    numbers = torch.rand(2).tolist()
    state.save()
    state.close()
    return rank, extra["step"], extra["rank"], of_model, kept["exp_avg"].item(), kept["step"].item(), numbers


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_of_version_1_is_read(tmp_path: Path, ranks: int) -> None:
    with tarfile.open(Path(__file__).with_name("bcp_state_version_1.tar.xz")) as archive:
        archive.extractall(tmp_path, filter="data")
    bias, momentum = -0.37139663100242615, -0.11192281544208527
    means = [-0.11324982345104218, -0.21150079369544983]
    numbers = [[0.7368624210357666, 0.03311049938201904], [0.16136807203292847, 0.6984719634056091]]
    expected = [(rank, 2, rank, [bias, means[rank]], momentum, 2.0, numbers[rank]) for rank in range(ranks)]
    assert values(run_ranks(version_1, str(tmp_path / "two"), ranks, ranks=ranks)) == expected


class Scaled(torch.optim.SGD):
    """Keeps the scale of the rank's own part of each parameter, and a plain tensor of the whole one's shape."""

    def step(self, closure: Any = None) -> Any:
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            own = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            state = self.state[parameter]
            state["scale"] = own.detach().abs().amax()
            state["count"] = state.get("count", torch.zeros(parameter.shape)) + 1
        return super().step(closure)


def of_own_parts(folder: str) -> Any:
    """What an optimizer keeps on this rank, and what is there after a restart; or why there is none."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    found = []
    ranks = torch.distributed.get_world_size()
    for is_first in (True, False):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
        optimizer = Scaled(model.parameters(), lr=0.1, momentum=0.9)
        state = BCPState(model, optimizer, "fsdp2", default_ckpt_path=folder)
        if is_first and ranks == 2:
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            model[1].requires_grad_(False)
            state.save()
        elif not is_first:
            try:
                state.load()
            except CheckpointError as error:
                return str(error)
        kept = [optimizer.state[parameter] for parameter in model.parameters()]
        found.append(
            [
                [one["scale"].item(), one["count"].tolist(), one["momentum_buffer"].to_local().tolist()]
                for one in kept
                if one
            ]
            + [[parameter.requires_grad for parameter in model.parameters()]]
        )
        state.close()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()  # with its own kinds of tensors
    return found


@needs_fsdp2_on_cpus
def test_what_an_optimizer_has_of_a_ranks_own_part_comes_back_to_that_rank(tmp_path: Path) -> None:
    first, second = values(run_ranks(of_own_parts, str(tmp_path), ranks=2))
    assert first[0] == first[1]
    assert second[0] == second[1]
    assert first[1][-1] == [True, True, False, False]
    assert [one[0] for one in first[0][:-1]] != [one[0] for one in second[0][:-1]]
    (refused, *_) = values(run_ranks(of_own_parts, str(tmp_path), ranks=3))
    assert re.search(
        r"'scale' of 0.weight.* were others on each of the 2 ranks that saved it, and there are 3", refused
    )
    assert "Nothing was loaded; start as many ranks" in refused


class Counting(nn.Linear):
    """Has seen as many batches as its rank says."""

    def __init__(self) -> None:
        super().__init__(2, 1)
        self.seen = 0

    def get_extra_state(self) -> int:
        return self.seen

    def set_extra_state(self, state: int) -> None:
        self.seen = state


def with_ddp(folder: str) -> Any:
    """Of a run, and of the job that goes on: what a module has seen, and which layers are trained."""
    found = []
    for seen in (10 + torch.distributed.get_rank(), 0):
        torch.manual_seed(1)
        model = nn.Sequential(Counting(), nn.Linear(1, 1), nn.Linear(1, 1))
        model[1].requires_grad_(seen > 0)  # the run has thawed it, and has wrapped it again
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
        model[0].seen = seen  # type: ignore[assignment]
        model[2].requires_grad_(seen == 0)  # and has frozen this one
        state = BCPState(wrapped, None, default_ckpt_path=folder)
        state.save() if seen else state.load()
        found.append((model[0].seen, model[1].weight.requires_grad, model[2].weight.requires_grad))
        state.close()
    return found


def test_ddp_keeps_what_each_module_has_seen_and_averages_whatever_is_trained(tmp_path: Path) -> None:
    found = values(run_ranks(with_ddp, str(tmp_path), ranks=2))
    assert found == [[(seen, True, False), (seen, False, False)] for seen in (10, 11)]
