"""Who is in a run, and with which rank; see docs/rendezvous.md.

The decision is pure: `protocol.py` takes what the leader knows (`view.py`) and returns what is to be done. `host.py` is
one host's part (`own_records.py`, `round_document.py`, and `leadership.py` when it is its turn); it asks for requests
(`requests.py`), which its agent carries out on a `store.py`: etcd, in `etcd.py` and the modules beside it. A worker
asks its agent for a round (`client.py`, `wire.py`, `worker_rules.py`) and gets rank, world size and a c10d store
(`handler.py`, `round_store.py`).

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

__getattr__, __dir__ = lazily(__name__)
