"""Tells the data set which epoch each item is for."""

from __future__ import annotations

from collections.abc import Sequence

from torchelastic.data import ElasticBatchSampler


class EpochSampler(ElasticBatchSampler):
    """An ``ElasticBatchSampler`` that asks the data set for ``epoch * dataset_size + index``.

    What is counted (``pending``, ``BatchShare.indices``) stays plain indices.
    """

    def keys(self, epoch: int, indices: Sequence[int]) -> list[int]:
        """What the data set is asked for."""
        return [epoch * self.dataset_size + index for index in indices]
