"""Whose state counts as a source, where a run has gone back to an older checkpoint: see `group.rollback`."""

from __future__ import annotations

from collections.abc import Sequence

from torchelastic.rendezvous.records import StateProgress, StateStatus


def standing_after(progress: Sequence[StateProgress], counts: Sequence[int]) -> list[StateProgress]:
    """By rank: what its state counts as a source, where the run has gone back. Pure.

    Args:
        progress: of each rank's state.
        counts: see `Rollback.count`.

    >>> old, new = StateProgress.of(StateStatus.COMPLETE, 9), StateProgress.of(StateStatus.COMPLETE, 4)
    >>> standing_after([old, new], [0, 1])[0] < new, standing_after([old, new], [1, 1]) == [old, new]
    (True, True)
    """
    newest = max(counts)
    return [
        one if count == newest or one.state_status is StateStatus.INITIAL else StateProgress.of(StateStatus.PARTIAL, 0)
        for one, count in zip(progress, counts, strict=True)
    ]
