"""Checkpoints in several tiers, saved by all ranks beside the training; see `manager.TieredCheckpointManager`.

Names are loaded on first use (PEP 562).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchelastic.checkpoint.tiered.api import ElasticCheckpointManager, ElasticState
    from torchelastic.checkpoint.tiered.manager import TieredCheckpointManager
    from torchelastic.checkpoint.tiered.peers import Alone, Mailbox, Peers

__all__ = [
    "Alone",
    "ElasticCheckpointManager",
    "ElasticState",
    "Mailbox",
    "Peers",
    "TieredCheckpointManager",
]

_HOME_OF_NAME = {
    "Alone": "peers",
    "ElasticCheckpointManager": "api",
    "ElasticState": "api",
    "Mailbox": "peers",
    "Peers": "peers",
    "TieredCheckpointManager": "manager",
}


def __getattr__(name: str) -> object:
    if name not in _HOME_OF_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF_NAME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF_NAME})
