"""What `ElasticAccelerator.prepare` gives in place of Accelerate's own: an optimizer, and loaders for evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from torch.utils.data import DataLoader

from torchelastic.adapters.in_process.batches import EpochBatches
from torchelastic.errors import UnfitError


class MicroBatchOptimizer(AcceleratedOptimizer):  # type: ignore[misc, unused-ignore]
    """Steps, and drops gradients, once in a step, wherever among the micro batches it is asked to.

    Args:
        optimizer: torch's own.
        accumulates: whether there are gradients of this step that no optimizer has used yet.
        **options: for Accelerate's.
    """

    def __init__(self, optimizer: Any, accumulates: Callable[[], bool], **options: Any) -> None:
        super().__init__(optimizer, **options)
        self._accumulates = accumulates
        self._has_stepped = False

    def begin_step(self) -> None:
        """A step, or another attempt at one, begins; what an error has left of the one before is put right."""
        self._has_stepped = False
        if self.scaler is not None:  # while it steps, the scaler has another method in place of the optimizer's
            self.optimizer.step = self._optimizer_original_step_method
            self._accelerate_step_called = self._is_overflow = False

    def step(self, closure: Any = None) -> None:
        """As Accelerate's."""
        super().step(closure)
        self._has_stepped = self._has_stepped or self.gradient_state.sync_gradients

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Of torch's own; nothing while gradients add up, since many scripts begin, or end, each batch with it."""
        if self._has_stepped or not self._accumulates():
            self.optimizer.zero_grad(set_to_none is not False)


class TrainingBatches(EpochBatches):
    """What `ElasticAccelerator.loader` gives: for `steps` alone, and no DataLoader of the script's own loops."""

    def __iter__(self) -> Iterator[Any]:
        """Raises UnfitError: always."""
        raise UnfitError(
            "what accelerator.loader() gives is iterated by steps: `for step in accelerator.steps(train_loader):`, in "
            "it `with step:`, and in that `for batch in step:`"
        )

    @property
    def batch_sampler(self) -> Any:
        """Raises UnfitError: always; `skip_first_batches` asks for it."""
        raise UnfitError(
            "the training data of an ElasticAccelerator goes on by itself behind the steps that load_state has loaded: "
            "leave skip_first_batches out"
        )


class LoaderOfGroup:
    """A DataLoader whose batches are shared by the ranks of the present group: looked at when it is iterated.

    All attributes that it has not are the plain one's.

    Args:
        plain: the user's.
        prepared: makes Accelerate's of it, for the group of now.
        group: rank and size of now.
    """

    def __init__(
        self, plain: DataLoader[Any], prepared: Callable[[], Any], group: Callable[[], tuple[int, int]]
    ) -> None:
        self._plain, self._prepared, self._group = plain, prepared, group
        self._made: tuple[tuple[int, int], Any] | None = None

    def _of_now(self) -> Any:
        group = self._group()
        if self._made is None or self._made[0] != group:
            self._made = group, self._prepared()
        return self._made[1]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._of_now())

    def __len__(self) -> int:
        return len(self._of_now())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_plain"], name)
