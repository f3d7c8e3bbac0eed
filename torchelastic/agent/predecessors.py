"""Other agents of this host that have ended without a word: found by the records that outlive them.

Each agent writes which processes it and its workers are. Another one of the same host, under the same boot and in the
same pid namespace, reads from that whether they have ended: see `torchelastic.rendezvous.dead_agents`. Nothing read
from the store is trusted.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from torchelastic.foreign_json import RecordError, Text, checked, decode_json
from torchelastic.processes.identity import Process, is_this_place, this_place
from torchelastic.rendezvous.dead_agents import Predecessor
from torchelastic.rendezvous.records import Keys
from torchelastic.rendezvous.store import CoordinationStore, KeyValue, StoreError

log = logging.getLogger(__name__)

#: Between two looks at whether a process has ended that had not at the one before, in seconds.
POLL_S = 0.25
#: What is longer was not written by us.
MAX_RECORD_BYTES = 1_500_000


@dataclass(frozen=True)
class ProcessRecord:
    """One agent and its workers.

    Attributes:
        place: boot and pid namespace, see `identity.this_place`.
        agent: its process.
        lease_id: of what it wrote.
        members: the process of each member.
    """

    place: Mapping[str, Text]
    agent: Process
    lease_id: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    members: Mapping[str, Process]

    def encode(self) -> bytes:
        """As JSON."""
        return json.dumps(msgspec.to_builtins(self), separators=(",", ":")).encode()

    @property
    def is_of_this_place(self) -> bool:
        """Whether anything can be said here of its processes."""
        return is_this_place(self.place)


def describe(processes: Mapping[str, Process], lease_id: int, members: Collection[str]) -> bytes:
    """The record of this agent.

    Args:
        processes: of its members; of one that is not in there, nothing can be said later.
        lease_id: of what it writes.
        members: that live.
    """
    unknown = Process(0, -1)
    agent = Process.of(os.getpid())
    return ProcessRecord(this_place(), agent, lease_id, {n: processes.get(n, unknown) for n in members}).encode()


def decode(key: str, value: bytes) -> ProcessRecord:
    """The inverse of `ProcessRecord.encode`; the key of the record is named in a RecordError."""
    return checked(key, decode_json(key, value, most_bytes=MAX_RECORD_BYTES), ProcessRecord)


class Predecessors:
    """What is known of the other agents of this host. Its calls block; use it on one thread at a time.

    Args:
        store: of the run.
        keys: of the run.
        host: this host's name.
        is_one: whether an agent, of which the key of its record and the process are given, is one of them.
        owner_pid: of a private agent: the process that it serves. Whatever that was a member of before, it has left.
    """

    def __init__(
        self,
        store: CoordinationStore,
        keys: Keys,
        host: str,
        *,
        is_one: Callable[[str, Process], bool],
        owner_pid: int | None = None,
    ) -> None:
        self._store, self._prefix, self._host = store, f"{keys.processes}{host}/", host
        self._is_one = is_one
        self._owner = None if owner_pid is None else Process.of(owner_pid)
        #: by key: the agents of this host that may have ended, or may end, and what was said of them last
        self._agents: dict[str, Process] = {}
        self._said: dict[str, tuple[str, ...]] = {}

    def look(self) -> None:
        """Read which other agents there are, or were. Raises StoreError."""
        for stored in self._store.list_prefix(self._prefix).items:
            record = self._read(stored)
            if record is not None and self._is_one(stored.key, record.agent):
                self._agents[stored.key] = record.agent

    @property
    def is_empty(self) -> bool:
        """Whether there is none left of which anything could be said."""
        return not self._agents

    def ended(self) -> list[Predecessor]:
        """Those that have ended by now, each again whenever more of its members have; later while there is no store."""
        found = []
        for key in [key for key, agent in self._agents.items() if agent.has_ended]:
            with suppress(StoreError):
                predecessor = self._judge(self._store.get(key))  # what it wrote last
                if predecessor is None or predecessor.all_ended:
                    del self._agents[key]
                if predecessor is not None and (predecessor.all_ended or predecessor.ended != self._said.get(key, ())):
                    self._said[key] = predecessor.ended
                    found.append(predecessor)
        return found

    def living(self) -> list[Process]:
        """The workers that still run although their agent has ended. Raises StoreError."""
        keys = [key for key, agent in self._agents.items() if agent.has_ended]
        records = [self._read(self._store.get(key)) for key in keys]
        processes = [process for record in records if record is not None for process in record.members.values()]
        return [process for process in processes if not process.has_ended]

    def _read(self, stored: KeyValue | None) -> ProcessRecord | None:
        """A record of which something can be said here."""
        if stored is None:
            return None
        try:
            record = decode(stored.key, stored.value)
        except RecordError as error:
            log.error("ignored: %s", error)
            return None
        return record if record.is_of_this_place else None

    def _judge(self, stored: KeyValue | None) -> Predecessor | None:
        """What is known of an agent that has ended; None: it has left in order, or somebody else has said it."""
        record = self._read(stored)
        if stored is None or record is None:
            return None
        ended = tuple(name for name, process in record.members.items() if process.has_ended or process == self._owner)
        return Predecessor(stored, self._host, record.lease_id, ended, all_ended=len(ended) == len(record.members))
