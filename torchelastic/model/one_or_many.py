"""One object or many of a kind (optimizers, schedulers) as the user gave them, kept as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchelastic.errors import UnfitError, UnfitStateError


class OneOrMany:
    """One object, or a list, a tuple or a dict of them, with one state_dict and load_state_dict.

    One object's state is its own, so that checkpoints do not change; that of many is a dict by name, where those
    of a list are called by their numbers. Load all or nothing is not promised: the parts are loaded one by one.

    Args:
        what: "optimizer", "scheduler": for messages.
        given: one object, a list, a tuple or a dict of such; None for none.

    Attributes:
        names: of the objects, in order; [""] for a single one.
        objects: the objects themselves.

    Raises:
        ValueError: an object cannot be kept, or an empty list.
    """

    def __init__(self, what: str, given: Any) -> None:
        self._what = what
        self.is_single = not isinstance(given, (list, tuple, dict))
        if isinstance(given, dict):
            named = {str(name): value for name, value in given.items()}
        elif self.is_single:
            named = {} if given is None else {"": given}
        else:
            named = {str(number): value for number, value in enumerate(given)}
        if not self.is_single and not named:
            raise ValueError(f"{what} is an empty {type(given).__name__}: leave it out, or give at least one")
        for name, value in named.items():
            check_stateful(f"{what} {name}".rstrip(), value)
        self.names: list[str] = list(named)
        self.objects: list[Any] = list(named.values())

    def state_dict(self) -> Any:
        """The single object's own, a dict of them by name, or None for no object."""
        return self.as_given([value.state_dict() for value in self.objects])

    def as_given(self, values: Sequence[Any]) -> Any:
        """What belongs to each object, in order, as `state_dict` has it."""
        if self.is_single:
            return values[0] if values else None
        return dict(zip(self.names, values, strict=True))

    def load_state_dict(self, state: Any) -> None:
        """The inverse. Raises UnfitStateError, before anything is changed, if the state is of other objects."""
        for value, own in zip(self.objects, self.states_in(state), strict=True):
            value.load_state_dict(own)

    def states_in(self, state: Any) -> list[Any]:
        """What such a state has for each object, in order. Raises UnfitStateError if it is of other objects."""
        if self.is_single:
            return [state] if self.objects else []
        if not isinstance(state, dict) or set(state) != set(self.names):
            held = ", ".join(sorted(map(str, state))) if isinstance(state, dict) else type(state).__name__
            raise UnfitStateError(
                f"the state of {self._what}s {', '.join(self.names)} was expected, and this one has {held}"
            )
        return [state[name] for name in self.names]


class GivenOnce:
    """An attribute for the objects of a `OneOrMany`: as they were given, and never others."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, of: Any, owner: type | None = None) -> Any:
        if of is None:
            return self
        try:
            return vars(of)[self._name]
        except KeyError:
            raise AttributeError(f"{type(of).__name__} has no {self._name} yet") from None

    def __set__(self, of: Any, value: Any) -> None:
        """Raises UnfitError: it is another one than was given."""
        if vars(of).setdefault(self._name, value) is not value:
            raise UnfitError(
                f"state.{self._name} cannot be replaced in a run: what the new one keeps would neither be undone "
                f"with a failed step, nor sent to a worker that joins, nor saved. Give ModelState every {self._name} "
                f"that the run uses (`{{'warm up': .., 'main': ..}}`) and step the one whose turn it is; an optimizer "
                "begins anew with `optimizer.state.clear()`"
            )


def is_stateful(value: Any) -> bool:
    """Whether an object can be kept: it has state_dict and load_state_dict."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def check_stateful(name: str, value: Any, *, instead: str = "an object that has both") -> None:
    """Raise ValueError for an object that is there and cannot be kept; the error says what to give `instead`."""
    if value is not None and not is_stateful(value):
        raise ValueError(
            f"{name} is a {type(value).__name__} without state_dict and load_state_dict, so it can be neither undone "
            f"nor sent nor saved: give {instead}, or leave it out"
        )
