"""torchelastic keeps a PyTorch training job alive while machines come and go.

Write a `State` (or use `ModelState`) and a train step, build a coordinator, call `train`. Names are loaded when they
are first used, so that the agent of a host never imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchelastic.lazy_names import lazily
from torchelastic.version import __version__

if TYPE_CHECKING:
    from torchelastic.coordinator import Coordinator
    from torchelastic.data.batch_sampler import ElasticBatchSampler
    from torchelastic.data.loader import ElasticLoader
    from torchelastic.data.stream import ElasticStream
    from torchelastic.errors import NonRetryableException, RetryableException, StopException
    from torchelastic.model.world_change import WorldChange, keep_global_batch, scale_learning_rate
    from torchelastic.model_state import ModelState
    from torchelastic.p2p.coordinator_p2p import CoordinatorP2P
    from torchelastic.sharded.state import ShardedState
    from torchelastic.state import State
    from torchelastic.step import Step
    from torchelastic.train_loop import steps, train
    from torchelastic.worker_stats import SimpleWorkerStats, WorkerStats

_WHERE = {
    "Coordinator": "coordinator",
    "CoordinatorP2P": "p2p.coordinator_p2p",
    "ElasticBatchSampler": "data.batch_sampler",
    "ElasticLoader": "data.loader",
    "ElasticStream": "data.stream",
    "ModelState": "model_state",
    "NonRetryableException": "errors",
    "RetryableException": "errors",
    "ShardedState": "sharded.state",
    "SimpleWorkerStats": "worker_stats",
    "State": "state",
    "Step": "step",
    "StopException": "errors",
    "WorldChange": "model.world_change",
    "keep_global_batch": "model.world_change",
    "scale_learning_rate": "model.world_change",
    "WorkerStats": "worker_stats",
    "steps": "train_loop",
    "train": "train_loop",
}

__all__ = [
    "Coordinator",
    "CoordinatorP2P",
    "ElasticBatchSampler",
    "ElasticLoader",
    "ElasticStream",
    "ModelState",
    "NonRetryableException",
    "RetryableException",
    "ShardedState",
    "SimpleWorkerStats",
    "State",
    "Step",
    "StopException",
    "WorkerStats",
    "WorldChange",
    "__version__",
    "keep_global_batch",
    "scale_learning_rate",
    "steps",
    "train",
]

__getattr__, __dir__ = lazily(__name__, _WHERE)
