"""Who is in a run, and with which rank.

Names are loaded on first use: the agent imports this without torch, a trainer without grpc.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchelastic.lazy_names import lazily

if TYPE_CHECKING:
    from torchelastic.rendezvous.handler import (
        RendezvousClosedException as RendezvousClosedException,
        RendezvousHandler as RendezvousHandler,
        RendezvousNonRetryableError as RendezvousNonRetryableError,
        RendezvousTimeoutException as RendezvousTimeoutException,
    )
    from torchelastic.rendezvous.server import EtcdServer as EtcdServer

_NAMES = {
    "handler": "RendezvousClosedException RendezvousHandler RendezvousNonRetryableError RendezvousTimeoutException",
    "server": "EtcdServer",
}

lazily(__name__, _NAMES)
