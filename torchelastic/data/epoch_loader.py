"""A loader for loops that iterate once per epoch and save the loader's state themselves, as Lightning's does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch.utils.data import Dataset

from torchelastic.data.batch_sampler import ElasticBatchSampler
from torchelastic.data.loader import ElasticLoader


class EpochLoader:
    """One iteration per epoch, as a DataLoader, that goes on in the middle of an epoch after a resume.

    A batch counts as trained when it is handed out; `state_dict` gives the position behind the newest one. It is the
    same on every rank, and holds for another number of ranks too: each sample of the epoch is trained once. For
    training data in loops that save the state of their loaders (Lightning does; `train` of torchelastic uses
    `ElasticLoader`, which can also take a batch back). A loop that ends an epoch early goes on with the rest of it in
    its next iteration.

    The ranks share each global batch as evenly as it can be divided. A loop that weights ranks alike, as Lightning's
    DDP, wants shares of equal size: a `global_batch_size` that the number of ranks divides, and `drop_last=True` or a
    dataset of whole batches.

    Args:
        dataset: as for `ElasticLoader`.
        sampler: says what to load; its `epochs` are at least those of the loop.
        rank: of this process among those that share a batch; default: its rank in the default process group.
        world_size: how many share a batch; default: the size of that group; without one, 1.
        **dataloader_kwargs: as for `ElasticLoader`.

    Raises:
        ValueError: as for `ElasticLoader`; or only one of `rank` and `world_size` is given.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        sampler: ElasticBatchSampler,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        **dataloader_kwargs: Any,
    ) -> None:
        if (rank is None) != (world_size is None):
            raise ValueError(f"rank is {rank} and world_size is {world_size}: give both, or neither")
        self._loader = ElasticLoader(dataset, sampler, **dataloader_kwargs)
        self._place = None if rank is None or world_size is None else (rank, world_size)

    @property
    def dataset(self) -> Dataset[Any]:
        """The dataset."""
        return self._loader.dataset

    @property
    def sampler(self) -> ElasticBatchSampler:
        """The sampler; its position moves with each batch that is handed out."""
        return self._loader.sampler

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return self.sampler.batches_per_epoch

    def __iter__(self) -> Iterator[Any]:
        """The batches from the present position to the end of its epoch.

        Raises:
            RuntimeError: at the first batch: all epochs of the sampler are over.
        """
        place = self._place
        if place is None:
            place = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.sampler.set_world(*place)
        return self._rest_of_epoch()

    def _rest_of_epoch(self) -> Iterator[Any]:
        # what is loaded between the call of `iter` and the first batch counts
        epoch = self.sampler.epoch
        if self.sampler.finished:
            raise RuntimeError(
                f"all {self.sampler.epochs} epochs of the sampler are over: give ElasticBatchSampler at least as many "
                "epochs= as the loop has"
            )
        while self.sampler.epoch == epoch:
            batch = next(self._loader)
            self.sampler.commit()
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """The position behind the newest batch that was handed out, as plain integers."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position; takes effect at once. Raises: as `ElasticBatchSampler.load_state_dict`."""
        self.sampler.load_state_dict(state)

    def close(self) -> None:
        """Drop what was prefetched and let the worker processes end. A later iteration starts them anew."""
        self._loader.close()
