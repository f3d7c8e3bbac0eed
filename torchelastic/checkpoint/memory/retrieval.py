"""Fetches objects of other hosts into this host's containers: once per host, verified before they get their names."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

from torchelastic.checkpoint.errors import CheckpointError, explained
from torchelastic.checkpoint.memory.choice import Fetch
from torchelastic.checkpoint.memory.container import Container
from torchelastic.checkpoint.memory.names import COMMIT_FILE, ObjectName
from torchelastic.checkpoint.memory.received import ReceivedObjects, verify_received
from torchelastic.checkpoint.replication.client import pull_into
from torchelastic.checkpoint.replication.manager import ReplicationManager
from torchelastic.checkpoint.restore import first_good_copy
from torchelastic.checkpoint.restore_plan import ShardSource
from torchelastic.checkpoint.shards.disk import lock_file
from torchelastic.checkpoint.shards.writing import HIDDEN
from torchelastic.metrics import publish_metric

log = logging.getLogger(__name__)

_POLL_S = 0.02
#: For how long another process of this host is waited for that fetches the same object.
FETCHING_ELSEWHERE_S = 600.0


class Retrieval:
    """Fetches into containers; may be used by several threads.

    Args:
        shelf: of the object manager.
        replication: knows the other ranks.
    """

    def __init__(self, shelf: ReceivedObjects, replication: ReplicationManager) -> None:
        self._shelf = shelf
        self._replication = replication

    def fetch(self, container: Container, step: int, file: str, holders: Sequence[int]) -> Path | None:
        """Fetches an object unless it is there by now.

        Args:
            container: where it goes.
            step: of the checkpoint.
            file: a shard or the commit.
            holders: the ranks that may give it, best first.

        Returns:
            Where it is; None for a commit.

        Raises:
            CorruptCheckpointError: nobody gives it, or all copies are damaged.
            CheckpointError: there is no room for it.
        """
        name = ObjectName(container.name, step, file)
        if file == COMMIT_FILE:
            self._receive(str(name), holders)
            return None
        path = container.folder_of(step) / file
        with _alone(container, name):
            if not path.exists():
                self._receive(str(name), holders)
        return path

    def _receive(self, object_id: str, holders: Sequence[int]) -> None:
        """Asks the holders until a copy is good: a holder's disk may have gone bad since it verified its copy."""

        def check(view: memoryview) -> None:
            if not object_id.endswith(f"/{COMMIT_FILE}"):
                verify_received(view, object_id)

        def take(source: ShardSource) -> None:
            pull = partial(self._replication.fetch, object_id, source.rank)
            pull_into(self._shelf.fetching(), object_id, pull, check)

        first_good_copy(object_id, [ShardSource(rank) for rank in holders], take)


@contextmanager
def _alone(container: Container, name: ObjectName) -> Iterator[None]:
    """One process of this host at a time fetches an object; the others find it when it is their turn."""
    path = container.root / f"{HIDDEN}fetch-{name.step}-{name.file}"
    with explained("lock an object of the checkpoint", path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            for attempt in Retrying(
                retry=retry_if_exception_type(BlockingIOError),
                wait=wait_fixed(_POLL_S),
                stop=stop_after_delay(FETCHING_ELSEWHERE_S),
                reraise=True,
            ):
                with attempt:
                    lock_file(descriptor, fcntl.LOCK_EX)
        except BlockingIOError as error:
            raise CheckpointError(
                f"another process has been fetching {name} for {FETCHING_ELSEWHERE_S:g} s and holds {path}: end it if "
                "it is stopped"
            ) from error
        yield
        container.disk.remove(path)  # who waits for this one has the file open, and finds the object
    finally:
        os.close(descriptor)


def make_replicas(
    retrieval: Retrieval, container: Container, step: int, fetches: Sequence[Fetch], is_wanted: Callable[[], bool]
) -> bool:
    """Makes missing replicas, beside the training.

    Args:
        retrieval: fetches them.
        container: where they go.
        step: of the checkpoint.
        fetches: what this rank fetches.
        is_wanted: whether the checkpoint still is the one to keep.

    Returns:
        Whether they are there, or not wanted any more.
    """
    failed = False
    for fetch in fetches:
        if not is_wanted():
            break
        try:
            retrieval.fetch(container, step, fetch.file, fetch.holders)
        except Exception as error:  # noqa: BLE001 - training goes on; the next save makes replicas of its own
            if not is_wanted():
                break
            failed = True
            publish_metric("torchelastic", "checkpoint.replication.failures", 1)
            log.warning("step %d has no new replica of %s: %s", step, fetch.file, str(error) or type(error).__name__)
        else:
            publish_metric("torchelastic", "checkpoint.replication.remade.bytes", fetch.size_bytes)
    return not failed
