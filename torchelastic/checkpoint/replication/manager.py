"""The ranks of a job as holders of each other's objects: who is where, who receives what, and how they are reached.

Objects are named by ids; where they lie is known to the shelf (see `ReplicaShelf`). Each rank runs a server. They are
told apart from servers of other jobs, and of former groups of the same job, by a random token that rank 0 makes anew in
each `initialize` and that travels in the process group only.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch.distributed as dist

from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.local.neighbours import address_among, network_id
from torchelastic.checkpoint.replication.bulk import BulkRetrieval, done_of
from torchelastic.checkpoint.replication.circle import (
    Circle,
    DestinationStrategy,
    ObjectManager,
    ReplicationRetryConfig,
    destinations,
)
from torchelastic.checkpoint.replication.client import Destination, ReplicaClient, pull_from_any
from torchelastic.checkpoint.replication.errors import NoReplicasAvailableError, ReplicationError
from torchelastic.checkpoint.replication.incoming import IncomingObject
from torchelastic.checkpoint.replication.server import ReplicaServer
from torchelastic.group.rank_group import Answer, RankGroup, begun
from torchelastic.metrics import publish_metric
from torchelastic.processes.identity import host_id

log = logging.getLogger(__name__)

#: Names what this rank fails with, if that is not its host.
FAILURE_DOMAIN_ENV = "TORCHELASTIC_FAILURE_DOMAIN"

_LEAST_TRANSFERS = 16
_MOST_THREADS = 16
#: How many ranks of another host are tried for what only one of them has to take.
_TRIES_PER_HOST = 2
#: Ranks come here from building their models, not all at the same pace; one that has died is noticed at once.
_WAIT_S = 300.0


class ReplicationManager:
    """Pushes objects to partners on other hosts, and fetches them back; calls may come from any thread.

    Before `initialize`, and in a job of one rank, it has no partners. It pickles to what a process beside the trainer
    needs to push and fetch: addresses, partners and the token; the server stays where it is.
    """

    def __init__(self) -> None:
        self._circle: Circle | None = None
        self._objects: ObjectManager | None = None
        self._ranks = RankGroup(None, _WAIT_S)
        self._prepare()

    def _prepare(self) -> None:
        self._server: ReplicaServer | None = None
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
            ValueError, TypeError: an argument makes no sense.
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
        host = host or os.environ.get(FAILURE_DOMAIN_ENV) or host_id()
        told = {"network": network_id(), "host": host, "token": secrets.token_hex(32)}
        found = self.run_on_all("ReplicationManager.initialize()", lambda: told)
        hosts = tuple(str(each["host"]) for each in found)
        self._circle = Circle(self._ranks.rank, hosts, retry=retry_config or ReplicationRetryConfig())
        if len(hosts) > 1:
            networks = [str(each["network"]) for each in found]
            try:
                self._serve(str(found[0]["token"]), networks, listen_port, replica_host, repl_strategy, copies)
            except BaseException:
                self.shutdown()
                raise

    def _serve(
        self,
        token: str,
        networks: Sequence[str],
        port: int,
        replica_host: str | None,
        strategy: DestinationStrategy | None,
        copies: int,
    ) -> None:
        circle, objects = self._require_circle(), self._objects
        rank, retry = circle.rank, circle.retry
        call = "ReplicationManager.initialize()"

        def listen() -> list[Any]:
            assert objects is not None
            address = replica_host or address_among(networks)
            self._server = ReplicaServer(
                objects.shelf,
                token,
                host=address,
                port=port + networks[:rank].count(networks[rank]) if port else 0,
                timeout_s=retry.timeout_seconds,
                max_transfers=max(_LEAST_TRANSFERS, len(networks)),  # all may ask one at once
                max_connections=2 * max(_LEAST_TRANSFERS, len(networks)),
            )
            self._server.start()
            return list(self._server.address)

        addresses = tuple((str(each[0]), int(each[1])) for each in self.run_on_all(f"{call}, listening", listen))
        chosen = self.run_on_all(f"{call}, choosing", lambda: destinations(strategy, circle, addresses, copies))[rank]
        self._circle = Circle(rank, circle.hosts, addresses, tuple(chosen), token, retry, copies)
        if len(chosen) < copies and strategy is None and rank == 0:
            log.warning("each object gets %d replica(s) and not %d: there are too few hosts", len(chosen), copies)

    # --- who is where -------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """The own rank."""
        return self._circle.rank if self._circle is not None else self._ranks.rank

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return len(self._circle.hosts) if self._circle is not None else self._ranks.world_size

    @property
    def is_initialized(self) -> bool:
        """Whether `initialize` was called."""
        return self._circle is not None

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host of each rank; before `initialize`, one for all."""
        if self._circle is not None:
            return self._circle.hosts
        return (os.environ.get(FAILURE_DOMAIN_ENV) or host_id(),) * self.world_size

    @property
    def partners(self) -> tuple[int, ...]:
        """Who receives the objects of this rank."""
        if self._circle is None and self.world_size > 1 and not self._has_warned:
            self._has_warned = True
            log.warning("objects get no replicas: call ReplicationManager.initialize() on all ranks first")
        return self._circle.partners if self._circle is not None else ()

    @property
    def copies(self) -> int:
        """On how many other hosts each object is to be; 0 before `initialize`."""
        return self._circle.copies if self._circle is not None else 0

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """The ranks on this host."""
        return tuple(rank for rank, host in enumerate(self.hosts) if host == self.hosts[self.rank])

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
        circle, ranks = self._circle, self._ranks
        now = (ranks.rank, ranks.world_size)
        if circle is not None and ranks.source is not None and now != (circle.rank, len(circle.hosts)):
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

    def push(self, object_id: str, content: memoryview, digest: str | None = None) -> int:
        """Sends an object to all partners; when this returns, they have verified and published it.

        Args:
            object_id: its name.
            content: its bytes, which must not change meanwhile.
            digest: `digest_of` the content, if it is known.

        Returns:
            How many copies were made; 0 without partners.

        Raises:
            ReplicationError: a partner does not have it; names it. Others may.
        """
        for rank in self.partners:
            try:
                self._push_to(rank, object_id, content, digest)
            except ReplicationError as error:
                raise ReplicationError(
                    f"rank {rank} on {self.host_of(rank)} has no copy of {object_id}: {error}"
                ) from (error)
        return len(self.partners)

    def spread(self, object_id: str, content: memoryview) -> list[str]:
        """Sends an object to one rank of each other host.

        Returns:
            The hosts that did not take it; why is logged.
        """
        by_host = self._circle.other_hosts() if self._circle is not None else {}
        if not by_host:
            return []
        with ThreadPoolExecutor(min(_MOST_THREADS, len(by_host)), thread_name_prefix="replication") as threads:
            taken = list(threads.map(lambda ranks: self._push_to_one(ranks, object_id, content), by_host.values()))
        return [host for host, is_taken in zip(by_host, taken, strict=True) if not is_taken]

    def fetch(self, object_id: str, holders: Sequence[int], destination: Destination) -> IncomingObject:
        """Fetches an object from the first of several ranks that can give it.

        Args:
            object_id: its name.
            holders: best first; the own rank is passed over.
            destination: called once with the size in bytes; returns the buffer to receive into.

        Raises:
            NoReplicasAvailableError: none of them could; tells why of each.
            CheckpointError: what `destination` raised.
        """
        if not self.is_initialized and self.world_size > 1:
            raise NoReplicasAvailableError(f"{object_id} cannot be fetched before ReplicationManager.initialize()")
        return pull_from_any([self._client(rank) for rank in holders if rank != self.rank], object_id, destination)

    def async_replicate(self, buffer_io: Any) -> list[Future[int]]:
        """Pushes a closed object in the background.

        Args:
            buffer_io: of the object manager; its `object_id` is that of a shard.

        Returns:
            One per partner, with the number of bytes; or the `ReplicationError`.

        Raises:
            ValueError: it is no object that has replicas.
        """
        if not self.partners or self._objects is None:
            return []
        object_id = str(self._objects.names_of(buffer_io.object_id))
        return [begun(partial(self._push_published, rank, object_id)) for rank in self.partners]

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
            retrieved_object_ids: gets those that are here now.
            retrieved_container_ids: the same.

        Returns:
            Whether all of it is here now; what failed is logged.
        """
        retrieval = BulkRetrieval(self._client(source_global_rank), self._require_objects())
        have_objects = done_of(object_ids_to_retrieve, lambda one: retrieval.objects([one]), retrieved_object_ids)
        have_containers = done_of(container_ids_to_retrieve, retrieval.container, retrieved_container_ids)
        return have_objects and have_containers

    def shutdown(self) -> None:
        """Stops serving and forgets the others. Not a collective; `initialize` may follow."""
        server = self._server
        self._server = self._circle = None
        if server is not None:
            server.close()
        self._ranks.close()

    # --- how ----------------------------------------------------------------------------------------------------------

    def _client(self, rank: int) -> ReplicaClient:
        return self._require_circle().client(rank)

    def _push_to(self, rank: int, object_id: str, content: memoryview, digest: str | None) -> int:
        try:
            sent = self._client(rank).push(object_id, content, token_round=0, digest=digest)
        except ReplicationError:
            publish_metric("torchelastic", "checkpoint.replication.failures", 1)
            raise
        publish_metric("torchelastic", "checkpoint.replication.bytes", sent.sent_bytes)
        return sent.size_bytes

    def _push_to_one(self, ranks: Sequence[int], object_id: str, content: memoryview) -> bool:
        for rank in ranks[:_TRIES_PER_HOST]:
            try:
                self._push_to(rank, object_id, content, None)
            except ReplicationError as error:
                log.warning("rank %d on %s has not taken %s: %s", rank, self.host_of(rank), object_id, error)
            else:
                return True
        return False

    def _push_published(self, rank: int, object_id: str) -> int:
        content = self._require_objects().shelf.source(object_id)
        if content is None:
            raise NoReplicasAvailableError(f"{object_id} is not here: close its buffer before it is replicated")
        return self._push_to(rank, object_id, content, None)

    def _require_circle(self) -> Circle:
        if self._circle is None:
            raise NoReplicasAvailableError("call ReplicationManager.initialize() on all ranks first")
        return self._circle

    def _require_objects(self) -> ObjectManager:
        if self._objects is None:
            raise NoReplicasAvailableError("call ReplicationManager.initialize() on all ranks first")
        return self._objects

    def __getstate__(self) -> dict[str, Any]:
        return {"circle": self._circle, "objects": self._objects, "timeout_s": self._ranks.timeout_s}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._circle, self._objects = state["circle"], state["objects"]
        self._ranks = RankGroup(None, state["timeout_s"])
        self._prepare()
