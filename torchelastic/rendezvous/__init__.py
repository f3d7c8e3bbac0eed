"""Who is in a run, and with which rank.

Names are loaded on first use: the agent imports this without torch, a trainer without grpc.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchelastic.lazy_names import lazily

if TYPE_CHECKING:
    from torchelastic.rendezvous.handler import RendezvousClosedException as RendezvousClosedException
    from torchelastic.rendezvous.handler import RendezvousHandler as RendezvousHandler
    from torchelastic.rendezvous.handler import RendezvousNonRetryableError as RendezvousNonRetryableError
    from torchelastic.rendezvous.handler import RendezvousTimeoutException as RendezvousTimeoutException
    from torchelastic.rendezvous.server import EtcdServer as EtcdServer

__getattr__, __dir__, __all__ = lazily(
    __name__,
    {
        "handler": "RendezvousClosedException RendezvousHandler RendezvousNonRetryableError RendezvousTimeoutException",
        "server": "EtcdServer",
    },
)
