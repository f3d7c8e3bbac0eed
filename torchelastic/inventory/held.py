"""What an object holds: a search for things of some classes, in what is near."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from types import ModuleType
from typing import Any, cast

#: A container with more entries than this is data; and so many objects of each depth are looked at.
_MOST = 2000


def held_by(root: Any, wanted: tuple[type, ...], *, depth: int, closed: tuple[type, ...] = ()) -> list[Any]:
    """The objects of these classes that something is, or holds; each once. Some milliseconds at most.

    Looks into dicts, lists, tuples and the attributes of objects; not into classes and modules of Python.

    Args:
        root: begins here.
        wanted: the classes, or what they inherit from.
        depth: through how many objects, one in the other, at most.
        closed: into what is of these classes it does not look.
    """
    found: list[Any] = []
    seen, level = {id(root)}, [root]
    for _ in range(depth):
        found += [one for one in level if issubclass(type(one), wanted)]
        inside = (one for value in level for one in _inside(value, closed) if id(one) not in seen)
        level = list({id(one): one for one in islice(inside, _MOST)}.values())
        seen.update(map(id, level))
    return found


def _inside(value: Any, closed: tuple[type, ...]) -> Iterable[Any]:
    kind = type(value)
    if issubclass(kind, (dict, list, tuple)):  # no other mappings: their values may be read from a file
        if len(value) > _MOST:
            return ()
        return tuple(dict.values(value)) if issubclass(kind, dict) else tuple(value)
    if issubclass(kind, (type, ModuleType, *closed)):
        return ()
    try:
        return tuple(cast("dict[str, Any]", object.__getattribute__(value, "__dict__")).values())
    except AttributeError:
        return ()
