"""Which processes an agent and its workers are, as a record in the store that outlives them.

Another process of the same host, under the same boot and in the same pid namespace, reads from it whether they have
ended: see `torchelastic.rendezvous.burial`. Nothing read from the store is trusted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from torchelastic.foreign_json import Text, checked, decode_json
from torchelastic.processes.identity import Process, is_this_place, this_place

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
    """The inverse of `ProcessRecord.encode`; the key that it stands under is named in a RecordError."""
    return checked(key, decode_json(key, value, most_bytes=MAX_RECORD_BYTES), ProcessRecord)
