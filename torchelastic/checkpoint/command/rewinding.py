"""`rewind`: the run goes on from an older checkpoint, wherever newer ones lie."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from torchelastic.checkpoint.command.command_error import CheckpointCommandError
from torchelastic.checkpoint.command.format import FoundCheckpoint
from torchelastic.checkpoint.command.shard_checkpoints import FolderOfShards, kind_at
from torchelastic.checkpoint.command.stored_saves import StoredSaves
from torchelastic.checkpoint.store.fence import OwnedError
from torchelastic.checkpoint.store.kinds import Kind
from torchelastic.console import say
from torchelastic.text import measured_text, number_text, shortlist

#: Who restores from tiers, and so knows of a rewind.
_OF_TIERS = (Kind.TIERED, Kind.TRAINING_STATE)
#: Of others: where else what is newer lies.
_ALSO_IN = {Kind.LOCAL: ", on every host", Kind.MEMORY: ", on every host"}


@dataclass(frozen=True)
class Target:
    """What somebody wants to go back to.

    Attributes:
        at_most: the most of one that counts.
        by: of which metric that is; None: committed steps, as in the names of checkpoints.
    """

    at_most: int
    by: str | None = None

    def of(self, one: FoundCheckpoint) -> float | None:
        """How far a checkpoint is; None: it does not say."""
        return (one.step or 0) if self.by is None else one.metrics.get(self.by)

    def takes(self, one: FoundCheckpoint) -> bool:
        """Whether it may be gone back to."""
        far = self.of(one)
        return far is not None and far <= self.at_most

    def __str__(self) -> str:
        return f"{self.at_most} steps" if self.by is None else f"{self.by} {self.at_most}"


def rewind(saves: StoredSaves, target: Target, *, dry_run: bool) -> int:
    """`torchelastic checkpoint rewind`; returns the exit code.

    Removes nothing: a small file beside the checkpoints says what does not count any more, in all places of the run.
    The run must have ended.

    Args:
        saves: of the run, in a folder or at a URL.
        target: see there.
        dry_run: only say what would not count any more.

    Raises:
        CheckpointCommandError: no usable checkpoint is that old, something else than tiers has saved them, the path is
            one itself, or a run is alive there.
        CheckpointError: the place cannot be written.
    """
    found = _of_tiers(saves, target)
    counting = [one for one in found if one.is_usable and not one.is_rewound]
    out = [one.name for one in found if one.is_usable and one.is_rewound and target.takes(one)]
    chosen = _chosen(saves, counting, out, target)
    step = target.at_most if target.by is None else chosen.step or 0
    newer = [one.name for one in counting if (one.step or 0) > step]
    undo = ""
    if not dry_run:
        try:
            undo = saves.rewind(step, f"torchelastic checkpoint rewind, process {os.getpid()}")
        except OwnedError as error:
            raise CheckpointCommandError(str(error)) from None
    or_newer = "" if chosen.step == step else f", or a newer one of at most {step} that lies elsewhere"
    measured = f" ({measured_text(chosen.metrics)})" if chosen.metrics else ""
    is_now = "would be" if dry_run else "is"
    say(f"{chosen.name} {is_now} the newest here: the run goes on from step {chosen.step}{measured}{or_newer}")
    if out:
        say(f"still do not count since an earlier rewind, whose file you may remove: {shortlist(out, 8)}")
    if newer:
        say(f"{'would not count' if dry_run else 'do not count'} any more: {shortlist(newer, 8)}")
    else:
        say(f"none here has more than {step}, so none here {'would be' if dry_run else 'is'} left out")
    if kind_at(chosen.path) is Kind.TRAINING_STATE:
        say("a BCPState counts its saves, and not the steps of the training: `show` says what each one holds")
    if not dry_run:
        say("what lies in memory of the hosts, or on their own disks, is treated alike, if the run uses this place too")
        say(f"to undo it, remove {undo}; the next save removes what does not count")
    return 0


def _chosen(
    saves: StoredSaves, counting: Sequence[FoundCheckpoint], out: Sequence[str], target: Target
) -> FoundCheckpoint:
    """The newest that counts and is old enough."""
    chosen = next((one for one in counting if target.takes(one)), None)
    if chosen is not None:
        return chosen
    known = sorted(far for one in counting if (far := target.of(one)) is not None)
    if counting and not known:
        names = sorted({name for one in counting for name in one.metrics})
        raise CheckpointCommandError(
            f"no checkpoint in {saves.path} says its {target.by}, nothing is changed; "
            + (f"they say {shortlist(names, 8)}" if names else "they say nothing but their steps: leave --by out")
        )
    steps = shortlist([number_text(float(one)) for one in known], 8) if known else "none"
    before = f"; since an earlier rewind, whose file you may remove, these do not: {shortlist(out, 8)}"
    raise CheckpointCommandError(
        f"no checkpoint in {saves.path} has at most {target}, nothing is changed; those that count have "
        f"{steps}{before if out else ''}"
    )


def _of_tiers(saves: StoredSaves, target: Target) -> list[FoundCheckpoint]:
    found = saves.find()
    if any(one.path == saves.path for one in found):
        raise CheckpointCommandError(
            f"{saves.path} is a checkpoint itself: give the folder that holds it and the others"
        )
    kinds = [_kind_of(one) for one in found]
    for one, kind in zip(found, kinds, strict=True):
        if kind not in _OF_TIERS and not (kind is None and one.damage is not None):
            alike = [other for other, its in zip(found, kinds, strict=True) if its is kind]
            raise CheckpointCommandError(_how_else(saves, kind, alike, target))
    return found


def _kind_of(one: FoundCheckpoint) -> Kind | None:
    """Who has saved it; None: nobody can tell."""
    return kind_at(one.path) if isinstance(one.format, FolderOfShards) else Kind.STREAMS


def _how_else(saves: StoredSaves, kind: Kind | None, found: Sequence[FoundCheckpoint], target: Target) -> str:
    """What to do about checkpoints whose owner knows of no rewind."""
    title = found[0].format.step_title
    of = "somebody else" if kind is None else kind.value
    why = f"{saves.path} holds checkpoints of {of}, which knows of no rewind (TieredCheckpointManager and BCPState do)"
    folders = sorted({str(one.path.parent) for one in found})
    if len(folders) > 1:
        return f"{why}, of {len(folders)} sessions: give the folder of one, such as {folders[0]}. Nothing is changed"
    chosen = next((one for one in found if one.is_usable and target.takes(one)), None)
    if chosen is None:
        there = shortlist(sorted(one.step or 0 for one in found), 8)
        return f"{why}, and none of at most {title} {target.at_most}; there are {title}s {there}. Nothing is changed"
    newer = [str(one.path) for one in found[: found.index(chosen)]]
    if not newer:
        return f"{why}; it goes on from {chosen.name}, the newest, as it is. Nothing is changed"
    durable = ", and what is newer in its durable copies" if kind in _ALSO_IN else ""
    return (
        f"{why}, nothing is changed. To have it go on from {chosen.name}, end the run, and move these to another "
        f"folder{_ALSO_IN.get(kind, '') if kind else ''}{durable}: {shortlist(newer, 20)}"
    )
