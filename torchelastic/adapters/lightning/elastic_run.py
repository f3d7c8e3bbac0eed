"""One `fit` of Lightning as steps of torchelastic: train, the end of a batch, the beginning and the end of an epoch.

Each is undone as a whole and repeated where a worker is lost. The methods of Lightning's loops do the work; this says
which is next, in a value that newcomers get with the state. So they enter where the others are.
"""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import SequentialSampler

from torchelastic.adapters.in_process.batches import EpochBatches, MicroBatches, largest_group
from torchelastic.adapters.in_process.driven_steps import DrivenSteps
from torchelastic.adapters.in_process.own_checkpoints import say_which_do_not_fit
from torchelastic.adapters.lightning.elastic_averages import averages_of, require_all_known
from torchelastic.adapters.lightning.elastic_loops import BatchEndedError, TrainingFetcher
from torchelastic.adapters.lightning.elastic_manual import LeftGradients, ManualPasses
from torchelastic.adapters.lightning.elastic_progress import FitPhase, LightningProgress
from torchelastic.adapters.lightning.elastic_rank_zero import (
    become_rank_zero,
    file_names,
    own_checkpoints,
    take_file_names,
)
from torchelastic.adapters.lightning.elastic_requirements import require_one_loader, require_plain_loop
from torchelastic.adapters.lightning.elastic_results import settle, share_sums, sums_of
from torchelastic.checkpoint.checkpoint_manager import CheckpointManager
from torchelastic.errors import UnfitError
from torchelastic.model_state import ModelState
from torchelastic.p2p import CoordinatorP2P

log = logging.getLogger(__name__)

#: Epochs, where the trainer does not count them.
_ENDLESS = 2**31


class ElasticRun:
    """The steps of one `fit`; used on the training thread.

    Args:
        trainer: whose they are.
        library: that it is of.
        marker: the first of its callbacks.
        coordinator: finds the other workers.
        global_batch_size: samples of a batch over all ranks; None: the DataLoader's times the largest group.
        checkpoint: saves beside Lightning's own checkpoints; None: nothing does.

    Attributes:
        trainer: as given.
        state: of the training.
        samples_of_all: of all ranks in the micro batch at hand, when they have reduced a value of it.
        reads_training_data: whether the DataLoader at hand is that of the training.
        manual: what `training_step` does in manual optimization; None: it is automatic.
    """

    state: ModelState
    _steps: DrivenSteps
    _batches: EpochBatches
    _fetcher: TrainingFetcher

    def __init__(
        self,
        trainer: Any,
        library: str,
        marker: Any,
        coordinator: CoordinatorP2P,
        global_batch_size: int | None,
        checkpoint: CheckpointManager | None,
    ) -> None:
        self.trainer, self._library, self._marker, self.coordinator = trainer, library, marker, coordinator
        self._global_batch_size, self._checkpoint = global_batch_size, checkpoint
        self._call = importlib.import_module(f"{library}.trainer.call")
        classes = importlib.import_module(f"{library}.trainer.connectors.logger_connector.result")
        self._progress = LightningProgress(trainer, classes)
        self._world: tuple[int, int] | None = None
        self._restores: list[Callable[[], object]] = []
        self._part: int | None = None
        self.samples_of_all = 0
        self.reads_training_data = False
        self.manual: ManualPasses | None = None
        self._has_looked_at_callbacks = False
        self._phases = {
            FitPhase.EPOCH_START: self._start_epoch,
            FitPhase.TRAIN: self._train,
            FitPhase.BATCH_END: self._end_batch,
            FitPhase.VALIDATE: self._validate,
            FitPhase.EPOCH_END: self._end_epoch,
            FitPhase.END: self._end,
        }

    # --- set up -------------------------------------------------------------------------------------------------------

    @contextmanager
    def training_data(self) -> Iterator[None]:
        """Within, the DataLoader that is processed is that of the training."""
        self.reads_training_data = True
        try:
            yield
        finally:
            self.reads_training_data = False

    def shares_of(self, plain: Any) -> EpochBatches:
        """The training data as global batches of a constant size, of which each rank has a share."""
        require_one_loader(plain)
        epochs = self.trainer.fit_loop.max_epochs
        global_batch_size = self._global_batch_size or plain.batch_size * largest_group(self.coordinator)
        is_cut = self.trainer.lightning_module.automatic_optimization
        options = {"worker_init_fn": plain.worker_init_fn, "timeout": plain.timeout}
        return EpochBatches(
            plain,
            global_batch_size,
            plain.batch_size if is_cut else global_batch_size,
            epochs=_ENDLESS if epochs is None or epochs < 0 else epochs,
            max_steps=0,
            seed=int(os.environ.get("PL_GLOBAL_SEED", "0")),
            drop_last=plain.drop_last,
            shuffle=not isinstance(plain.sampler, SequentialSampler),
            **options,
        )

    def fetcher_of(self, combined_loader: Any, fetcher: Any, length: int) -> TrainingFetcher:
        """What the training loop draws from; Lightning's own would fetch ahead, and could not go back."""
        self._batches = require_plain_loop(self.trainer, combined_loader, fetcher)
        self._fetcher = TrainingFetcher(self._batches, self.trainer.fit_loop.epoch_loop, length)
        return self._fetcher

    def _make_state(self) -> None:
        trainer = self.trainer
        strategy = trainer.strategy
        extra: dict[str, Any] = {"lightning": self._progress}
        self._progress.give(extra)
        is_manual = not trainer.lightning_module.automatic_optimization
        if is_manual:
            self.manual = ManualPasses(trainer.lightning_module.parameters())
            extra["lightning_gradients"] = LeftGradients(trainer.lightning_module)
        averages = self._progress.averages = averages_of(self._progress.callbacks, trainer.lightning_module)
        extra.update({place.name: average for place, average in averages.items()})
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            extra["scaler"] = scaler
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        ddp = dict(strategy._ddp_kwargs)
        unused = bool(ddp.pop("find_unused_parameters", False)) or is_manual
        optimizers = list(strategy.optimizers)
        self.state = ModelState(
            strategy.lightning_module,
            optimizers[0] if len(optimizers) == 1 else optimizers,
            scheduler=schedulers[0] if len(schedulers) == 1 else schedulers or None,
            sampler=self._batches.sampler,
            extra=extra,
            # what follows the last optimizer's step in `training_step` may fail, too, and is to be undone with it; and
            # a validation may have the averages in the place of the weights
            snapshot="full" if is_manual or averages else "auto",
            find_unused_parameters=unused,
            ddp=ddp or None,
        )
        self._steps = DrivenSteps(self.coordinator, self.state, self._checkpoint)

    # --- steps --------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Train to the end.

        Raises:
            StoppedEarly: this worker was asked to leave the run, which has not finished.
            SystemExit: the others had finished when this worker came.
        """
        self._make_state()
        self.trainer.callbacks.insert(0, self._marker)
        try:
            while self._begin():
                try:
                    phase = self._progress.phase
                    is_slow = phase is not FitPhase.TRAIN
                    with self.coordinator.slow_section() if is_slow else nullcontext():
                        self._enter_group()
                        before = sums_of(self.results)
                        self._progress.phase = self._phases[phase]()
                        share_sums(self.results, before)
                except BaseException as error:
                    if not self._undo(error):
                        raise
                else:
                    if not self._steps.commit():
                        self._put_back()
        finally:
            self.close()

    def _begin(self) -> bool:
        self._restores = []
        self._progress.give(self.state.extra)
        has_begun = self._steps.begin()
        self._progress.take(self.state.extra)
        is_first = self._world is None
        self._follow_group()
        if is_first and self._steps.has_resumed and self.coordinator.rank == 0:
            say_which_do_not_fit("Lightning", self.trainer.global_step, *own_checkpoints(self.trainer))
        if has_begun:
            self._restores = self._progress.restores()
        else:
            self._steps.raise_if_left(self.trainer.global_step, self.trainer.max_steps)
            if self._steps.came_late:
                log.warning("the other workers had finished when this one came: it has no result, and ends here")
                raise SystemExit(0)  # what comes behind `fit` would look for its best checkpoint
        return has_begun

    def _undo(self, error: BaseException) -> bool:
        if not self._steps.undo(error):
            return False
        self._put_back()
        return True

    def _put_back(self) -> None:
        """What a failed step has changed in the trainer, beside what is in the state."""
        trainer = self.trainer
        for restore in self._restores:
            restore()
        trainer.training = True
        trainer.lightning_module._current_fx_name = None
        trainer.fit_loop.epoch_loop.val_loop._results.clear()
        self.take_part(None)

    def close(self) -> None:
        """This worker trains no further, whatever the reason."""
        trainer = self.trainer
        trainer.callbacks[:] = [one for one in trainer.callbacks if one is not self._marker]
        self._steps.close()
        self._batches.close()
        if self.manual is not None:
            self.manual.close()
        trainer.strategy.model = trainer.lightning_module

    # --- groups -------------------------------------------------------------------------------------------------------

    def _follow_group(self) -> None:
        """What Lightning keeps of the group, as it is now."""
        trainer, world = self.trainer, (self.coordinator.rank, self.coordinator.world_size)
        trainer.strategy.model = self.state.model
        if world == self._world:
            return
        was_zero = self._world is not None and self._world[0] == 0
        self._world = world
        trainer.strategy.cluster_environment.enter_group(*world)
        trainer.strategy.set_world_ranks()
        trainer.fit_loop.epoch_loop.val_loop._combined_loader = None  # it has the shares of another group
        if world[0] != 0 and trainer.progress_bar_callback is not None:
            trainer.progress_bar_callback.disable()  # the first worker of each host had one
        if world[0] == 0 and not was_zero and self._progress.names is not None:
            take_file_names(trainer, self._progress.names)
            become_rank_zero(trainer, self._library, is_first=False)

    def _enter_group(self) -> None:
        """The run begins: in its first step, on all ranks."""
        trainer = self.trainer
        if self._progress.names is None:
            self._progress.names = trainer.strategy.broadcast(file_names(trainer))
            take_file_names(trainer, self._progress.names)
            if trainer.is_global_zero:
                become_rank_zero(trainer, self._library, is_first=True)

    # --- what a step does ---------------------------------------------------------------------------------------------

    @property
    def results(self) -> Any:
        """What the training has logged."""
        return self.trainer.fit_loop.epoch_loop._results

    def _start_epoch(self) -> FitPhase:
        fit, loop = self.trainer.fit_loop, self.trainer.fit_loop.epoch_loop
        fit.on_advance_start()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before")
            loop.reset()  # the counters say where the data go on
        loop.on_run_start(self._fetcher)
        batches = self._batches
        batches.go_to(fit.epoch_progress.current.processed * len(batches) + loop.batch_progress.current.ready)
        return FitPhase.EPOCH_END if loop.done else FitPhase.TRAIN

    def _train(self) -> FitPhase:
        """Forward and backward passes up to the optimizer's step; no callback sees the end of a batch yet."""
        loop, ended = self.trainer.fit_loop.epoch_loop, []
        while True:
            last = self._advance(loop)
            if last is None:  # it resumes behind this batch
                break
            ended.append((last.outputs, last.batch, last.number))
            if not loop._should_accumulate():
                break
            self.trainer._logger_connector.on_batch_end()
            loop.batch_progress.increment_completed()
        self._progress.ended = ended
        return FitPhase.BATCH_END

    def _advance(self, loop: Any) -> BatchEndedError | None:
        self._marker.is_armed = True
        try:
            loop.advance(self._fetcher)
        except BatchEndedError as error:
            return error
        except StopIteration as stop:
            raise UnfitError(
                "on_train_batch_start returned -1, and ElasticDDPStrategy ends no epoch before its data: set "
                "trainer.should_stop, or limit_train_batches"
            ) from stop
        finally:
            self._marker.is_armed = False
            self.trainer.lightning_module._current_fx_name = None
        return None

    def _end_batch(self) -> FitPhase:
        """Callbacks, and the log."""
        trainer, loop = self.trainer, self.trainer.fit_loop.epoch_loop
        connector = trainer._logger_connector
        for outputs, batch, number in self._progress.ended:
            own = batch if batch is not None else self._batch_of_others(number)
            self._call._call_callback_hooks(trainer, "on_train_batch_end", outputs, own, number)
            self._call._call_lightning_module_hook(trainer, "on_train_batch_end", outputs, own, number)
        if not self._has_looked_at_callbacks:
            self._has_looked_at_callbacks = True
            require_all_known(self._progress.averages, self._progress.callbacks, trainer.lightning_module)
        if self._progress.ended:
            connector.on_batch_end()
            loop.batch_progress.increment_completed()
            connector.update_train_step_metrics()
        if loop._should_check_val_fx(self._fetcher) and not loop._skip_next_val:
            return FitPhase.VALIDATE
        return self._validate()

    def _validate(self) -> FitPhase:
        """If it is due; and what follows it."""
        loop = self.trainer.fit_loop.epoch_loop
        loop.on_advance_end(self._fetcher)
        loop.on_iteration_done()
        return FitPhase.EPOCH_END if loop.done else FitPhase.TRAIN

    def _batch_of_others(self, number: int) -> Any:
        """This worker has come at the end of a batch: its share of it, for callbacks that look at it."""
        epoch = self.trainer.fit_loop.epoch_progress.current.processed
        return self._place(self._batches.share_of(epoch, number))

    def _end_epoch(self) -> FitPhase:
        fit = self.trainer.fit_loop
        settle(self.results)
        fit.on_advance_end()
        fit.on_iteration_done()
        return FitPhase.END if fit.done else FitPhase.EPOCH_START

    def _end(self) -> FitPhase:
        self.trainer.fit_loop._restarting = False
        self.trainer.fit_loop.on_run_end()
        assert self._steps.current is not None
        self._steps.current.stop_training()
        return FitPhase.END

    # --- micro batches ------------------------------------------------------------------------------------------------

    @property
    def parts(self) -> MicroBatches:
        """Of the batch at hand."""
        return self._fetcher.parts

    def placed(self, first: Any) -> list[Any]:
        """The micro batches where the model is; Lightning has placed the first one."""
        return [first, *(self._place(part.inputs) for part in self.parts[1:])]

    def _place(self, inputs: Any) -> Any:
        trainer = self.trainer
        batch = trainer.precision_plugin.convert_input(inputs)
        batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
        return self._call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)

    def take_part(self, samples: int | None) -> None:
        """What comes is of a micro batch of so many samples; None: of none."""
        self._part = samples

    def backward(self, loss: torch.Tensor) -> None:
        """In place of `loss.backward()`: batches count alike, and in each of them each sample."""
        trainer, share = self.trainer, self._batches.sampler.pending[-1]
        assert self._part is not None
        number = trainer.fit_loop.epoch_loop.batch_idx
        accumulate = trainer.accumulate_grad_batches
        in_window = min(accumulate, self._fetcher.length - number // accumulate * accumulate)
        part = self._part / share.global_samples
        self.state.backward(loss * (part * in_window), part)

    def mean_over_samples(self, value: torch.Tensor) -> torch.Tensor | None:
        """Of all ranks' micro batches; None: there is none at hand."""
        if self._part is None or not dist.is_initialized():
            self.samples_of_all = self._part or 0
            return None
        samples = torch.tensor([self._part], dtype=torch.float64, device=value.device)
        flat = torch.cat([value.detach().double().reshape(-1) * samples, samples])
        dist.all_reduce(flat)
        self.samples_of_all = int(flat[-1])
        return value.copy_((flat[:-1] / flat[-1]).to(value.dtype).reshape(value.shape))

    def joined(self, results: list[Any]) -> Any:
        """What the micro batches of one batch have given, as one: the mean loss of this rank, the last one's extras."""
        samples = sum(part.samples for part in self.parts)
        last = results[-1]
        if len(results) > 1 and samples:
            pairs = zip(results, self.parts, strict=True)
            last.loss = sum(result.loss * (part.samples / samples) for result, part in pairs)
        return last
