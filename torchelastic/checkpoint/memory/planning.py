"""One save: what a rank adds to its plan, and the coordinator to all of them."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace

from torch.distributed.checkpoint.planner import SavePlan

from torchelastic.checkpoint.durable_copies import DurableCopies
from torchelastic.checkpoint.memory.ids import CheckpointContainerId
from torchelastic.checkpoint.memory.plans import (
    CoordinatorDecision,
    RankReport,
    collect_reports,
    deliver,
    epoch_of,
    refusal,
    shares_bytes,
    tensor_bytes,
)
from torchelastic.checkpoint.memory.room import measure
from torchelastic.checkpoint.memory.slots import Slots
from torchelastic.checkpoint.memory.staged_state import copied_bytes, refused_in
from torchelastic.checkpoint.memory.staging import StagedItems
from torchelastic.checkpoint.store.save_id import SaveId


@dataclass(eq=False)
class PlannedSave:
    """One save, on one rank.

    Attributes:
        id: the container of the checkpoint.
        step: its step.
        base: the container of the job.
        rank: among those that save, if DCP tells.
        extras: files that are attached.
        decision: what the coordinator has decided.
        staged: this rank's share.
    """

    id: CheckpointContainerId
    step: int
    base: CheckpointContainerId
    rank: int | None = None
    extras: dict[str, bytes] = field(default_factory=dict)
    decision: CoordinatorDecision | None = None
    staged: StagedItems | None = None

    @property
    def about(self) -> str:
        """What all hosts call the checkpoint."""
        return f"{self.base.name}/{self.id.name}"


def with_report(
    save: PlannedSave, plan: SavePlan, slots: Slots, rank: int, host: str, group: str, copies: DurableCopies | None
) -> SavePlan:
    """The plan of one rank with a `RankReport` of what that knows.

    Args:
        save: which.
        plan: of the planner.
        slots: of the container.
        rank: among those that save.
        host: see `RankReport`.
        group: names the ranks that save.
        copies: in durable storage.

    Raises:
        FencedError: these ranks were replaced.
    """
    slots.reclaim()
    refused = refused_in(item.index.fqn for item in plan.items)
    needed_bytes = tensor_bytes(plan)
    joined, known = slots.container.epochs(group)
    if copies is not None and not joined and rank == 0:
        known = max(known, copies.known_epoch(slots.container.run_id))
    report = RankReport(
        save.about,
        rank,
        host,
        max([slots.generation, *(known.name.generation for known in slots.container.inventory())]),
        (joined, known),
        needed_bytes,
        copied_bytes(),
        slots.warm_bytes(needed_bytes),
        measure(slots.container.root),
        replace(refused[1], rank=rank) if refused is not None else None,
        copies is not None and copies.is_free(),
    )
    deliver(report)
    items = plan.items if refused is None else [item for item in plan.items if item.index.fqn != refused[0]]
    return replace(plan, items=items, storage_data=report)


def with_decisions(
    save: PlannedSave, plans: list[SavePlan], slots: Slots, copies: DurableCopies | None
) -> tuple[list[SavePlan], SaveId]:
    """The plans of all ranks with a `CoordinatorDecision` in each; and the name of the save.

    Args:
        save: which.
        plans: of all ranks.
        slots: of the container.
        copies: in durable storage.

    Raises:
        RuntimeError: a rank saves something else.
    """
    reports = collect_reports(save.about, plans)
    generation = slots.next_generation(max(report.newest for report in reports))
    name = SaveId(epoch_of(reports), 0, generation, save.step, secrets.token_hex(4))
    skipped = refusal(reports, shares_bytes(plans))
    can_copy = skipped is None and all(report.can_copy for report in reports)
    is_copied = copies is not None and can_copy and copies.is_due(save.step)
    decisions = [
        CoordinatorDecision(save.about, rank, len(plans), name, skipped, is_copied) for rank in range(len(plans))
    ]
    deliver(decisions[0])  # for a save without collectives; with them, each rank's own arrives
    return [replace(plan, storage_data=decision) for plan, decision in zip(plans, decisions, strict=True)], name
