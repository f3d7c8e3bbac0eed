"""Two states of one process that save into one place: the last one saved would be loaded into either of them."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torchelastic.checkpoint.errors import CheckpointError

log = logging.getLogger(__name__)


@dataclass
class _Newest:
    """The newest checkpoint that this process has saved in a place, and the states that have its content.

    Attributes:
        name: of the checkpoint.
        states: that have saved or loaded it; none of them is kept alive.
    """

    name: str
    states: list[weakref.ref[Any]] = field(default_factory=list)

    def others_than(self, state: object) -> list[object]:
        """Those that are still used, if this one is not among them."""
        alive = [one for ref in self.states if (one := ref()) is not None]
        return [] if any(one is state for one in alive) else alive

    def add(self, state: object) -> None:
        """One more has it."""
        try:
            self.states.append(weakref.ref(state))
        except TypeError:  # of a class with `__slots__`: of such a state nothing is known
            self.states.clear()


class SavedStates:
    """Which states of this process may save next in each place. Used by one thread at a time for each place."""

    def __init__(self) -> None:
        self._newest: dict[str, _Newest] = {}

    def require_successor(self, place: str, state: object, newest_there: Callable[[], str | None]) -> None:
        """Refuse a state that saves behind another one, which it has not loaded.

        Args:
            place: where it is to be saved.
            state: to save.
            newest_there: the name of the newest checkpoint there now; None: there is none.

        Raises:
            CheckpointError: another state, which is still used in this process, has saved the newest one.
        """
        newest = self._newest.get(place)
        others = newest.others_than(state) if newest is not None else []
        if newest is None or not others or newest_there() != newest.name:
            return
        raise CheckpointError(
            f"{place} has the checkpoints of another {type(others[0]).__name__} of this process, the newest is "
            f"{newest.name}: after a restart the last one saved would be loaded into both. Give each state a manager "
            "with a folder of its own; a state that is to go on from the other one loads it first (load_latest)"
        )

    def saved(self, place: str, state: object, name: str) -> None:
        """It has saved the newest checkpoint there."""
        self._newest[place] = newest = _Newest(name)
        newest.add(state)

    def loaded(self, place: str, state: object, name: str) -> None:
        """It has the content of a checkpoint there; a warning says if that is another state's, which is still used."""
        newest = self._newest.get(place)
        if newest is None or newest.name != name:
            return
        if others := newest.others_than(state):
            log.warning(
                "%s was saved in this process, by another %s: this one goes on from there. If it is to train on its "
                "own, give it a manager with a folder of its own", name, type(others[0]).__name__,
            )  # fmt: skip
        newest.add(state)
