"""`prune`: removes what a policy does not keep."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from torchelastic.checkpoint.command.command_error import CheckpointCommandError
from torchelastic.checkpoint.command.format import FoundCheckpoint
from torchelastic.checkpoint.command.stored_saves import StoredSaves
from torchelastic.checkpoint.policy import KeepDecision, KeepPolicy, KeptCheckpoint
from torchelastic.checkpoint.store.kinds import Kind, kind_in
from torchelastic.checkpoint.store.removing import left_overs
from torchelastic.checkpoint.store.save_id import SaveId
from torchelastic.console import say, say_json
from torchelastic.text import bytes_text


def prune(saves: StoredSaves, policy: KeepPolicy, *, metric: str | None = None, dry_run: bool, as_json: bool) -> int:
    """`torchelastic checkpoint prune`; returns the exit code.

    Removes complete checkpoints, of which the newest of each kind stays, and what is left of saves that were never
    finished, or could not be removed as a whole: they have no manifest, and a newer one is complete. Damaged ones and
    the hidden folders of writers at work are left alone. May run beside the run that writes there: each checkpoint is
    hidden under another name before it is removed, and a reader that has it open can go on.

    Args:
        saves: in a folder, or at a URL.
        policy: says what stays.
        metric: what the policy compares; if no checkpoint has it, nothing is removed.
        dry_run: only say what would be removed.
        as_json: one line per checkpoint for programs.

    Raises:
        CheckpointCommandError: there is no complete checkpoint or none with the metric, or the path is one itself.
        CheckpointError: one cannot be removed.
    """
    found, path = saves.find(), saves.path
    if any(one.path == path for one in found):
        raise CheckpointCommandError(f"{path} is a checkpoint itself: give the folder that holds it and the others")
    if not any(one.is_usable for one in found):
        raise saves.none_usable(found)
    if not any(one.is_complete for one in found):
        raise CheckpointCommandError(f"no checkpoint in {path} is whole ({found[0].partial}): nothing is removed")
    measured = {name for one in found for name in one.metrics}
    if metric is not None and metric not in measured:
        raise CheckpointCommandError(
            f"no checkpoint in {path} has the metric {metric!r} (they have {', '.join(sorted(measured)) or 'none'}): "
            "nothing is removed"
        )
    freed_bytes = 0
    for one, decision in decisions_for(found, policy, _left_overs(found, has_all=saves.has_all_hosts)):
        state = "kept" if decision.keep else "would be removed" if dry_run else "removed"
        if not decision.keep:
            freed_bytes += one.size_bytes
            if not dry_run:
                saves.remove(one)
        if as_json:
            say_json({"path": str(one.path), "name": one.name, "state": state, "because": decision.because})
        else:
            say(f"{one.name}: {state} ({decision.because})")
    if not as_json:
        say(f"{bytes_text(freed_bytes)} {'would be freed' if dry_run else 'freed'}")
    return 0


def _left_overs(found: Sequence[FoundCheckpoint], *, has_all: bool) -> set[Path]:
    """Of what has no manifest that which never will: a run that has completed a newer one writes no older one any more.

    Of local checkpoints nobody can tell, unless all parts are here: other hosts have them.
    """
    names = {one.path: name for one in found if (name := SaveId.find(one.path.name)) is not None}
    left = set[Path]()
    for folder in {path.parent for path in names}:
        here = [one for one in found if one.path in names and one.path.parent == folder]
        complete = [names[one.path] for one in here if one.is_complete]
        over = left_overs([names[one.path] for one in here if one.is_unfinished], complete)
        left |= {folder / name.folder_name for name in over}
    return {path for path in left if has_all or kind_in(path) is not Kind.LOCAL}


def decisions_for(
    found: Sequence[FoundCheckpoint], policy: KeepPolicy, left: Collection[Path] = ()
) -> list[tuple[FoundCheckpoint, KeepDecision]]:
    """What becomes of each checkpoint, each kind in each folder for itself, oldest first; pure.

    Args:
        found: all that there are.
        policy: says what stays of what is complete.
        left: the paths of those that were never finished, and will not be.
    """
    decided: list[tuple[FoundCheckpoint, KeepDecision]] = []
    for kind, folder in dict.fromkeys((one.format, one.path.parent) for one in found):
        ours = [one for one in reversed(found) if one.format is kind and one.path.parent == folder]
        counting = [one.is_complete and not one.is_rewound for one in ours]
        answers = iter(policy.decide([_candidate(place, one) for place, one in enumerate(ours) if counting[place]]))
        for place, one in enumerate(ours):
            decision = KeepDecision(True, f"left alone: {one.damage or one.partial}")
            if one.path in left:
                decision = KeepDecision(False, "left over: it has no manifest, and a newer one is complete")
            elif one.is_complete and one.is_rewound:
                decision = KeepDecision(not any(counting[place:]), "the run was rewound to an older one")
            decided.append((one, next(answers) if counting[place] else decision))
    return decided


def _candidate(place: int, one: FoundCheckpoint) -> KeptCheckpoint:
    """As the policies want it. No rule here asks for times, and clocks may have been set back: the order counts."""
    return KeptCheckpoint(step=one.step or 0, saved_s=float(place), metrics=one.metrics, size_bytes=one.size_bytes)
