"""Replicas of checkpoints on other hosts: who keeps them, how they get there, and who gives them back.

It knows nothing of what is in an object. Nothing is visible before it is whole: the digest of all bytes is compared,
and the fence checked once more, under the lock that `fence` takes. Every wait has a bound. Bytes are not copied on
their way: they are received where the owner wants the object, and sent from where it lies. Names are loaded on first
use (PEP 562). Nothing here but the strategies and the manager imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchelastic.lazy_names import lazily

if TYPE_CHECKING:
    from torchelastic.checkpoint.replication.client import ReplicaClient
    from torchelastic.checkpoint.replication.errors import (
        AuthenticationError,
        CorruptReplicaError,
        DamagedFrameError,
        NoReplicasAvailableError,
        OutdatedRoundError,
        PeerLostError,
        PeerStalledError,
        ProtocolError,
        ReplicaBusyError,
        ReplicaRefusedError,
        ReplicationError,
        TransferError,
    )
    from torchelastic.checkpoint.replication.group_wrapper import GroupWrapper
    from torchelastic.checkpoint.replication.manager import ReplicationManager
    from torchelastic.checkpoint.replication.placement import (
        ExchangePlan,
        ExchangePlanEntry,
        PairwiseReplicationStrategy,
        parse_group_sequence,
        partners,
    )
    from torchelastic.checkpoint.replication.receive import MemoryShelf, ReplicaStore
    from torchelastic.checkpoint.replication.server import ReplicaServer
    from torchelastic.checkpoint.replication.strategies import (
        CliqueReplicationStrategy,
        LazyCliqueReplicationStrategy,
        LazyReplicationStrategyBuilder,
        ReplicationStrategy,
    )
    from torchelastic.checkpoint.replication.topology import ReplicationRetryConfig

#: The names of each module; to add one, name it here, above and below.
_NAMES_OF_HOME = {
    "client": "ReplicaClient",
    "errors": "AuthenticationError CorruptReplicaError DamagedFrameError NoReplicasAvailableError OutdatedRoundError "
    "PeerLostError PeerStalledError ProtocolError ReplicaBusyError ReplicaRefusedError ReplicationError TransferError",
    "group_wrapper": "GroupWrapper",
    "manager": "ReplicationManager",
    "placement": "ExchangePlan ExchangePlanEntry PairwiseReplicationStrategy parse_group_sequence partners",
    "receive": "MemoryShelf ReplicaStore",
    "server": "ReplicaServer",
    "strategies": "CliqueReplicationStrategy LazyCliqueReplicationStrategy LazyReplicationStrategyBuilder "
    "ReplicationStrategy",
    "topology": "ReplicationRetryConfig",
}
_HOME_OF_NAME = {name: home for home, names in _NAMES_OF_HOME.items() for name in names.split()}

__all__ = [
    "AuthenticationError",
    "CliqueReplicationStrategy",
    "CorruptReplicaError",
    "DamagedFrameError",
    "ExchangePlan",
    "ExchangePlanEntry",
    "GroupWrapper",
    "LazyCliqueReplicationStrategy",
    "LazyReplicationStrategyBuilder",
    "MemoryShelf",
    "NoReplicasAvailableError",
    "OutdatedRoundError",
    "PairwiseReplicationStrategy",
    "PeerLostError",
    "PeerStalledError",
    "ProtocolError",
    "ReplicaBusyError",
    "ReplicaClient",
    "ReplicaRefusedError",
    "ReplicaServer",
    "ReplicaStore",
    "ReplicationError",
    "ReplicationManager",
    "ReplicationRetryConfig",
    "ReplicationStrategy",
    "TransferError",
    "parse_group_sequence",
    "partners",
]

__getattr__, __dir__ = lazily(__name__, _HOME_OF_NAME)
