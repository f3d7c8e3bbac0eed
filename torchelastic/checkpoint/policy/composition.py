"""How two policies become one: shared by those that save and those that keep."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn, TypeVar

Policy = TypeVar("Policy", bound="Composable")


class Composable:
    """A policy that `|` and `&` combine. `or` and `and` cannot: they would silently drop one of the two."""

    __slots__ = ()

    def __bool__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} is neither true nor false: combine policies with | and &, not with `or` and "
            "`and`, and compare with `is None`"
        )


def flattened(
    name: str, policies: Iterable[Policy], kind: type[Composable], inside: Callable[[Policy], Sequence[Policy]]
) -> tuple[Policy, ...]:
    """The members of a combination: each of them once, those of an inner combination of the same sort in its place.

    Args:
        name: of the combination, for the error.
        policies: from left to right.
        kind: what each must be.
        inside: the members of an inner combination of the same sort; of any other policy, itself.

    Raises:
        TypeError: one of them is no such policy.
        ValueError: there are none.
    """
    flat: list[Policy] = []
    for policy in policies:
        if not isinstance(policy, kind):
            raise TypeError(f"{name} was given {policy!r}: every member must be a {kind.__name__}")
        flat.extend(new for new in inside(policy) if new not in flat)
    if not flat:
        raise ValueError(f"{name} was given no policies: give at least one")
    return tuple(flat)


def written(policies: Iterable[Composable], operator: str, weaker: tuple[type[Composable], ...] = ()) -> str:
    """The combination as one would type it; members of the types `weaker` bind less and get parentheses."""
    texts = (f"({policy!r})" if isinstance(policy, weaker) else repr(policy) for policy in policies)
    return f" {operator} ".join(texts)
