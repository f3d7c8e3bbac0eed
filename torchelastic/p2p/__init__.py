"""Process groups over a rendezvous: `CoordinatorP2P`, and when it calls a worker hung or slow."""

from torchelastic.p2p.coordinator_p2p import CoordinatorP2P
from torchelastic.p2p.hangs import HangPolicy
from torchelastic.p2p.stragglers import StragglerPolicy

__all__ = ["CoordinatorP2P", "HangPolicy", "StragglerPolicy"]
