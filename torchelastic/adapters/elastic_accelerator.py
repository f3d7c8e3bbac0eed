"""Accelerate's `Accelerator`, whose loop goes on in the running processes when workers are lost or join.

See docs/transformers.md. Import it before any `Accelerator` is made: from then on Accelerate forms no process group in
this process; torchelastic does, at the first step.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler

try:
    import accelerate  # type: ignore[import-untyped, unused-ignore]
    from accelerate.utils import recursively_apply
except ImportError as error:
    raise ImportError(f"{error}; accelerate is needed here: pip install 'torchelastic[transformers]'") from error

from torchelastic.adapters.hugging_face.accelerator_parts import (
    LoaderOfGroup,
    MicroBatchOptimizer,
    TrainingBatches,
)
from torchelastic.adapters.hugging_face.accelerator_requirements import (
    require_fit_options,
    require_own_group,
    require_training_data,
)
from torchelastic.adapters.hugging_face.accelerator_steps import AcceleratedRun, ElasticStep, ExtraOfScript, LookedAt
from torchelastic.adapters.hugging_face.one_process import stay_alone
from torchelastic.adapters.in_process.batches import EpochBatches, largest_group
from torchelastic.checkpoint.checkpoint_manager import CheckpointManager
from torchelastic.checkpoint.policy import SavePolicy
from torchelastic.errors import UnfitError
from torchelastic.model.step_model import step_model
from torchelastic.p2p import CoordinatorP2P

__all__ = ["ElasticAccelerator", "ElasticStep"]

stay_alone()


class ElasticAccelerator(accelerate.Accelerator):  # type: ignore[misc, unused-ignore]
    """In place of `Accelerator`, in a script under `torchelastic run`.

    The loop over epochs and batches becomes one over steps::

        for step in accelerator.steps(accelerator.loader(train_dataloader, epochs=3), between=evaluate):
            with step:
                for batch in step:
                    ...  # as before: model, backward, clipping, optimizer, scheduler, zero_grad

    When a worker is lost, hangs or joins, the others undo the step under way, form a new group and go on in the same
    processes: the same weights and learning rates, each sample once. A step is this rank's share of a global batch of
    constant size, in micro batches of the DataLoader's size; optimizers and schedulers step with the last one of them,
    whether they are called in the loop over the step or behind it.

    One model is trained, by one optimizer or several. Used on the training thread.

    Args:
        *args: as for `Accelerator`.
        **options: the same.

    Raises:
        UnfitError: (of `torchelastic.errors`) an option that would not be kept, by name, with the remedy.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        given = inspect.signature(accelerate.Accelerator.__init__).bind(self, *args, **options).arguments
        require_fit_options(given)
        require_own_group()
        super().__init__(*args, **options)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.gradient_state.plugin_kwargs["adjust_scheduler"] = False  # micro batches are no steps of the schedule
        self._extra: dict[str, Any] = {}
        self._looked_at = LookedAt()
        self.register_for_checkpointing(self._looked_at, ExtraOfScript(self._extra))
        self._trackers_wanted: tuple[Any, ...] | None = None
        self._logged_before: list[tuple[Any, ...]] = []
        self._run: AcceleratedRun | None = None
        self._coordinator: CoordinatorP2P | None = None
        self._module: torch.nn.Module | None = None
        self._called: torch.nn.Module | None = None

    @property
    def extra(self) -> dict[str, Any]:
        """Your own counters and objects by name, as in `ModelState`: undone with a step, sent to newcomers, saved."""
        return self._extra

    # --- trackers -----------------------------------------------------------------------------------------------------

    def init_trackers(
        self, project_name: str, config: dict[str, Any] | None = None, init_kwargs: dict[str, Any] | None = None
    ) -> None:
        """As Accelerate's; they begin in the first step, on rank 0, and anew on who takes its place."""
        self._trackers_wanted = (project_name, config, init_kwargs)
        if self._run is not None:
            self._begin_trackers()

    def _begin_trackers(self) -> None:
        """Begin those that `init_trackers` was called for, if this worker is rank 0 by now; called by the loop."""
        if self._trackers_wanted is None or self.process_index != 0:
            return
        wanted, self._trackers_wanted = self._trackers_wanted, None
        super().init_trackers(*wanted)
        for logged in self._logged_before:
            super().log(*logged)
        self._logged_before.clear()

    def log(self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None) -> None:
        """As Accelerate's; before the first step it is kept until trackers begin."""
        if self._run is None and self._trackers_wanted is not None:
            self._logged_before.append((values, step, log_kwargs))
        else:
            super().log(values, step, log_kwargs)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """As Accelerate's. Raises UnfitError: before the first step, when no worker is rank 0 yet."""
        if self._run is None and self._trackers_wanted is not None:
            raise UnfitError(
                "get_tracker() comes before the first step, when no worker is rank 0 yet and trackers have not begun: "
                "call it in a step, or in the function that steps(between=) is given"
            )
        return super().get_tracker(name, unwrap)

    # --- set up -------------------------------------------------------------------------------------------------------

    def prepare_model(self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        """As Accelerate's; the model that is trained comes back as one object that calls the present group's wrapper.

        Raises:
            UnfitError: it is the second one that is trained, or one of TorchScript.
        """
        if self._module is not None and model in (self._module, self._called):
            return self._called
        is_trained = not evaluation_mode and any(one.requires_grad for one in model.parameters())
        if is_trained and self._module is not None:
            raise UnfitError(
                "ElasticAccelerator trains one model, and a second one was prepared: put them into one "
                "(torch.nn.ModuleDict, say), or prepare those that are not trained with evaluation_mode=True"
            )
        prepared = super().prepare_model(model, device_placement, evaluation_mode)
        if not is_trained:
            return prepared
        called = step_model(prepared, self._call, self._no_sync)
        if called is None:
            raise UnfitError(f"a {type(model).__name__} cannot stand for itself in each group: give the plain module")
        self._module, self._called = prepared, called
        return called

    def _call(self, *args: Any, **options: Any) -> Any:
        assert self._module is not None
        return (self._module if self._run is None else self._run.state.model)(*args, **options)

    def _no_sync(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._run is None else self._run.state.no_sync()

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """As Accelerate's."""
        if not isinstance(optimizer, MicroBatchOptimizer):
            placed = self.device_placement if device_placement is None else device_placement
            optimizer = MicroBatchOptimizer(optimizer, self._has_gradients, device_placement=placed, scaler=self.scaler)
            optimizer._is_accelerate_prepared = True
        return super().prepare_optimizer(optimizer)

    def _has_gradients(self) -> bool:
        return self._run is not None and self._run.current is not None and self._run.current.has_gradients

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """As Accelerate's, but it steps once in a step: a global batch is the same whatever the number of processes."""
        prepared = super().prepare_scheduler(scheduler)
        prepared.split_batches = True
        return prepared

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """For evaluation: its batches are shared by the ranks of the group in which it is iterated."""
        if isinstance(data_loader, LoaderOfGroup):
            return data_loader

        def prepared() -> Any:
            made = super(ElasticAccelerator, self).prepare_data_loader(
                data_loader, device_placement, slice_fn_for_dispatch
            )
            self._dataloaders.remove(made)
            return made

        loader = LoaderOfGroup(data_loader, prepared, lambda: (self.process_index, self.num_processes))
        self._dataloaders.append(loader)
        return loader

    def unwrap_model(self, model: Any, *args: Any, **options: Any) -> Any:
        """The user's own."""
        return super().unwrap_model(self._module if model is self._called else model, *args, **options)

    def loader(
        self, dataloader: DataLoader[Any], *, epochs: int = 1, global_batch_size: int | None = None, seed: int = 0
    ) -> EpochBatches:
        """The training data, for `steps`; `len` of it is the number of steps of an epoch.

        Args:
            dataloader: torch's, not prepared: its dataset, collator, processes, `drop_last`, and whether it shuffles.
                Its batch size is that of a micro batch: the most that the model gets at once.
            epochs: of the run.
            global_batch_size: samples of a step over all ranks; None: the batch size times
                `gradient_accumulation_steps` times the largest number of workers that the launcher allows.
            seed: of the order of the samples; the same on all ranks.

        Raises:
            UnfitError: no worker could go on in these data where another one is; says why.
        """
        plain = require_training_data(dataloader)
        assert plain.batch_size is not None
        workers = largest_group(self._its_coordinator())
        batches = TrainingBatches(
            plain,
            global_batch_size or plain.batch_size * self.gradient_accumulation_steps * workers,
            plain.batch_size,
            epochs=epochs,
            max_steps=0,
            seed=seed,
            drop_last=plain.drop_last,
            shuffle=isinstance(plain.sampler, RandomSampler),
            worker_init_fn=plain.worker_init_fn,
            timeout=plain.timeout,
        )
        self.register_for_checkpointing(batches.sampler)
        return batches

    def _its_coordinator(self) -> CoordinatorP2P:
        if self._coordinator is None:
            self._coordinator = CoordinatorP2P("nccl" if self.device.type == "cuda" else "gloo")
        return self._coordinator

    # --- the loop -----------------------------------------------------------------------------------------------------

    def steps(
        self,
        loader: EpochBatches,
        *,
        between: Callable[[int], Any] | None = None,
        between_every: int | None = None,
        checkpoint: CheckpointManager | SavePolicy | None = None,
    ) -> Iterator[ElasticStep]:
        """The steps of the run, to be used with `with`; a step that has failed comes again.

        Args:
            loader: what `loader()` has given.
            between: called with the number of steps so far, to evaluate, save or log: as a step of its own, which is
                undone and repeated as a whole when a worker is lost, and in which newcomers take part. It ends the run
                if it returns true.
            between_every: so many steps, and behind the last one; None: an epoch.
            checkpoint: as for `torchelastic.train`; for the case that all workers are lost at once.

        Raises:
            UnfitError: nothing that is trained was prepared, or `loader` is another one.
            RuntimeError: what `torchelastic.train` raises, here and in the loop.
        """
        if not isinstance(loader, EpochBatches):
            raise UnfitError(
                f"steps() takes what accelerator.loader(train_dataloader) gives, and got a {type(loader).__name__}: "
                "leave the training data out of prepare()"
            )
        if self._module is None or not self._optimizers:
            raise UnfitError("steps() trains what was prepared: call accelerator.prepare(model, optimizer) before it")
        every = len(loader) if between_every is None else between_every
        if every < 1:
            raise ValueError(f"between_every={every} must be at least 1")
        self._run = AcceleratedRun(
            self, self._its_coordinator(), loader, self._module, self._looked_at, self._extra, between, every
        )
        return self._run.steps(checkpoint)

    def _step_for(self, what: str) -> ElasticStep:
        if self._run is None or self._run.current is None:
            raise UnfitError(f"{what} belongs into a step: `for step in accelerator.steps(..): with step:`")
        return self._run.current

    def backward(self, loss: torch.Tensor, count: float | torch.Tensor | None = None, **options: Any) -> None:
        """The backward pass of a batch of a step, called once for each.

        Args:
            loss: a mean over the samples of the batch; or, with `count`, a sum.
            count: of what it is the sum, of tokens say. Gradients are divided by that of the whole global batch.
            **options: none is taken.

        Raises:
            UnfitError: outside of a step, the second time for a batch, or with options of torch's.
            RuntimeError: a peer was lost.
        """
        if options:
            raise UnfitError(f"ElasticAccelerator.backward() does not take {', '.join(options)}: leave it out")
        self._step_for("backward()").backward(loss, count)

    @contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        """Nothing more than the loop over a step, which accumulates by itself; for scripts that have it."""
        del models
        self._step_for("accumulate()")
        yield

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """As Accelerate's; before the last batch of a step it clips nothing."""
        if self.sync_gradients:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        return torch.nn.utils.clip_grad_norm_(parameters, math.inf, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """The same."""
        if self.sync_gradients:
            super().clip_grad_value_(parameters, clip_value)

    def gather(self, tensor: Any) -> Any:
        """As Accelerate's; in a train step the ranks' batches may be of different sizes, and padding counts nothing."""
        if self._run is None or self._run.current is None or self.num_processes == 1:
            return super().gather(tensor)
        samples = self._run.current.samples
        return recursively_apply(lambda one: self._gather_uneven(one if samples else one[:0]), _at_least_1d(tensor))

    def _gather_uneven(self, one: torch.Tensor) -> torch.Tensor:
        sizes = super().gather(torch.tensor([len(one)], device=self.device)).tolist()
        padded = one.new_zeros((max(sizes), *one.shape[1:]))
        padded[: len(one)] = one
        rows = super().gather(padded).reshape(len(sizes), max(sizes), *one.shape[1:])
        return torch.cat([row[:size] for row, size in zip(rows, sizes, strict=True)])


def _at_least_1d(tensor: Any) -> Any:
    return recursively_apply(lambda one: one[None] if one.ndim == 0 else one, tensor)
