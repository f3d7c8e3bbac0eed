"""The last step of a save: what makes a checkpoint complete, on this host and on the others."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from torchelastic.checkpoint.memory.commit import Commit
from torchelastic.checkpoint.memory.container import Container
from torchelastic.checkpoint.memory.names import COMMIT_FILE, ObjectName
from torchelastic.checkpoint.shards.reading import ShardReader

if TYPE_CHECKING:
    from torchelastic.checkpoint.replication.manager import ReplicationManager

log = logging.getLogger(__name__)


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


def generation_in_use(container: Container) -> int:
    """The highest generation of anything on this host, complete or not; -1 if there is nothing."""
    steps = container.steps()
    of_commits = [step.commit.generation for step in steps if step.commit is not None]
    return max([*of_commits, *(name.generation for step in steps for name in step.shards)], default=-1)
