"""The steps of an `ElasticAccelerator`: each a global batch in micro batches, and what is due between two of them."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
from accelerate.utils import send_to_device

from torchelastic.adapters.hugging_face.one_process import report_group
from torchelastic.adapters.in_process.batches import EpochBatches, MicroBatch, MicroBatches
from torchelastic.checkpoint.checkpoint_manager import CheckpointManager
from torchelastic.checkpoint.policy import SavePolicy
from torchelastic.errors import UnfitError
from torchelastic.model.companions import MOST_SKIPS
from torchelastic.model.extras import Extras
from torchelastic.model_state import ModelState
from torchelastic.p2p import CoordinatorP2P
from torchelastic.step import Step
from torchelastic.train_loop import steps

if TYPE_CHECKING:
    from torchelastic.adapters.elastic_accelerator import ElasticAccelerator

log = logging.getLogger(__name__)

Between = Callable[[int], Any]
#: How Accelerate names the folders of `save_state()` with `automatic_checkpoint_naming`.
_NUMBERED = re.compile(r"checkpoint_(\d+)")
#: Names in `extra` of what Accelerate saves by itself begin with it.
_OF_ACCELERATE = "accelerate/"
#: In the metrics of checkpoints: steps as the script counts them, without what is done between two of them.
STEPS = f"{_OF_ACCELERATE}steps"


class LookedAt:
    """Up to which step what is due between two of them was done; undone with it, sent to newcomers, saved.

    Attributes:
        steps: that had been trained then.
    """

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, int]:
        """It."""
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """The inverse."""
        self.steps = int(state["steps"])


class ExtraOfScript:
    """What the script keeps in `ElasticAccelerator.extra`, for `save_state` and `load_state`.

    Args:
        values: by name; it stays the same object.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def state_dict(self) -> dict[str, Any]:
        """Plain values, and the states of objects."""
        own = {name: value for name, value in self._values.items() if not name.startswith(_OF_ACCELERATE)}
        return Extras(own).state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse. What the state does not know stays."""
        Extras(self._values).load_state_dict({**Extras(self._values).state_dict(), **state}, is_own=True)


class ElasticStep:
    """One attempt at a step, used with `with`; iterated once, it gives this rank's micro batches.

    Attributes:
        number: of the step, from 0.
        epoch: of its data, from 0.
        samples: in the micro batch at hand that are this rank's own; 0: it is computed for the sake of other ranks, and
            counts nothing.
    """

    def __init__(self, run: AcceleratedRun, step: Step) -> None:
        self._run, self._step = run, step
        self.number, self.epoch = run.batches.committed, run.batches.sampler.epoch
        self.samples = 0
        self._part: MicroBatch | None = None
        self._has_backward = self._is_through = False
        self._micro_batches: Iterator[Any] | None = None
        self.has_gradients = False

    @property
    def committed(self) -> bool:
        """Whether it has succeeded, on all ranks."""
        return self._step.committed

    def stop_training(self) -> None:
        """End the run for everybody with this step; one worker that calls it is enough."""
        self._step.stop_training()

    def skip(self, reason: str, *, most_in_a_row: int = MOST_SKIPS) -> NoReturn:
        """Leave this step out, on all ranks, for a loss that is no number, say; see `ModelState.skip_step`.

        Args:
            reason: for the log and the report.
            most_in_a_row: so many steps may be skipped in a row.

        Raises:
            NonRetryableException: so many were.
            RuntimeError: the step has stepped an optimizer already.
        """
        self._run.state.skip_step(reason, most_in_a_row=most_in_a_row)

    def __iter__(self) -> Iterator[Any]:
        if self._micro_batches is not None:
            raise UnfitError("a step is iterated once: its micro batches are one global batch")
        self._micro_batches = self._each(next(self._run.batches))
        return self._micro_batches

    def _each(self, parts: MicroBatches) -> Iterator[Any]:
        """The last one exchanges the gradients; only there optimizers and schedulers step."""
        run = self._run
        for number, part in enumerate(parts, start=1):
            self._part, self.samples, self._has_backward = part, part.samples, False
            is_last = number == len(parts)
            run.accelerator.sync_gradients = is_last
            with nullcontext() if is_last else run.state.no_sync():
                yield run.on_device(part.inputs)
            if not self._has_backward:
                raise UnfitError("a batch of a step was left without accelerator.backward(loss): call it for each one")
        self._part, self._is_through = None, True

    def backward(self, loss: torch.Tensor, count: Any) -> None:
        """See `ElasticAccelerator.backward`."""
        if self._part is None:
            raise UnfitError("backward() belongs to a batch: call it in the loop over the step")
        if self._has_backward:
            raise UnfitError(
                "accelerator.backward() was called twice for one batch: add the losses up, and call it once"
            )
        self._has_backward = self.has_gradients = True
        number = self.samples if count is None else count
        loss_sum = loss * self.samples if count is None else loss
        scaler = self._run.accelerator.scaler
        self._run.state.backward(loss_sum if scaler is None else scaler.scale(loss_sum), number if self.samples else 0)

    def __enter__(self) -> ElasticStep:
        self._step.__enter__()
        self._run.begins(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> Literal[False] | bool:
        self._run.ends()
        if self._micro_batches is not None:
            self._micro_batches.close()  # type: ignore[attr-defined]  # it is a generator
        if self._is_through:
            self._run.state.extra[STEPS] = self.number + 1
        if error is None and not self._is_through and not self._step.is_last:
            left = UnfitError("a step was left before its batches were all used: write `for batch in step:` in it")
            self._step.__exit__(UnfitError, left, None)
            raise left
        return self._step.__exit__(kind, error, traceback)


class AcceleratedRun:
    """One run of one worker; used on the training thread.

    Args:
        accelerator: with all that is trained prepared.
        coordinator: finds the other workers.
        batches: of the training.
        module: that is trained.
        looked_at: of the run.
        between: called between steps, with the number of steps.
        every: so often, in steps.

    Attributes:
        state: of the training.
        current: the step under way.
    """

    def __init__(
        self,
        accelerator: ElasticAccelerator,
        coordinator: CoordinatorP2P,
        batches: EpochBatches,
        module: torch.nn.Module,
        looked_at: LookedAt,
        extra: dict[str, Any],
        between: Between | None,
        every: int,
    ) -> None:
        self.accelerator, self.batches, self._looked_at = accelerator, batches, looked_at
        self.current: ElasticStep | None = None
        self._coordinator, self._between, self._every = coordinator, between, every
        self._world = (-1, 0)
        self._optimizers = accelerator._optimizers
        optimizers = [one.optimizer for one in self._optimizers]
        schedulers = [one.scheduler for one in accelerator._schedulers]
        kept = [
            one
            for one in accelerator._custom_objects
            if one is not batches.sampler and not isinstance(one, ExtraOfScript)
        ]
        extra |= {f"{_OF_ACCELERATE}{number}": one for number, one in enumerate(kept)}
        if accelerator.scaler is not None:
            extra[f"{_OF_ACCELERATE}scaler"] = accelerator.scaler
        handler = accelerator.ddp_handler
        self.state = ModelState(
            module,
            optimizers[0] if len(optimizers) == 1 else optimizers,
            scheduler=schedulers[0] if len(schedulers) == 1 else schedulers or None,
            sampler=batches.sampler,
            extra=extra,
            ddp=None if handler is None else handler.to_kwargs(),
        )

    def steps(self, checkpoint: CheckpointManager | SavePolicy | None) -> Iterator[ElasticStep]:
        """Yield one train step after the other; what is due between them is done here."""
        of_run = steps(self._coordinator, self.state, checkpoint=checkpoint)
        try:
            for step in of_run:
                self._follow_group()
                is_finished = self.batches.sampler.finished
                if self._is_due(is_finished):
                    self._look(step)
                elif is_finished:
                    with step:
                        step.stop_training()
                else:
                    yield ElasticStep(self, step)
            self._follow_group()
        finally:
            of_run.close()  # type: ignore[attr-defined]  # it is a generator
            self.batches.close()

    def _is_due(self, is_finished: bool) -> bool:
        done = self.batches.committed
        is_new = self._between is not None and done > self._looked_at.steps
        return is_new and (is_finished or done % self._every == 0)

    def _look(self, step: Step) -> None:
        """A step of its own: a loss in it undoes all that it has done, and newcomers take part when it is repeated."""
        assert self._between is not None
        with step:
            self._forget_loaders()
            self._looked_at.steps = self.batches.committed  # before: what `save_state` saves in there goes on behind it
            with self._coordinator.slow_section():
                self._agree_on_next_name()
                is_over = bool(self._between(self.batches.committed))
            if is_over:
                step.stop_training()

    def _agree_on_next_name(self) -> None:
        """The next free number for `save_state()` with automatic names, which only who has saved before would know."""
        project = self.accelerator.project_configuration
        if not project.automatic_checkpoint_naming or self.accelerator.project_dir is None:
            return
        names = [path.name for path in Path(self.accelerator.project_dir, "checkpoints").glob("checkpoint_*")]
        taken = [int(match[1]) for name in names if (match := _NUMBERED.fullmatch(name)) is not None]
        wanted = torch.tensor([max(project.iteration, *(number + 1 for number in taken), 0)])
        project.iteration = int(self.accelerator.gather(wanted.to(self.accelerator.device)).max())

    def begins(self, step: ElasticStep) -> None:
        """This train step is under way."""
        self.current = step
        self._forget_loaders()
        for optimizer in self._optimizers:
            optimizer.begin_step()

    def ends(self) -> None:
        """None is."""
        self.current, self.accelerator.sync_gradients = None, True

    def on_device(self, inputs: Any) -> Any:
        """Where the model is."""
        accelerator = self.accelerator
        if not accelerator.device_placement:
            return inputs
        return send_to_device(inputs, accelerator.device, non_blocking=accelerator.non_blocking)

    def _forget_loaders(self) -> None:
        """Those that an error has left in the middle of an epoch: Accelerate takes the last one for the active one."""
        self.accelerator.gradient_state.dataloader_references = [None]

    def _follow_group(self) -> None:
        """What Accelerate keeps of the group, as it is now."""
        world = self._coordinator.rank, self._coordinator.world_size
        if world == self._world:
            return
        self._world = world
        report_group(*world)
        if world[0] < 0:
            log.warning("the other workers had finished when this one came: it has the state that it began with")
        with self._coordinator.slow_section():
            self.accelerator._begin_trackers()
