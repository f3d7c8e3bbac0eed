"""What lies in a container on this host: completed, listed and verified."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError
from torchelastic.checkpoint.memory.commit import Commit, CommitHead, StoredStep
from torchelastic.checkpoint.memory.container import Container
from torchelastic.checkpoint.memory.names import COMMIT_FILE, PENDING_FILE, ObjectName
from torchelastic.checkpoint.shards.reading import ShardReader

if TYPE_CHECKING:
    from torchelastic.checkpoint.replication.manager import ReplicationManager

log = logging.getLogger(__name__)


def list_container(container: Container) -> list[StoredStep]:
    """What a container holds, by names; a commit that is damaged is removed, with a warning.

    Raises:
        CheckpointError: it cannot be listed.
    """
    steps = container.steps()
    if [one.step for one in steps if one.commit is None and _remove_useless_commit(container, one.step)]:
        steps = container.steps()  # an older commit of the same step may have been behind it
    return steps


def _remove_useless_commit(container: Container, step: int) -> bool:
    if container.commit_path(step) is None:
        return False
    try:
        container.read_candidate(step)
    except CorruptCheckpointError as error:
        log.warning("the commit of step %d is of no use and is removed: %s", step, error)
        remove_damaged(container, step, COMMIT_FILE)
        return True
    except CheckpointError:
        pass  # `Container.steps` has warned of it
    return False


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
        commit = container.read_commit(candidate.step)
        if commit.save_id != candidate.save_id:
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
            container.write_commit(commit, is_settled=not (folder / PENDING_FILE).exists())
            return


def remove_damaged(container: Container, step: int, file: str) -> None:
    """Removes an object that proved damaged, also where another process holds it: nobody can use it."""
    path = container.commit_path(step) if file == COMMIT_FILE else container.folder_of(step) / file
    if path is None:
        return
    if file != COMMIT_FILE:
        container.remove_object(path)
    container.disk.remove(path)


def settle(container: Container, candidate: CommitHead, *, is_elsewhere: bool) -> None:
    """The chosen checkpoint is on all hosts: what it replaces may go.

    Newer ones, which nobody could put together, do not count as settled any more; else they would replace this one.

    Args:
        container: of this host.
        candidate: the checkpoint.
        is_elsewhere: whether there is another host.

    Raises:
        CheckpointError: the disk refuses.
    """
    for one in container.steps():
        if one.commit is None:
            continue
        if one.commit.generation > candidate.generation and one.is_settled:
            folder = container.folder_of(one.step)
            container.disk.rename(folder / COMMIT_FILE, folder / PENDING_FILE)
        if is_elsewhere and one.step == candidate.step and not one.is_settled:
            container.settle(one.step)


def complete(container: Container, commit: Commit, replication: ReplicationManager | None) -> None:
    """Writes the commit of a checkpoint and sends it to all other hosts; older checkpoints may go once one has it.

    Args:
        container: of this host.
        commit: of shards that all have their replicas.
        replication: reaches the other hosts; None: there are none.

    Raises:
        CheckpointError: it cannot be written; then the checkpoint is not complete.
    """
    others = len(set(replication.hosts)) - 1 if replication is not None else 0
    path = container.write_commit(commit, is_settled=not others)
    if not others or replication is None:
        return
    with ShardReader(path) as shard, shard.view() as content:
        missing = replication.spread(str(ObjectName(container.name, commit.step, COMMIT_FILE)), content)
    if len(missing) < others:
        container.settle(commit.step)
    else:
        log.warning(
            "no other host has the commit of step %d in %s (missing: %s): older checkpoints stay until one has",
            commit.step,
            container.root,
            ", ".join(missing),
        )
