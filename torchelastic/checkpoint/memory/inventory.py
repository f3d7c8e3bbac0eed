"""What lies in a container on this host: verified, and fetched where it is missing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError
from torchelastic.checkpoint.memory.choice import Fetch
from torchelastic.checkpoint.memory.container import Container
from torchelastic.checkpoint.memory.ids import object_of
from torchelastic.checkpoint.memory.received import verify_received
from torchelastic.checkpoint.replication.client import pull_into
from torchelastic.checkpoint.replication.manager import ReplicationManager
from torchelastic.checkpoint.restore import first_good_copy
from torchelastic.checkpoint.restore_plan import ShardSource
from torchelastic.checkpoint.shards.writing import HIDDEN
from torchelastic.checkpoint.store.owner import locked
from torchelastic.checkpoint.store.save_id import ShardId, shard_file_name
from torchelastic.metrics import publish_metric

log = logging.getLogger(__name__)

#: For how long another process of this host is waited for that fetches the same shard.
FETCHING_ELSEWHERE_S = 600.0


def verify(container: Container, shards: Sequence[ShardId]) -> list[tuple[int, int]]:
    """Compares shards of a checkpoint with their checksums; what is damaged is removed, with a warning.

    Args:
        container: where they are.
        shards: which.

    Returns:
        The ranks of the good ones, and their sizes in bytes.
    """
    good = []
    for shard in shards:
        try:
            with container.open(shard.name, shard.rank) as opened:
                opened.verify()
                good.append((shard.rank, opened.size_bytes))
        except CorruptCheckpointError as error:
            log.warning("%s is of no use and is removed: %s", shard, error)
            container.remove_damaged(shard)
        except CheckpointError as error:
            log.warning("%s cannot be read: %s", shard, error)
    return good


def fetch(container: Container, shard: ShardId, holders: Sequence[int], replication: ReplicationManager) -> None:
    """Fetches a shard unless it is there by now; from any thread.

    The holders are asked until a copy is good: a holder's disk may have gone bad since it verified its copy.

    Args:
        container: where it goes.
        shard: of a rank, or the commit.
        holders: the ranks that may give it, best first.
        replication: knows them.

    Raises:
        CorruptCheckpointError: nobody gives it, or all copies are damaged.
        CheckpointError: there is no room for it.
    """

    def take(source: ShardSource) -> None:
        pull = partial(replication.fetch, object_of(container.name, shard), source.rank)
        pull_into(container.shelf.fetching(), str(shard), pull, partial(verify_received, shard=shard))

    # one process of this host at a time; the others find the shard when it is their turn
    lock = container.root / f"{HIDDEN}fetch-{shard.name}.{shard_file_name(shard.rank, shard.world_size)}"
    with locked(lock, FETCHING_ELSEWHERE_S):
        if not container.path_of(shard).exists():
            first_good_copy(shard, [ShardSource(rank) for rank in holders], take)
        container.disk.remove(lock)  # who waits for it has it open


def make_replicas(
    container: Container, fetches: Sequence[Fetch], replication: ReplicationManager, is_wanted: Callable[[], bool]
) -> bool:
    """Makes missing replicas, beside the training.

    Args:
        container: where they go.
        fetches: what this rank fetches.
        replication: knows the holders.
        is_wanted: whether the checkpoint still is the one to keep.

    Returns:
        Whether they are there, or not wanted any more.
    """
    failed = False
    for one in fetches:
        if not is_wanted():
            break
        try:
            fetch(container, one.shard, one.holders, replication)
        except Exception as error:  # noqa: BLE001 - training goes on; the next save makes replicas of its own
            if not is_wanted():
                break
            failed = True
            publish_metric("torchelastic", "checkpoint.replication.failures", 1)
            log.warning("there is no new replica of %s: %s", one.shard, str(error) or type(error).__name__)
        else:
            publish_metric("torchelastic", "checkpoint.replication.remade.bytes", one.size_bytes)
    return not failed
