"""Who is in a run, and with which rank.

Names are loaded on first use: the agent imports this without torch, a trainer without grpc.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchelastic.lazy_names import lazily

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

__getattr__, __dir__ = lazily(__name__, _MODULE_OF)
