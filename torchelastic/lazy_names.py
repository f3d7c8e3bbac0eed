"""Packages whose names are loaded on first use (PEP 562): so the agent can import one without torch, and so on."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable

_FOR_TYPES = "TYPE_CHECKING"


def lazily(package: str) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """What a package, or a module, assigns to `__getattr__` and `__dir__`.

    Its imports under `if TYPE_CHECKING:`, each `as` itself, are the one list of names, for type checkers and for us.
    The source is parsed when a name is first asked for, and not by the import, which so costs nothing. `__all__` is
    all that is imported `as` itself, if the package has none of its own.

    Args:
        package: its `__name__`.
    """

    @functools.cache
    def imported() -> tuple[dict[str, str], list[str]]:
        return _imported_as_itself(package)

    def get(name: str) -> object:
        if name == "__all__":
            return imported()[1]
        # `from module import name` asks for `__path__`, and others for `__wrapped__`: not worth parsing for.
        module = None if name.startswith("__") else imported()[0].get(name)
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(module), name)

    def names() -> list[str]:
        return sorted({"__all__", *vars(sys.modules[package]), *imported()[0]})

    return get, names


def _imported_as_itself(package: str) -> tuple[dict[str, str], list[str]]:
    """The module of each name that is imported for type checkers only, and what is imported `as` itself anywhere."""
    import ast

    spec = sys.modules[package].__spec__
    get_source = getattr(spec and spec.loader, "get_source", None)
    source = get_source and get_source(package)
    if source is None:
        raise ImportError(
            f"{package} loads its names on first use, and reads them from its source, which is missing: "
            "install torchelastic with its .py files, not as bytecode alone",
            name=package,
        )
    lazy: dict[str, str] = {}
    eager: dict[str, str] = {}
    for statement in ast.parse(source).body:
        body, found = [statement], eager
        if isinstance(statement, ast.If) and isinstance(statement.test, ast.Name) and statement.test.id == _FOR_TYPES:
            body, found = statement.body, lazy
        for node in body:
            if isinstance(node, ast.ImportFrom) and node.module:
                found |= {alias.name: node.module for alias in node.names if alias.asname == alias.name}
    return lazy, sorted(lazy | eager)
