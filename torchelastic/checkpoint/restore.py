"""What is damaged is passed over: another copy of the shard is tried, then the next older checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from torchelastic.checkpoint.errors import CorruptCheckpointError
from torchelastic.checkpoint.replication.errors import ReplicationError
from torchelastic.checkpoint.restore_plan import ShardSource

log = logging.getLogger(__name__)

Save = TypeVar("Save")
Got = TypeVar("Got")


def newest_readable(
    saves: Iterable[Save], read: Callable[[Save], Got], pass_over: Callable[[Save, CorruptCheckpointError], None]
) -> Got | None:
    """What `read` returns for the first checkpoint that is not damaged; None if there is none.

    Args:
        saves: the newest first.
        read: reads one. If several ranks read together, it raises on all of them alike.
        pass_over: called with each that proved damaged.
    """
    for save in saves:
        try:
            return read(save)
        except CorruptCheckpointError as error:
            pass_over(save, error)
    return None


def first_good_copy(shard: object, sources: Sequence[ShardSource], take: Callable[[ShardSource], Got]) -> Got:
    """What `take` returns for the first source that has a good copy; the others are named in warnings.

    Args:
        shard: for people.
        sources: best first.
        take: reads and checks one. A `CorruptCheckpointError` or `ReplicationError` means: try the next; anything else
            would be no better there.

    Raises:
        CorruptCheckpointError: no source has a good copy; tells why of each.
    """
    failures = []
    for source in sources:
        try:
            return take(source)
        except (CorruptCheckpointError, ReplicationError) as error:
            failures.append(f"rank {source.rank}: {error}")
            log.warning("%s is of no use at rank %d: %s", shard, source.rank, error)
    raise CorruptCheckpointError(f"no good copy of {shard} is left ({'; '.join(failures) or 'nobody holds one'})")
