"""That a run is to go back to an older checkpoint, since what was trained after it may be wrong."""

from __future__ import annotations

from collections.abc import Sequence


class Rollback:
    """One per state that may go back, on every rank; on the training thread.

    A worker that finds out takes its state for torn (`StateStatus.PARTIAL`): then nobody has progress, and the train
    loop loads a checkpoint, as after a failure that has left nothing whole.

    Attributes:
        at_most: committed steps of the newest checkpoint that may be loaded; None: the run does not go back now.
        count: how often the run has gone back, as far as this state knows. One that knows of fewer was away then, and
            is of a history that does not count any more.
    """

    def __init__(self) -> None:
        self.at_most: int | None = None
        self.count = 0

    def begin(self, at_most: int) -> None:
        """What this rank has is not to be used; called on each rank that has taken part in what may be wrong."""
        self.at_most, self.count = at_most, self.count + 1

    @property
    def words(self) -> tuple[int, int]:
        """For `agree`."""
        return (-1 if self.at_most is None else self.at_most, self.count)

    def agree(self, rows: Sequence[Sequence[int]]) -> bool:
        """A group has formed in which nobody has progress: go back if anybody has to, and as far; whether that is so.

        Args:
            rows: `words` of each rank.
        """
        wanted = [at_most for at_most, _ in rows if at_most >= 0]
        if wanted:
            self.at_most, self.count = min(wanted), max(count for _, count in rows)
        return bool(wanted)

    def ended(self, count: int) -> None:
        """All are in sync, after so many times."""
        self.at_most, self.count = None, count
