"""`rewind`: the run goes on from an older checkpoint, wherever newer ones lie."""

from __future__ import annotations

import os

from torchelastic.checkpoint.command.command_error import CheckpointCommandError
from torchelastic.checkpoint.command.format import FoundCheckpoint
from torchelastic.checkpoint.command.shard_checkpoints import FolderOfShards, kind_at
from torchelastic.checkpoint.command.stored_saves import StoredSaves
from torchelastic.checkpoint.store.fence import OwnedError
from torchelastic.checkpoint.store.kinds import Kind
from torchelastic.console import say
from torchelastic.text import shortlist

#: Who restores from tiers, and so knows of a rewind.
_OF_TIERS = (Kind.TIERED, Kind.TRAINING_STATE)


def rewind(saves: StoredSaves, step: int, *, dry_run: bool) -> int:
    """`torchelastic checkpoint rewind`; returns the exit code.

    Removes nothing: a small file beside the checkpoints says what does not count any more, in all places of the run.
    The run must have ended.

    Args:
        saves: of the run, in a folder or at a URL.
        step: the most committed steps of a checkpoint that counts.
        dry_run: only say what would not count any more.

    Raises:
        CheckpointCommandError: no usable checkpoint has so few steps, something else than tiers has saved them, the
            path is one itself, or a run is alive there.
        CheckpointError: the place cannot be written.
    """
    found = _of_tiers(saves)
    counting = [one for one in found if one.is_usable and not one.is_rewound]
    chosen = next((one for one in counting if (one.step or 0) <= step), None)
    out = [one.name for one in found if one.is_usable and one.is_rewound and (one.step or 0) <= step]
    if chosen is None:
        steps = shortlist(sorted(one.step or 0 for one in counting), 8) if counting else "none"
        before = f"; since an earlier rewind, whose file you may remove, these do not: {shortlist(out, 8)}"
        raise CheckpointCommandError(
            f"no checkpoint in {saves.path} has at most {step} steps, nothing is changed; those that count have "
            f"{steps}{before if out else ''}"
        )
    newer = [one.name for one in counting if (one.step or 0) > step]
    if not dry_run:
        try:
            undo = saves.rewind(step, f"torchelastic checkpoint rewind, process {os.getpid()}")
        except OwnedError as error:
            raise CheckpointCommandError(str(error)) from None
    or_newer = "" if chosen.step == step else f", or a newer one of at most {step} that lies elsewhere"
    is_now = "would be" if dry_run else "is"
    say(f"{chosen.name} {is_now} the newest here: the run goes on from step {chosen.step}{or_newer}")
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


def _of_tiers(saves: StoredSaves) -> list[FoundCheckpoint]:
    found = saves.find()
    if any(one.path == saves.path for one in found):
        raise CheckpointCommandError(
            f"{saves.path} is a checkpoint itself: give the folder that holds it and the others"
        )
    for one in found:
        kind = kind_at(one.path) if isinstance(one.format, FolderOfShards) else None
        if kind in _OF_TIERS or (kind is None and one.damage is not None):
            continue
        raise CheckpointCommandError(
            f"{one.name} in {saves.path} is of {kind.value if kind is not None else one.format.kind}: only runs that "
            "restore from tiers (TieredCheckpointManager, BCPState) know of a rewind. Move away what is newer, on "
            "every host"
        )
    return found
