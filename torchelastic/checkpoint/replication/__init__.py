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
    from torchelastic.checkpoint.compat.nvrx.local.group_wrapper import GroupWrapper as GroupWrapper
    from torchelastic.checkpoint.compat.nvrx.local.strategies import (
        CliqueReplicationStrategy as CliqueReplicationStrategy,
    )
    from torchelastic.checkpoint.compat.nvrx.local.strategies import (
        LazyCliqueReplicationStrategy as LazyCliqueReplicationStrategy,
    )
    from torchelastic.checkpoint.compat.nvrx.local.strategies import (
        LazyReplicationStrategyBuilder as LazyReplicationStrategyBuilder,
    )
    from torchelastic.checkpoint.compat.nvrx.local.strategies import ReplicationStrategy as ReplicationStrategy
    from torchelastic.checkpoint.replication.placement import ExchangePlan as ExchangePlan
    from torchelastic.checkpoint.replication.placement import ExchangePlanEntry as ExchangePlanEntry
    from torchelastic.checkpoint.replication.placement import PairwiseReplicationStrategy as PairwiseReplicationStrategy
    from torchelastic.checkpoint.replication.placement import parse_group_sequence as parse_group_sequence
    from torchelastic.checkpoint.replication.replication_errors import (
        NoReplicasAvailableError as NoReplicasAvailableError,
    )
    from torchelastic.checkpoint.replication.replication_errors import ReplicationError as ReplicationError
    from torchelastic.checkpoint.replication.replication_manager import ReplicationManager as ReplicationManager
    from torchelastic.checkpoint.replication.topology import ReplicationRetryConfig as ReplicationRetryConfig

__getattr__, __dir__ = lazily(__name__)
