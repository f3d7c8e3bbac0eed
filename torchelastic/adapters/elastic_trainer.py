"""Transformers' `Trainer`, which goes on in the running processes when workers are lost or join; docs/transformers.md.

Import it before `TrainingArguments` are made: from then on Accelerate and Transformers form no process group in this
process; torchelastic does, at the first step.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

try:
    import transformers.trainer
    from accelerate.state import PartialState
    from transformers import Trainer
except ImportError as error:
    raise ImportError(f"{error}; transformers is needed here: pip install 'torchelastic[transformers]'") from error

from torchelastic.adapters.hugging_face.one_process import said_to_be_of, stay_alone
from torchelastic.adapters.hugging_face.resume import checked_resume
from torchelastic.adapters.hugging_face.trainer_requirements import (
    require_known_version,
    require_own_batches,
    require_permutations,
    require_supported,
    warn_of_other_epochs,
)
from torchelastic.adapters.hugging_face.trainer_steps import EnterAgainError, TrainerSteps
from torchelastic.adapters.in_process.batches import EpochBatches, MicroBatch, MicroBatches, largest_group
from torchelastic.checkpoint.checkpoint_manager import CheckpointManager
from torchelastic.p2p import CoordinatorP2P

__all__ = ["ElasticTrainer", "ElasticTrainerMixin"]

stay_alone()

#: In place of the folder of a checkpoint, where an epoch is entered again.
_AGAIN = "the state that this process has"


class ElasticTrainerMixin:
    """Put it before the Trainer's class: `class MyTrainer(ElasticTrainerMixin, SFTTrainer)`, under `torchelastic run`.

    `train()` is called on every worker. When one is lost, hangs or joins, the others undo the step under way, form a
    new group and go on in the same processes: the same weights, learning rates and logged numbers, each sample once. An
    evaluation or a save that a loss interrupts is repeated as a whole. The Trainer's own checkpoints are as they were.

    A step has `per_device_train_batch_size * gradient_accumulation_steps * W` samples, whatever the number of workers:
    W is the largest that the launcher allows. A rank computes its share in micro batches of at most
    `per_device_train_batch_size`.

    Attributes:
        elastic_global_batch_size: samples of a step; None: as above.
        elastic_checkpoint: saves beside the Trainer's own checkpoints, in memory say, for the case that all workers are
            lost at once (`torchelastic.checkpoint.TieredCheckpointManager`); None: nothing does.
        elastic_attributes: names of attributes in which a class of yours counts while it computes losses (numbers,
            texts, lists and dicts of them): undone with a step, and sent to newcomers. Those of TRL's trainers are.
    """

    elastic_global_batch_size: int | None = None
    elastic_checkpoint: CheckpointManager | None = None
    elastic_attributes: Sequence[str] = ()
    _coordinator: CoordinatorP2P | None = None
    _elastic: TrainerSteps | None = None
    _has_trained = False  # in this process, which has the group of its last training then
    _accumulation = 1
    _started = 0.0
    _items: list[Any]
    _numbers_of: str | None = None

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, ignore_keys_for_eval: Any = None) -> Any:
        """As `Trainer.train`; once in a process under the launcher.

        Raises:
            UnfitError: (of `torchelastic.errors`) an option that would not be kept, by name; before anything is
                trained.
            RuntimeError: what `torchelastic.train` raises.
            StoppedEarly: (of `torchelastic.lifetime`, a SystemExit) this worker was asked to leave, by SIGTERM or
                `torchelastic drain`: the script ends here, and publishes no model that has not finished.
        """
        require_known_version()
        require_supported(self, trial, may_have_group=ElasticTrainerMixin._has_trained)  # type: ignore[arg-type]
        ElasticTrainerMixin._has_trained = True
        trainer: Any = self
        args = trainer.args
        resume_from_checkpoint = checked_resume(resume_from_checkpoint, trainer.args.output_dir)
        self._coordinator = CoordinatorP2P("nccl" if args.device.type == "cuda" else "gloo")
        self._accumulation, args.gradient_accumulation_steps = args.gradient_accumulation_steps, 1
        vars(self)["training_step"] = self._train_share
        try:
            return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)  # type: ignore[misc]
        finally:
            args.gradient_accumulation_steps = self._accumulation
            del vars(self)["training_step"]
            if self._elastic is not None:
                self._elastic.close()
            self._elastic = self._coordinator = None

    # --- set up -------------------------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """On this worker's own GPU: alone, Transformers would take all of the host."""
        args: Any = self.args  # type: ignore[attr-defined]
        if args.device.type == "cuda":
            device = PartialState().device
            torch.cuda.set_device(device)
            args.__dict__["_setup_devices"], args._n_gpu = device, 1
        super().create_accelerator_and_postprocess()  # type: ignore[misc]

    def get_train_dataloader(self) -> Any:
        """This rank's shares of the global batches, read and collated as the Trainer does."""
        if self._coordinator is None:
            return super().get_train_dataloader()  # type: ignore[misc]
        args: Any = self.args  # type: ignore[attr-defined]
        plain, size = super().get_train_dataloader(), self.get_total_train_batch_size(args)  # type: ignore[misc]
        require_permutations(plain, args.per_device_train_batch_size)
        return EpochBatches(
            plain,
            size,
            args.per_device_train_batch_size,
            epochs=math.ceil(args.num_train_epochs),
            max_steps=args.max_steps,
            seed=args.seed if args.data_seed is None else args.data_seed,
            drop_last=args.dataloader_drop_last,
        )

    def get_total_train_batch_size(self, args: Any) -> int:
        """Samples of a step, over all ranks."""
        if self._coordinator is None:
            return int(super().get_total_train_batch_size(args))  # type: ignore[misc]
        workers = largest_group(self._coordinator)
        own = args.per_device_train_batch_size * self._accumulation * workers
        return self.elastic_global_batch_size or own

    def _init_training_state(self, *arguments: Any) -> Any:
        found = super()._init_training_state(*arguments)  # type: ignore[misc]
        # another checkpoint than the Trainer's may be of an earlier epoch
        return found if self._coordinator is None or self.elastic_checkpoint is None else (0, 0)

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        trainer: Any = self
        model, batches = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)  # type: ignore[misc]
        trainer._tr_loss = torch.tensor(0.0, device=trainer.args.device)
        trainer._total_loss_scalar, trainer._globalstep_last_logged = 0.0, trainer.state.global_step
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        assert self._coordinator is not None
        require_own_batches(batches)
        self._elastic = TrainerSteps(
            trainer, self._coordinator, batches, model, optimizer, trainer.lr_scheduler, self.elastic_checkpoint,
            self.elastic_attributes,
        )  # fmt: skip
        self._elastic.progress.epochs_ended = trainer.state.global_step // len(batches)
        self._numbers_of = resume_from_checkpoint
        warn_of_other_epochs(trainer.state, len(batches))
        batches.go_to(trainer.state.global_step)
        trainer.args.gradient_accumulation_steps = self._accumulation  # for trackers, which begin with the training
        return self._elastic.state.model, batches

    # --- the loop -----------------------------------------------------------------------------------------------------

    def _run_epoch(self, **arguments: Any) -> None:
        """The Trainer's loop over an epoch, entered again where the run is after a loss, or where it is elsewhere."""
        trainer: Any = self
        elastic, epoch = self._elastic, arguments["epoch"]
        if elastic is None:
            super()._run_epoch(**arguments)  # type: ignore[misc]
            return
        elastic.keep_what_was_met()
        trainer.args.gradient_accumulation_steps = 1  # a step is one batch for the loop
        while not elastic.is_over:
            try:
                while self._work_is_due():
                    self._work(elastic, arguments["model"], arguments["trial"], arguments["ignore_keys_for_eval"])
                if epoch < elastic.progress.epochs_ended:
                    return
                done = trainer.state.global_step - epoch * len(elastic.batches)
                arguments |= {"epochs_trained": epoch, "steps_trained_in_current_epoch": done}
                arguments["resume_from_checkpoint"] = _AGAIN if done else None
                super()._run_epoch(**arguments)  # type: ignore[misc]
                return
            except EnterAgainError:
                pass
            except BaseException as error:
                if not elastic.undo(error):
                    raise

    def _work_is_due(self) -> bool:
        trainer: Any = self
        control, logged = trainer.control, trainer._globalstep_last_logged
        is_logged = control.should_log and trainer.state.global_step > logged
        return bool(is_logged or control.should_evaluate or control.should_save)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        """A step begins. Raises EnterAgainError: the run is elsewhere by now."""
        elastic = self._elastic
        if elastic is None or epoch_iterator is not elastic.batches:
            return super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[misc]
        position = elastic.progress.position
        elastic.begin()
        if elastic.progress.position != position or self._work_is_due():
            raise EnterAgainError
        if self._numbers_of is not None and elastic.state.step == 0:
            super()._load_rng_state(self._numbers_of)  # type: ignore[misc]  # of this rank, which is known only now
        parts: MicroBatches = next(epoch_iterator)
        self._items = [self._labels_of(part, device) for part in parts]
        return [parts], elastic.count(self._items, lambda count, ranks: self._loss_of(parts[0].inputs, count, ranks))

    def _loss_of(self, inputs: Any, count: float, ranks: int) -> float:
        """The loss of a micro batch that is divided by this count and multiplied by the ranks, if it is."""
        trainer: Any = self
        trainer.model.eval()
        items = torch.tensor(count, device=trainer.args.device)
        with torch.no_grad(), said_to_be_of(ranks), trainer.compute_loss_context_manager():
            prepared = trainer._prepare_inputs(copy.copy(inputs))  # labels may be taken out of it
            loss = trainer.compute_loss(trainer.model, prepared, num_items_in_batch=items)
        trainer.model.train()
        return float(loss)

    def _labels_of(self, part: MicroBatch, device: torch.device) -> Any:
        """How many labels count in a micro batch; None: its loss is a mean over samples."""
        args: Any = self.args  # type: ignore[attr-defined]
        args.average_tokens_across_devices = False  # else it asks the other ranks
        try:
            count = super()._get_num_items_in_batch([part.inputs], device)  # type: ignore[misc]
        finally:
            args.average_tokens_across_devices = True
        return count if part.samples or count is None else 0

    def _train_share(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """In place of `training_step`, which is called for each micro batch; the last one averages the gradients."""
        elastic, train = self._elastic, type(self).training_step  # type: ignore[attr-defined]
        assert elastic is not None
        losses = []
        for number, (part, items) in enumerate(zip(inputs, self._items, strict=True), start=1):
            elastic.take_part(part, items)
            with nullcontext() if number == len(inputs) else elastic.state.no_sync():
                losses.append((train(self, model, part.inputs, num_items_in_batch), part.samples))
        return elastic.reported(losses)

    def floating_point_ops(self, inputs: Any) -> int:
        """Of all micro batches."""
        if not isinstance(inputs, MicroBatches):
            return int(super().floating_point_ops(inputs))  # type: ignore[misc]
        return sum(super(ElasticTrainerMixin, self).floating_point_ops(part.inputs) for part in inputs if part.samples)  # type: ignore[misc]

    def _track_num_input_tokens(self, inputs: Any) -> None:
        for part in inputs if isinstance(inputs, MicroBatches) else ():
            # all ranks count at once, so who has none counts an empty batch
            super()._track_num_input_tokens(part.inputs if part.samples else _emptied(part.inputs))  # type: ignore[misc]

    def _maybe_log_save_evaluate(
        self,
        tr_loss: torch.Tensor,
        grad_norm: Any,
        model: Any,
        trial: Any,
        epoch: float,
        ignore_keys_for_eval: Any,
        start_time: float,
        learning_rate: float | None = None,
    ) -> None:
        """What is due between two steps is a step of its own: undone and repeated as a whole where a worker is lost."""
        elastic = self._elastic
        if elastic is None:
            super()._maybe_log_save_evaluate(  # type: ignore[misc]
                tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval, start_time, learning_rate
            )
            return
        elastic.progress.grad_norm = None if grad_norm is None else float(grad_norm)
        elastic.progress.learning_rate = learning_rate
        self._started = start_time
        while self._work_is_due():
            self._work(elastic, model, trial, ignore_keys_for_eval)

    def _work(self, elastic: TrainerSteps, model: Any, trial: Any, ignore_keys_for_eval: Any) -> None:
        """Log, evaluate and save, as far as it is due. Raises EnterAgainError: the run is elsewhere by now."""
        trainer: Any = self
        position = elastic.progress.position
        elastic.begin()
        if elastic.progress.position != position:
            raise EnterAgainError
        if not self._work_is_due():
            return  # the others have done it
        progress, control, args = elastic.progress, trainer.control, trainer.args
        args.gradient_accumulation_steps = self._accumulation  # it is saved with the model
        try:
            with elastic.slow_section():
                super()._maybe_log_save_evaluate(  # type: ignore[misc]
                    trainer._tr_loss, progress.grad_norm, model, trial, trainer.state.epoch, ignore_keys_for_eval,
                    self._started, progress.learning_rate,
                )  # fmt: skip
        except BaseException as error:
            if not elastic.undo(error):
                raise
            return
        finally:
            args.gradient_accumulation_steps = 1
        control.should_log = control.should_evaluate = control.should_save = False
        elastic.commit()

    def _load_rng_state(self, checkpoint: Any) -> None:
        if self._elastic is None:
            super()._load_rng_state(checkpoint)  # type: ignore[misc]

    def store_flos(self) -> None:
        """What all ranks have computed; in a step, where a loss is undone."""
        if self._elastic is None or not self._elastic.is_over:
            super().store_flos()  # type: ignore[misc]

    def _finalize_training(self, *arguments: Any) -> Any:
        if self._elastic is not None:
            self._elastic.finish()
        self.args.gradient_accumulation_steps = self._accumulation  # type: ignore[attr-defined]
        return super()._finalize_training(*arguments)  # type: ignore[misc]


class ElasticTrainer(ElasticTrainerMixin, Trainer):  # type: ignore[misc, unused-ignore]
    """`transformers.Trainer` with `ElasticTrainerMixin`."""


def _emptied(inputs: Any) -> dict[str, Any]:
    return {name: value[:0] for name, value in inputs.items() if isinstance(value, torch.Tensor) and value.dim()}


def _skips_none_of_ours(known: Any) -> Any:
    """An epoch that is entered again goes on where its sampler is, and not behind so many batches of a new loader."""
    return lambda loader, count=0: loader if isinstance(loader, EpochBatches) else known(loader, count)


_OF_TRAINER: Any = transformers.trainer
_OF_TRAINER.skip_first_batches = _skips_none_of_ours(_OF_TRAINER.skip_first_batches)
