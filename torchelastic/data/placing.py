"""The place of a sampler among the ranks of the default process group."""

from __future__ import annotations

import logging
from typing import Any

import torch.distributed as dist

from torchelastic.data.shares import RankBatches

log = logging.getLogger(__name__)


def place_in_group() -> tuple[int, int]:
    """Rank and size in the default process group, if there is one."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


def say_if_all_load_all(sampler: RankBatches[Any]) -> None:
    """Warn, once, where several ranks load data and nobody has told this sampler of the others."""
    world_size = place_in_group()[1]
    if world_size > 1 and not sampler._has_place:
        sampler._has_place = True
        log.warning(
            "each of the %d ranks loads every sample, and a restart begins with the first: this %s is in no state; "
            "give it to ModelState(..., sampler=...), or call its set_world(rank, world_size)",
            world_size, type(sampler).__name__,
        )  # fmt: skip
