"""Finds the newest checkpoint in memory that the hosts can put together, and brings it to where it is needed."""

from __future__ import annotations

import logging
import os
import threading
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from torchelastic.checkpoint.compat.flashpoint.container import Container
from torchelastic.checkpoint.compat.flashpoint.ids import (
    CheckpointContainerId,
    CheckpointObjectId,
    newest_of_step,
    object_of,
    parse_object,
    parts_of,
)
from torchelastic.checkpoint.compat.flashpoint.object_manager import CheckpointObjectManager
from torchelastic.checkpoint.engine.group_folders import GroupFolders, verify
from torchelastic.checkpoint.engine.restorer import Restorer, shards_of
from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError
from torchelastic.checkpoint.format.shard_reader import ShardReader
from torchelastic.checkpoint.replicas.receive import Destination
from torchelastic.checkpoint.replicas.replica_client import Transferred
from torchelastic.checkpoint.replicas.replication_errors import ReplicationError
from torchelastic.checkpoint.replicas.replication_manager import ReplicationManager
from torchelastic.checkpoint.replicas.topology import root_id
from torchelastic.checkpoint.store.restore_plan import (
    Candidate,
    ShardSource,
    candidates,
    kept,
    nearness,
    plan_reads,
)
from torchelastic.checkpoint.store.save_id import SaveId, ShardId
from torchelastic.checkpoint.store.tier import TierEntry
from torchelastic.metrics import publish_metric
from torchelastic.processes.background import in_background

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


@dataclass(frozen=True)
class _Survey:
    """What there is.

    Attributes:
        container: on this host.
        shared: the same folder among those of the group.
        candidates: all saves, newest first; each rank of a folder can read what is in it.
        restorer: of this group.
    """

    container: Container
    shared: GroupFolders
    candidates: list[Candidate]
    restorer: Restorer

    def wanted(self, candidate: Candidate) -> dict[int, list[int]]:
        """By rank, which shards are to be in its folder: its own, and once in each folder the commit."""
        commit, ranks, firsts = candidate.world_size - 1, len(self.shared.roots), _firsts(self.shared.roots)
        return {rank: [*range(rank, commit, ranks), *[commit] * (rank in firsts)] for rank in range(ranks)}


def _firsts(folders: Sequence[str]) -> set[int]:
    """Of the ranks that use a folder, the one that acts for all."""
    return {folders.index(folder) for folder in folders}


def _held_by(rank: int, candidate: Candidate) -> list[int]:
    """The shards in the folder of a rank."""
    return [shard for shard, sources in candidate.sources.items() if ShardSource(rank) in sources]


def _instead_of(container: Container, shard: ShardId) -> CheckpointError | None:
    """Why a shard is fetched that lies here: it was not found good when all were verified."""
    return CheckpointError(f"{shard} could not be read here") if container.has_whole(shard) else None


class DefaultCheckpointLoader(CheckpointLoader):
    """Loads from the containers of all hosts.

    The callables are accepted for code written for ML Flashpoint; what they would tell is asked of the replication
    manager.

    Args:
        checkpoint_object_manager: has the containers of this host.
        replication_manager: knows the other ranks.
        global_rank_getter, local_rank_getter, broadcast_object_list_func, all_gather_object_func, world_size_getter:
            not needed.
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
        self._lock = threading.Lock()
        self._known: dict[tuple[str, SaveId], tuple[Candidate, Sequence[str]]] = {}
        self._making: Future[bool] | None = None

    # --- reading ------------------------------------------------------------------------------------------------------

    def read_metadata(
        self, checkpoint_id: str | os.PathLike[str] | CheckpointContainerId, object_name: str = ""
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
        save = container.save_of(step)
        if save is None:
            shard = self._commit_elsewhere(container, step)
            self._fetch(container, shard)
            container.complete(container.read_commit(shard), by_all=True)
        else:
            shard = container.commit_shard(save)
        try:
            return container.read_commit(shard).metadata
        except CorruptCheckpointError as error:
            self._replace(container, shard, error)
        return container.read_commit(shard).metadata

    def open(self, checkpoint_id: str | os.PathLike[str] | CheckpointContainerId, file: str) -> ShardReader:
        """See `CheckpointLoader`; what is fetched stays here. On any rank, from any thread.

        Raises:
            CorruptCheckpointError: it is no shard.
            CheckpointError: it is nowhere to be had, or there is no room for it.
        """
        container, shard = self._shard_of(checkpoint_id, file)
        if not container.has_whole(shard):
            log.info("fetching %s from another host", shard)
            self._fetch(container, shard)
        return container.open(shard.name, shard.rank)

    def repair(self, checkpoint_id: str | os.PathLike[str] | CheckpointContainerId, file: str) -> ShardReader:
        """See `CheckpointLoader`. On any rank, from any thread.

        Raises:
            CorruptCheckpointError: no other host has a good copy.
            CheckpointError: there is no room for it.
        """
        container, shard = self._shard_of(checkpoint_id, file)
        with self._lock:
            try:
                with container.open(shard.name, shard.rank) as opened:
                    opened.verify()
            except CheckpointError as error:
                log.warning("%s is removed, and fetched from another host: %s", container.path_of(shard), error)
                self._replace(container, shard, error)
        return container.open(shard.name, shard.rank)

    def _replace(self, container: Container, shard: ShardId, error: CheckpointError) -> None:
        """Removes a damaged shard, and fetches another copy. Raises: CorruptCheckpointError if there is none."""
        container.remove_damaged(shard)  # first: there may be no room for both
        self._fetch(container, shard, error)

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
        found = self._survey(checkpoint_base_container, call)

        def read(candidate: Candidate) -> CheckpointContainerId:
            verified = self._verified(found, candidate, call)
            self._bring(found, verified, call, deletes_newer=True)
            self._make_copies_again(found, verified)
            return CheckpointContainerId(found.container.folder_of(candidate.save.step))

        report = partial(log.warning if self._replication.rank == 0 else log.debug, "%s")
        newest = found.restorer.newest(found.candidates, read, report)
        return None if newest is None else newest[1]

    def get_candidate_checkpoints(
        self, checkpoint_base_container: str | os.PathLike[str] | CheckpointContainerId
    ) -> list[CheckpointContainerId]:
        """The checkpoints of which every object is on some host, newest first; nothing is verified. Collective."""
        call = f"get_candidate_checkpoints(.../{Path(checkpoint_base_container).name})"
        found = self._survey(checkpoint_base_container, call)
        return [
            CheckpointContainerId(found.container.folder_of(candidate.save.step))
            for candidate in found.candidates
            if candidate.is_complete
        ]

    def get_checkpoint_objects_by_rank(
        self, checkpoint_container_id: str | os.PathLike[str] | CheckpointContainerId
    ) -> dict[int, list[CheckpointObjectId]]:
        """Of each rank, which shards of a checkpoint are on its host; the last one is the commit. Collective."""
        base, step = parts_of(checkpoint_container_id)
        found = self._survey(base, f"get_checkpoint_objects_by_rank({base.name}, {step})")
        saves = [candidate for candidate in reversed(found.candidates) if candidate.save.step == step]
        return {
            rank: [
                CheckpointObjectId(f"{base}/{shards_of(candidate)[shard]}")
                for candidate in saves
                for shard in _held_by(rank, candidate)
            ]
            for rank in range(len(found.shared.roots))
        }

    def retrieve_checkpoint(self, checkpoint_id: str | os.PathLike[str] | CheckpointContainerId) -> bool:
        """Fetches what this host's ranks need of one checkpoint; whether all ranks could. Collective."""
        base, step = parts_of(checkpoint_id)
        call = f"retrieve_checkpoint({base.name}, {step})"
        found = self._survey(base, call)
        candidate = next((one for one in found.candidates if one.is_committed and one.save.step == step), None)
        try:
            if candidate is not None:
                self._bring(found, self._verified(found, candidate, call), call, deletes_newer=False)
        except CorruptCheckpointError as error:
            log.warning("%s: %s", call, error)
            return False
        return candidate is not None

    def wait_for_replicas(self, timeout_s: float) -> bool:
        """Waits until this rank has made the replicas that were missing at the last recovery. Not a collective.

        Returns:
            Whether they are there, or the checkpoint was replaced meanwhile; false when the time is over or one failed.
        """
        return self._making is None or (bool(wait([self._making], timeout_s).done) and self._making.result())

    # --- how ----------------------------------------------------------------------------------------------------------

    def _survey(self, base: str | os.PathLike[str] | CheckpointContainerId, call: str) -> _Survey:
        """Where everybody is, and what there is by names; the first rank of each folder lists it when all have come."""
        rank, run_on_all = self._replication.rank, self._replication.run_on_all
        folders = run_on_all(f"{call}, looking", lambda: root_id(self._objects.container(base).root))
        container = self._objects.container(base)
        restorer = Restorer(rank, run_on_all, self._objects.copies)

        def here() -> tuple[list[TierEntry], None]:  # not before: now nobody completes a save, or removes one
            return container.noted_inventory() if rank in _firsts(folders) else [], None

        lists, _ = restorer.look(f"{call}, listing", here)
        held = [lists[folders.index(folder)] for folder in folders]
        found = candidates([*held, restorer.durable])
        return _Survey(container, self._shared(container, folders), found, restorer)

    def _verified(self, found: _Survey, candidate: Candidate, call: str) -> Candidate:
        """The same with the good copies alone. Raises: CorruptCheckpointError if there are too few."""
        rank, shards, folders = self._replication.rank, shards_of(candidate), found.shared.roots
        sharers = [other for other, folder in enumerate(folders) if folder == folders[rank]]
        share = _held_by(rank, candidate)[sharers.index(rank) :: len(sharers)]
        told = self._replication.run_on_all(
            f"{call}, verifying step {candidate.save.step}",
            lambda: verify(found.container, [shards[one] for one in share]),
        )
        good: dict[str, list[int]] = defaultdict(list)
        for folder, each in zip(folders, told, strict=True):
            good[folder] += each
        held = [[TierEntry(candidate.save, candidate.world_size, tuple(good[folder]))] for folder in folders]
        durable = [one for one in found.restorer.durable if one.name == candidate.save]
        (verified,) = candidates([*held, durable])
        if verified.missing:
            raise CorruptCheckpointError(verified.fault)
        return verified

    def _bring(self, found: _Survey, candidate: Candidate, call: str, *, deletes_newer: bool) -> None:
        """Has all ranks fetch what they want. Raises: CorruptCheckpointError, on all of them, if one cannot.

        It is completed when all is there: a host that has a checkpoint removes older ones.
        """
        container, shards, rank = found.container, shards_of(candidate), self._replication.rank
        commit, wanted = shards[-1], found.wanted(candidate)
        reads = plan_reads(candidate.sources, wanted, distance=nearness(found.shared.roots))[rank]
        call = f"{call}, fetching step {commit.name.step}"

        def fetch_own() -> None:
            for shard, sources in reads.items():
                if not sources[0].place and found.shared.roots[sources[0].rank] == found.shared.roots[rank]:
                    continue
                try:
                    why = _instead_of(container, shards[shard])
                    came = found.shared.fetch(shards[shard], sources, instead_of=why)
                except CheckpointError as error:  # without room for it, there may be some for an older one
                    raise CorruptCheckpointError(f"could not fetch {shards[shard]}: {error}") from error
                publish_metric("torchelastic", "checkpoint.recovery.fetched.bytes", came)

        def complete() -> None:
            if commit.rank in wanted[rank]:
                if deletes_newer:
                    container.delete_newer(commit.name)
                container.complete(container.read_commit(commit), by_all=True)

        self._replication.run_on_all(call, fetch_own)
        self._replication.run_on_all(f"{call}, its commit", complete)

    def _make_copies_again(self, found: _Survey, candidate: Candidate) -> None:
        """Everybody has what is needed: replicas that were lost are made again, in the background."""
        container, shards = found.container, shards_of(candidate)
        self._known = {(container.name, candidate.save): (candidate, found.shared.roots)}
        there = kept(candidate.sources, found.wanted(candidate), found.shared.roots)
        lost = found.shared.lost(there, own_too=False).get(self._replication.rank, [])
        bad = {shards[one]: why for one in lost if (why := _instead_of(container, shards[one])) is not None}
        is_wanted = partial(container.has_committed, candidate.save)
        again = partial(found.shared.make_again, shards, there, lost, bad=bad, is_wanted=is_wanted)
        self._making = in_background(again, "replica-copies")

    def _fetch(self, container: Container, shard: ShardId, instead_of: CheckpointError | None = None) -> None:
        shared, sources = self._sources(container, shard)
        shared.fetch(shard, sources, instead_of=instead_of)

    def _shared(self, container: Container, folders: Sequence[str]) -> GroupFolders:
        def pull(shard: ShardId, source: ShardSource, destination: Destination) -> Transferred:
            if self._objects.copies is not None and source.place:
                return self._objects.copies.pull(shard, destination)
            return self._replication.fetch(object_of(container.name, shard), source.rank, destination)

        group = self._replication
        return GroupFolders(container, group.rank, folders, group.hosts, group.partners_of, pull)

    def _sources(self, container: Container, shard: ShardId) -> tuple[GroupFolders, list[ShardSource]]:
        """Where a shard may be: where it is known to be, else one rank of each other host; not all ask the same."""
        hosts = self._replication.hosts
        candidate, folders = self._known.get((container.name, shard.name), (None, hosts))
        known = candidate.sources.get(shard.rank) if candidate is not None else None
        sources = known or [ShardSource(hosts.index(host)) for host in sorted(set(hosts))]
        shared = self._shared(container, folders)
        return shared, shared.elsewhere({shard.rank: sources}, shard.rank)

    def _commit_elsewhere(self, container: Container, step: int) -> ShardId:
        """The commit of the newest save of a step that another host has. Raises: CorruptCheckpointError."""
        found = []
        for source in self._sources(container, ShardId(SaveId(0, 0, 0, step), 0, 1))[1]:
            try:
                found += newest_of_step(self._replication.ids(source.rank), container.name, step)[-1:]
            except ReplicationError as error:
                log.warning("step %d: %s does not report what it has: %s", step, source, error)
        if not found:
            folder = container.folder_of(step)
            raise CorruptCheckpointError(f"{folder} has no commit: it is being written, or was never complete")
        return max(parse_object(one)[1] for one in found)

    def _shard_of(
        self, checkpoint_id: str | os.PathLike[str] | CheckpointContainerId, file: str
    ) -> tuple[Container, ShardId]:
        container, step = self._step_of(checkpoint_id)
        shard = ShardId.parse(file)
        if shard.name.step != step:
            raise CorruptCheckpointError(f"{file} is no shard of {checkpoint_id}")
        return container, shard

    def _step_of(self, checkpoint_id: str | os.PathLike[str] | CheckpointContainerId) -> tuple[Container, int]:
        base, step = parts_of(checkpoint_id)
        return self._objects.container(base), step

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._objects, self._replication)
