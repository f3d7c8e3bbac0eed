"""How far a `Trainer` is, as one value of a training state: undone with a step, sent to newcomers, saved."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from transformers.trainer_callback import ExportableState

from torchelastic.adapters.in_process.own_checkpoints import GLOBAL_STEP
from torchelastic.adapters.values import json_like

if TYPE_CHECKING:
    from transformers import Trainer

log = logging.getLogger(__name__)

#: Of the `TrainerState`: what changes in the run.
_OF_STATE = (
    "epoch", "global_step", "num_input_tokens_seen", "total_flos",
    "best_metric", "best_global_step", "best_model_checkpoint",
)  # fmt: skip
#: Of the Trainer itself.
_OF_TRAINER = (
    "_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step", "_initial_num_input_tokens_seen",
)  # fmt: skip
#: What TRL's trainers count in `compute_loss`, until it is logged.
_OF_TRL = ("_metrics", "_total_train_tokens")
#: In `extra`, as plain values: what each rank has measured for itself.
LOGGED, FLOATING_POINT_OPS = "log_history", "floating_point_ops"


class TrainerProgress:
    """The counters of one Trainer, which stay where they are; this reads and sets them.

    Args:
        trainer: in `train()`, with its state set up.
        names: of attributes of it, beside TRL's, that are undone and sent, too; of plain values.

    Attributes:
        epochs_ended: for so many epochs the callbacks have seen `on_epoch_end`.
        grad_norm: of the last step, for who logs it in another group.
        learning_rate: the same.
        divides_by_items: whether the model's loss is divided by the count of labels that it is given; None: it was not
            looked at yet.
        multiplies_by_ranks: whether such a loss is multiplied by the number of ranks, as the Trainer's own is.
    """

    def __init__(self, trainer: Trainer, names: Sequence[str] = ()) -> None:
        self._trainer = trainer
        self._names = [name for name in (*_OF_TRL, *names) if hasattr(trainer, name)]
        self.epochs_ended = 0
        self.grad_norm: float | None = None
        self.learning_rate: float | None = None
        self.divides_by_items: bool | None = None
        self.multiplies_by_ranks = True
        self._history: tuple[int, str] = (0, "[]")

    @property
    def position(self) -> tuple[int, int]:
        """Steps, and epochs that have ended."""
        return self._trainer.state.global_step, self.epochs_ended

    def state_dict(self) -> dict[str, Any]:
        """All of it; small, but for what was logged, which is one text."""
        trainer = self._trainer
        plain = {
            "state": {name: getattr(trainer.state, name) for name in _OF_STATE},
            "trainer": {name: getattr(trainer, name) for name in _OF_TRAINER},
            "attributes": {name: getattr(trainer, name) for name in self._names},
            "callbacks": [one.state() for one in self._exportable()],
            "epochs_ended": self.epochs_ended,
            "grad_norm": self.grad_norm,
            "learning_rate": self.learning_rate,
            "divides_by_items": self.divides_by_items,
            "multiplies_by_ranks": self.multiplies_by_ranks,
        }
        return {"plain": json.dumps(json_like(plain, _skip)), "tr_loss": trainer._tr_loss.detach().clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse, in place: callbacks and the Trainer's loop hold these objects."""
        trainer, plain = self._trainer, json.loads(state["plain"])
        for name in _OF_STATE:
            setattr(trainer.state, name, plain["state"][name])
        for name in _OF_TRAINER:
            setattr(trainer, name, plain["trainer"][name])
        self._put_attributes(plain["attributes"])
        for one, saved in zip(self._exportable(), plain["callbacks"], strict=False):
            # what a callback was made with stays as it was made here; the flags of the control are such arguments
            for name, value in saved["args" if one is trainer.control else "attributes"].items():
                setattr(one, name, value)
        self.epochs_ended = plain["epochs_ended"]
        self.grad_norm, self.learning_rate = plain["grad_norm"], plain["learning_rate"]
        self.divides_by_items = plain["divides_by_items"]
        self.multiplies_by_ranks = plain["multiplies_by_ranks"]
        trainer._tr_loss.copy_(state["tr_loss"])

    @contextmanager
    def unchanged_attributes(self) -> Iterator[None]:
        """Within, what `compute_loss` counts counts for nothing."""
        text = json.dumps(json_like({name: getattr(self._trainer, name) for name in self._names}, _skip))
        yield
        self._put_attributes(json.loads(text))

    def _put_attributes(self, saved: Mapping[str, Any]) -> None:
        for name, value in saved.items():
            setattr(self._trainer, name, _put(getattr(self._trainer, name), value))

    def _exportable(self) -> list[ExportableState]:
        """The callbacks with a state of their own, and the flags that say what is due."""
        trainer = self._trainer
        return [
            one for one in (*trainer.callback_handler.callbacks, trainer.control) if isinstance(one, ExportableState)
        ]

    def give(self, extra: dict[str, Any]) -> None:
        """Put this rank's own values into `extra`, before a step begins."""
        history = self._trainer.state.log_history
        if self._history[0] != len(history):
            self._history = len(history), json.dumps(json_like(history, _skip))
        extra |= {LOGGED: self._history[1], FLOATING_POINT_OPS: json.dumps(self._trainer.current_flos)}
        extra[GLOBAL_STEP] = self._trainer.state.global_step

    def take(self, extra: Mapping[str, Any]) -> None:
        """The inverse, where the state may be another one."""
        self._trainer.current_flos = float(extra[FLOATING_POINT_OPS])  # type: ignore[assignment]  # it begins with 0
        if extra[LOGGED] != self._history[1] or len(self._trainer.state.log_history) != self._history[0]:
            self._trainer.state.log_history = history = json.loads(extra[LOGGED])
            self._history = len(history), extra[LOGGED]


def _put(current: Any, saved: Any) -> Any:
    """What was saved as text, in the containers that are there: of their kinds (a defaultdict) a text says nothing."""
    if isinstance(current, MutableMapping) and isinstance(saved, dict):
        keys = {str(key): key for key in current}
        values = {keys.get(name, name): _put(current.get(keys.get(name)), value) for name, value in saved.items()}
        current.clear()
        current.update(values)
        return current
    if isinstance(current, MutableSequence) and isinstance(saved, list):
        current.clear()
        current.extend(saved)
        return current
    return saved


def _skip(place: str, value: Any) -> None:
    log.warning("%s, a %s, is no number and no text: newcomers begin without it", place, type(value).__name__)
