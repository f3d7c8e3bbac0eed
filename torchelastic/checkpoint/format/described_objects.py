"""Small values that are more than dicts, lists and numbers, as such with the name of their class, and back.

Named tuples, enums, `argparse.Namespace`, paths, `defaultdict`, `Counter`, `deque`, generators of random numbers, and
what is in `plain_objects.py`: what many training states hold, and what can be built again without running anything
that a checkpoint names. A class of the program is looked up among those that are imported already; nothing is imported
for it, and neither its `__init__` nor its `__new__` is called.
"""

from __future__ import annotations

import argparse
import collections
import enum
import pathlib
import sys
import types
from collections.abc import Mapping
from typing import Any, NamedTuple

from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.format.generators import GENERATOR_KINDS, content_of_generator, made_generator
from torchelastic.checkpoint.format.plain_objects import PLAIN_KINDS, content_of, made_of_content
from torchelastic.moved_modules import path_from_files, path_in_files

_NAMESPACES: dict[str, type] = {"argparse": argparse.Namespace, "types": types.SimpleNamespace}
#: The first that fits: a `Path` of another system becomes one of this.
_PATHS: dict[str, type[pathlib.PurePath]] = {
    "path": pathlib.Path,
    "posix": pathlib.PurePosixPath,
    "windows": pathlib.PureWindowsPath,
}
#: What `Described.about` may call a value by.
KINDS = frozenset({"enum", "named tuple", "defaultdict", "counter", "deque", "namespace", "path"})
KINDS |= PLAIN_KINDS | GENERATOR_KINDS
_FACTORIES: dict[str, type] = {kind.__name__: kind for kind in (list, dict, set, int, float, str, bool, tuple)}


class Described(NamedTuple):
    """A value as a simpler one.

    Attributes:
        content: the dict, tuple, list, text, number or tensor that it holds.
        about: what `rebuilt` needs besides; JSON can hold it.
    """

    content: Any
    about: dict[str, Any]


def described(value: Any) -> Described | None:
    """A value as a simpler one; None if it is none of those that this module knows.

    Raises:
        TypeError: it is of a class that cannot be found again by its name; the text begins after the value's place.
    """
    kind = type(value)
    if isinstance(value, enum.Enum) and value.name in kind.__members__:  # several flags at once have no name
        return Described(value.name, {"as": "enum", "class": _name_of(kind)})
    if isinstance(value, tuple) and isinstance(getattr(kind, "_fields", None), tuple):
        return Described(tuple(value), {"as": "named tuple", "class": _name_of(kind)})
    if kind is collections.defaultdict and (value.default_factory is None or _is_known(value.default_factory)):
        factory = None if value.default_factory is None else value.default_factory.__name__
        return Described(dict(value), {"as": "defaultdict", "factory": factory})
    if kind is collections.Counter:  # such as a MultiStepLR's milestones
        return Described(dict(value), {"as": "counter"})
    if kind is collections.deque:
        return Described(list(value), {"as": "deque", "longest": value.maxlen})
    for name, namespace in _NAMESPACES.items():
        if kind is namespace:
            return Described(dict(vars(value)), {"as": "namespace", "of": name})
    for name, path in _PATHS.items():
        if isinstance(value, path):
            return Described(str(value), {"as": "path", "of": name})
    generator = content_of_generator(value)
    if generator is not None:
        return Described(*generator)
    plain = content_of(value)
    return None if plain is None else Described(plain.content, {"as": plain.kind})


def rebuilt(content: Any, about: Mapping[str, Any]) -> Any:
    """The inverse of `described`.

    Raises:
        CheckpointError: its class is not defined in this process, or is another one by now.
        KeyError, TypeError, ValueError: this is nothing that `described` makes.
    """
    what = about["as"]
    if what == "enum":
        return _class_named(about["class"], enum.Enum).__members__[content]
    if what == "named tuple":
        kind = _class_named(about["class"], tuple)
        if len(getattr(kind, "_fields", ())) != len(content):
            raise CheckpointError(f"{about['class']} has other fields than when the state was saved")
        return tuple.__new__(kind, content)
    if what == "defaultdict":
        return collections.defaultdict(None if about["factory"] is None else _FACTORIES[about["factory"]], content)
    if what == "counter":
        return collections.Counter(content)
    if what == "deque":
        return collections.deque(content, about["longest"])
    if what in GENERATOR_KINDS:
        return made_generator(content, about)
    if what == "namespace":
        namespace = _NAMESPACES[about["of"]]()
        vars(namespace).update({str(name): item for name, item in content.items()})
        return namespace
    if what == "path":
        return _PATHS[about["of"]](content)
    return made_of_content(what, content)


def _is_known(factory: Any) -> bool:
    return isinstance(factory, type) and _FACTORIES.get(factory.__name__) is factory


def _name_of(kind: type) -> str:
    name = f"{path_in_files(kind.__module__)}:{kind.__qualname__}"
    if _found(name) is not kind:
        raise TypeError(
            f"is a {kind.__module__}.{kind.__qualname__}, which cannot be found by that name when it is loaded: define "
            "the class at the top of a module, or save plain values"
        )
    return name


def _class_named(name: str, base: type) -> Any:
    kind = _found(name)
    if not (isinstance(kind, type) and issubclass(kind, base)):
        raise CheckpointError(
            f"the saved state holds a {name.replace(':', '.')}, which is not defined in this process: import it first"
        )
    return kind


def _found(name: str) -> Any:
    """What has this name in a module that is imported already. No attribute is computed on the way."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(path_from_files(module))
    for part in path.split("."):
        found = None if found is None else vars(found).get(part)
    return found
