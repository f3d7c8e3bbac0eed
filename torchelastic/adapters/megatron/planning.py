"""What all ranks do together in a save: steps that succeed on all or on none, and the plan of what is written."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner

from torchelastic.checkpoint.compat.flashpoint.staged_items import why_not
from torchelastic.checkpoint.errors import CheckpointError, FencedError
from torchelastic.group.rank_group import RankGroup
from torchelastic.text import shortlist

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan

    from torchelastic.checkpoint.memory import MemoryStorageWriter

Part = TypeVar("Part")

COORDINATOR = 0
_MAX_TEXT = 2000


class SaveSkippedError(CheckpointError):
    """A save cannot be made, on some rank, for what storage, memory or a peer said; the program is not to blame.

    Args:
        text: which ranks, and why.
        reason: in one word; see `SkippedSaves.skipped`.
    """

    def __init__(self, text: str, reason: str) -> None:
        super().__init__(text)
        self.reason = reason


class Ranks:
    """The ranks of the default process group; every method is a collective, for one thread of each rank.

    Args:
        timeout_s: for how long a rank is waited for that does not come.
    """

    def __init__(self, timeout_s: float) -> None:
        self._group = RankGroup(None, timeout_s)

    @property
    def is_coordinator(self) -> bool:
        """Whether this is the rank that puts things together."""
        return dist.get_rank() == COORDINATOR

    def agree(self, step: str, here: Callable[[], Any]) -> list[Any]:
        """Has each rank do its part; nobody goes on unless all have succeeded.

        Args:
            step: completes "could not ...".
            here: the part of this rank; JSON can hold what it returns.

        Returns:
            What each rank's part returned, by rank.

        Raises:
            SaveSkippedError: on all ranks: storage, memory or a peer were to blame for all that was raised.
            Exception: on the rank where another error was raised, that one; a CheckpointError on the others then.
            OutOfStepError: a rank does something else, or did not come in time; names it.
        """
        causes: list[Exception] = []

        def part() -> dict[str, Any]:
            try:
                return {"value": here()}
            except Exception as error:
                reason = _reason_of(error)
                if reason is None:
                    raise
                causes.append(error)
                return {"reason": reason, "because": f"{type(error).__name__}: {error}"[:_MAX_TEXT]}

        answers = self._group.run_on_all(step, part)
        skipped = [f"rank {rank}: {each['because']}" for rank, each in enumerate(answers) if "because" in each]
        if skipped:
            reason = next(each["reason"] for each in answers if "reason" in each)
            raise SaveSkippedError(f"could not {step}: {shortlist(skipped)}", reason) from next(iter(causes), None)
        return [each["value"] for each in answers]

    def own(self, step: str, here: Callable[[], Part]) -> Part:
        """As `agree`; returns what the own part returned, whatever that is."""
        got: list[Part] = []
        self.agree(step, lambda: got.append(here()))
        return got[0]

    def gather(self, part: Part) -> list[Part]:
        """Sends rank 0 a part of each rank, and returns them there, by rank; none on the others. After an `agree`.

        As DCP sends its plans: by pickles within the process group, whose timeout bounds the wait.
        """
        parts: list[Any] | None = [None] * dist.get_world_size() if self.is_coordinator else None
        dist.gather_object(part, parts, dst=COORDINATOR)
        return parts or []

    def scatter(self, parts: list[Part]) -> Part:
        """Sends each rank its part from rank 0, where they are by rank; as `gather`."""
        received: list[Any] = [None]
        dist.scatter_object_list(received, parts if self.is_coordinator else None, src=COORDINATOR)
        part: Part = received[0]
        return part


def _reason_of(error: Exception) -> str | None:
    """Why a save is to be left out, in one word; None: the program is to blame, or was replaced and has to end."""
    if isinstance(error, CheckpointError) and not isinstance(error, FencedError):
        return why_not(error, 0).reason
    return "ram" if isinstance(error, MemoryError) else "disk" if isinstance(error, OSError) else None


@dataclass(frozen=True)
class Planned:
    """What this rank writes.

    Attributes:
        plan: of this rank.
        planner: resolves its items.
        metadata: of the whole checkpoint; on rank 0 only.
    """

    plan: SavePlan
    planner: Any  # Megatron has no types
    metadata: Metadata | None


@dataclass(frozen=True)
class _CachedPlan:
    """A plan that was made for a state of this structure: what this rank asked for, and what came of it."""

    asked: SavePlan
    plan: SavePlan
    metadata: Metadata | None


class CollectivePlanner:
    """Plans saves, one after the other, with Megatron's planner.

    Args:
        ranks: that save.
        is_recurring: take the last plan as long as the structure of the state is the same on all ranks. What each rank
            wants to write is made out and compared for every save, so nothing new is ever left out; what is spared is
            sending all of it to rank 0 and back, and rank 0's work on it.
    """

    def __init__(self, ranks: Ranks, *, is_recurring: bool) -> None:
        self._ranks = ranks
        self._is_recurring = is_recurring
        self._kept: _CachedPlan | None = None

    def plan(self, step: str, writer: MemoryStorageWriter, begin: Callable[[], dict[str, Any]]) -> Planned:
        """What each rank writes. Collective.

        Args:
            step: completes "could not ...".
            writer: writes it.
            begin: calls the writer's `reset`, and returns the state as torch's planner takes it.

        Raises:
            SaveSkippedError: and what else `Ranks.agree` raises.
        """
        planner: Any = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        kept, ranks = self._kept, self._ranks
        asked: list[SavePlan] = []

        def ask() -> bool:
            planner.set_up_planner(begin(), is_coordinator=ranks.is_coordinator)
            writer.set_up_storage_writer(ranks.is_coordinator)
            own = planner.create_local_plan()
            asked.extend((own, writer.prepare_local_plan(own)))
            return kept is not None and kept.asked == own

        is_same = all(ranks.agree(step, ask))
        own, prepared = asked
        is_kept = is_same and kept is not None  # then the writer alone has something to say
        plans = ranks.gather(replace(prepared, items=[]) if is_kept else prepared)

        def put_together() -> tuple[list[SavePlan], Metadata | None]:
            if not ranks.is_coordinator:
                return [], None
            of_all, metadata = (plans, None) if is_kept else planner.create_global_plan(plans)
            return writer.prepare_global_plan(of_all), metadata

        of_all, metadata = ranks.own(step, put_together)
        plan = ranks.scatter(of_all)
        if is_same and kept is not None:
            plan = replace(kept.plan, storage_data=plan.storage_data)
            return Planned(planner.finish_plan(plan), planner, copy.copy(kept.metadata))
        plan = planner.finish_plan(plan)
        self._kept = _CachedPlan(own, plan, metadata) if self._is_recurring else None
        return Planned(plan, planner, copy.copy(metadata))
