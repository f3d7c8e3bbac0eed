"""Replicas of checkpoints on other hosts: who keeps them, and the manager of those of ML Flashpoint. See `replicas`.

Names are loaded on first use (PEP 562). Nothing here but the strategies and the manager imports torch.
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
    from torchelastic.checkpoint.replicas.placement import ExchangePlan as ExchangePlan
    from torchelastic.checkpoint.replicas.placement import ExchangePlanEntry as ExchangePlanEntry
    from torchelastic.checkpoint.replicas.placement import PairwiseReplicationStrategy as PairwiseReplicationStrategy
    from torchelastic.checkpoint.replicas.placement import parse_group_sequence as parse_group_sequence
    from torchelastic.checkpoint.replicas.replication_errors import NoReplicasAvailableError as NoReplicasAvailableError
    from torchelastic.checkpoint.replicas.replication_errors import ReplicationError as ReplicationError
    from torchelastic.checkpoint.replicas.replication_manager import ReplicationManager as ReplicationManager
    from torchelastic.checkpoint.replicas.topology import ReplicationRetryConfig as ReplicationRetryConfig

__getattr__, __dir__ = lazily(__name__)
