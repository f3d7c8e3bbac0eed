"""Process groups over a rendezvous: `CoordinatorP2P`."""

from torchelastic.p2p.coordinator_p2p import CoordinatorP2P

__all__ = ["CoordinatorP2P"]
