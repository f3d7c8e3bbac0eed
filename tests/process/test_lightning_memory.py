"""Real trainers on the CPU, with checkpoints in memory."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, Callback, EarlyStopping, ModelCheckpoint, Timer
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

from tests.older_torch import needs_fsdp2_on_cpus
from tests.process import local_ranks
from tests.process.lightning_memory_job import (
    Batches,
    Growing,
    GrowingLoosely,
    Model,
    Outcome,
    Trained,
    quiet_trainer,
    train,
    train_ranks,
)
from tests.process.local_ranks import Crew, crew_of, succeeded
from torchelastic.adapters.lightning import (
    MemoryCheckpointCallback,
    wrap_trainer_and_auto_resume,
)
from torchelastic.adapters.lightning.memory_resume import step_of_checkpoint
from torchelastic.adapters.memory_tier import StorageTier, takes_memory
from torchelastic.checkpoint.errors import CheckpointError

STEPS = list(range(12))


@pytest.fixture
def folder(memory_folder: Path) -> Path:
    return memory_folder


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with pytest.MonkeyPatch.context() as patch, crew_of(2) as ranks:
        patch.setattr(local_ranks, "ANSWER_S", 300)  # importing Lightning takes a while on a machine with much to do
        yield ranks


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the checkpoints that are saved in memory, as it happens."""
    names: list[str] = []
    save = StorageTier.save

    def recorded(self: StorageTier, checkpoint_id: str, tensors: Any) -> None:
        names.append(Path(checkpoint_id).name)
        save(self, checkpoint_id, tensors)

    monkeypatch.setattr(StorageTier, "save", recorded)
    return names


def steps_in(container: Path) -> list[str]:
    return sorted(path.name for path in container.glob("step-*_ckpt"))


def assert_equal(one: Outcome, other: Outcome, *, but: str = "nothing") -> None:
    for mine, theirs in ((one.weights, other.weights), (one.optimizer, other.optimizer)):
        assert mine.keys() == theirs.keys()
        assert [name for name in mine if but not in name and not torch.equal(mine[name], theirs[name])] == []


def wrapped(container: Path, *callbacks: Callback, default: Any = None, **options: Any) -> tuple[Trainer, Any]:
    trainer = quiet_trainer(*callbacks, **options)
    return trainer, wrap_trainer_and_auto_resume(trainer, container, async_save=False, default_auto_resume=default)


# --- two ranks --------------------------------------------------------------------------------------------------------


def undisturbed(crew: Crew, folder: Path, **options: Any) -> list[Outcome]:
    return succeeded(crew.run(train_with, folder / "undisturbed", {"every_n_steps": 100, **options}, ranks=2))


def train_with(folder: Path, options: dict[str, Any]) -> Outcome:
    return train_ranks(folder, **options)


@pytest.mark.long
def test_a_killed_run_of_two_ranks_goes_on_from_memory_as_if_nothing_had_happened(crew: Crew, folder: Path) -> None:
    with crew_of(2) as killed, pytest.raises(EOFError):  # rank 1 is gone; rank 0 has answered with an error
        killed.run(train_with, folder, {"hosts": 2, "killed_at": 7, "every_n_steps": 1, "keep": False}, ranks=2)
    assert "step-7_ckpt" in steps_in(folder / "host0" / "job"), "rank 0 has not removed what it may need"
    resumed = succeeded(crew.run(train_with, folder, {"hosts": 2, "keep": False}, ranks=2))
    assert [one.resumed_from for one in resumed] == ["step-7_ckpt"] * 2
    assert [one.seen for one in resumed] == [STEPS[7:]] * 2
    whole = undisturbed(crew, folder)
    assert [one.seen for one in whole] == [STEPS] * 2
    assert_equal(resumed[0], whole[0])
    assert_equal(resumed[1], whole[1], but="running")  # batch norm's are those of rank 0, as ever with Lightning
    assert not [host for host in ("host0", "host1") if (folder / host / "job").exists()], "the run is over"


@pytest.mark.long
@needs_fsdp2_on_cpus
def test_with_fsdp2_each_rank_saves_its_part(crew: Crew, folder: Path) -> None:
    options = {"strategy": "fsdp2"}
    succeeded(crew.run(train_with, folder, {"max_steps": 7, **options}, ranks=2))
    resumed = succeeded(crew.run(train_with, folder, options, ranks=2))
    assert [one.resumed_from for one in resumed] == ["step-6_ckpt"] * 2
    whole = undisturbed(crew, folder, **options)
    assert_equal(resumed[0], whole[0])
    assert_equal(resumed[1], whole[1], but="running")


@pytest.mark.long
@needs_fsdp2_on_cpus
@pytest.mark.parametrize("kind", [Growing, GrowingLoosely])
def test_a_branch_that_no_optimizer_has_stepped_for_has_no_state_when_it_goes_on(
    crew: Crew, folder: Path, kind: type[Growing]
) -> None:
    options: dict[str, Any] = {"strategy": "fsdp2", "kind": kind}
    before = succeeded(crew.run(train_with, folder, {"max_steps": 6, **options}, ranks=2))
    assert len(before[0].optimizer) == 3 * 4
    resumed = succeeded(crew.run(train_with, folder, {"max_steps": 7, **options}, ranks=2))
    assert [one.resumed_from for one in resumed] == ["step-6_ckpt"] * 2
    assert resumed[0].optimizer.keys() == before[0].optimizer.keys()
    resumed = succeeded(crew.run(train_with, folder, options, ranks=2))
    whole = undisturbed(crew, folder, **options)
    assert_equal(resumed[0], whole[0])


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp2", marks=needs_fsdp2_on_cpus)])
def test_another_number_of_ranks_goes_on_from_it(crew: Crew, folder: Path, strategy: str) -> None:
    options = {"max_steps": 6, "strategy": strategy}
    before = succeeded(crew.run(train_with, folder, options, ranks=2))[0]
    (after,) = succeeded(crew.run(train_with, folder, options, ranks=1))
    assert (after.resumed_from, after.seen) == ("step-6_ckpt", [])
    assert len(after.optimizer) == 3 * len(list(Model().parameters()))
    assert_equal(after, before)


# --- one process ------------------------------------------------------------------------------------------------------


class Thawing(BaseFinetuning):
    """Freezes the first layer at each start, and trains it from the second epoch on, with a group of its own."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer)


def test_a_layer_that_was_thawed_in_the_run_is_trained_when_it_goes_on(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = train(folder / "undisturbed", Thawing(), every_n_steps=100, kind=Trained)
    train(folder / "job", Thawing(), max_steps=6, kind=Trained)
    resumed = train(folder / "job", Thawing(), kind=Trained)
    assert resumed.resumed_from == "step-6_ckpt"
    assert_equal(resumed, whole)
    told = [text for text in caplog.messages if "2 parameters (net.0.bias, net.0.weight) are not frozen, as" in text]
    assert len(told) == 1


def test_steps_of_durable_checkpoints_are_left_out(folder: Path, saved: list[str]) -> None:
    durable = ModelCheckpoint(folder / "durable", every_n_train_steps=6, save_top_k=-1)
    trainer, _ = wrapped(
        folder / "job",
        MemoryCheckpointCallback(folder / "job", 3, skip_every_n_steps=6),
        durable,
        enable_checkpointing=True,
    )
    trainer.fit(Model(), Batches())
    assert saved == ["step-3_ckpt", "step-9_ckpt"]
    names = sorted(path.name for path in (folder / "durable").iterdir())
    assert names == ["epoch=1-step=6.ckpt", "epoch=2-step=12.ckpt"], "durable ones go on"
    assert torch.load(folder / "durable" / names[1], weights_only=False)["global_step"] == 12


def test_it_can_be_turned_off(folder: Path, saved: list[str]) -> None:
    callback = MemoryCheckpointCallback(folder / "job", 1, enabled=False)
    quiet_trainer(callback).fit(Model(), Batches())  # the trainer need not be wrapped
    quick = quiet_trainer(MemoryCheckpointCallback(folder / "job", 1), fast_dev_run=True)
    quick.fit(Model(), Batches())
    assert saved == []
    assert not (folder / "job").exists()


def test_a_checkpoint_in_memory_holds_what_a_durable_one_holds(folder: Path) -> None:
    callbacks = [
        EarlyStopping("loss", patience=100, check_on_train_epoch_end=True),
        Timer(),
        ModelCheckpoint(folder / "durable", every_n_train_steps=2, save_top_k=-1),
        MemoryCheckpointCallback(folder / "job", 100, keep_on_train_end=True),
        SavesBoth(folder),
    ]
    trainer, _ = wrapped(folder / "job", *callbacks, enable_checkpointing=True, max_steps=6)
    trainer.fit(HardToStore(), Batches())
    durable = torch.load(folder / "both.ckpt", weights_only=False)
    loaded = wrapped(folder / "job")[0].strategy.load_checkpoint(folder / "job" / "step-6_ckpt")
    assert loaded.keys() == durable.keys()
    for key in durable:
        assert repr(loaded[key]) == repr(durable[key]), key
    assert loaded["state_dict"]._metadata == durable["state_dict"]._metadata
    assert type(loaded["state_dict"]) is OrderedDict


class SavesBoth(Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.save_checkpoint(self.folder / "both.ckpt")
        trainer.save_checkpoint(self.folder / "job" / "step-6_ckpt")


class HardToStore(Model):
    def __init__(self, width: int = 3, options: tuple[int, ...] = (1, 2)) -> None:
        super().__init__(width)
        self.save_hyperparameters()

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1, amsgrad=True)
        one_cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 20)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return [optimizer], [one_cycle, {"scheduler": plateau, "monitor": "loss"}]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = {1: np.arange(3), "x": np.float64(0.1), "nan": float("nan"), "who": (b"a", {3, 4}, 2**70)}


# --- the end of a run -------------------------------------------------------------------------------------------------


class Raises(Callback):
    def __init__(self, error: type[BaseException], hook: str) -> None:
        self.error = error
        setattr(self, hook, self._raise)

    def _raise(self, *arguments: Any) -> None:
        raise self.error("on purpose")


class FailsAtTheEnd(TorchCheckpointIO):
    """Its save fails when the training is over."""

    def __init__(self) -> None:
        self.is_over = threading.Event()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        assert self.is_over.wait(60)
        raise OSError("the store is full")


class SetsAtTheEnd(Callback):
    def __init__(self, event: threading.Event) -> None:
        self.event = event

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.event.set()


@pytest.mark.parametrize("how", ["removed", "kept", "kept by the other name"])
def test_a_run_that_is_over_removes_its_container_unless_told_otherwise(folder: Path, how: str) -> None:
    keep = {"removed": {}, "kept": {"keep_on_train_end": True}}.get(how, {"keep_mlf_checkpoint_on_train_end": True})
    trainer, _ = wrapped(folder / "job", MemoryCheckpointCallback(folder / "job", 3, **keep))
    trainer.fit(Model(), Batches())
    assert (folder / "job").exists() == (how != "removed")
    assert trainer.global_step == 12
    trainer.fit_loop.epoch_loop.max_steps = 15
    trainer.fit(Model(), Batches())  # once more, with what is open by then
    assert (folder / "job").exists() == (how != "removed")


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_run_that_is_interrupted_keeps_it(folder: Path, error: type[BaseException]) -> None:
    callbacks = [MemoryCheckpointCallback(folder / "job", 3), Raises(error, "on_train_epoch_end")]
    trainer, _ = wrapped(folder / "job", *callbacks)
    with pytest.raises((error, SystemExit)):
        trainer.fit(Model(), Batches())
    assert steps_in(folder / "job") == ["step-3_ckpt"]


def test_it_is_kept_when_the_last_durable_checkpoint_fails_after_the_training(folder: Path) -> None:
    durable = ModelCheckpoint(folder / "durable", every_n_train_steps=12)
    memory = MemoryCheckpointCallback(folder / "job", 3, skip_every_n_steps=12)
    failing = FailsAtTheEnd()
    trainer, _ = wrapped(
        folder / "job",
        memory,
        SetsAtTheEnd(failing.is_over),  # after the callback before it
        durable,
        plugins=[AsyncCheckpointIO(failing)],
        enable_checkpointing=True,
    )
    with pytest.raises(OSError, match="the store is full"):
        trainer.fit(Model(), Batches())
    assert "step-9_ckpt" in steps_in(folder / "job")


# --- where to go on from ----------------------------------------------------------------------------------------------


def test_the_newer_checkpoint_is_chosen_and_memory_of_equals(folder: Path) -> None:
    cases = [(None, 5), (5, 6), (5, 5), (5, 4), (5, None)]
    assert [takes_memory(*case) for case in cases] == [False, False, True, True, True]
    train(folder / "job", max_steps=8)
    for step in (4, 6, 9):
        torch.save({"global_step": step}, folder / f"{step}.ckpt")
    memory = str(folder / "job" / "step-6_ckpt")
    chosen = {step: wrapped(folder / "job", default=folder / f"{step}.ckpt")[1].ckpt_path() for step in (4, 6, 9)}
    assert chosen == {4: memory, 6: memory, 9: str(folder / "9.ckpt")}
    assert wrapped(folder / "none", default=folder / "4.ckpt")[1].ckpt_path() == str(folder / "4.ckpt")
    assert wrapped(folder / "none")[1].ckpt_path() is None


def test_the_durable_checkpoint_may_be_named_in_many_ways(folder: Path) -> None:
    class Resume:
        ckpt_path = "a.ckpt"

    class LikeNeMo:
        def __init__(self) -> None:
            self.was_set_up: list[Any] = []

        def setup(self, trainer: Any, model: Any = None) -> None:
            self.was_set_up.append((trainer, model))

        def get_trainer_ckpt_path(self) -> Path:
            return Path("a.ckpt")

    _, other = wrapped(folder / "other", default=lambda: "a.ckpt")
    for default in ("a.ckpt", Path("a.ckpt"), lambda: Path("a.ckpt"), Resume(), LikeNeMo(), other):
        assert wrapped(folder / "job", default=default)[1].ckpt_path() == "a.ckpt"
    nemo = LikeNeMo()
    trainer, auto_resume = wrapped(folder / "job", default=nemo)
    auto_resume.setup(trainer, "model")
    assert nemo.was_set_up == [(trainer, "model")]
    assert trainer.ckpt_path == "a.ckpt"
    with pytest.raises(ValueError, match="not the trainer"):
        auto_resume.setup(object())
    with pytest.raises(TypeError, match="default_auto_resume is a int"):
        wrapped(folder / "job", default=5)[1].ckpt_path()


def test_the_step_of_a_durable_checkpoint_is_read_without_running_it(folder: Path) -> None:
    torch.save({"global_step": 7, "state_dict": {"a": torch.ones(3)}}, folder / "step=3.ckpt")
    assert step_of_checkpoint(folder / "step=3.ckpt") == 7
    torch.save({"global_step": 7, "hyper_parameters": Batches()}, folder / "epoch=1-step=8.ckpt")
    assert step_of_checkpoint(folder / "epoch=1-step=8.ckpt") == 8
    (folder / "sharded").mkdir()
    torch.save({"global_step": 11}, folder / "sharded" / "meta.pt")
    assert step_of_checkpoint(folder / "sharded") == 11
    assert [step_of_checkpoint(name) for name in ("s3://a/step=5.ckpt", "last", folder / "none")] == [5, None, None]
    trainer = quiet_trainer()
    auto_resume = wrap_trainer_and_auto_resume(trainer, folder / "job", True, "x", durable_step=lambda _: 10**6)
    train(folder / "job", max_steps=4)
    assert auto_resume.ckpt_path() == "x"


def test_a_checkpoint_in_memory_that_cannot_be_loaded_gives_way_to_the_durable_one(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(folder / "job", max_steps=8)
    durable = folder / "durable.ckpt"
    torch.save({"global_step": 4}, durable)
    trainer, auto_resume = wrapped(folder / "job", default=durable)
    path = Path(auto_resume.ckpt_path())
    assert path.name == "step-6_ckpt"
    for file in (folder / "job").glob("step-000000006.*/*"):
        file.unlink()
    assert trainer.strategy.load_checkpoint(path) == {"global_step": 4}
    assert "durable.ckpt is" in caplog.text
    trainer, auto_resume = wrapped(folder / "job")
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        trainer.strategy.load_checkpoint(path)


# --- what can be stored -----------------------------------------------------------------------------------------------


def test_hyper_parameters_that_cannot_be_stored_are_left_out(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Odd(Model):
        def __init__(self, width: int, norm: Any, options: dict[str, Any]) -> None:
            super().__init__()
            self.save_hyperparameters()

    trainer, _ = wrapped(folder / "job", MemoryCheckpointCallback(folder / "job", 6, keep_on_train_end=True))
    trainer.fit(Odd(5, torch.nn.LayerNorm, {"a": 1, "b": Batches()}), Batches())
    loaded = trainer.strategy.load_checkpoint(folder / "job" / "step-12_ckpt")
    assert loaded["hyper_parameters"] == {"width": 5, "options": {"a": 1}}
    warnings = [record for record in caplog.records if "saved without" in record.message]
    assert [record.levelno for record in warnings] == [logging.WARNING]
    assert "hyper_parameters/norm, hyper_parameters/options/b" in warnings[0].message
