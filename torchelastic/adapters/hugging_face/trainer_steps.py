"""The steps of a `Trainer`, driven from its own loop: begun before a batch is drawn, committed behind the optimizer."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from torchelastic.adapters.hugging_face.one_process import report_group
from torchelastic.adapters.hugging_face.resume import durable_checkpoints
from torchelastic.adapters.hugging_face.trainer_progress import TrainerProgress
from torchelastic.adapters.in_process.batches import EpochBatches, MicroBatch
from torchelastic.adapters.in_process.driven_steps import DrivenSteps
from torchelastic.adapters.in_process.own_checkpoints import say_which_do_not_fit
from torchelastic.checkpoint.checkpoint_manager import CheckpointManager
from torchelastic.errors import UnfitError
from torchelastic.model_state import ModelState
from torchelastic.p2p import CoordinatorP2P

if TYPE_CHECKING:
    from transformers import Trainer

log = logging.getLogger(__name__)


class EnterAgainError(Exception):
    """Leaves the Trainer's loop over an epoch, which is entered again where the run is now."""


class TrainerSteps:
    """The steps of one `train()`; used on the training thread.

    Args:
        trainer: whose they are.
        coordinator: finds the other workers.
        batches: in place of the Trainer's DataLoader.
        module: what is trained, as Accelerate has prepared it.
        optimizer: torch's own.
        scheduler: of the Trainer.
        checkpoint: saves beside the Trainer's own checkpoints; None: nothing does.
        attributes: of the trainer, by name, that are undone with a step.

    Attributes:
        state: of the training.
        is_over: whether the run has ended.
        is_telling: whether callbacks are told of a step that has counted already.
    """

    def __init__(
        self,
        trainer: Trainer,
        coordinator: CoordinatorP2P,
        batches: EpochBatches,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        checkpoint: CheckpointManager | None,
        attributes: Sequence[str],
    ) -> None:
        self._trainer, self._coordinator, self.batches = trainer, coordinator, batches
        self.progress = TrainerProgress(trainer, attributes)
        extra: dict[str, Any] = {"trainer": self.progress}
        self.progress.give(extra)
        if trainer.accelerator.scaler is not None:
            extra["scaler"] = trainer.accelerator.scaler
        self.state = ModelState(
            module, optimizer, scheduler=scheduler, sampler=batches.sampler, extra=extra, ddp=_options_of_ddp(trainer)
        )
        self.is_over = False
        self._steps = DrivenSteps(coordinator, self.state, checkpoint)
        self._world: tuple[int, int] | None = None
        self.is_telling = False
        self._met_with: dict[str, Any] | None = None
        self._began_with: dict[str, Any] | None = None
        self._meeting = ExitStack()
        self._part = MicroBatch(None, 0)
        self._counted: tuple[float, float] | None = None
        self._callback = CommitCallback(self)
        trainer.callback_handler.callbacks[:0] = [self._callback]
        trainer.accelerator.backward = self.backward

    # --- steps --------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A step begins, unless one has begun that nothing was done in; in a new group, where one is wanted.

        The Trainer's progress may be another one then.

        Raises:
            EnterAgainError: the run has ended meanwhile, on the other workers.
            StoppedEarly: this worker was asked to leave the run, which has not finished.
        """
        if self._steps.current is not None:
            return
        self.progress.give(self.state.extra)
        position, is_first = self.progress.position, self._world is None
        self.is_over = not self._steps.begin()
        self.progress.take(self.state.extra)
        self._follow_group()
        if self.is_over:
            trainer = self._trainer
            self._steps.raise_if_left(trainer.state.global_step, trainer.state.max_steps)
            trainer.control.should_training_stop = True
            raise EnterAgainError
        if not is_first and self.progress.position != position:
            self._tell(position)

    def meet(self) -> None:
        """The first step begins before any callback asks who is process zero, and behind what the Trainer resets.

        A callback that begins at nothing, in a worker that joins, must not undo what it has from the others:
        `keep_what_was_met`.
        """
        with suppress(EnterAgainError):  # the run has ended meanwhile
            self.begin()
            self._look_at_own_checkpoints()
        self._meeting.enter_context(self.slow_section())  # a callback may start a tracker, or copy the weights
        self._met_with = self.progress.state_dict() if self.state.step else None

    def _look_at_own_checkpoints(self) -> None:
        trainer = self._trainer
        if self._steps.has_resumed and self._coordinator.rank == 0:
            folder = Path(trainer.args.output_dir or ".")
            best = [trainer.state.best_model_checkpoint or ""]
            with suppress(OSError):  # who cannot look there says so when it saves
                found = {str(folder / one.folder): one.step for one in durable_checkpoints(folder)}
                say_which_do_not_fit("the Trainer", trainer.state.global_step, found, best)

    def keep_what_was_met(self) -> None:
        """All callbacks have begun; what they have begun with in a new run outlives an undone first step."""
        self._meeting.close()
        if self._met_with is not None:
            self.progress.load_state_dict(self._met_with)
        elif not self.state.step:
            self._began_with = self.progress.state_dict()
        self._met_with = None

    def _take(self) -> None:
        """What a step has become: committed, or undone."""
        self.progress.take(self.state.extra)
        if self._began_with is not None and not self.state.step:
            self.progress.load_state_dict(self._began_with)

    def _tell(self, known: tuple[int, int]) -> None:
        """Others have counted the step that was undone here: its end, which callbacks have not seen here yet.

        Args:
            known: the position before; weights and counters are those behind the step by now.
        """
        trainer = self._trainer
        handler, met_with = trainer.callback_handler, self.progress.state_dict()
        steps, epochs = (now - before for now, before in zip(self.progress.position, known, strict=True))
        self.is_telling = True
        try:
            for is_missed, event in ((steps == 1, handler.on_step_end), (epochs == 1, handler.on_epoch_end)):
                if is_missed:
                    event(trainer.args, trainer.state, trainer.control)
        finally:
            self.is_telling = False
        self.progress.load_state_dict(met_with)  # what is due, and the states of callbacks, have come from the others

    def commit(self) -> bool:
        """The step counts; false: it must not, and was undone."""
        self.progress.give(self.state.extra)
        is_committed = self._steps.commit()
        self._take()
        return is_committed

    def undo(self, error: BaseException) -> bool:
        """The step has failed; false: its error is to be raised, or no step has begun."""
        if not self._steps.undo(error):
            return False
        self._take()
        return True

    def finish(self) -> None:
        """End the run, for everybody, when what each rank has counted for itself is summed up."""
        while not self.is_over:
            try:
                self.begin()
                assert self._steps.current is not None
                self._trainer.store_flos()
                self._steps.current.stop_training()
            except EnterAgainError:
                return
            except BaseException as error:
                if not self.undo(error):
                    raise
            else:
                self.is_over = self.commit()
        self._follow_group()

    def close(self) -> None:
        """This worker trains no further, whatever the reason; the Trainer is as it was before."""
        self._meeting.close()
        callbacks = self._trainer.callback_handler.callbacks
        callbacks[:] = [one for one in callbacks if one is not self._callback]
        vars(self._trainer.accelerator).pop("backward", None)
        self._steps.close()
        self.batches.close()

    def slow_section(self) -> AbstractContextManager[None]:
        """Around an evaluation, or a save, which may take minutes."""
        return self._coordinator.slow_section()

    def _follow_group(self) -> None:
        """What the libraries keep of the group, as it is now."""
        rank, world_size = self._coordinator.rank, self._coordinator.world_size
        if (rank, world_size) == self._world:
            return
        has_bars = self._world is not None
        self._world = (rank, world_size)
        trainer = self._trainer
        report_group(rank, world_size)
        if self._steps.came_late:
            log.warning("the other workers had finished when this one came: it has the state that it began with")
        trainer.state.is_world_process_zero = trainer.is_world_process_zero()
        trainer.state.is_local_process_zero = trainer.is_local_process_zero()
        trainer.__dict__.pop("_eval_dataloaders", None)  # they have the shares of another group
        if trainer.state.is_world_process_zero and has_bars:
            for callback in trainer.callback_handler.callbacks:
                if getattr(callback, "training_bar", self) is None:  # it was made where rank 0 was before
                    callback.on_train_begin(trainer.args, trainer.state, trainer.control)

    # --- losses -------------------------------------------------------------------------------------------------------

    def count(self, items: Sequence[Any], loss_of: Callable[[float, int], float]) -> torch.Tensor | None:
        """What the losses of the step are divided by, over all ranks; None: each is a mean over its samples.

        Args:
            items: of each micro batch: how many labels count in it; None: it is not by labels.
            loss_of: the loss of the first one, if this is what it is divided by, in a group of so many.
        """
        self._counted = None
        if self.progress.divides_by_items is None:
            self._look_at(items, loss_of)
        if not self.progress.divides_by_items:
            return None
        total = self._summed(torch.tensor(float(sum(items)), dtype=torch.float64))
        ranks = self._trainer.accelerator.num_processes if self.progress.multiplies_by_ranks else 1
        self._counted = (float(total), 1.0 / max(1, ranks))
        return total.to(torch.float32)

    def _look_at(self, items: Sequence[Any], loss_of: Callable[[float, int], float]) -> None:
        """Whether losses are divided by a count, and multiplied by the ranks: not all are. The same on all ranks."""
        progress = self.progress
        if any(one is None for one in items):
            progress.divides_by_items = False
            return
        with progress.unchanged_attributes():
            once, by_two, of_two = loss_of(1.0, 1), loss_of(2.0, 1), loss_of(1.0, 2)
        is_seen = math.isfinite(once) and once != 0.0
        is_divided, is_multiplied = (not math.isclose(once, other, rel_tol=1e-3) for other in (by_two, of_two))
        flags = [is_seen and not is_divided, is_seen and is_divided, is_seen and is_multiplied]
        found = self._summed(torch.tensor(flags, dtype=torch.float64))
        as_means, by_items, progress.multiplies_by_ranks = (bool(value) for value in found)
        if as_means:
            log.warning(
                "the loss of %s is a mean, whatever num_items_in_batch it is given, so each sample counts alike, and "
                "not each label", type(self._trainer.model).__name__,
            )  # fmt: skip
        elif by_items and not progress.multiplies_by_ranks:
            log.warning(
                "compute_loss divides by num_items_in_batch, and does not multiply by accelerator.num_processes as the "
                "Trainer's own does: steps take it as the mean over all labels, but eval_loss is divided by the number "
                "of workers, and changes with it"
            )
        progress.divides_by_items = False if as_means else by_items or None

    def take_part(self, part: MicroBatch, items: torch.Tensor | int | None) -> None:
        """The next backward pass is of this micro batch."""
        self._part, self._items = part, items

    def backward(self, loss: torch.Tensor, **_: Any) -> None:
        """In place of `Accelerator.backward`: each sample, or each label, of a global batch counts alike."""
        part, counted = self._part, self._counted
        count = float(self._items or 0) if counted is not None else part.samples
        if not part.samples:
            count = 0
        loss_sum = loss * (counted[0] * counted[1] if counted is not None else count)
        scaler = self._trainer.accelerator.scaler
        self.state.backward(loss_sum if scaler is None else scaler.scale(loss_sum), count)

    def reported(self, losses: list[tuple[torch.Tensor, int]]) -> torch.Tensor:
        """The mean loss of the global batch, the same on all ranks.

        Args:
            losses: of each micro batch, and its samples.
        """
        share = self.batches.sampler.pending[-1]
        if self._counted is not None:
            own = sum(loss.double() for loss, samples in losses if samples) * self._counted[1]
        else:
            own = sum(loss.double() * samples for loss, samples in losses) / share.global_samples
        own = torch.as_tensor(own, dtype=torch.float64, device=losses[0][0].device)
        return self._summed(own).to(losses[0][0].dtype)

    @staticmethod
    def _summed(value: torch.Tensor) -> torch.Tensor:
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(value)
        return value


def _options_of_ddp(trainer: Trainer) -> dict[str, Any]:
    """As Accelerate would have given them to DDP; of sizes only what the user has chosen."""
    args, handler = trainer.args, trainer.accelerator.ddp_handler
    chosen = {"bucket_cap_mb": args.ddp_bucket_cap_mb, "broadcast_buffers": args.ddp_broadcast_buffers}
    chosen = {name: value for name, value in chosen.items() if value is not None}
    flags = ("find_unused_parameters", "static_graph", "gradient_as_bucket_view")
    return chosen | {name: True for name in flags if getattr(handler, name, False)}


class CommitCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """The first of the Trainer's callbacks: a step counts before any other one sees its end."""

    def __init__(self, of_run: TrainerSteps) -> None:
        self._steps = of_run

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Behind what the Trainer resets."""
        self._steps.meet()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Behind optimizer, scheduler and counters. Raises EnterAgainError: the step was undone."""
        if not self._steps.is_telling and not self._steps.commit():
            raise EnterAgainError

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """No other callback has seen it either. Raises UnfitError: a callback has ended it before its data did."""
        del args
        if self._steps.is_telling:
            return
        if state.global_step % len(self._steps.batches) and not control.should_training_stop:
            raise UnfitError(
                "a callback has set control.should_epoch_stop in the middle of an epoch, and ElasticTrainer goes on "
                "with the rest of its data: end the training (should_training_stop), or take more epochs of fewer data"
            )
        self._steps.progress.epochs_ended += 1
