"""Packages whose names are loaded on first use (PEP 562): so the agent can import one without torch, and so on."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping


def lazily(package: str, module_of_name: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """What a package assigns to `__getattr__` and `__dir__`.

    Args:
        package: its `__name__`.
        module_of_name: where each of its names is defined: a module of the package, or one with its whole name.
    """
    root = package.partition(".")[0]

    def get(name: str) -> object:
        if name not in module_of_name:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = module_of_name[name]
        return getattr(
            importlib.import_module(module if module.startswith(f"{root}.") else f"{package}.{module}"), name
        )

    def names() -> list[str]:
        return sorted({*vars(importlib.import_module(package)), *module_of_name})

    return get, names
