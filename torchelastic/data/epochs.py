"""Loaders for loops that iterate once per epoch and save the loader's state themselves, as Lightning's does."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import Dataset

from torchelastic.data.batch_sampler import ElasticBatchSampler
from torchelastic.data.loader import ElasticLoader
from torchelastic.data.placing import place_in_group
from torchelastic.data.stream import ElasticStream


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
        self.sampler.set_world(*(self._place or place_in_group()))
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


class EpochStream:
    """What `EpochLoader` is for a dataset with an index: one iteration per epoch, that goes on in the middle of one.

    All ranks of the default process group share the stream. Near the end of an epoch batches have fewer samples, and
    a rank may get a copy of another one's. A loop that weights ranks alike, as Lightning's DDP, wants none of that:
    shards of equal lengths, which the samples of a shard in each batch divide.

    Args:
        stream: its `epochs` are at least those of the loop, or None.
        fetched_ahead: how many batches the loop holds beside the one that it trains; they do not count as trained.
            Lightning: 1, since a stream does not know its length; a `for` loop: 0.

    Raises:
        ValueError: `fetched_ahead` is neither 0 nor 1.
    """

    def __init__(self, stream: ElasticStream, *, fetched_ahead: int) -> None:
        if fetched_ahead not in (0, 1):
            raise ValueError(
                f"fetched_ahead is 0 or 1 batches, got {fetched_ahead}: the progress of the loop is not known otherwise"
            )
        self.stream = stream
        self._may_look = fetched_ahead == 1  # whether anything is left, when nothing is
        #: The places that the loop may be at: the newest is behind what it has taken, the first behind what it trained.
        self._places: deque[dict[str, int | str]] = deque([stream.state_dict()], maxlen=fetched_ahead + 1)

    def __iter__(self) -> Iterator[Any]:
        """The batches from the present place to the end of its epoch.

        Raises:
            RuntimeError: at the first batch: all epochs of the stream are over. (A loop that takes a batch ahead may
                look once.)
        """
        self.load_state_dict(self.state_dict())  # an epoch that was left early: what was not trained comes again
        self.stream.set_world(*place_in_group())
        return self._rest_of_epoch()

    def _rest_of_epoch(self) -> Iterator[Any]:
        stream = self.stream
        epoch = stream.epoch
        if stream.finished and self._may_look:
            self._may_look = False
            return
        if stream.finished:
            raise RuntimeError(
                f"all {stream.epochs} epochs of the stream are over: give ElasticStream at least as many epochs= as "
                "the loop has, or None"
            )
        while stream.epoch == epoch:
            batch = next(stream)
            stream.commit()
            self._places.append(stream.state_dict())
            yield batch
        self._places.popleft()  # who asks for more than there is begins to train the last batch
        self._places.append(stream.state_dict())

    def state_dict(self) -> dict[str, int | str]:
        """The place behind the newest batch that the loop has trained; the same on every rank, and plain values."""
        return self._places[0]

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go to a saved place; takes effect at once. Raises: as `ElasticStream.load_state_dict`."""
        self.stream.load_state_dict(state)
        self._places.clear()
        self._places.append(self.stream.state_dict())

    def close(self) -> None:
        """Drop what was read ahead and let the worker processes end. A later iteration starts them anew."""
        self.stream.close()
