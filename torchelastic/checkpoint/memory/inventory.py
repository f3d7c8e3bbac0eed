"""What lies in a container on this host: completed, verified, and fetched where it is missing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError
from torchelastic.checkpoint.memory.choice import Fetch
from torchelastic.checkpoint.memory.commit import Commit, CommitHead
from torchelastic.checkpoint.memory.container import Container, read_commit
from torchelastic.checkpoint.memory.ids import COMMIT_FILE, ObjectName
from torchelastic.checkpoint.memory.received import ReceivedObjects, verify_received
from torchelastic.checkpoint.replication.client import pull_into
from torchelastic.checkpoint.replication.manager import ReplicationManager
from torchelastic.checkpoint.restore import first_good_copy
from torchelastic.checkpoint.restore_plan import ShardSource
from torchelastic.checkpoint.shards.reading import ShardReader
from torchelastic.checkpoint.shards.writing import HIDDEN
from torchelastic.checkpoint.store.owner import locked
from torchelastic.metrics import publish_metric

log = logging.getLogger(__name__)

#: For how long another process of this host is waited for that fetches the same object.
FETCHING_ELSEWHERE_S = 600.0


def verify(container: Container, candidate: CommitHead, files: Sequence[str]) -> dict[str, int]:
    """Compares objects of a checkpoint with their checksums; what is damaged is removed, with a warning.

    Args:
        container: where they are.
        candidate: the checkpoint.
        files: shards, and maybe the commit.

    Returns:
        The good ones, with their sizes in bytes (commit: 0).
    """
    good = {}
    for file in files:
        try:
            good[file] = _verified_bytes(container, candidate, file)
        except CorruptCheckpointError as error:
            log.warning("%s of step %d is of no use and is removed: %s", file, candidate.step, error)
            remove_damaged(container, candidate.step, file)
        except CheckpointError as error:
            log.warning("%s of step %d cannot be read: %s", file, candidate.step, error)
    return good


def _verified_bytes(container: Container, candidate: CommitHead, file: str) -> int:
    if file == COMMIT_FILE:
        commit = read_commit(container.folder_of(candidate.step))
        if commit.name != candidate.name:
            raise CheckpointError(f"step {candidate.step} was saved anew meanwhile")
        _mend_extras(container, commit)
        return 0
    with container.open(candidate.step, file) as shard:
        shard.verify()
        return shard.size_bytes


def _mend_extras(container: Container, commit: Commit) -> None:
    """Writes the extra files anew where they are not what the commit says; they have no checksums of their own."""
    folder = container.folder_of(commit.step)
    for name, content in commit.extras.items():
        try:
            is_same = (folder / name).read_bytes() == content
        except OSError:
            is_same = False
        if not is_same:
            log.warning("%s of step %d is not what was saved: it is written anew", name, commit.step)
            container.write_commit(commit, by_all=True)
            return


def remove_damaged(container: Container, step: int, file: str) -> None:
    """Removes an object that proved damaged, also where another process holds it: nobody can use it."""
    path = container.folder_of(step) / file
    if file != COMMIT_FILE:
        container.remove_object(path)
    container.disk.remove(path)


def give_up_newer(container: Container, candidate: CommitHead) -> None:
    """Checkpoints newer than the chosen one, which nobody could put together, are none any more: they would replace it.

    Args:
        container: of this host.
        candidate: the checkpoint that was chosen.

    Raises:
        CheckpointError: the disk refuses.
    """
    for one in container.entries():
        if one.is_committed and one.name > candidate.name:
            container.remove_commit(one.name.step)


def complete(container: Container, commit: Commit, replication: ReplicationManager | None) -> None:
    """Writes the commit of a checkpoint, and sends it to all other hosts; those that do not take it are logged.

    Args:
        container: of this host.
        commit: of shards that all have their replicas.
        replication: reaches the other hosts; None: there are none.

    Raises:
        CheckpointError: it cannot be written; then the checkpoint is not complete.
    """
    path = container.write_commit(commit)
    if replication is not None:
        with ShardReader(path) as shard, shard.view() as content:
            replication.spread(str(ObjectName(container.name, commit.step, COMMIT_FILE)), content)


# --- from other hosts -------------------------------------------------------------------------------------------------


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
        # one process of this host at a time; the others find the object when it is their turn
        lock = container.root / f"{HIDDEN}fetch-{step}-{file}"
        with locked(lock, FETCHING_ELSEWHERE_S):
            if not path.exists():
                self._receive(str(name), holders)
            container.disk.remove(lock)  # who waits for it has it open
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
