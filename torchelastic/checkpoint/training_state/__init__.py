"""Model, optimizer, random numbers and a script's own values, saved and resumed by a few calls; see `state.BCPState`.

Names are loaded on first use (PEP 562).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchelastic.checkpoint.training_state.state import BCPState, DCPState

__all__ = ["BCPState", "DCPState"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.state"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
