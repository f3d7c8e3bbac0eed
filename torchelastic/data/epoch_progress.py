"""The progress of a run in its data, and the global batches that follow. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

Position = tuple[int, int]  # epoch and number of a global batch in it


@dataclass(frozen=True)
class EpochProgress:
    """The committed position, and what committed steps of the present epoch have left out.

    An epoch has its regular batches, and behind them further ones of what was left out: they are cut from the front of
    `postponed`, which loses what was trained and grows at its end.

    Attributes:
        regular: batches of an epoch in which nothing is left out.
        size: samples of a global batch.
        epoch: of the first batch that is not committed.
        number: of that batch in its epoch.
        postponed: dataset indices left for later in this epoch.
    """

    regular: int
    size: int
    epoch: int = 0
    number: int = 0
    postponed: tuple[int, ...] = ()

    @property
    def position(self) -> Position:
        """Of the first batch that is not committed."""
        return self.epoch, self.number

    def batches_in(self, epoch: int) -> int:
        """How many batches an epoch has, as far as is known now."""
        if epoch != self.epoch:
            return self.regular
        return max(self.regular, self.number) + -(-len(self.postponed) // self.size)

    def batches_left(self, epochs: int) -> int:
        """Batches that are not committed of a run of so many epochs, as far as is known now."""
        if self.epoch >= epochs:
            return 0
        return self.batches_in(self.epoch) - self.number + self.regular * (epochs - self.epoch - 1)

    def following(self, position: Position) -> Position:
        """The position behind one batch."""
        epoch, number = position
        return (epoch, number + 1) if number + 1 < self.batches_in(epoch) else (epoch + 1, 0)

    def batch(self, order: torch.Tensor, position: Position) -> tuple[int, ...]:
        """The dataset indices of one batch.

        Args:
            order: of the position's epoch, int64 of shape (dataset_size,).
            position: not before the committed one where it lies behind the regular batches.
        """
        epoch, number = position
        if number < self.regular:
            return tuple(order[number * self.size : (number + 1) * self.size].tolist())
        behind = number - max(self.number, self.regular) if epoch == self.epoch else 0
        return self.postponed[self._bound(behind) : self._bound(behind + 1)]

    def _bound(self, batches: int) -> int:
        """How many samples so many batches of those that were left out have."""
        left = len(self.postponed)
        is_single = left % self.size == 1 and left > self.size > 2
        if is_single and batches == left // self.size:
            return left - 2  # the last one has two samples, and the one before it one less: for some layers one is few
        return min(batches * self.size, left)

    def advanced(self, to: Position, deferred: tuple[int, ...] = ()) -> EpochProgress:
        """All batches before `to` are committed, except for the samples of `deferred`, which are trained later.

        Those that are left out in the last batch of an epoch make the epoch longer.
        """
        end = to[1] if to[0] == self.epoch else self.batches_in(self.epoch)
        trained = self._bound(max(0, end - max(self.number, self.regular)))
        postponed = self.postponed[trained:] + deferred
        if to[0] == self.epoch or postponed:
            return replace(self, number=end, postponed=postponed)
        return replace(self, epoch=to[0], number=to[1], postponed=())
