"""How a worker and the agent of its host talk: JSON lines over a Unix socket that only their user may open.

Worker to agent:
    {"op": "hello", "pid": .., "local_rank": .., "notice": ..}  -> {"op": "welcome", "member": .., "host": .., ..}
        notice: whether the worker has left one of its death, see `torchelastic.processes.death_notice`
    {"op": "join", ..}      wants the next round, see `records.JoinRequest`
                                                    -> {"op": "round", "round": {..}} at every change from then on
    {"op": "done", "step": ..}                      -> {"op": "noted"} once the store has it
    {"op": "leave"}         wants to leave the run  -> {"op": "fatal", "kind": "drained", ..} when it may go
    {"op": "stop"}          stops the run before a deadline, with all of its group, and hangs up
    {"op": "elsewhere", "pid": .., "local_rank": .., "run": .., "closed": ..}    instead of a hello: the script names
        another run than the launcher's, which may be closed already; then the worker hangs up
    {"op": "fail_for_good"} is about to end with an error that another process in its place would run into again
    {"op": "computes_wrong", "step": .., "why": ..}    was found to: no other process is started in its place
    {"op": "metrics", ..}   see `torchelastic.metrics`
Agent to worker besides the answers:
    {"op": "contact", "leave_at_s": .., "commit_until_s": ..}     how long it may go on without a sign of the store
    {"op": "fatal", "kind": "timeout" | "closed" | "unavailable" | "drained", "message": ..}

Nothing is ever unpickled or evaluated.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta, Struct

from torchelastic.foreign_json import Count, RecordError, decode_object
from torchelastic.processes.identity import MAX_PID
from torchelastic.processes.local_rank import local_rank_of
from torchelastic.rendezvous.records import MemberCount, Name

#: In the environment of a worker that an agent has started, and of a process that has started an agent for itself.
SOCKET_VARIABLE = "TORCHELASTIC_AGENT_SOCKET"

#: The run that the launcher's agent serves: a worker whose script names another one has an agent of its own.
INIT_METHOD_VARIABLE = "TORCHELASTIC_INIT_METHOD"

#: A line that is longer is refused: the largest message is a roster of 10,000 members.
MAX_LINE_BYTES = 4 * 1024 * 1024

Message = dict[str, Any]


class WireError(ValueError):
    """A line that is no message of ours."""


class Hello(Struct):
    """What a worker says of itself first."""

    pid: Annotated[int, Meta(ge=1, le=MAX_PID)]
    local_rank: Count | None = None
    notice: bool = False


class Elsewhere(Hello, kw_only=True):
    """Of a worker whose script names another run."""

    run: Name
    closed: bool


class Done(Struct):
    """Of a worker that has finished the run."""

    step: MemberCount


class FoundWrong(Struct):
    """Of a worker that was found to compute wrong, in a step; a place that did, in the store."""

    step: MemberCount
    why: Name


def who(environment: Mapping[str, str]) -> Message:
    """What a worker says of itself first: its process, and its place on this host if a launcher has given it one."""
    return {"pid": os.getpid(), "local_rank": local_rank_of(environment)}


def encode(message: Message) -> bytes:
    """One message as one line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Message:
    """One line as a message. Raises WireError."""
    try:
        message = decode_object("a line", line, most_bytes=MAX_LINE_BYTES)
    except RecordError as error:
        raise WireError(f"{error}: {line[:80]!r}") from error
    if not isinstance(message.get("op"), str):
        raise WireError(f"no object with an 'op': {line[:80]!r}")
    return message
