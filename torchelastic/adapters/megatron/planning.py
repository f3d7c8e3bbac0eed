"""What all ranks do together in a save: steps that succeed on all or on none, and the plan of what is written."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner

from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.memory.staging import why_not
from torchelastic.group.rank_group import RankGroup

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan

    from torchelastic.checkpoint.memory import MemoryStorageWriter

Part = TypeVar("Part")
Answer = TypeVar("Answer")

COORDINATOR = 0
_NAMED_FAILURES = 4
_MAX_TEXT = 2000


class LeftOutError(CheckpointError):
    """A save cannot be made, on some rank, for what storage, memory or a peer said; the program is not to blame.

    Args:
        text: which ranks, and why.
        reason: in one word; see `SkippedSaves.skipped`.
    """

    def __init__(self, text: str, reason: str) -> None:
        super().__init__(text)
        self.reason = reason


@dataclass(frozen=True)
class _Failure:
    """Why a rank could not do its part. Texts only: not every exception survives being sent.

    Attributes:
        rank: which.
        text: the error.
        reason: in one word, if storage, memory or a peer are to blame; None: the program is.
    """

    rank: int
    text: str
    reason: str | None


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
            LeftOutError: on all ranks: `OSError` and `MemoryError` were the only errors that were raised.
            Exception: on the rank where another error was raised, that one.
            CheckpointingException: on the other ranks then.
            OutOfStepError: a rank does something else, or did not come in time; names it.
        """
        cause: Exception | None = None
        answer: dict[str, Any]
        try:
            answer = {"value": here()}
        except Exception as error:  # noqa: BLE001 - the others must know of it, whatever it is
            cause, answer = error, {"text": _text_of(error), "reason": _reason_of(error)}
        answers = self._group.all_gather(step, answer)
        failures = [_Failure(rank, a["text"], a["reason"]) for rank, a in enumerate(answers) if "text" in a]
        if failures:
            _raise(step, failures, cause)
        return [answer["value"] for answer in answers]

    def exchange(self, step: str, part: Part, at_coordinator: Callable[[list[Part]], list[Answer]]) -> Answer:
        """Has rank 0 put together what the ranks send. They are in step: it follows an `agree`.

        Sent as DCP sends its plans, by pickles within the process group; its timeout bounds the wait.

        Args:
            step: completes "could not ...".
            part: of this rank.
            at_coordinator: called on rank 0 with the parts, by rank; returns the answer for each.

        Returns:
            The answer for this rank.

        Raises:
            Exception: as `agree`, where `at_coordinator` raised.
        """
        world_size = dist.get_world_size()
        parts: list[Any] | None = [None] * world_size if self.is_coordinator else None
        dist.gather_object(part, parts, dst=COORDINATOR)
        answers: list[Any] | None = None
        cause: Exception | None = None
        if parts is not None:
            try:
                answers = list(at_coordinator(parts))
            except Exception as error:  # noqa: BLE001 - as above
                answers, cause = [_Failure(COORDINATOR, _text_of(error), _reason_of(error))] * world_size, error
        received: list[Any] = [None]
        dist.scatter_object_list(received, answers, src=COORDINATOR)
        answer: Any = received[0]
        if isinstance(answer, _Failure):
            _raise(step, [answer], cause)
        return answer  # type: ignore[no-any-return] # what was sent is what came


def _reason_of(error: Exception) -> str | None:
    if isinstance(error, CheckpointError):
        return why_not(error, 0).reason
    return "ram" if isinstance(error, MemoryError) else "disk" if isinstance(error, OSError) else None


def _text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:_MAX_TEXT]


def _raise(step: str, failures: list[_Failure], cause: Exception | None) -> None:
    named = "; ".join(f"rank {failure.rank}: {failure.text}" for failure in failures[:_NAMED_FAILURES])
    rest = f"; and {len(failures) - _NAMED_FAILURES} more ranks" if len(failures) > _NAMED_FAILURES else ""
    text = f"could not {step}: {named}{rest}"
    reasons = [failure.reason for failure in failures if failure.reason is not None]
    if len(reasons) == len(failures):
        raise LeftOutError(text, reasons[0]) from cause
    if cause is not None and _reason_of(cause) is None:
        raise cause
    raise CheckpointingException(text) from cause


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


class Planning:
    """Plans saves, one after the other, with Megatron's planner.

    Args:
        ranks: that save.
        is_recurring: take the last plan as long as the structure of the state is the same on all ranks. What each rank
            wants to write is made out and compared for every save, so nothing new is ever left out; what is spared is
            sending all of it to rank 0 and back, and rank 0's work on it.

    Attributes:
        new_plans: how many plans were made anew.
    """

    def __init__(self, ranks: Ranks, *, is_recurring: bool) -> None:
        self._ranks = ranks
        self._is_recurring = is_recurring
        self._kept: _CachedPlan | None = None
        self.new_plans = 0

    def plan(self, step: str, writer: MemoryStorageWriter, begin: Callable[[], dict[str, Any]]) -> Planned:
        """What each rank writes. Collective.

        Args:
            step: completes "could not ...".
            writer: writes it.
            begin: calls the writer's `reset`, and returns the state as torch's planner takes it.

        Raises:
            LeftOutError: and what else `Ranks.agree` raises.
        """
        planner: Any = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        kept = self._kept
        asked: list[SavePlan] = []
        metadata: list[Metadata] = []

        def ask() -> bool:
            planner.set_up_planner(begin(), is_coordinator=self._ranks.is_coordinator)
            writer.set_up_storage_writer(self._ranks.is_coordinator)
            own = planner.create_local_plan()
            asked.extend((own, writer.prepare_local_plan(own)))
            return kept is not None and kept.asked == own

        def put_together(plans: list[SavePlan]) -> list[SavePlan]:
            global_plans, made = planner.create_global_plan(plans)
            metadata.append(made)
            prepared: list[SavePlan] = writer.prepare_global_plan(global_plans)
            return prepared

        is_same = all(self._ranks.agree(step, ask))
        own, prepared = asked
        if is_same and kept is not None:  # the writer alone has something to say
            note = replace(prepared, items=[])
            answer = self._ranks.exchange(step, note, writer.prepare_global_plan)
            plan = replace(kept.plan, storage_data=answer.storage_data)
            return Planned(planner.finish_plan(plan), planner, copy.copy(kept.metadata))
        plan = planner.finish_plan(self._ranks.exchange(step, prepared, put_together))
        self.new_plans += 1
        made = metadata[0] if metadata else None
        self._kept = _CachedPlan(own, plan, made) if self._is_recurring else None
        return Planned(plan, planner, copy.copy(made))
