"""A run of NeMo that is as small as it gets: two layers, MegatronStrategy, gloo. After `on_cpu.install()` only."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import lightning.pytorch as pl
import nemo.lightning as nl
import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig
from nemo.collections import llm
from nemo.lightning import io
from nemo.utils.callbacks.dist_ckpt_io import AsyncFinalizableCheckpointIO, AsyncFinalizerCallback
from nemo.utils.exp_manager import NotFoundError

from tests.nemo.runs import DURABLE_EVERY, MEMORY_EVERY, STEPS, Run
from torchelastic.adapters.megatron import MegatronCommonLoadStrategy
from torchelastic.adapters.nemo import MemoryAutoResume, MemoryCheckpointCallback, wrap_trainer_and_auto_resume
from torchelastic.checkpoint.memory import CheckpointContainerId, MemoryStorageReader

BATCH = 4


class Watched(pl.Callback):
    """Notes the steps, and what is in the container before each; has the process killed."""

    def __init__(self, killed_at: int | None = None, container: Path | None = None, notes: Path | None = None) -> None:
        self.killed_at, self.container, self.notes = killed_at, container, notes
        self.steps: list[int] = []

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        step = int(trainer.global_step)
        finalize = getattr(trainer.strategy.checkpoint_io, "maybe_finalize_save_checkpoint", None)
        if finalize is not None and step in (DURABLE_EVERY + 1, self.killed_at):
            finalize(blocking=True)  # else it is chance how far the last save has come
        if self.container is not None and self.notes is not None:
            names = sorted(path.name for path in self.container.glob("step-*_ckpt"))
            with self.notes.open("a") as notes:
                notes.write(json.dumps(names) + "\n")
        if step == self.killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.steps.append(step)


class Tokens(io.IOMixin):  # type: ignore[misc] # NeMo has no types
    vocab_size = 64
    eod = 0
    unique_identifiers: dict[str, str] = {}  # noqa: RUF012 - as Megatron has it


class Samples(llm.MockDataModule):  # type: ignore[misc] # NeMo has no types
    """NeMo's, which goes on where it was, as that for real data does."""

    def state_dict(self) -> dict[str, Any]:
        return {"consumed_samples": self.trainer.global_step * BATCH}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.data_sampler.init_consumed_samples = state_dict["consumed_samples"]


def layers(_: Any) -> Any:
    return get_gpt_layer_local_spec()


def model_of() -> Any:
    config = llm.GPTConfig(
        num_layers=2,
        hidden_size=16,
        ffn_hidden_size=32,
        num_attention_heads=2,
        seq_length=16,
        use_cpu_initialization=True,
        transformer_layer_spec=layers,
        make_vocab_size_divisible_by=32,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )
    optimizer = OptimizerConfig(optimizer="adam", lr=1e-2, use_distributed_optimizer=False)
    return llm.GPTModel(config, optim=nl.MegatronOptimizerModule(optimizer), tokenizer=Tokens())


def samples_of() -> Any:
    return Samples(
        seq_length=16,
        tokenizer=Tokens(),
        micro_batch_size=2,
        global_batch_size=BATCH,
        num_train_samples=400,
        num_workers=0,
        pin_memory=False,
        create_attention_mask=True,
    )


def trainer_of(run: Run, rank: int, *callbacks: Any) -> Any:
    durable = nl.ModelCheckpoint(
        dirpath=str(run.folder / "durable"),
        filename="{step}",
        every_n_train_steps=DURABLE_EVERY,
        save_last=True,
        save_top_k=-1,
        save_on_train_epoch_end=False,
    )
    memory = MemoryCheckpointCallback(
        str(run.container(rank)), MEMORY_EVERY, DURABLE_EVERY, enabled=run.has_memory, keep_on_train_end=run.keep
    )
    return nl.Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=run.hosts,
        max_steps=STEPS,
        max_epochs=1,
        strategy=nl.MegatronStrategy(
            process_group_backend="gloo", ckpt_async_save=run.durable_async, gradient_as_bucket_view=False
        ),
        plugins=nl.MegatronMixedPrecision(precision="32"),
        callbacks=[durable, memory, *callbacks],
        limit_val_batches=0,
        logger=False,
        enable_progress_bar=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        log_every_n_steps=1000,
    )


def train(run: Run, rank: int) -> None:
    """Trains, and leaves steps and weights in the folder."""
    if run.breaks:
        broken: Any = MemoryStorageReader if run.breaks == "read_data" else MegatronCommonLoadStrategy
        setattr(broken, run.breaks, _broken if rank == run.hosts - 1 else getattr(broken, run.breaks))
    watched = Watched(run.killed_at, run.container(rank), run.folder / f"seen-{rank}.jsonl")
    trainer = trainer_of(run, rank, watched)
    trainer.strategy.setup_environment()
    resume = nl.AutoResume(
        resume_if_exists=True, resume_ignore_no_checkpoint=True, resume_from_directory=str(run.folder / "durable")
    )
    resume = wrap_trainer_and_auto_resume(trainer, run.container(rank), run.async_save, resume, **run.options)
    model = model_of()
    context = None
    if run.options:
        resume.get_trainer_ckpt_path(model)
        context = resume.get_context_path(model)
    log = nl.NeMoLogger(log_dir=str(run.folder / "log"), use_datetime_version=False)
    llm.train(model, samples_of(), trainer, resume=resume, log=log)
    torch.save({name: value.clone() for name, value in model.named_parameters()}, run.folder / f"weights-{rank}.pt")
    found = {
        "steps": watched.steps,
        "ckpt_path": str(trainer.ckpt_path),
        "context_path": str(context),
        "context": sorted(path.name for path in context.iterdir()) if context is not None else None,
    }
    (run.folder / f"result-{rank}.json").write_text(json.dumps(found))


def _broken(*_: Any, **__: Any) -> None:
    raise OSError(5, "a test has broken it")


def wrap(folder: Path, rank: int) -> None:
    """What the wrapper does to a trainer, and what it leaves alone."""
    run = Run(folder)
    trainer = trainer_of(run, rank)
    trainer.strategy.setup_environment()
    durable_io = trainer.strategy.checkpoint_io
    before = nl.AutoResume(resume_from_path="/durable", resume_past_end=True)
    resume = wrap_trainer_and_auto_resume(trainer, run.container(), True, before)
    plugin, callbacks = trainer.strategy.checkpoint_io, list(trainer.callbacks)
    memory = trainer.strategy.unwrapped_checkpoint_io
    assert (resume.resume_from_path, resume.resume_past_end, resume.resume_if_exists) == ("/durable", True, False)
    assert resume.get_trainer_ckpt_path() == "/durable"
    assert memory.fallback == "/durable"
    assert isinstance(plugin, AsyncFinalizableCheckpointIO)
    assert memory.wrapped_checkpoint_io is durable_io
    assert sum(isinstance(one, AsyncFinalizerCallback) for one in callbacks) == 1

    assert wrap_trainer_and_auto_resume(trainer, run.container(), True, resume) is resume
    assert trainer.strategy.checkpoint_io is plugin
    assert trainer.callbacks == callbacks
    with pytest.raises(ValueError, match="wrapped already"):
        wrap_trainer_and_auto_resume(trainer, folder / "another", True)

    inside = run.container() / "step-3_ckpt"
    assert memory.is_in_memory(inside)
    assert not memory.is_in_memory(run.container().with_name("job-70") / "step-3_ckpt")
    durable = Mock()
    memory.wrapped_checkpoint_io = durable
    plugin.save_checkpoint({"state_dict": {}}, "/durable/a.ckpt", {"finalize_fn": print})
    durable.save_checkpoint.assert_called_once_with({"state_dict": {}}, "/durable/a.ckpt", {"finalize_fn": print})
    assert plugin.load_checkpoint("/durable/a.ckpt", strict=True) is durable.load_checkpoint.return_value
    plugin.remove_checkpoint("/durable/a.ckpt")
    durable.remove_checkpoint.assert_called_once_with("/durable/a.ckpt")
    with pytest.raises(ValueError, match="step-<N>_ckpt"):
        plugin.save_checkpoint({}, run.container() / "last.ckpt")

    without = trainer_of(run, rank)
    without.callbacks = [one for one in without.callbacks if not isinstance(one, MemoryCheckpointCallback)]
    own = without.strategy.checkpoint_io
    assert wrap_trainer_and_auto_resume(without, run.container(), True, before) is before
    assert without.strategy.checkpoint_io is own
    other_format = trainer_of(run, rank)
    other_format.strategy.save_ckpt_format = "fsdp_dtensor"
    with pytest.raises(ValueError, match="torch_dist"):
        wrap_trainer_and_auto_resume(other_format, run.container(), True)
    plugin.teardown()


#: The recipe of ML Flashpoint's guide, with our import line.
GUIDE = """
import os

import nemo.lightning
from torchelastic.adapters.nemo import MemoryCheckpointCallback, wrap_trainer_and_auto_resume

memory_base_path = _get_my_base_path()  # such as str(job_container())
os.makedirs(memory_base_path, exist_ok=True)

callbacks.append(
    MemoryCheckpointCallback(
        memory_base_path,
        args.ckpt_mlf_every_n_steps,
        skip_every_n_steps=args.ckpt_std_every_n_steps,  # the steps of the standard checkpoints
    )
)

auto_resume = nemo.lightning.AutoResume(resume_if_exists=True, resume_ignore_no_checkpoint=True)

trainer.strategy.setup_environment()

auto_resume = wrap_trainer_and_auto_resume(
    trainer=trainer,
    flashpoint_base_container=memory_base_path,
    async_save=not args.sync_save,
    default_auto_resume=auto_resume,  # optional
    # always_save_context=False,
    # write_thread_count=1,
    # initial_write_buffer_size_bytes=...,  # never a limit here
)
"""


def as_the_guide_says(folder: Path, rank: int) -> None:
    """The recipe of ML Flashpoint's guide, with the names that it takes from the user's own."""
    run = Run(folder)
    trainer = trainer_of(run, rank)
    trainer.callbacks[:] = [one for one in trainer.callbacks if not isinstance(one, MemoryCheckpointCallback)]
    own = trainer.strategy.checkpoint_io
    names: dict[str, Any] = {
        "_get_my_base_path": lambda: str(run.container()),
        "args": Mock(ckpt_mlf_every_n_steps=MEMORY_EVERY, ckpt_std_every_n_steps=DURABLE_EVERY, sync_save=False),
        "callbacks": trainer.callbacks,
        "trainer": trainer,
    }
    exec(GUIDE, names)
    assert isinstance(names["auto_resume"], MemoryAutoResume)
    assert trainer.strategy.unwrapped_checkpoint_io.wrapped_checkpoint_io is own
    assert sum(isinstance(one, MemoryCheckpointCallback) for one in trainer.callbacks) == 1
    trainer.strategy.checkpoint_io.teardown()


class _Derived(nl.AutoResume):  # type: ignore[misc] # NeMo has no types
    def get_trainer_ckpt_path(self, _: Any = None) -> Path:
        return Path("/derived/epoch=0-step=30")


def choose(folder: Path, _: int) -> None:
    """What is resumed from, for what is in memory (step 20) and in long-term storage."""
    plugin = Mock(container=CheckpointContainerId("/shm/job-7"))
    plugin.is_in_memory = lambda path: str(path).startswith("/shm/job-7/")
    plugin.tier.ranks.all_gather = lambda _call, value: [value]
    in_memory = CheckpointContainerId("/shm/job-7/step-20_ckpt")
    trainer = Mock(world_size=1, global_rank=0)

    def resume(memory: Any, default: Any = None, **options: Any) -> MemoryAutoResume:
        plugin.tier.newest.return_value = None if memory is None else (memory, 20)
        options = {"resume_if_exists": True, "resume_from_directory": str(folder), **options}
        return MemoryAutoResume(trainer=trainer, checkpoint_io=plugin, default=default, **options)

    def path(*args: Any, **options: Any) -> str:
        return str(resume(*args, **options).get_trainer_ckpt_path())

    folder.mkdir()
    assert path(in_memory) == str(in_memory)
    assert path(None, resume_ignore_no_checkpoint=True) == "None"
    with pytest.raises(NotFoundError):
        path(None)
    assert path(in_memory, resume_if_exists=False) == str(in_memory)
    assert path(in_memory, _Derived()) == "/derived/epoch=0-step=30"
    assert plugin.fallback == Path("/derived/epoch=0-step=30")

    last = folder / "step=19-last"
    last.mkdir()
    (folder / "step=19-last-unfinished").touch()
    assert path(in_memory) == str(in_memory)
    with pytest.raises(ValueError, match="unfinished"):
        path(None)
    (folder / "step=19-last-unfinished").unlink()
    for step, expected in ((19, str(in_memory)), (20, str(in_memory)), (21, str(last))):
        torch.save({"global_step": step}, last / "common.pt")
        assert path(in_memory) == expected

    (folder / "step=30-end").mkdir()
    with pytest.raises(ValueError, match="already completed"):
        path(in_memory)
    assert path(in_memory, resume_past_end=True) == str(in_memory)

    trainer = Mock(world_size=1, global_rank=0)
    trainer.checkpoint_callback.last_model_path = "before"
    resume(in_memory, resume_past_end=True).setup(trainer)
    assert (str(trainer.ckpt_path), trainer.checkpoint_callback.last_model_path) == (str(in_memory), "before")


class Plain(pl.LightningModule):
    """A model that has nothing to do with Megatron."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 4)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def train_plainly(folder: Path, _: int) -> None:
    """With a strategy of Lightning's: three steps, then three more by a new trainer."""
    container = folder / "job-8"
    batches: Any = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(6, 4)))
    weights = []
    for max_steps, keep in ((3, True), (6, False)):
        watched = Watched()
        trainer = nl.Trainer(
            accelerator="cpu",
            strategy="auto",
            max_steps=max_steps,
            callbacks=[MemoryCheckpointCallback(str(container), 3, keep_on_train_end=keep), watched],
            logger=False,
            enable_progress_bar=False,
            enable_checkpointing=False,
        )
        resume = wrap_trainer_and_auto_resume(trainer, container, True)
        model = Plain()
        resume.setup(trainer, model)
        trainer.fit(model, batches)
        assert watched.steps == list(range(max_steps - 3, max_steps))
        assert container.exists() is keep
        weights.append(model.layer.weight.detach().clone())
    assert not torch.equal(*weights)
