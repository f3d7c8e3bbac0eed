"""Model, optimizer, random numbers and a script's own values, saved and resumed by a few calls; see `state.BCPState`.

Names are loaded on first use (PEP 562).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchelastic.lazy_names import lazily

if TYPE_CHECKING:
    from torchelastic.checkpoint.training_state.state import BCPState, DCPState

__all__ = ["BCPState", "DCPState"]

__getattr__, __dir__ = lazily(__name__, dict.fromkeys(__all__, "state"))
