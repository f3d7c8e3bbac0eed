"""How far a trainer of Lightning is, as one value of a training state: undone with a step, sent to newcomers, saved."""

from __future__ import annotations

import enum
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from torchelastic.adapters.in_process.own_checkpoints import GLOBAL_STEP
from torchelastic.adapters.lightning.elastic_averages import AveragePlace
from torchelastic.adapters.lightning.elastic_packing import packed, unpacked
from torchelastic.adapters.lightning.elastic_results import described, rebuild, restores_of
from torchelastic.inventory.attributes import attributes_of

#: Larger outputs of a batch are not kept for who joins at its end.
MOST_OUTPUTS_BYTES = 4096
#: Attributes of the logger connector: which values are those of now.
_OF_CONNECTOR = ("_current_fx", "_first_loop_iter")
_METRICS = ("_progress_bar_metrics", "_logged_metrics", "_callback_metrics")
#: In `extra`: what each rank has for itself.
_OF_RANK = "lightning_rank"
#: By the clock of one process.
_OF_PROCESS = {"_last_time_checked"}
_PLAIN = (bool, int, float, str, type(None))


class FitPhase(str, enum.Enum):
    """What the next step does."""

    EPOCH_START = "epoch start"
    TRAIN = "train"
    BATCH_END = "batch end"
    VALIDATE = "validate"
    EPOCH_END = "epoch end"
    END = "end"


class LightningProgress:
    """The counters of one trainer, which stay where they are; this reads and sets them.

    Args:
        trainer: in `fit`, with its state set up.
        classes: Lightning's module with the classes of logged values.

    Attributes:
        phase: what the next step does.
        ended: outputs, batch and number of each batch of which no callback has seen the end; the batch is None where
            another worker has trained it.
        averages: that callbacks keep of the weights.
        names: of the files of loggers and checkpoints, as rank 0 had them when the run began; None: not yet.
    """

    def __init__(self, trainer: Any, classes: Any) -> None:
        self._trainer, self._classes = trainer, classes
        self._own = uuid.uuid4().hex  # this process
        self.phase = FitPhase.EPOCH_START
        self.ended: list[tuple[Any, Any, int]] = []
        self.averages: dict[AveragePlace, Any] = {}
        self.names: dict[str, Any] | None = None

    # --- undone with a step -------------------------------------------------------------------------------------------

    def restores(self) -> list[Callable[[], object]]:
        """What undoes in callbacks and logged values what a step does, beside what is in `state_dict`."""
        found = restores_of(self._trainer.fit_loop.epoch_loop._results)
        connector = self._trainer._logger_connector
        metrics = {name: dict(getattr(connector, name)) for name in _METRICS}
        found.append(lambda: vars(connector).update(metrics))
        for number, callback in enumerate(self.callbacks):
            kept = [place.attribute for place in self.averages if place.number == number]
            found += attributes_of(callback, type(callback).__name__, kept_otherwise=kept)
        return found

    @property
    def callbacks(self) -> list[Any]:
        """Of the trainer, as the user has given them."""
        return [one for one in self._trainer.callbacks if not hasattr(one, "is_armed")]

    # --- of the run: equal on all ranks -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Counters, and what comes next."""
        trainer, connector = self._trainer, self._trainer._logger_connector
        return packed(
            {
                "phase": self.phase,
                "names": self.names,
                "should_stop": trainer.should_stop,
                "loops": {name: _counters(loop) for name, loop in _loops(trainer)},
                "connector": {name: getattr(connector, name) for name in _OF_CONNECTOR},
            }
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse, in place: loops hold these objects."""
        trainer, connector = self._trainer, self._trainer._logger_connector
        state = unpacked(state)
        self.phase, self.names = FitPhase(state["phase"]), state["names"]
        trainer.should_stop = state["should_stop"]
        for name, loop in _loops(trainer):
            _set_counters(loop, state["loops"][name])
        for name in _OF_CONNECTOR:
            setattr(connector, name, state["connector"][name])

    # --- of each rank, for who takes a place in the group -------------------------------------------------------------

    def give(self, extra: dict[str, Any]) -> None:
        """Put this rank's own values into `extra`, before a step begins."""
        trainer, connector = self._trainer, self._trainer._logger_connector
        extra[GLOBAL_STEP] = trainer.global_step
        extra[_OF_RANK] = {
            "of": self._own,
            **packed(
                {
                    "metrics": {name: getattr(connector, name) for name in _METRICS},
                    "results": described(trainer.fit_loop.epoch_loop._results),
                    "callbacks": [_sent(one) for one in self.callbacks],
                    "ended": [(_small(outputs), number) for outputs, _, number in self.ended],
                }
            ),
        }

    def take(self, extra: Mapping[str, Any]) -> None:
        """The inverse, where they have come from another rank, or from a checkpoint."""
        if extra[_OF_RANK]["of"] == self._own:
            return  # `restores` has undone what was done
        trainer, connector = self._trainer, self._trainer._logger_connector
        device = trainer.strategy.root_device
        of_rank = unpacked(extra[_OF_RANK], device)
        for name in _METRICS:
            setattr(connector, name, of_rank["metrics"][name])
        results = trainer.fit_loop.epoch_loop._results
        rebuild(results, of_rank["results"], self._classes, trainer.strategy.reduce, device)
        self.ended = [(outputs, None, number) for outputs, number in of_rank["ended"]]
        for callback, sent in zip(self.callbacks, of_rank["callbacks"], strict=False):
            _receive(callback, sent)


def _loops(trainer: Any) -> Iterator[tuple[str, Any]]:
    fit = trainer.fit_loop
    yield "fit", fit
    yield "epoch", fit.epoch_loop
    is_automatic = trainer.lightning_module.automatic_optimization
    yield "optimization", fit.epoch_loop.automatic_optimization if is_automatic else fit.epoch_loop.manual_optimization
    yield "validation", fit.epoch_loop.val_loop


def _counters(loop: Any) -> dict[str, Any]:
    """What a loop counts: its trackers, and plain values."""
    found: dict[str, Any] = {}
    for name, value in vars(loop).items():
        if type(value) in _PLAIN:
            found[name] = value
        elif hasattr(value, "from_state_dict"):  # a tracker
            found[name] = value.state_dict()
    return found


def _set_counters(loop: Any, counters: Mapping[str, Any]) -> None:
    for name, value in counters.items():
        own = vars(loop).get(name)
        if hasattr(own, "from_state_dict"):
            _set_tracker(own, value)
        else:
            setattr(loop, name, value)


def _set_tracker(tracker: Any, state: Mapping[str, Any]) -> None:
    """Into the dataclasses as they are: others hold them."""
    for name, value in state.items():
        own = getattr(tracker, name)
        if isinstance(value, Mapping):
            _set_tracker(own, value)
        else:
            setattr(tracker, name, value)


def _decides(callback: Any) -> bool:
    """Whether it is a callback of the library that decides by what it has seen: all its plain values are sent."""
    return any(one.__name__ in ("ModelCheckpoint", "EarlyStopping") for one in type(callback).__mro__)


def _sent(callback: Any) -> dict[Any, Any]:
    if not _decides(callback):
        return dict(callback.state_dict())
    return {name: value for name, value in vars(callback).items() if name not in _OF_PROCESS}


def _receive(callback: Any, sent: dict[Any, Any]) -> None:
    if not _decides(callback):
        if sent:
            callback.load_state_dict(sent)
        return
    for name, value in sent.items():
        known = getattr(callback, name, None)
        setattr(callback, name, type(known)(value) if isinstance(known, enum.Enum) else value)


def _small(outputs: Any) -> Any:
    """What is kept of the outputs of a batch for who joins at its end: the loss, and what else is small."""
    if not isinstance(outputs, Mapping):
        return None
    return {
        name: value
        for name, value in outputs.items()
        if not isinstance(value, torch.Tensor) or value.numel() * value.element_size() <= MOST_OUTPUTS_BYTES
    }
