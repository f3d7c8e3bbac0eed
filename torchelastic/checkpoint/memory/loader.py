"""Finds the newest checkpoint in memory that the hosts can put together, and brings it to where it is needed."""

from __future__ import annotations

import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError
from torchelastic.checkpoint.memory.choice import (
    Fetch,
    MemoryCandidate,
    RecoveryPlan,
    Roster,
    listed_in,
    recovery_plan,
    verification_share,
)
from torchelastic.checkpoint.memory.commit import CommitHead, objects_of
from torchelastic.checkpoint.memory.container import Container, read_candidate, read_commit
from torchelastic.checkpoint.memory.ids import COMMIT_FILE, CheckpointContainerId, CheckpointObjectId, parts_of
from torchelastic.checkpoint.memory.inventory import (
    Retrieval,
    give_up_newer,
    make_replicas,
    remove_damaged,
    verify,
)
from torchelastic.checkpoint.memory.objects import CheckpointObjectManager
from torchelastic.checkpoint.replication.manager import ReplicationManager
from torchelastic.checkpoint.replication.topology import root_id
from torchelastic.checkpoint.restore import newest_readable
from torchelastic.checkpoint.shards.reading import ShardReader
from torchelastic.checkpoint.store.tier import TierEntry
from torchelastic.group.rank_group import begun
from torchelastic.metrics import publish_metric

log = logging.getLogger(__name__)


class CheckpointLoader(ABC):
    """Finds checkpoints and opens what is in them."""

    @abstractmethod
    def read_metadata(self, checkpoint_id: str | os.PathLike[str] | CheckpointContainerId) -> Metadata:
        """DCP's metadata of a checkpoint. Raises: CheckpointError if it is not complete, or cannot be read."""

    @abstractmethod
    def open(self, checkpoint_id: str | os.PathLike[str] | CheckpointContainerId, file: str) -> ShardReader:
        """Opens a shard; it is fetched first if it is not on this host. Raises: CheckpointError."""

    @abstractmethod
    def repair(self, checkpoint_id: str | os.PathLike[str] | CheckpointContainerId, file: str) -> ShardReader:
        """Opens another copy of a shard that proved damaged. Raises: CheckpointError if there is none."""

    @abstractmethod
    def get_latest_complete_checkpoint(
        self, checkpoint_base_container: str | os.PathLike[str] | CheckpointContainerId
    ) -> CheckpointContainerId | None:
        """The newest checkpoint that can be loaded; None if there is none. Collective."""


class DefaultCheckpointLoader(CheckpointLoader):
    """Loads from the containers of all hosts.

    The callables are accepted for code written for ML Flashpoint; what they would tell is asked of the replication
    manager.

    Args:
        checkpoint_object_manager: has the containers of this host.
        replication_manager: knows the other ranks.
        global_rank_getter: not needed.
        local_rank_getter: not needed.
        broadcast_object_list_func: not needed.
        all_gather_object_func: not needed.
        world_size_getter: not needed.
    """

    def __init__(
        self,
        checkpoint_object_manager: CheckpointObjectManager,
        replication_manager: ReplicationManager,
        *,
        global_rank_getter: Callable[..., int] | None = None,
        local_rank_getter: Callable[..., int] | None = None,
        broadcast_object_list_func: Callable[..., Any] | None = None,
        all_gather_object_func: Callable[..., Any] | None = None,
        world_size_getter: Callable[..., int] | None = None,
    ) -> None:
        del global_rank_getter, local_rank_getter, broadcast_object_list_func, all_gather_object_func, world_size_getter
        self._objects = checkpoint_object_manager
        self._replication = replication_manager
        self._retrieval = Retrieval(checkpoint_object_manager.shelf, replication_manager)
        self._lock = threading.Lock()
        self._plans: dict[tuple[str, int], RecoveryPlan] = {}
        self._making: Future[bool] | None = None

    # --- reading ------------------------------------------------------------------------------------------------------

    def read_metadata(
        self, checkpoint_id: str | os.PathLike[str] | CheckpointContainerId, object_name: str = COMMIT_FILE
    ) -> Metadata:
        """See `CheckpointLoader`; a commit that is missing or damaged here is fetched. On any rank, from any thread.

        Args:
            checkpoint_id: the container of the step.
            object_name: accepted for code written for ML Flashpoint; metadata lie in the commit.

        Raises:
            CorruptCheckpointError: the checkpoint is not complete, or its commit is damaged, and nobody has another.
        """
        del object_name
        container, step = self._step_of(checkpoint_id)
        try:
            return read_commit(container.folder_of(step)).metadata
        except CorruptCheckpointError as error:
            self._replace(container, step, COMMIT_FILE, error)
        return read_commit(container.folder_of(step)).metadata

    def open(self, checkpoint_id: str | os.PathLike[str] | CheckpointContainerId, file: str) -> ShardReader:
        """See `CheckpointLoader`; what is fetched stays here. On any rank, from any thread.

        Raises:
            CorruptCheckpointError: it is no shard.
            CheckpointError: it is nowhere to be had, or there is no room for it.
        """
        container, step = self._step_of(checkpoint_id)
        path = container.folder_of(step) / file
        if not path.exists():
            log.info("fetching %s of step %d from another host", file, step)
            self._retrieval.fetch(container, step, file, self._holders(container, step, file))
        return container.open(step, file)

    def repair(self, checkpoint_id: str | os.PathLike[str] | CheckpointContainerId, file: str) -> ShardReader:
        """See `CheckpointLoader`. On any rank, from any thread.

        Raises:
            CorruptCheckpointError: no other host has a good copy.
            CheckpointError: there is no room for it.
        """
        container, step = self._step_of(checkpoint_id)
        path = container.folder_of(step) / file
        with self._lock:
            try:
                with container.open(step, file) as shard:
                    shard.verify()
            except CheckpointError as error:
                log.warning("%s is removed, and fetched from another host: %s", path, error)
                self._replace(container, step, file, error)
        return container.open(step, file)

    def _replace(self, container: Container, step: int, file: str, error: CheckpointError) -> None:
        """Removes a damaged object, and fetches another copy. Raises: CorruptCheckpointError if there is none."""
        try:
            remove_damaged(container, step, file)
            self._retrieval.fetch(container, step, file, self._holders(container, step, file))
        except CheckpointError as other:
            raise CorruptCheckpointError(f"{error}; and on other hosts: {other}") from other

    # --- choosing -----------------------------------------------------------------------------------------------------

    def get_latest_complete_checkpoint(
        self, checkpoint_base_container: str | os.PathLike[str] | CheckpointContainerId
    ) -> CheckpointContainerId | None:
        """The newest checkpoint of which a good copy of everything is left. Collective; on the thread that trains.

        When it returns one, every host has what its ranks need of it, verified. Replicas that were lost are made again
        in the background; see `wait_for_replicas`.

        Args:
            checkpoint_base_container: of the job, on this host.

        Returns:
            The container of its step, on all ranks the same step; None if there is none: then load from long-term
            storage, or begin anew.

        Raises:
            OutOfStepError: a rank did not come, or its process has ended; names it.
            CheckpointError: a rank cannot use its container; names it.
        """
        call = f"get_latest_complete_checkpoint(.../{Path(checkpoint_base_container).name})"
        container, roster, listings = self._survey(checkpoint_base_container, call)
        is_first = roster.is_first(self._replication.rank)

        def read(candidate: MemoryCandidate) -> CheckpointContainerId:
            plan = self._verified_plan(container, candidate, roster, listings, call)
            if failures := self._execute(container, plan, call, gives_up_newer=is_first):
                raise CorruptCheckpointError("; ".join(failures[:4]))
            self._finish(container, plan)
            return CheckpointContainerId(container.folder_of(candidate.save.step))

        def pass_over(candidate: MemoryCandidate, error: CorruptCheckpointError) -> None:
            if self._replication.rank == 0:
                log.warning("step %d cannot be recovered: %s", candidate.save.step, error)

        return newest_readable(listed_in(listings, roster), read, pass_over)

    def get_candidate_checkpoints(
        self, checkpoint_base_container: str | os.PathLike[str] | CheckpointContainerId
    ) -> list[CheckpointContainerId]:
        """The checkpoints of which every object is on some host, newest first; nothing is verified. Collective."""
        call = f"get_candidate_checkpoints(.../{Path(checkpoint_base_container).name})"
        container, roster, listings = self._survey(checkpoint_base_container, call)
        return [
            CheckpointContainerId(container.folder_of(candidate.save.step))
            for candidate in listed_in(listings, roster)
            if candidate.is_complete
        ]

    def get_checkpoint_objects_by_rank(
        self, checkpoint_id: str | os.PathLike[str] | CheckpointContainerId
    ) -> dict[int, list[CheckpointObjectId]]:
        """Of each rank, which shards of a checkpoint, and whether its commit, are on its host. Collective."""
        parent = CheckpointContainerId(checkpoint_id)
        base, step = parts_of(parent)
        _, roster, listings = self._survey(base, f"get_checkpoint_objects_by_rank({base.name}, {step})")
        found = {}
        for rank, folder in enumerate(roster.folders):
            files = {file for one in listings[folder] if one.name.step == step for file in objects_of(one)}
            found[rank] = [CheckpointObjectId.from_container(parent, file) for file in sorted(files)]
        return found

    def retrieve_checkpoint(
        self, checkpoint_base_container: str | os.PathLike[str] | CheckpointContainerId, plan: RecoveryPlan
    ) -> bool:
        """Fetches what a plan says, of `choice.recovery_plan`; whether all ranks could. Collective."""
        container = self._objects.container(checkpoint_base_container)
        return not self._execute(container, plan, f"retrieve_checkpoint({container.name}, {plan.candidate.step})")

    def wait_for_replicas(self, timeout_s: float) -> bool:
        """Waits until this rank has made the replicas that were missing at the last recovery. Not a collective.

        Returns:
            Whether they are there, or the checkpoint was replaced meanwhile; false when the time is over or one failed.
        """
        return self._making is None or (bool(wait([self._making], timeout_s).done) and self._making.result())

    # --- how ----------------------------------------------------------------------------------------------------------

    def _survey(
        self, base: str | os.PathLike[str] | CheckpointContainerId, call: str
    ) -> tuple[Container, Roster, Mapping[str, Sequence[TierEntry]]]:
        """Where everybody is, and what there is by names; the first rank of each folder lists it when all have come."""

        def look() -> list[str]:
            host = self._replication.host_of(self._replication.rank)
            return [host, root_id(self._objects.container(base).root)]

        told = self._replication.run_on_all(f"{call}, looking", look)
        container = self._objects.container(base)
        roster = Roster(tuple(str(host) for host, _ in told), tuple(str(folder) for _, folder in told))
        is_first = roster.is_first(self._replication.rank)

        def list_here() -> list[Any]:  # not before: now nobody completes a save, or removes one
            return [one.as_plain() for one in container.entries()] if is_first else []

        lists = self._replication.run_on_all(f"{call}, listing", list_here)
        found = {
            folder: [TierEntry.from_plain(told) for told in lists[ranks[0]]] for folder, ranks in roster.sharers.items()
        }
        return container, roster, found

    def _verified_plan(
        self,
        container: Container,
        listed: MemoryCandidate,
        roster: Roster,
        listings: Mapping[str, Sequence[TierEntry]],
        call: str,
    ) -> RecoveryPlan:
        """How to recover a checkpoint from its good copies. Raises: CorruptCheckpointError if there are too few."""
        candidate, rank = CommitHead(listed.save, len(listed.whole)), self._replication.rank
        if listed.missing:
            raise CorruptCheckpointError(f"nobody has a copy of {', '.join(candidate.files_of(listed.missing[:8]))}")
        folder = roster.folders[rank]
        share = verification_share(listings[folder], candidate, roster.sharers[folder], rank)
        told = self._replication.run_on_all(
            f"{call}, verifying step {candidate.step}", lambda: verify(container, candidate, share)
        )
        verified: dict[str, dict[str, int]] = {}
        for other, good in enumerate(told):
            verified.setdefault(roster.folders[other], {}).update(good)
        return recovery_plan(candidate, verified, roster, self._replication.copies)

    def _fetch_own(self, container: Container, plan: RecoveryPlan, fetches: Sequence[Fetch]) -> list[str]:
        """Fetches what this rank is to fetch; why it could not what it could not."""
        failed = []
        for fetch in fetches:
            if fetch.receiver != self._replication.rank:
                continue
            try:
                self._retrieval.fetch(container, plan.candidate.step, fetch.file, fetch.holders)
                publish_metric("torchelastic", "checkpoint.recovery.fetched.bytes", fetch.size_bytes)
            except CheckpointError as error:
                log.warning("%s of step %d could not be fetched: %s", fetch.file, plan.candidate.step, error)
                failed.append(f"rank {fetch.receiver} could not fetch {fetch.file}: {error}"[:500])
        return failed

    def _execute(
        self, container: Container, plan: RecoveryPlan, call: str, *, gives_up_newer: bool = False
    ) -> list[str]:
        """Has all ranks fetch what they need; why those could not that could not.

        The commit comes when all else is there: a host that has it removes older checkpoints.
        """
        call = f"{call}, fetching step {plan.candidate.step}"
        commits = [fetch for fetch in plan.fetches if fetch.file == COMMIT_FILE]
        shards = [fetch for fetch in plan.fetches if fetch.file != COMMIT_FILE]

        def fetch_commit() -> list[str]:
            if gives_up_newer:
                give_up_newer(container, plan.candidate)
            return self._fetch_own(container, plan, commits)

        told = self._replication.run_on_all(call, lambda: self._fetch_own(container, plan, shards))
        if not any(told):
            told = self._replication.run_on_all(f"{call}, its commit", fetch_commit)
        return [text for each in told for text in each]

    def _finish(self, container: Container, plan: RecoveryPlan) -> None:
        """Everybody has what is needed: lost replicas are made again."""
        rank, candidate = self._replication.rank, plan.candidate
        self._plans = {(container.name, candidate.step): plan}
        own = [fetch for fetch in plan.replicas if fetch.receiver == rank]
        is_wanted = partial(_is_there, container, candidate)
        self._making = begun(partial(make_replicas, self._retrieval, container, candidate.step, own, is_wanted))

    def _holders(self, container: Container, step: int, file: str) -> list[int]:
        """Who may have an object: those known to have it, else one rank of each other host; not all ask the same."""
        rank, world_size = self._replication.rank, self._replication.world_size
        plan = self._plans.get((container.name, step))
        known: Sequence[int] = plan.holders.get(file, ()) if plan is not None else ()
        if not known:
            hosts = self._replication.hosts
            known = [hosts.index(host) for host in sorted(set(hosts)) if host != hosts[rank]]
        return sorted((one for one in known if one != rank), key=lambda one: (one - rank) % world_size)

    def _step_of(self, checkpoint_id: str | os.PathLike[str] | CheckpointContainerId) -> tuple[Container, int]:
        base, step = parts_of(checkpoint_id)
        return self._objects.container(base), step

    def __getstate__(self) -> dict[str, Any]:
        return {"objects": self._objects, "replication": self._replication}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["objects"], state["replication"])  # type: ignore[misc]


def _is_there(container: Container, candidate: CommitHead) -> bool:
    """Whether a checkpoint is still this one: it was not replaced by a newer one meanwhile."""
    try:
        return read_candidate(container.folder_of(candidate.step)).name == candidate.name
    except CheckpointError:
        return False
