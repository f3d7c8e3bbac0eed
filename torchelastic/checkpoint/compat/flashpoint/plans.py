"""What the ranks of a save tell each other through DCP's plans: who saves, under which name, and whether to at all.

Each rank puts a `RankReport` into its local plan; the coordinator answers with a `CoordinatorDecision` in everybody's
plan. What it decides is a pure function of the reports.

A planner that caches plans (`enable_plan_caching`) hands out the plan of an earlier save, with what was in it then. So
reports and decisions are also remembered where they arrive, by the checkpoint they are about: unpickling one delivers
it.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch.distributed.checkpoint.planner import SavePlan

from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.store.host_memory.room import Free, NotSaved, why_no_room
from torchelastic.checkpoint.store.save_id import SaveId

#: Of how many checkpoints reports, and decisions, are kept that nobody has asked for: of saves that failed in between.
_KEPT = 32


class NotSavedError(CheckpointError):
    """A save is left out: there is no memory for it, or a replica cannot be made. The checkpoint before it stays.

    Args:
        why: the reason.
    """

    def __init__(self, why: NotSaved) -> None:
        super().__init__(str(why))
        self.why = why

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.why,)


class _Message:
    """What travels in a plan: unpickling one delivers it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (type(self), *vars(self).values())


@dataclass(frozen=True)
class RankReport(_Message):
    """What one rank knows before a save.

    Attributes:
        about: the checkpoint, by the name that it has on all hosts.
        rank: of those that save.
        host: names the host; ranks of one host share its memory.
        newest: the highest generation that is known here; -1 if there is none.
        epochs: in which this process has saved before as one of these ranks (0: in none), and that of the fence.
        needed_bytes: of the tensors in this rank's plan, before others take their part of them.
        copied_bytes: how large a copy is that was made of a state already, into a slot; 0: none.
        warm_bytes: how large a slot is that is free.
        free: what more there is on the host.
        why_not: why this rank cannot save.
        can_copy: whether this rank can begin a durable copy.
    """

    about: str
    rank: int
    host: str
    newest: int
    epochs: tuple[int, int]
    needed_bytes: int
    copied_bytes: int
    warm_bytes: int
    free: Free
    why_not: NotSaved | None = None
    can_copy: bool = False

    def allocates_bytes(self, share_bytes: int | None) -> int:
        """How much this rank has to allocate.

        Args:
            share_bytes: what it writes according to the global plan; None: as in the local one.
        """
        share = self.needed_bytes if share_bytes is None else min(share_bytes, self.needed_bytes)
        is_copied = share == self.needed_bytes <= self.copied_bytes
        return 0 if is_copied or share <= self.warm_bytes else share


@dataclass(frozen=True)
class CoordinatorDecision(_Message):
    """What the coordinator has decided.

    Attributes:
        about: as in the reports.
        rank: of whom it is for.
        world_size: how many ranks save.
        save: the name of this save.
        skipped: why nobody saves.
        is_copied: whether each rank makes a durable copy of its shard.
    """

    about: str
    rank: int
    world_size: int
    save: SaveId
    skipped: NotSaved | None = None
    is_copied: bool = False


def epoch_of(reports: Sequence[RankReport]) -> int:
    """In which epoch ranks save: in that of their last save, or, where one of them is new, in one above all others."""
    epochs = {epoch for report in reports for epoch in report.epochs}
    return max(epochs) + (len(epochs) > 1 or epochs == {0})


def why_skipped(reports: Sequence[RankReport], shares_bytes: Sequence[int | None]) -> NotSaved | None:
    """Whether all hosts have room for their ranks' shares; pure.

    Args:
        reports: of all ranks.
        shares_bytes: of each, as for `RankReport.allocates_bytes`.

    Returns:
        Why there is to be no save; None if there is room.
    """
    needed: dict[str, int] = defaultdict(int)
    for report, share_bytes in zip(reports, shares_bytes, strict=True):
        if report.why_not is not None:
            return report.why_not
        needed[report.host] += report.allocates_bytes(share_bytes)
    for host, needed_bytes in needed.items():
        there = [report for report in reports if report.host == host]
        tmpfs = [report.free.tmpfs_bytes for report in there if report.free.tmpfs_bytes is not None]
        free = Free(min(tmpfs, default=None), min(report.free.ram_bytes for report in there))
        why = why_no_room(needed_bytes, free)
        if why is not None:
            return NotSaved(why.reason, f"no room on host {host!r}: {why.because}", there[0].rank)
    return None


def tensor_bytes(plan: SavePlan) -> int:
    """How many bytes the tensors of a plan have."""
    total = 0
    for item in plan.items:
        if item.tensor_data is not None:
            sizes = item.tensor_data.size if item.tensor_data.chunk is None else item.tensor_data.chunk.sizes
            total += math.prod(sizes) * item.tensor_data.properties.dtype.itemsize
    return total


def shares_bytes(plans: Iterable[SavePlan]) -> list[int | None]:
    """What each rank writes; None for plans that stand for others (caches of planners)."""
    plans = list(plans)
    if any(not getattr(plan, "usable", True) for plan in plans) or not any(plan.items for plan in plans):
        return [None] * len(plans)
    return [tensor_bytes(plan) for plan in plans]


# --- messages ---------------------------------------------------------------------------------------------------------


_lock = threading.Lock()
#: What has arrived, by kind and checkpoint, of each rank, in the order of arrival.
_messages: dict[tuple[type, str], dict[int, Any]] = {}


_Kind = TypeVar("_Kind", RankReport, CoordinatorDecision)


def deliver(message: RankReport | CoordinatorDecision) -> None:
    """Remembers a report or a decision, instead of an older one; arriving from another rank does it too."""
    key = (type(message), message.about)
    with _lock:
        arrived = _messages.pop(key, {})
        arrived.pop(message.rank, None)
        _messages[key] = {**arrived, message.rank: message}
        while len(_messages) > _KEPT:
            _messages.pop(next(iter(_messages)))


def collect_reports(about: str, plans: Sequence[SavePlan]) -> list[RankReport]:
    """The reports of all ranks, each once.

    Args:
        about: the checkpoint.
        plans: of all ranks; one per rank is expected.

    Raises:
        RuntimeError: the report of a rank is missing: not all of them save with a `MemoryStorageWriter`.
    """
    arrived = _taken(RankReport, about)
    reports = [arrived.get(rank, plan.storage_data) for rank, plan in enumerate(plans)]
    return [_require(report, RankReport, about, f"rank {rank}") for rank, report in enumerate(reports)]


def collect_decision(about: str, plan: SavePlan) -> CoordinatorDecision:
    """The decision of this rank.

    Raises:
        RuntimeError: there is none: the coordinator saves something else.
    """
    arrived = _taken(CoordinatorDecision, about)
    return _require(
        list(arrived.values())[-1] if arrived else plan.storage_data, CoordinatorDecision, about, "the coordinator"
    )


def _taken(kind: type[RankReport | CoordinatorDecision], about: str) -> dict[int, Any]:
    with _lock:
        return _messages.pop((kind, about), {})


def _require(message: Any, kind: type[_Kind], about: str, sender: str) -> _Kind:
    if isinstance(message, kind) and message.about == about:
        return message
    raise RuntimeError(
        f"{sender} has said nothing about {about}: all ranks must save the same checkpoint, each with a "
        "MemoryStorageWriter"
    )


def _arrived(kind: type[RankReport | CoordinatorDecision], *values: Any) -> RankReport | CoordinatorDecision:
    message = kind(*values)
    deliver(message)
    return message
