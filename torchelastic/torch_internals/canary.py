"""Which private names does the installed torch lack, and what is to be said about it?"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any

from packaging.version import Version

from torchelastic.torch_internals.table import NAMES, NameKind, PrivateName
from torchelastic.version import NEWEST_TESTED_TORCH, OLDEST_TORCH

log = logging.getLogger(__name__)

_ABSENT = object()
_KNOWN = {name.path: name for name in NAMES}


def missing(names: Iterable[PrivateName], torch_version: str, has: Callable[[PrivateName], bool]) -> list[PrivateName]:
    """The names that a torch lacks, of those that it should have.

    Args:
        names: of the table.
        torch_version: as `torch.__version__`.
        has: whether it has one, see `is_there`.
    """
    return [name for name in names if name.is_expected(torch_version) and not has(name)]


def why_unusable(torch_version: str, lacking: Iterable[PrivateName]) -> str | None:
    """Why this package cannot work with a torch, in one line; None: it can.

    Args:
        torch_version: as `torch.__version__`.
        lacking: the names that it lacks.
    """
    version = Version(torch_version)
    if version.release < Version(OLDEST_TORCH).release:
        return (
            f"torch {torch_version} is too old for torchelastic, which needs torch {OLDEST_TORCH} or newer: "
            f"pip install 'torch>={OLDEST_TORCH}'"
        )
    needed = next((name for name in lacking if name.is_needed), None)
    if needed is None:
        return None
    lack = f"it has no {needed.path}, which is needed for {needed.purpose}"
    if version.release > Version(NEWEST_TESTED_TORCH).release:
        return (
            f"torch {torch_version} is newer than this release of torchelastic knows: {lack}; "
            f"pip install 'torch<={NEWEST_TESTED_TORCH}'"
        )
    return f"torch {torch_version} is not as it was released: {lack}; pip install --force-reinstall torch"


@functools.cache
def check_torch() -> None:
    """Called where the trainer half is imported, before it uses torch.

    Raises:
        ImportError: the installed torch is too old, or lacks a name that nothing can work without.
    """
    version = installed_version()
    needed = [name for name in NAMES if name.is_needed]
    text = why_unusable(version, ()) or why_unusable(version, missing(needed, version, is_there))
    if text is not None:
        raise ImportError(text)


def found(path: str) -> Any:
    """What the installed torch has by a name of the table; None, and a line in the log once, where it lacks it."""
    value = _value_of(_KNOWN[path].path)
    if value is _ABSENT:
        say_missing(path)
        return None
    return value


@functools.cache
def has_argument(path: str) -> bool:
    """Whether a function takes an argument of the table; a line in the log once where it does not."""
    if is_there(_KNOWN[path]):
        return True
    say_missing(path)
    return False


@functools.cache
def say_missing(path: str) -> None:
    """Say once in the log what is lost without a name; nothing where this torch is older than the name."""
    name, version = _KNOWN[path], installed_version()
    if name.is_expected(version):
        log.warning("torch %s has no %s. %s", version, name.path, name.without)


def installed_version() -> str:
    """As `torch.__version__`."""
    return str(importlib.import_module("torch").__version__)


def is_there(name: PrivateName) -> bool:
    """Whether the installed torch has a name. May import what has it."""
    if name.only_with and _value_of(name.only_with) is _ABSENT:
        return True
    if name.kind is NameKind.ATTRIBUTE:
        return _value_of(name.path) is not _ABSENT
    owner = _value_of(name.owner)
    if name.kind is NameKind.ARGUMENT:
        return owner is not _ABSENT and name.attribute in _arguments(owner)
    return isinstance(owner, type) and name.attribute in _mentioned_by(owner)


def _value_of(path: str) -> Any:
    """What a path leads to, or `_ABSENT`."""
    parts = path.split(".")
    value: Any = importlib.import_module(parts[0])
    for number, part in enumerate(parts[1:], 2):
        inner = getattr(value, part, _ABSENT)
        value = inner if inner is not _ABSENT else _module_named(".".join(parts[:number]))
        if value is _ABSENT:
            break
    return value


def _module_named(path: str) -> Any:
    try:
        return importlib.import_module(path)
    except ImportError:  # its parent may be no package, too
        return _ABSENT


def _arguments(function: Any) -> set[str]:
    """The names of the arguments of a function, or of what makes an object of a class."""
    own = vars(function) if isinstance(function, type) else {}
    makers = [own[name] for name in ("__new__", "__init__") if name in own] if own else [function]
    return {name for maker in makers for name in inspect.signature(maker).parameters}


def _mentioned_by(kind: type) -> set[str]:
    """The attributes of a class and of those that it extends, and the names that its code mentions."""
    words: set[str] = set()
    for each in kind.__mro__:
        words |= {*vars(each), *getattr(each, "__annotations__", ())}
        for value in vars(each).values():
            words |= set(_words(value))
    return words


def _words(value: Any) -> Iterator[str]:
    """What the code of a function, a method or a property mentions: attributes, and texts."""
    for inner in (getattr(value, "fget", None), getattr(value, "__func__", None), getattr(value, "__wrapped__", None)):
        if inner is not None:
            yield from _words(inner)
    if isinstance(value, FunctionType):
        yield from _words_of_code(value.__code__)


def _words_of_code(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):
            yield from _words_of_code(constant)
