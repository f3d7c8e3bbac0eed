"""torchelastic keeps a PyTorch training job alive while machines come and go.

Write a `State` (or use `ModelState`) and a train step, build a coordinator, call `train`. Names are loaded when they
are first used, so that the agent of a host never imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchelastic.lazy_names import lazily
from torchelastic.moved_modules import find_moved
from torchelastic.version import __version__ as __version__

if TYPE_CHECKING:
    from torchelastic.coordinator import Coordinator as Coordinator
    from torchelastic.data.batch_sampler import ElasticBatchSampler as ElasticBatchSampler
    from torchelastic.data.loader import ElasticLoader as ElasticLoader
    from torchelastic.data.stream import ElasticStream as ElasticStream
    from torchelastic.errors import NonRetryableException as NonRetryableException
    from torchelastic.errors import RetryableException as RetryableException
    from torchelastic.errors import StopException as StopException
    from torchelastic.model.compute_check.options import ComputeCheck as ComputeCheck
    from torchelastic.model.world_change import WorldChange as WorldChange
    from torchelastic.model.world_change import keep_global_batch as keep_global_batch
    from torchelastic.model.world_change import scale_learning_rate as scale_learning_rate
    from torchelastic.model_state import ModelState as ModelState
    from torchelastic.p2p.coordinator_p2p import CoordinatorP2P as CoordinatorP2P
    from torchelastic.sharded.sharded_state import ShardedState as ShardedState
    from torchelastic.state import State as State
    from torchelastic.step import Step as Step
    from torchelastic.train_loop import steps as steps
    from torchelastic.train_loop import train as train
    from torchelastic.worker_stats import SimpleWorkerStats as SimpleWorkerStats
    from torchelastic.worker_stats import WorkerStats as WorkerStats

find_moved()

__getattr__, __dir__ = lazily(__name__)
