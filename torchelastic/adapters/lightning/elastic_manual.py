"""Manual optimization: a `training_step` that computes backward passes and steps optimizers itself.

One batch is one step of torchelastic, with all that is stepped in it. `training_step` gets a rank's whole share of the
batch at once: called for each of several micro batches it would step for each. Gradients may stay from one batch to the
next; they are averaged in each backward pass, so every rank has the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from torchelastic.adapters.lightning.elastic_results import MicroBatchValues
from torchelastic.errors import UnfitError
from torchelastic.inventory.names import named_parameters
from torchelastic.torch_internals.gradients import begin_backward

if TYPE_CHECKING:
    from torchelastic.adapters.lightning.elastic_run import ElasticRun

_AVERAGE = (
    "these gradients are of this worker's samples alone, and go with it when it is lost: let each manual_backward "
    "average them (toggle_model() without sync_grad=False)"
)


class ElasticManualOptimization:
    """In place of `_ManualOptimization`."""

    trainer: Any
    optim_step_progress: Any
    elastic: ElasticRun

    def advance(self, kwargs: OrderedDict[str, Any]) -> None:
        """One `training_step`, with the weight that its samples have in the global batch."""
        run, passes = self.elastic, self.elastic.manual
        (part,) = run.parts
        assert passes is not None
        values = None if part.samples else MicroBatchValues(run.results)
        if values is not None:
            values.begin(kwargs["batch"], is_padding=True)
        run.take_part(part.samples)
        try:
            with passes.of_a_batch():
                super().advance(kwargs)  # type: ignore[misc]
        except BaseException:
            if self.optim_step_progress.total.ready > self.optim_step_progress.total.completed:
                self.trainer.profiler.stop("optimizer_step")
            raise
        if values is not None:
            values.end(part.samples, run.samples_of_all)
        run.take_part(None)
        if values is not None:
            values.put()


class ManualPasses:
    """The backward passes and optimizer steps of one `training_step`; on the training thread.

    Args:
        parameters: that are trained.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._is_in_batch = self._is_in_pass = self._is_local = False
        self._has_passed = self._has_local = False
        wanted: Iterable[Any] = (one for one in parameters if one.requires_grad)
        self._hooks = [one.register_post_accumulate_grad_hook(self._accumulated) for one in wanted]

    @contextmanager
    def of_a_batch(self) -> Iterator[None]:
        """Around a `training_step`. Raises UnfitError: it leaves gradients that were not averaged."""
        self._is_in_pass = self._is_local = self._has_passed = self._has_local = False
        self._is_in_batch = True
        try:
            yield
        finally:
            self._is_in_batch = False
        if self._has_local:
            raise UnfitError(f"training_step ends after a manual_backward under sync_grad=False: {_AVERAGE}")

    @contextmanager
    def local(self) -> Iterator[None]:
        """Within it gradients add up here."""
        was_local, self._is_local = self._is_local, True
        try:
            yield
        finally:
            self._is_local = was_local

    @contextmanager
    def backward(self, loss: torch.Tensor) -> Iterator[None]:
        """Around the backward pass of a loss. Raises UnfitError: there is no batch to weight it by."""
        if not self._is_in_batch:
            raise UnfitError(
                "manual_backward is called outside of training_step, where no samples are known to weight it by: move "
                "backward passes and optimizer steps into training_step"
            )
        if not self._is_local:
            begin_backward(loss)
        self._is_in_pass = True
        try:
            yield
        finally:
            self._is_in_pass = False
        self._has_passed, self._has_local = True, self._is_local

    def _accumulated(self, _: torch.Tensor) -> None:
        if not self._is_in_pass:
            raise UnfitError(
                "a backward pass gives the parameters gradients beside manual_backward, which are not averaged over "
                "the workers: call self.manual_backward(loss) in place of loss.backward(), in training_step"
            )

    def check_step(self) -> None:
        """Asked before an optimizer steps. Raises UnfitError: its gradients are not known to be averaged."""
        if not self._is_in_batch or not self._has_passed:
            raise UnfitError(
                "an optimizer steps outside of training_step, or before the first manual_backward of its batch, and "
                "ElasticDDPStrategy takes no step without a backward pass of the same batch: move it behind that"
            )
        if self._has_local:
            raise UnfitError(f"an optimizer steps after a manual_backward under sync_grad=False: {_AVERAGE}")

    def close(self) -> None:
        """Nothing is trained any more."""
        for hook in self._hooks:
            hook.remove()


class LeftGradients:
    """Gradients that a batch leaves for the next one, as a part of a training state. The same on all ranks.

    Args:
        module: whose they are.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """By the names of the parameters; not copied."""
        found = named_parameters(self._module).items()
        return {"gradients": {name: one.grad for name, one in found if one.grad is not None}}

    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """The inverse: a parameter that is not in it has none."""
        for name, one in named_parameters(self._module).items():
            gradient = state["gradients"].get(name)
            one.grad = None if gradient is None else gradient.detach().to(one.device, copy=True)


def step_checked(passes: ManualPasses | None, closure: Callable[[], Any]) -> Callable[[], Any]:
    """A closure of an optimizer, behind which it is asked whether that may step."""

    def checked() -> Any:
        result = closure()
        if passes is not None:
            passes.check_step()
        return result

    return checked
