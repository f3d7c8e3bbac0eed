"""A step that others have committed with a part of one rank's gradients only: they go back to the state before it.

A rank that has averaged gradients and wants to average more in the same step, unlike in its step before, has asked the
others first (`group.step_course`). Where they had committed by then, what they count is a step with a part of its
batch. They keep no copy of the state before it; the rank that has asked does, as it has undone the step. So it is the
source of the next sync, and the step is repeated.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchelastic.inventory.generators import Generators
from torchelastic.rendezvous.records import StateProgress, StateStatus


def standing(progress: Sequence[StateProgress], withdrawn: Sequence[int]) -> list[StateProgress]:
    """By rank: what its state counts as a source, where a step must not count. Pure.

    Args:
        progress: of each rank's state.
        withdrawn: of each rank, the number of the step of which it holds the state before; 0: there is none.

    >>> before, after = StateProgress.of(StateStatus.COMPLETE, 4), StateProgress.of(StateStatus.COMPLETE, 5)
    >>> standing([after, before], [0, 5])[0] < before, standing([after, before], [0, 0]) == [after, before]
    (True, True)
    """
    first = max(
        (step for step, one in zip(withdrawn, progress, strict=True) if one.state_status is StateStatus.COMPLETE),
        default=0,
    )
    return [
        StateProgress.of(StateStatus.INITIAL, 0) if first and _weights_of(one) >= first else one for one in progress
    ]


def _weights_of(progress: StateProgress) -> int:
    """How many steps are in the weights."""
    return progress.step + (progress.state_status is StateStatus.UNCOMMITTED)


def text_of(step: int) -> str:
    """What a rank says whose step is taken back, of that number. Pure."""
    return (
        f"step {step} is taken back on all ranks and repeated: others had committed it with a part of this rank's "
        "gradients; put forward and backward passes of all micro batches but the last under state.no_sync()"
    )


class EarlierNumbers:
    """This rank's random numbers at the begin of its last two steps: nobody else has them."""

    def __init__(self) -> None:
        self._kept: list[tuple[int, Generators]] = []

    def keep(self, step: int, random: Generators) -> None:
        """A step begins, after so many committed ones; or it begins again."""
        self._kept = [*(one for one in self._kept if one[0] < step), (step, random)][-2:]

    def put(self, step: int) -> bool:
        """Draw from here on as after so many committed steps; false: that is not known."""
        known = [random for kept, random in self._kept if kept == step]
        for random in known:
            random.put()
        return bool(known)
