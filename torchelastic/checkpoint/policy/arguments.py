"""Checks of what a policy is built from: one error, at once, that names the argument and what to give instead."""

from __future__ import annotations

import math
import operator
from collections.abc import Hashable, ItemsView, Iterable, Iterator, Mapping
from typing import SupportsIndex, TypeVar

Value = TypeVar("Value", bound=Hashable)


def whole_number(name: str, value: SupportsIndex, *, at_least: int, remedy: str) -> int:
    """The value as an int.

    Args:
        name: of the argument, for the error.
        value: an int, or what counts as one (numpy's too).
        at_least: the smallest that is accepted.
        remedy: what to give instead; ends the error.

    Raises:
        TypeError: it is no whole number; 3.0 is none.
        ValueError: it is too small.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}, which is no whole number: {remedy}") from None
    if number < at_least:
        raise ValueError(f"{name} is {number}: {remedy}")
    return number


def real_number(name: str, value: float, *, above: float | None = None, or_inf: bool = False, remedy: str) -> float:
    """The value as a float of at least 0, or of more than `above`; never NaN.

    Args:
        name: of the argument, for the error.
        value: the number.
        above: it must be greater; None: 0 is accepted too.
        or_inf: whether infinity is accepted.
        remedy: what to give instead; ends the error.

    Raises:
        TypeError: it is no number.
        ValueError: it is NaN, too small, or infinite.
    """
    if isinstance(value, str) or not hasattr(value, "__float__"):
        raise TypeError(f"{name} is {value!r}, which is no number: {remedy}")
    number = float(value)
    large_enough = number >= 0.0 if above is None else number > above
    if not large_enough or (math.isinf(number) and not or_inf):
        raise ValueError(f"{name} is {value}: {remedy}")
    return number


def text(name: str, value: str, remedy: str) -> str:
    """The value, which must be a string that is not empty. Raises TypeError or ValueError, with the remedy."""
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}, which is no string: {remedy}")
    if not value:
        raise ValueError(f"{name} is empty: {remedy}")
    return value


class FrozenMapping(Mapping[str, Value]):
    """A mapping that nobody can change: it compares equal to a dict, can be hashed and pickled, and prints as a dict.

    (`types.MappingProxyType` can neither be hashed nor pickled.)
    """

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, Value] | Iterable[tuple[str, Value]] = ()) -> None:
        self._items: dict[str, Value] = dict(items)

    def __getitem__(self, key: str) -> Value:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def items(self) -> ItemsView[str, Value]:
        """As of a dict; that of `Mapping` takes ten times as long."""
        return self._items.items()

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)
