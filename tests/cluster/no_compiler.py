"""Imported by jobs of the cluster tests: torch without its compiler, which takes each worker 1.5 s of a core to import.

Optimizers and DDP import torch._dynamo only to tell it what it is not to compile, and these jobs compile nothing. The
scripts that users have (ordinary_script.py, framework_scripts.py, the examples) have torch as it is.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch


def _unchanged(function: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
    return function


def _stand_in() -> ModuleType:
    module = ModuleType("torch._dynamo")
    parts = {
        "disable": _unchanged,
        "graph_break": lambda: None,
        "utils": SimpleNamespace(get_optimize_ddp_mode=lambda: "no_optimization"),
        "trace_rules": SimpleNamespace(
            LEGACY_MOD_INLINELIST=set[str](),
            get_legacy_mod_inlinelist=functools.cache(set[str]),
            clear_lru_cache=lambda: None,
        ),
    }
    for name, part in parts.items():
        setattr(module, name, part)
    return module


if "torch._dynamo" not in sys.modules:  # another torch may need it by itself
    sys.modules["torch._dynamo"] = _stand_in()
    setattr(torch, "_dynamo", sys.modules["torch._dynamo"])  # noqa: B010 - mypy refuses the plain assignment
