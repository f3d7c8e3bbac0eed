"""Transformers' `Trainer` with checkpoints in memory between its durable ones; see docs/transformers.md."""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

try:
    from transformers import TrainerCallback
    from transformers.trainer_callback import ExportableState
except ImportError as error:
    raise ImportError(f"{error}; transformers is needed here: pip install 'torchelastic[transformers]'") from error

from torchelastic.adapters.hugging_face.rank_state import (
    LEADING,
    REPLICATED,
    RankState,
    belongs_to,
    distributed_kind,
    own_part,
    part_from,
    require_unsharded,
    rng_state,
    save_step,
    split_model,
    tensors_of,
    without_arrays,
)
from torchelastic.adapters.hugging_face.resume import (
    Durable,
    best_of_all,
    durable_checkpoints,
    require_loadable,
    rng_file,
    step_to_compare,
    trainer_rng,
    write_folder,
)
from torchelastic.adapters.memory_tier import TIMEOUT_S, StorageTier, is_due, takes_memory
from torchelastic.adapters.values import json_like
from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.failures import Failures
from torchelastic.checkpoint.format import torch_stream
from torchelastic.checkpoint.memory import CheckpointContainerId
from torchelastic.checkpoint.policy.arguments import whole_number
from torchelastic.errors import UnsavableError
from torchelastic.text import shortlist

if TYPE_CHECKING:
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

__all__ = ["MemoryCheckpointCallback", "resume_path"]

log = logging.getLogger(__name__)


class MemoryCheckpointCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Saves all that a resume needs to memory every few optimizer steps, beside the Trainer's durable checkpoints.

    That is the model, the optimizer and its schedule, the gradient scaler, the Trainer's state and each rank's random
    numbers; where the Trainer is in its data it works out from the step, as always. A step is saved when the Trainer is
    through with logging, evaluating and saving it, and values are those of that moment. Every rank has to have the
    callback. For one process and for DDP; other strategies are refused when training begins.

    A save for which there is no memory is skipped, and one that fails, for whatever reason, is logged: training goes
    on, and the checkpoint before stays. What can never be saved is refused when training begins, by name. Values that
    were logged are saved as the Trainer's own file of JSON would have them. When the run has come to its end, or has
    stopped with a durable checkpoint at least as new, the
    container is removed; after a crash it stays.

    Args:
        checkpoint_base_container: where this job's checkpoints lie on this host; None: `job_container()`.
        every_n_steps: save after the optimizer steps that this divides.
        skip_every_n_steps: but not after those that this divides, such as the `save_steps` of the Trainer.
        enabled: False leaves everything to the Trainer's own checkpoints.
        keep_on_train_end: do not remove the container.
        async_save: go on with training as soon as the values have been copied.
        resume_folder: where the folder to resume from is made, on this host; None: in the container, on tmpfs. Twice
            the size of the checkpoint is in memory until the first step is done.
        timeout_s: how long a save may take, and how long ranks wait for each other.

    Attributes:
        failures: the latest failures of saves, oldest first, in words.

    Raises:
        TypeError: a number of steps is no whole number.
        ValueError: a number is not above 0, or the container is no absolute path.
    """

    def __init__(
        self,
        checkpoint_base_container: CheckpointContainerId | str | os.PathLike[str] | None = None,
        every_n_steps: int = 10,
        *,
        skip_every_n_steps: int | None = None,
        enabled: bool = True,
        keep_on_train_end: bool = False,
        async_save: bool = True,
        resume_folder: str | os.PathLike[str] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        whole_number("every_n_steps", every_n_steps, at_least=1, remedy="give 1 or more")
        if skip_every_n_steps is not None:
            whole_number("skip_every_n_steps", skip_every_n_steps, at_least=1, remedy="give 1 or more")
        self._tier: StorageTier | None = None
        if enabled:
            self._tier = StorageTier(checkpoint_base_container, async_save=async_save, timeout_s=timeout_s)
        self._every_n_steps, self._skip_every_n_steps = every_n_steps, skip_every_n_steps
        self._keep_on_train_end = keep_on_train_end
        self._resume_folder = resume_folder
        self._args: TrainingArguments | None = None
        self._trainer: weakref.ref[Any] | None = None
        self._materialised: Path | None = None
        self._newest: int | None = None
        self._is_due = False
        self._skipped: set[str] = set()
        self._loadable: set[type] = {torch.Tensor, torch.nn.Parameter}
        self.failures = Failures()

    # --- resuming -----------------------------------------------------------------------------------------------------

    def resume_from_checkpoint(self, trainer: Trainer | TrainingArguments | None = None) -> str | None:
        """What to give to `trainer.train(resume_from_checkpoint=...)`. All ranks call it, from the main thread.

        Args:
            trainer: the Trainer, or its arguments. May be left out if the callback was given to the Trainer's
                constructor, unless the states of callbacks are to be restored
                (`restore_callback_states_from_checkpoint`).

        Returns:
            A folder made from the newest complete checkpoint in memory, or the newest durable checkpoint if that is
            newer (or the one in memory cannot be used: a warning says why), or None to begin anew. The folder made from
            memory is removed after the first step.

        Raises:
            ValueError: the Trainer is not known, or its strategy is not one that can be saved; says what to do.
            CheckpointError: it is not known what is in memory.
        """
        args = self._args_of(trainer)
        durable = durable_checkpoints(args.output_dir)
        best = max(durable, default=None)
        if self._tier is not None:
            require_unsharded("MemoryCheckpointCallback", distributed_kind())
            self._tier.start()
            newest = self._tier.newest()
            best = _best_for_all(self._tier, durable)
            if newest is not None and takes_memory(newest[1], step_to_compare(best, args.max_steps)):
                try:
                    path = str(self._materialise(self._tier, *newest, args))
                except CheckpointError as error:
                    log.warning("step %d: the checkpoint in memory is skipped: %s", newest[1], error)
                else:
                    self._newest = newest[1]
                    return path
        return None if best is None else str(Path(args.output_dir or "") / best.folder)

    def _args_of(self, trainer: Any) -> TrainingArguments:
        if trainer is not None and not hasattr(trainer, "output_dir"):
            if not hasattr(trainer, "args"):
                raise ValueError(f"{trainer!r} is neither a Trainer nor TrainingArguments")
            self._trainer, self._args = weakref.ref(trainer), trainer.args
        elif trainer is not None:
            self._args = trainer
        if self._args is None:
            raise ValueError(
                "it is not known which Trainer is to resume: call resume_from_checkpoint(trainer), or give the "
                "callback to Trainer(callbacks=[...])"
            )
        return self._args

    def _materialise(
        self, tier: StorageTier, memory: CheckpointContainerId, step: int, args: TrainingArguments
    ) -> Path:
        """Makes a folder in the Trainer's own layout, one on each host. Raises: CheckpointError on all ranks."""
        rank = tier.ranks.rank
        parent = Path(self._resume_folder or f"{tier.container}/resume")
        folder = parent / f"checkpoint-{step}"
        parts = [own_part(rank), *([REPLICATED, LEADING] if args.local_process_index == 0 else [])]
        tensors = tier.load(str(memory), lambda name: any(belongs_to(name, part) for part in parts))

        def write_common() -> None:
            shutil.rmtree(parent, ignore_errors=True)
            replicated, leading = part_from(tensors, REPLICATED), part_from(tensors, LEADING)
            model = {**replicated["parameters"], **leading["buffers"]}
            write_folder(folder, {**leading, "model": model, "optimizer": replicated["optimizer"]})

        def write_own() -> None:
            if not any(belongs_to(name, own_part(rank)) for name in tensors):
                log.info("step %d was saved by fewer ranks: rank %d keeps its random numbers", step, rank)
                return
            state = trainer_rng(part_from(tensors, own_part(rank)), is_distributed=args.world_size > 1)
            torch.save(state, folder / rng_file(rank, args.world_size))

        tier.own_on_all(f"write {folder.name}", write_common if args.local_process_index == 0 else _nothing)
        self._materialised = parent
        tier.own_on_all(f"write the random numbers of {folder.name}", write_own)
        return folder

    def _remove_materialised(self, args: TrainingArguments) -> None:
        if self._materialised is not None and args.local_process_index == 0:
            shutil.rmtree(self._materialised, ignore_errors=True)
        self._materialised = None

    def close(self) -> None:
        """Waits for the save that is under way, and ends the background work; `on_train_end` does so."""
        if self._tier is not None:
            self._tier.end()

    # --- the Trainer's events -----------------------------------------------------------------------------------------

    def on_init_end(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """The Trainer is made."""
        self._args = args

    def on_train_begin(self, args: TrainingArguments, state: Any, control: Any, **others: Any) -> None:
        """Training begins, or goes on. Raises: ValueError, TypeError if this Trainer's state cannot be saved."""
        self._args = args
        if self._tier is None:
            return
        require_unsharded("MemoryCheckpointCallback", distributed_kind())
        if args.restore_callback_states_from_checkpoint and self._trainer is None:
            raise ValueError(
                "restore_callback_states_from_checkpoint is set, and the callbacks of the Trainer are not known: call "
                "resume_from_checkpoint(trainer) of the MemoryCheckpointCallback before train()"
            )
        self._is_due = False
        self._tier.start()
        if others.get("optimizer") is not None:
            self._check_savable(state, control, others)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: Any, **_: Any) -> None:  # noqa: ARG002
        """An optimizer step was taken; what it was resumed from is not needed any more."""
        if not args.auto_find_batch_size:  # else the Trainer may begin again from the same folder
            self._remove_materialised(args)
        self._is_due = is_due(state.global_step, self._every_n_steps, self._skip_every_n_steps)

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **others: Any) -> None:  # noqa: ARG002
        """Saves the step before, with the random numbers that a resumed Trainer has here: its batch was fetched."""
        self._save_if_due(state, control, others)

    def on_epoch_begin(self, args: Any, state: TrainerState, control: TrainerControl, **others: Any) -> None:  # noqa: ARG002
        """Saves the last step of the epoch before, with the random numbers that its first batches are drawn with."""
        self._save_if_due(state, control, others)

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **others: Any) -> None:  # noqa: ARG002
        """Saves the step at which something has stopped: at the end of training the model may be the best one.

        The last of `max_steps` is saved only to be kept: from there the Trainer would train one more.
        """
        if control.should_training_stop and (self._keep_on_train_end or state.global_step < state.max_steps):
            self._save_if_due(state, control, others)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Waits for the last save, and removes the container if the run is over."""
        self._remove_materialised(args)
        if self._tier is None:
            return
        try:
            if not self._keep_on_train_end and self._is_over(self._tier, args, state):
                self._tier.remove(args.local_process_index)
            else:
                self._tier.end()
        except CheckpointError as error:  # a rank that hangs in a save, say: what was trained stays trained
            self.failures.add("ending the saves in memory", error)

    def _is_over(self, tier: StorageTier, args: TrainingArguments, state: TrainerState) -> bool:
        done = tier.ranks.all_gather("end training", state.global_step >= state.max_steps)
        best = _best_for_all(tier, durable_checkpoints(args.output_dir))
        if all(done) or not takes_memory(self._newest, step_to_compare(best)):
            return True
        log.warning(
            "training has stopped at step %d of %d without a durable checkpoint as new: that in memory is kept, in %s",
            state.global_step,
            state.max_steps,
            tier.container,
        )
        return False

    # --- saving -------------------------------------------------------------------------------------------------------

    def _save_if_due(self, state: TrainerState, control: TrainerControl, others: dict[str, Any]) -> None:
        if not self._is_due or self._tier is None:
            return
        self._is_due = False
        tier = self._tier
        try:
            save_step(tier, state.global_step, lambda: self._tensors(state, control, others, tier.ranks.rank))
        except Exception as error:  # noqa: BLE001 - what was trained stays trained, whatever a save raises
            then = ": not saved in memory; training goes on, the checkpoint before stays"
            self.failures.add(f"step {state.global_step}", error, then=then)
        else:
            self._newest = state.global_step

    def _tensors(
        self, state: TrainerState, control: TrainerControl, others: dict[str, Any], rank: int
    ) -> dict[str, torch.Tensor]:
        """All of this rank. Raises TypeError: something in it cannot be saved; names it."""
        trainer = None if self._trainer is None else self._trainer()
        if trainer is not None:
            trainer.store_flos()  # else those since the last log would be missing
        parameters, buffers = split_model(others["model"])
        scaler = getattr(others["optimizer"], "scaler", None)
        leading = {
            "buffers": buffers,
            "scheduler": others["lr_scheduler"].state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "trainer_state": self._trainer_state(state, control),
        }
        replicated = {"parameters": parameters, "optimizer": others["optimizer"].state_dict()}
        require_loadable(replicated["optimizer"], "the optimizer's state", self._loadable)
        return tensors_of(RankState(replicated, leading, rng_state()), rank)

    def _trainer_state(self, state: TrainerState, control: TrainerControl) -> dict[str, Any]:
        """As the Trainer's own file has it, of whatever was logged."""
        stored = {each.name: getattr(state, each.name) for each in dataclasses.fields(state)}
        trainer = None if self._trainer is None else self._trainer()
        if trainer is not None:
            stored["stateful_callbacks"] = _exported([*trainer.callback_handler.callbacks, control])
        found: dict[str, Any] = json_like(stored, self._say_skipped)
        return found

    def _say_skipped(self, place: str, value: Any) -> None:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        if kind not in self._skipped:
            self._skipped.add(kind)
            log.warning(
                "%s of the Trainer's state is a %s, which its file of JSON cannot hold: not saved, here and wherever "
                "there is such a value; log numbers and texts", place, kind,
            )  # fmt: skip

    def _check_savable(self, state: TrainerState, control: TrainerControl, others: dict[str, Any]) -> None:
        """Find what cannot be saved, or not be loaded by the Trainer, before anything is trained."""
        assert self._tier is not None
        try:
            self._tensors(state, control, others, 0)
        except (TypeError, ValueError) as error:
            raise UnsavableError(f"MemoryCheckpointCallback cannot save this Trainer: {error}") from error
        unread = torch_stream.unreadable({"scheduler": without_arrays(others["lr_scheduler"].state_dict())})
        if unread:
            raise UnsavableError(
                f"MemoryCheckpointCallback cannot save this Trainer: {shortlist(unread)} is no plain value that "
                "torch.load(weights_only=True) reads, so no Trainer could load it: keep numbers and texts there"
            )


def resume_path(
    trainer_or_args: Trainer | TrainingArguments,
    base: CheckpointContainerId | str | os.PathLike[str] | None = None,
    *,
    timeout_s: float = TIMEOUT_S,
) -> str | None:
    """`MemoryCheckpointCallback.resume_from_checkpoint`, for who does not hold the callback. All ranks call it.

    The folder that is made from memory stays until the job's next one, or until its container is removed.

    Args:
        trainer_or_args: who is to resume.
        base: the container of the job; None: `job_container()`.
        timeout_s: how long ranks wait for each other.

    Raises:
        As the method.
    """
    callback = MemoryCheckpointCallback(base, timeout_s=timeout_s)
    try:
        return callback.resume_from_checkpoint(trainer_or_args)
    finally:
        callback.close()


def _exported(callbacks: Iterable[Any]) -> dict[str, Any]:
    """The states of those callbacks that have one, as `TrainerState` keeps them: a list where a class is twice."""
    states: dict[str, list[Any]] = {}
    for callback in callbacks:
        if isinstance(callback, ExportableState):
            states.setdefault(type(callback).__name__, []).append(callback.state())
    return {name: each[0] if len(each) == 1 else each for name, each in states.items()}


def _best_for_all(tier: StorageTier, durable: Iterable[Durable]) -> Durable | None:
    """The best of the durable checkpoints that all ranks see; None: there is none. Collective."""
    rows = tier.ranks.all_gather("compare durable checkpoints", [[one.is_full, one.step] for one in durable])
    return best_of_all([[Durable(*one) for one in seen] for seen in rows])


def _nothing() -> None:
    pass
