"""The loops of Lightning that a step of torchelastic is cut from; each is put before the library's own class."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from torchelastic.adapters.in_process.batches import EpochBatches, MicroBatches
from torchelastic.adapters.lightning.elastic_results import MicroBatchValues
from torchelastic.errors import UnfitError

if TYPE_CHECKING:
    from torchelastic.adapters.lightning.elastic_run import ElasticRun


class BatchEndedError(Exception):
    """Leaves the loop over batches where a batch was trained and no callback has seen its end.

    Attributes:
        outputs: of the batch.
        batch: it.
        number: of it, in its epoch.
    """

    def __init__(self, outputs: Any, batch: Any, number: int) -> None:
        super().__init__(number)
        self.outputs, self.batch, self.number = outputs, batch, number


class BatchMarker:
    """The first of the callbacks; a part of a `Callback` of Lightning.

    Attributes:
        is_armed: whether the next end of a batch leaves the loop.
    """

    is_armed = False

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Raises BatchEndedError."""
        del trainer, pl_module
        if self.is_armed:
            raise BatchEndedError(outputs, batch, batch_idx)


class TrainingFetcher:
    """What the training loop draws its batches from: this rank's share of each global batch, the first part of it.

    Args:
        batches: of the training.
        epoch_loop: counts them.
        length: batches in an epoch.

    Attributes:
        parts: of the batch that was drawn last.
    """

    def __init__(self, batches: EpochBatches, epoch_loop: Any, length: int) -> None:
        self._batches, self._loop, self.length = batches, epoch_loop, length
        self.parts = MicroBatches()
        self.fetched = 0  # the loop counts

    @property
    def done(self) -> bool:
        """Whether the batch that was drawn last is the last one of its epoch."""
        return int(self._loop.batch_progress.current.ready) + 1 >= self.length

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> tuple[Any, int, int]:
        self.parts = next(self._batches)
        return self.parts[0].inputs, int(self._loop.batch_progress.current.ready), 0

    def teardown(self) -> None:
        """The training is over, or has failed."""
        self._batches.close()


class ElasticFitLoop:
    """In place of `_FitLoop`, whose methods do the work: the steps are torchelastic's."""

    trainer: Any
    max_batches: Any
    _combined_loader: Any
    _data_fetcher: Any
    epoch_loop: Any
    elastic: ElasticRun

    def setup_data(self) -> None:
        """The user's DataLoader, cut into shares of global batches of a constant size."""
        if self._combined_loader is not None:
            return
        with self.elastic.training_data():
            super().setup_data()  # type: ignore[misc]
        if self._combined_loader is None or self.max_batches == 0:
            return
        self._data_fetcher = self.elastic.fetcher_of(self._combined_loader, self._data_fetcher, int(self.max_batches))

    def run(self) -> None:
        """Train to the end, over losses and joins."""
        self.setup_data()
        if self.skip:  # type: ignore[attr-defined]
            return
        self.reset()  # type: ignore[attr-defined]
        self.on_run_start()  # type: ignore[attr-defined]
        self.elastic.run()


class ElasticEpochLoop:
    """In place of `_TrainingEpochLoop`."""

    def _broadcast_sigterm_tensor(self) -> None:
        """A worker that is asked to leave does so at an agreed step: nothing is to be sent."""


class ElasticOptimization:
    """In place of `_AutomaticOptimization`: a batch is computed in micro batches of the size that the user gave."""

    trainer: Any
    elastic: ElasticRun

    def _make_closure(self, kwargs: OrderedDict[str, Any], optimizer: Any, batch_idx: int) -> Any:
        make = super()._make_closure  # type: ignore[misc]
        run, parts = self.elastic, self.elastic.parts
        batches = run.placed(kwargs["batch"])
        closures = [make(OrderedDict(kwargs, batch=batch), optimizer, batch_idx) for batch in batches]
        first = closures[0]
        for later in closures[1:]:
            later._zero_grad_fn = None

        def all_parts() -> Any:
            values = MicroBatchValues(run.results) if len(parts) > 1 or not parts[0].samples else None
            results = []
            for number, (part, closure, batch) in enumerate(zip(parts, closures, batches, strict=True)):
                is_last = number == len(parts) - 1
                run.take_part(part.samples)
                if values is not None:
                    values.begin(batch, is_padding=not part.samples)
                with nullcontext() if is_last else run.state.no_sync():
                    results.append(type(closure).closure(closure))
                if results[-1].closure_loss is None:
                    raise UnfitError(
                        "training_step returned None, and ElasticDDPStrategy leaves no batch out on one rank alone: "
                        "return a loss of 0 that depends on the parameters (`0.0 * loss`)"
                    )
                if values is not None:
                    values.end(part.samples, run.samples_of_all)
            run.take_part(None)
            if values is not None:
                values.put()
            return run.joined(results)

        first.closure = all_parts
        return first
