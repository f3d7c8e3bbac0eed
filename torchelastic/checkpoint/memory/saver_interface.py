"""What a storage writer needs of a saver, so that it can be replaced."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from torchelastic.checkpoint.memory.commit import Commit
from torchelastic.checkpoint.memory.ids import CheckpointContainerId
from torchelastic.checkpoint.memory.staged_state import StagedState
from torchelastic.checkpoint.memory.staging import StagedItems


class CheckpointSaver(ABC):
    """What a storage writer needs of a saver: one save is these calls, in this order, on one thread of each rank."""

    @abstractmethod
    def initialize_checkpoint(self, checkpoint_id: str | os.PathLike[str] | CheckpointContainerId) -> None:
        """Begins a save; touches nothing yet. Raises: ValueError if this cannot be the container of a step."""

    @abstractmethod
    def stage_data(
        self,
        checkpoint_id: str | os.PathLike[str] | CheckpointContainerId | None,
        state_dict: Mapping[str, Any],
        non_blocking: bool = True,
    ) -> StagedState:
        """Copies a state; when this returns, it may change."""

    @abstractmethod
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Adds what this rank knows to its plan."""

    @abstractmethod
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Adds to all plans what is decided; on the coordinator."""

    @abstractmethod
    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner, *, with_checksums: bool = False) -> StagedItems:
        """Copies what the plan writes."""

    @abstractmethod
    def write_data(self, staged: StagedItems) -> list[WriteResult]:
        """Writes it and has it replicated."""

    @abstractmethod
    def write_metadata(self, metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> Commit | None:
        """Makes the checkpoint complete; on the coordinator."""

    @abstractmethod
    def finalize_checkpoint(
        self, checkpoint_id: str | os.PathLike[str] | CheckpointContainerId | None = None
    ) -> list[int]:
        """Removes what newer checkpoints have replaced."""
