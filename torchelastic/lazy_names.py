"""Packages whose names are loaded on first use (PEP 562): so the agent can import one without torch, and so on."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping


def lazily(package: str, names_of_module: Mapping[str, str]) -> None:
    """Give a package that is being imported `__getattr__`, `__dir__` and, if it has none of its own, `__all__`.

    For type checkers it imports the same names, `as` themselves, where TYPE_CHECKING is.

    Args:
        package: its `__name__`.
        names_of_module: the names, with blanks between them, by where they are defined: a module of the package, or one
            with its whole name.
    """
    root = package.partition(".")[0]
    homes = {name: module for module, names in names_of_module.items() for name in names.split()}

    def get(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = homes[name] if homes[name].startswith(f"{root}.") else f"{package}.{homes[name]}"
        return getattr(importlib.import_module(home), name)

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    namespace = vars(sys.modules[package])
    namespace |= {"__getattr__": get, "__dir__": names, "__all__": namespace.get("__all__", sorted(homes))}
