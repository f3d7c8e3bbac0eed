"""What a group of ranks does with each kind of checkpoint that all ranks save; each rank is a host of its own."""

from __future__ import annotations

import logging
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from tests.contracts import local_ranks, memory_ranks
from tests.contracts.facades import Model, outcome, step_of, weights_at
from tests.contracts.local_ranks import rank
from torchelastic.checkpoint import BCPState, DiskTier, DurableTier, MemoryTier

Tiers = Callable[[Path], "DiskTier | MemoryTier | DurableTier"]


class GroupFacade(ABC):
    """One way to save and resume on all ranks.

    Attributes:
        timeout_s: for how long a rank that does not come is waited for.
    """

    timeout_s = 30.0

    @abstractmethod
    def save(self, root: Path, step: int, value: object = None) -> None:
        """Save a step, with a value of this rank's own. Called on all ranks."""

    @abstractmethod
    def resume(self, root: Path, saved_by: int) -> int | None:
        """The step of the newest checkpoint, as this rank gets it; None: the job would start afresh. On all ranks.

        Args:
            root: of all hosts.
            saved_by: how many ranks saved it; what was a rank's own is compared where there was that rank.
        """


class Training(GroupFacade):
    """BCPState, in a folder that all hosts share, or in tiers."""

    def __init__(self, tier: Tiers | None = None, *, is_shared: bool = False, replicas: int = 0) -> None:
        self._tier, self._is_shared, self._replicas = tier, is_shared, replicas

    def save(self, root: Path, step: int, value: object = None) -> None:
        module, state = self._state(root, value)
        with torch.no_grad():
            module.weights.copy_(weights_at(step))
        try:
            state.save()
        finally:
            state.close()

    def resume(self, root: Path, saved_by: int) -> int | None:
        module, state = self._state(root)
        try:
            extra = state.maybe_resume_from_ckpt()
        finally:
            state.close()
        if extra is None:
            return None
        assert extra["rank"] == rank() % saved_by
        return step_of(module.weights.detach())

    def _state(self, root: Path, value: object = None) -> tuple[Model, BCPState]:
        module, mine = Model(weights_at(0)), {"rank": rank(), "value": value}
        options: dict[str, Any] = {"get_extra_fn": lambda: mine, "timeout_s": self.timeout_s}
        if self._tier is None:
            return module, BCPState(module, None, default_ckpt_path=root / "shared", **options)
        folder = root / ("shared" if self._is_shared else f"host-{rank()}")
        options |= {"replicas": self._replicas, "host": f"host-{rank()}"}
        return module, BCPState(module, None, tiers=[self._tier(folder)], **options)


class Local(GroupFacade):
    """LocalCheckpointManager, in cliques of two."""

    def save(self, root: Path, step: int, value: object = None) -> None:
        local_ranks.save(root, step, value, timeout_s=self.timeout_s)

    def resume(self, root: Path, saved_by: int) -> int | None:
        found = local_ranks.resume(root, timeout_s=self.timeout_s)
        assert found["loaded"] == (found["found"] if found["found"] >= 0 else None)
        step: int | None = found["loaded"]
        return step


class Memory(GroupFacade):
    """DCP into memory."""

    def save(self, root: Path, step: int, value: object = None) -> None:
        also: dict[str, Any] = {} if value is None else {"value": value}
        try:
            memory_ranks.save(root, step, **also)
        except CheckpointException as error:  # DCP's wrapper around what ranks raised, which is no Exception
            raise RuntimeError(str(error).lower()) from error  # it says "(RANK 1)"

    def resume(self, root: Path, saved_by: int) -> int | None:
        step, is_equal = memory_ranks.recover(root, saved_by)
        assert is_equal
        return step


GROUPS: Mapping[str, GroupFacade] = {
    "training": Training(),
    "training, durable": Training(lambda folder: DurableTier(folder.as_uri()), is_shared=True),
    "training, private disk": Training(lambda folder: DiskTier(folder, shared=False)),
    "training, memory": Training(MemoryTier, replicas=1),
    "local": Local(),
    "memory": Memory(),
}
#: Where each shard has a copy on another host.
WITH_COPIES = ("training, memory", "local", "memory")


def save(name: str, root: Path, step: int) -> None:
    """On all ranks."""
    GROUPS[name].save(root, step)


def save_and_die(name: str, root: Path, step: int) -> None:
    """The same; then nobody tidies up."""
    GROUPS[name].save(root, step)
    if dist.is_initialized():
        dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def resume(name: str, root: Path, saved_by: int) -> dict[str, Any]:
    """What becomes of it on a rank: see `outcome`."""
    logging.getLogger("torchelastic").setLevel(logging.WARNING)
    return outcome(lambda: GROUPS[name].resume(root, saved_by))
