"""Who is in a run, and with which rank.

Names are loaded on first use: the agent imports this without torch, a trainer without grpc.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchelastic.rendezvous.handler import (
        RendezvousClosedException,
        RendezvousHandler,
        RendezvousNonRetryableError,
        RendezvousTimeoutException,
    )
    from torchelastic.rendezvous.server import EtcdServer

_MODULE_OF = {
    "EtcdServer": "torchelastic.rendezvous.server",
    "RendezvousClosedException": "torchelastic.rendezvous.handler",
    "RendezvousHandler": "torchelastic.rendezvous.handler",
    "RendezvousNonRetryableError": "torchelastic.rendezvous.handler",
    "RendezvousTimeoutException": "torchelastic.rendezvous.handler",
}

__all__ = [
    "EtcdServer",
    "RendezvousClosedException",
    "RendezvousHandler",
    "RendezvousNonRetryableError",
    "RendezvousTimeoutException",
]


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
