"""The ranks of a job as holders of each other's objects: who is where, who receives what, and how they are reached.

Objects are named by ids; where they lie is known to the shelf (see `ReplicaStore`).
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.replicas.receive import Destination
from torchelastic.checkpoint.replicas.replica_client import ReplicaClient, Transferred, pull_into
from torchelastic.checkpoint.replicas.replication_errors import NoReplicasAvailableError, ReplicationError
from torchelastic.checkpoint.replicas.topology import (
    FAILURE_DOMAIN_ENV,
    DestinationStrategy,
    ObjectManager,
    PeerTopology,
    ReplicationRetryConfig,
    destinations,
    meet,
)
from torchelastic.group.rank_group import Answer, RankGroup
from torchelastic.metrics import publish_metric
from torchelastic.processes.dropped import let_go_when_dropped
from torchelastic.processes.identity import host_id

Made = TypeVar("Made")

log = logging.getLogger(__name__)

_MOST_THREADS = 16
#: How many ranks of another host are tried for what only one of them has to take.
_TRIES_PER_HOST = 2
#: Ranks come here from building their models, not all at the same pace; one that has died is noticed at once.
_WAIT_S = 300.0


class ReplicationManager:
    """Pushes objects to partners on other hosts, and fetches them back; calls may come from any thread.

    Before `initialize`, and in a job of one rank, it has no partners. It pickles to what a process beside the trainer
    needs to push and fetch: addresses, partners and the token; the server stays where it is. One that is dropped stops
    serving.
    """

    def __init__(self) -> None:
        self._topology: PeerTopology | None = None
        self._objects: ObjectManager | None = None
        self._ranks = RankGroup(None, _WAIT_S)
        self._let_go: Callable[[], object] = self._ranks.close
        self._has_warned = False

    def initialize(
        self,
        checkpoint_object_manager: ObjectManager | None = None,
        listen_port: int = 0,
        retry_config: ReplicationRetryConfig | None = None,
        replication_transfer_service: object = None,
        repl_strategy: DestinationStrategy | None = None,
        *,
        host: str | None = None,
        copies: int = 1,
        timeout_s: float = _WAIT_S,
        process_group: dist.ProcessGroup | None = None,
        replica_host: str | None = None,
    ) -> None:
        """Makes all ranks know each other, and starts to serve. Collective; to be called on the thread that trains.

        To be called again, by all ranks, when the process group was formed anew: servers of the former group end, and
        what its members still send is refused.

        Args:
            checkpoint_object_manager: has the objects.
            listen_port: the port of the first rank of each machine; the next ones take the ports that follow. 0: free
                ones.
            retry_config: None: the defaults.
            replication_transfer_service: accepted for code written for ML Flashpoint; not needed.
            repl_strategy: who receives the objects of whom; None: cliques across hosts, see `partners`.
            host: ranks that give the same name are lost together. None: what the environment says
                (TORCHELASTIC_FAILURE_DOMAIN), else the machine.
            copies: on how many other hosts each object is to be, with the strategy None; fewer if there are fewer.
            timeout_s: for how long a rank is waited for, here and whenever all ranks meet. (How long a transfer may be
                silent says `retry_config`.)
            process_group: whose ranks belong together; None: the default group, or this process alone without one.
            replica_host: the address to listen on; None: found out.

        Raises:
            ValueError, TypeError: an argument is invalid.
            OutOfStepError: a rank did not come (names it), or the group is broken.
            CheckpointError: a rank cannot listen.
        """
        del replication_transfer_service
        if checkpoint_object_manager is None:
            raise TypeError("initialize() needs the CheckpointObjectManager, which has the objects")
        if copies < 0 or not timeout_s > 0:
            raise ValueError(f"copies is {copies} and timeout_s {timeout_s}: give 0 or more, and more than 0 s")
        self.shutdown()
        self._objects, self._ranks = checkpoint_object_manager, RankGroup(process_group, timeout_s)
        self._let_go = self._ranks.close
        shelf = checkpoint_object_manager.shelf

        def choose(met: PeerTopology) -> list[int]:
            return destinations(repl_strategy, met, copies) if len(met.hosts) > 1 else []

        met, server, _ = meet(
            self._ranks,
            "ReplicationManager.initialize()",
            lambda: shelf,
            retry_config or ReplicationRetryConfig(),
            choose=choose,
            host=host,
            port=listen_port,
            replica_host=replica_host,
        )
        self._topology = met
        self._let_go = let_go_when_dropped(self, server, self._ranks)
        if len(met.hosts) > 1 and len(met.partners) < copies and repl_strategy is None and met.rank == 0:
            few = "each object gets %d replica(s) and not %d: there are too few hosts"
            log.warning(few, len(met.partners), copies)

    # --- who is where -------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """The own rank."""
        return self._topology.rank if self._topology is not None else self._ranks.rank

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return len(self._topology.hosts) if self._topology is not None else self._ranks.world_size

    @property
    def is_initialized(self) -> bool:
        """Whether `initialize` was called."""
        return self._topology is not None

    @property
    def group(self) -> str:
        """The name of this group, a new one whenever ranks meet in `initialize`; empty before."""
        token = self._topology.token if self._topology is not None else ""
        return hashlib.sha256(token.encode()).hexdigest()[:16] if token else ""

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host of each rank; before `initialize`, one for all."""
        if self._topology is not None:
            return self._topology.hosts
        return (os.environ.get(FAILURE_DOMAIN_ENV) or host_id(),) * self.world_size

    @property
    def partners(self) -> tuple[int, ...]:
        """Who receives the objects of this rank."""
        if self._topology is None and self.world_size > 1 and not self._has_warned:
            self._has_warned = True
            log.warning("objects get no replicas: call ReplicationManager.initialize() on all ranks first")
        return self._topology.partners if self._topology is not None else ()

    @property
    def partners_of(self) -> tuple[tuple[int, ...], ...]:
        """By rank, who receives its objects; empty if nobody does."""
        return self._topology.partners_of if self._topology is not None else ()

    def host_of(self, rank: int) -> str:
        """The host of a rank."""
        return self.hosts[rank]

    # --- meeting ------------------------------------------------------------------------------------------------------

    def all_gather(self, call: str, payload: Any) -> list[Any]:
        """Tells all ranks what this one is about to do, and returns what each says, by rank. Collective.

        Args:
            call: the method and its arguments, for people; equal on all ranks.
            payload: JSON can hold it.

        Raises:
            OutOfStepError: a rank calls something else, or did not come within the time limit; names it.
            CheckpointError: the process group was formed anew since `initialize`.
        """
        topology, ranks = self._topology, self._ranks
        now = (ranks.rank, ranks.world_size)
        if topology is not None and ranks.source is not None and now != (topology.rank, len(topology.hosts)):
            raise CheckpointError(
                "the process group was formed anew: call ReplicationManager.initialize() again on all ranks"
            )
        return self._ranks.all_gather(call, payload)

    def run_on_all(self, call: str, work: Callable[[], Answer]) -> list[Answer]:
        """Does this rank's part of something, however long it takes, and returns what all parts returned. Collective.

        While a rank works, it still answers the others: only one that does not is missed.

        Args:
            call: see `all_gather`.
            work: JSON can hold what it returns; called on another thread.

        Raises:
            CheckpointError: another rank failed; names it. The own failure is raised as it is.
            OutOfStepError: see `all_gather`.
        """
        return self._ranks.run_on_all(call, work, is_long=True)

    # --- moving objects -----------------------------------------------------------------------------------------------

    def push(self, object_id: str, content: memoryview) -> int:
        """Sends an object to all partners; when this returns, they have verified and published it.

        Args:
            object_id: its name.
            content: its bytes, which must not change meanwhile.

        Returns:
            How many copies were made; 0 without partners.

        Raises:
            ReplicationError: a partner does not have it; names the first one, with its error as the cause. The others
                were tried too.
        """
        failed: list[tuple[int, ReplicationError]] = []
        for rank in self.partners:
            try:
                self._push_to(rank, object_id, content)
            except ReplicationError as error:
                failed.append((rank, error))
        if failed:
            rank, why = failed[0]
            raise ReplicationError(f"rank {rank} on {self.host_of(rank)} has no copy of {object_id}: {why}") from why
        return len(self.partners)

    def spread(self, object_id: str, content: memoryview) -> list[str]:
        """Sends an object to one rank of each other host.

        Returns:
            The hosts that did not take it; why is logged.
        """
        by_host = self._topology.other_hosts() if self._topology is not None else {}
        if not by_host:
            return []
        with ThreadPoolExecutor(min(_MOST_THREADS, len(by_host)), thread_name_prefix="replication") as threads:
            taken = list(threads.map(lambda ranks: self._push_to_one(ranks, object_id, content), by_host.values()))
        return [host for host, is_taken in zip(by_host, taken, strict=True) if not is_taken]

    def fetch(self, object_id: str, holder: int, destination: Destination) -> Transferred:
        """Fetches an object from a rank.

        Args:
            object_id: its name.
            holder: who has it.
            destination: called once with the size in bytes; returns the buffer to receive into.

        Raises:
            ReplicationError: it cannot give it.
            CheckpointError: what `destination` raised.
        """
        return self._client(holder).pull(object_id, destination)

    def ids(self, holder: int) -> list[str]:
        """What another rank can give. Raises: ReplicationError if it does not say."""
        return list(self._client(holder).ids())

    def sync_bulk_retrieve(
        self,
        source_global_rank: int,
        object_ids_to_retrieve: Iterable[Any] = (),
        container_ids_to_retrieve: Iterable[Any] = (),
        retrieved_object_ids: list[Any] | None = None,
        retrieved_container_ids: list[Any] | None = None,
    ) -> bool:
        """Fetches objects, and whole containers of steps, from one rank into this host's containers.

        Args:
            source_global_rank: who has them.
            object_ids_to_retrieve: shards and commits.
            container_ids_to_retrieve: containers of steps.
            retrieved_object_ids: an empty list gets those that are here now.
            retrieved_container_ids: the same.

        Returns:
            Whether all of it is here now; what failed is logged.

        Raises:
            ValueError: something is no shard, or is to get another name.
        """
        try:
            client, all_done = self._client(source_global_rank), True
        except NoReplicasAvailableError as error:
            log.warning("rank %s: could not retrieve from it: %s", source_global_rank, error)
            return False
        for asked, retrieve, retrieved in (
            (object_ids_to_retrieve, self._retrieve_object, retrieved_object_ids),
            (container_ids_to_retrieve, self._retrieve_container, retrieved_container_ids),
        ):
            wanted = list(asked)
            if retrieved and list(map(str, retrieved)) != list(map(str, wanted)):
                raise ValueError(
                    f"what is retrieved keeps its name, and {retrieved[0]} is another one: give an empty list, which "
                    "gets what is here now"
                )
            here = []
            for each in wanted:
                is_done = retrieve(client, each)
                all_done = all_done and is_done
                here += [each] * is_done
            if retrieved is not None:
                retrieved[:] = here
        return all_done

    def shutdown(self) -> None:
        """Stops serving and forgets the others. Not a collective; `initialize` may follow."""
        let_go, self._let_go, self._topology = self._let_go, self._ranks.close, None
        let_go()

    # --- how ----------------------------------------------------------------------------------------------------------

    def _client(self, rank: int) -> ReplicaClient:
        return _made(self._topology).client(rank)

    def _push_to(self, rank: int, object_id: str, content: memoryview) -> int:
        try:
            sent = self._client(rank).push(object_id, content, token_round=0)
        except ReplicationError:
            publish_metric("torchelastic", "checkpoint.replication.failures", 1)
            raise
        publish_metric("torchelastic", "checkpoint.replication.bytes", sent.sent_bytes)
        return sent.size_bytes

    def _push_to_one(self, ranks: Sequence[int], object_id: str, content: memoryview) -> bool:
        for rank in ranks[:_TRIES_PER_HOST]:
            try:
                self._push_to(rank, object_id, content)
            except ReplicationError as error:
                log.warning("rank %d on %s has not taken %s: %s", rank, self.host_of(rank), object_id, error)
            else:
                return True
        return False

    def _retrieve_object(self, client: ReplicaClient, wanted: Any) -> bool:
        """Whether it could be fetched; why not is logged."""
        return self._retrieve(client, _made(self._objects).names_of(wanted))

    def _retrieve(self, client: ReplicaClient, object_id: str) -> bool:
        try:
            pull_into(_made(self._objects).shelf, object_id, partial(client.pull, object_id))
        except CheckpointError as error:
            log.warning("could not retrieve %s from %s: %s", object_id, client.peer, error)
            return False
        return True

    def _retrieve_container(self, client: ReplicaClient, wanted: Any) -> bool:
        """Whether all objects of the container of a step could be fetched, and there was one; the commit comes last."""
        try:
            there = _made(self._objects).names_in(wanted, client.ids())
        except ReplicationError as error:
            log.warning("%s does not report what is in %s: %s", client.peer, wanted, error)
            return False
        return bool(there) and all(self._retrieve(client, object_id) for object_id in there)

    def __getstate__(self) -> tuple[Any, ...]:
        return self._topology, self._objects, self._ranks.timeout_s

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._topology, self._objects, timeout_s = state
        self._ranks, self._has_warned = RankGroup(None, timeout_s), False
        self._let_go = self._ranks.close


def _made(one: Made | None) -> Made:
    """What `initialize` has made."""
    if one is None:
        raise NoReplicasAvailableError("call ReplicationManager.initialize() on all ranks first")
    return one
