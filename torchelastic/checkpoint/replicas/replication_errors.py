"""What can go wrong with replicas and with their way from host to host, in words that name the peer and the remedy."""

from __future__ import annotations

from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError


class ReplicationError(CheckpointError):
    """A replica could not be placed, sent or fetched."""


class NoReplicasAvailableError(ReplicationError):
    """Nobody who is left holds what is asked for; the message names the ids."""


class TransferError(ReplicationError):
    """An object did not get from one host to the other."""


class PeerLostError(TransferError):
    """A peer cannot be reached, or its connection broke; its process has ended, or the network is cut."""


class PeerStalledError(TransferError, TimeoutError):
    """A peer accepted the connection and then was silent for longer than the time limit."""


class AuthenticationError(TransferError):
    """One end does not know the token that the other end has."""


class ProtocolError(TransferError):
    """The peer sent what this protocol does not know, or more than it allows."""


class ReplicaBusyError(TransferError):
    """The receiver takes no further object now; later it may."""


class OutdatedRoundError(TransferError):
    """The sender's round was replaced by a newer one: it must not publish anything any more."""


class ReplicaRefusedError(TransferError):
    """The receiver does not want this object at all, for example because it is too large."""


class CorruptReplicaError(TransferError, CorruptCheckpointError):
    """The bytes that arrived are not those that were announced; nothing of them was delivered."""


class DamagedFrameError(CorruptReplicaError):
    """An object or a message was changed on its way; it is sent again."""


#: The peer is dead, unreachable, replaced by another process, still busy with a broken transfer, or without room.
#: Anything else (the content changed under the transfer, the sender was replaced) is no matter of the peer.
UNREACHABLE = (PeerLostError, PeerStalledError, AuthenticationError, ReplicaBusyError)
