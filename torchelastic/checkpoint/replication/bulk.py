"""Objects, and whole containers of steps, from one rank into this host's containers: ML Flashpoint's bulk retrieval."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.replication.circle import ObjectManager
from torchelastic.checkpoint.replication.client import ReplicaClient
from torchelastic.checkpoint.replication.errors import ReplicationError

log = logging.getLogger(__name__)

_COMMIT = "/commit.shard"


class BulkRetrieval:
    """Fetches from one rank.

    Args:
        client: of its server.
        objects: where objects go.
    """

    def __init__(self, client: ReplicaClient, objects: ObjectManager) -> None:
        self._client = client
        self._objects = objects

    def objects(self, wanted: Sequence[Any]) -> bool:
        """Whether all of these objects could be fetched; what failed is logged."""
        for each in wanted:
            try:
                self._fetch(str(self._objects.names_of(each)))
            except CheckpointError as error:
                log.warning("could not retrieve %s from %s: %s", each, self._client.peer, error)
                return False
        return True

    def container(self, wanted: Any) -> bool:
        """Whether all objects of the container of a step could be fetched, and there was one; the commit comes last."""
        begin = str(self._objects.names_of(f"{wanted}{_COMMIT}")).removesuffix(_COMMIT) + "/"
        try:
            there = [one for one in self._client.ids() if one.startswith(begin)]
        except ReplicationError as error:
            log.warning("%s does not tell what is in %s: %s", self._client.peer, wanted, error)
            return False
        there.sort(key=lambda object_id: object_id.endswith(_COMMIT))
        return bool(there) and self.objects([f"{wanted}/{one.rpartition('/')[2]}" for one in there])

    def _fetch(self, object_id: str) -> None:
        shelf = self._objects.shelf

        def destination(size_bytes: int) -> memoryview | bytearray:
            buffer = shelf.destination(object_id, size_bytes)
            if buffer is None:
                raise CheckpointError(f"there is no room for the {size_bytes} bytes of {object_id}")
            return buffer

        try:
            incoming = self._client.pull(object_id, destination)
            incoming.release()
        except BaseException:
            shelf.abandon(object_id)
            raise
        shelf.received(object_id, incoming.digest)


def done_of(wanted: Iterable[Any], retrieve: Callable[[Any], bool], into: list[Any] | None) -> bool:
    """Whether each of these could be retrieved; those that could are appended."""
    all_done = True
    for each in wanted:
        is_done = retrieve(each)
        all_done = all_done and is_done
        if is_done and into is not None:
            into.append(each)
    return all_done
