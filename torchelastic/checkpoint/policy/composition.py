"""How policies become one: shared by those that save and those that keep."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Generic, NoReturn, TypeVar

Policy = TypeVar("Policy", bound="Composable")


class Composable:
    """A policy that `|` and `&` combine. `or` and `and` cannot: they would silently drop one of the two."""

    __slots__ = ()

    def __bool__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} is neither true nor false: combine policies with | and &, not with `or` and "
            "`and`, and compare with `is None`"
        )


class Combination(Generic[Policy]):
    """Several policies in one: each of them once, those of an inner combination of the same sort in its place.

    The other base of a frozen dataclass that is a policy itself.

    Raises:
        TypeError: a member is no such policy.
        ValueError: there are none.
    """

    policies: tuple[Policy, ...]
    #: What each member must be, and of how many it has to hold: `any` for `a | b`, `all` for `a & b`.
    _member: ClassVar[type[Composable]]
    _holds_of: ClassVar[Callable[[Iterable[object]], bool]]

    def __post_init__(self) -> None:
        name, flat = type(self).__name__, list[Policy]()
        for policy in self.policies:
            if not isinstance(policy, self._member):
                raise TypeError(f"{name} was given {policy!r}: every member must be a {self._member.__name__}")
            flat.extend(
                new for new in (policy.policies if isinstance(policy, type(self)) else (policy,)) if new not in flat
            )
        if not flat:
            raise ValueError(f"{name} was given no policies: give at least one")
        object.__setattr__(self, "policies", tuple(flat))

    def __repr__(self) -> str:
        """As one would type it: `|` binds less than `&`."""
        is_and = type(self)._holds_of is all
        texts = (f"({one!r})" if is_and and isinstance(one, Combination) else repr(one) for one in self.policies)
        return (" & " if is_and else " | ").join(texts)


def combined(kind: Any, left: Policy, right: Policy) -> Policy:
    """The combination of this kind of two policies; NotImplemented if the right one is none of that kind's members."""
    if not isinstance(right, kind._member):
        return NotImplemented  # type: ignore[no-any-return]  # as `__or__` and `__and__` may
    both: Policy = kind((left, right))
    return both if len(both.policies) > 1 else left  # type: ignore[attr-defined]
