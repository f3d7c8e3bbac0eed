"""Packages whose names are loaded on first use (PEP 562): so the agent can import one without torch, and so on."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping


def lazily(
    package: str, names_of_module: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """What a package assigns to `__getattr__`, `__dir__` and `__all__`.

    Type checkers need the same names once more: import each `as` itself under `TYPE_CHECKING`.

    Args:
        package: its `__name__`.
        names_of_module: which of its names a module defines, with blanks between; the module is one of the package, or
            one with its whole name.
    """
    root = package.partition(".")[0]
    module_of_name = {name: module for module, names in names_of_module.items() for name in names.split()}

    def get(name: str) -> object:
        if name not in module_of_name:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = module_of_name[name]
        return getattr(
            importlib.import_module(module if module.startswith(f"{root}.") else f"{package}.{module}"), name
        )

    def names() -> list[str]:
        return sorted({*vars(importlib.import_module(package)), *module_of_name})

    return get, names, sorted(module_of_name)
