"""Tells the data set which epoch each item is for."""

from __future__ import annotations

from collections.abc import Iterator

from torchelastic.data import ElasticBatchSampler


class EpochSampler(ElasticBatchSampler):
    """An ``ElasticBatchSampler`` that asks the data set for ``epoch * dataset_size + index``.

    Loader processes run ahead, over the end of the epoch too, so "the present epoch" means nothing to them. What is
    counted (``pending``, ``BatchShare.indices``) stays plain indices.
    """

    def upcoming(self) -> Iterator[list[int]]:
        """Yields this rank's batches from the present position to the end of the last epoch."""
        epoch, number = self.position
        for batch in super().upcoming():
            yield [epoch * self.dataset_size + index for index in batch]
            number += 1
            if number == self.batches_per_epoch:
                epoch, number = epoch + 1, 0
