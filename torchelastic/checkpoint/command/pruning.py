"""`prune`: removes what a policy does not keep."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torchelastic.checkpoint.command.command_error import CheckpointCommandError
from torchelastic.checkpoint.command.format import FoundCheckpoint
from torchelastic.checkpoint.command.listing import find, none_usable
from torchelastic.checkpoint.policy import KeepDecision, KeepPolicy, KeptCheckpoint
from torchelastic.console import say, say_json
from torchelastic.text import bytes_text


def prune(path: Path, policy: KeepPolicy, *, metric: str | None = None, dry_run: bool, as_json: bool) -> int:
    """`torchelastic checkpoint prune`; returns the exit code.

    Removes complete checkpoints only; of each kind the newest complete one stays. Damaged ones and the hidden folders
    of writers at work are left alone. May run beside the run that writes there: each checkpoint is hidden under
    another name before it is removed, and a reader that has it open can go on.

    Args:
        path: a folder of checkpoints.
        policy: says what stays.
        metric: what the policy compares; if no checkpoint has it, nothing is removed.
        dry_run: only say what would be removed.
        as_json: one line per checkpoint for programs.

    Raises:
        CheckpointCommandError: the path holds no complete checkpoint or none with the metric, or is one itself.
        CheckpointError: one cannot be removed.
    """
    found = find(path)
    if any(one.path == path for one in found):
        raise CheckpointCommandError(f"{path} is a checkpoint itself: give the folder that holds it and the others")
    if not any(one.is_usable for one in found):
        raise none_usable(path, found)
    if not any(one.is_complete for one in found):
        raise CheckpointCommandError(f"no checkpoint in {path} is whole ({found[0].partial}): nothing is removed")
    measured = {name for one in found for name in one.metrics}
    if metric is not None and metric not in measured:
        raise CheckpointCommandError(
            f"no checkpoint in {path} has the metric {metric!r} (they have {', '.join(sorted(measured)) or 'none'}): "
            "nothing is removed"
        )
    freed_bytes = 0
    for one, decision in decisions_for(found, policy):
        state = "kept" if decision.keep else "would be removed" if dry_run else "removed"
        if not decision.keep:
            freed_bytes += one.size_bytes
            if not dry_run:
                one.format.remove(one)
        if as_json:
            say_json({"path": str(one.path), "name": one.name, "state": state, "because": decision.because})
        else:
            say(f"{one.name}: {state} ({decision.because})")
    if not as_json:
        say(f"{bytes_text(freed_bytes)} {'would be freed' if dry_run else 'freed'}")
    return 0


def decisions_for(found: Sequence[FoundCheckpoint], policy: KeepPolicy) -> list[tuple[FoundCheckpoint, KeepDecision]]:
    """What becomes of each checkpoint, each kind in each folder for itself, oldest first; pure."""
    decided: list[tuple[FoundCheckpoint, KeepDecision]] = []
    for kind, folder in dict.fromkeys((one.format, one.path.parent) for one in found):
        ours = [one for one in reversed(found) if one.format is kind and one.path.parent == folder]
        answers = iter(policy.decide([_candidate(place, one) for place, one in enumerate(ours) if one.is_complete]))
        for one in ours:
            left_alone = f"left alone: {one.damage or one.partial}"
            decided.append((one, next(answers) if one.is_complete else KeepDecision(True, left_alone)))
    return decided


def _candidate(place: int, one: FoundCheckpoint) -> KeptCheckpoint:
    """As the policies want it. No rule here asks for times, and clocks may have been set back: the order counts."""
    return KeptCheckpoint(step=one.step or 0, saved_s=float(place), metrics=one.metrics, size_bytes=one.size_bytes)
