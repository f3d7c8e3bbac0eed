"""What an object holds ends with it: when it is closed, or with the last reference to it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol


class Closable(Protocol):
    """What can be let go; closing it again does nothing."""

    def close(self) -> object:
        """Lets it go."""


def when_dropped(owner: object, call: Callable[..., object], *args: object) -> weakref.finalize[Any, Any]:
    """Calls with the last reference to the owner, on whatever thread that goes; not when the interpreter ends.

    Args:
        owner: neither the call nor its arguments may refer to it, or it would live for ever.
        call: what to do.
        args: of the call.

    Returns:
        Called, it does that now and never again; after its `detach` nobody does.
    """
    dropped = weakref.finalize(owner, call, *args)
    dropped.atexit = False  # the system frees all of it then
    return dropped


def let_go_when_dropped(owner: object, *held: Closable | None) -> weakref.finalize[Any, Any]:
    """The same with `let_go` of what the owner holds."""
    return when_dropped(owner, let_go, *held)


def let_go(*held: Closable | None) -> None:
    """Closes all of them in this order."""
    for one in held:
        if one is not None:
            one.close()
