"""Pure: how local checkpoints are called by their users, and what the headers of their shards state."""

from __future__ import annotations

import operator
import re
from typing import Any, NamedTuple, SupportsIndex

from torchelastic.checkpoint.store.kinds import LOCAL_STATE
from torchelastic.checkpoint.store.save_id import ShardId

MAX_NUMBER = 10**12

_SESSION = re.compile(r"(?! )[A-Za-z0-9_.:=@+, -]{0,128}(?<! )")


class CkptID(NamedTuple):
    """What names one rank's part of a checkpoint to its user; the fields and their order are those of NVRx.

    Attributes:
        iteration: of training.
        rank: whose shard it is, among the ranks that saved it.
        session_id: of the manager.
    """

    iteration: int
    rank: int
    session_id: str


def described(shard: ShardId) -> str:
    """A shard, for people."""
    return f"the shard of rank {shard.rank} of {shard.name}"


def header_meta(shard: ShardId, session_id: str) -> dict[str, Any]:
    """What the header says of a shard, covered by its digest."""
    return {
        "kind": LOCAL_STATE,
        "session": session_id,
        **shard.stated,
        "iteration": shard.name.step,
        "world_size": shard.world_size,
    }


def check_session_id(session_id: str) -> str:
    """Returns a session id that can be a folder's name.

    Raises:
        ValueError: it cannot.
    """
    if not _SESSION.fullmatch(session_id) or session_id.startswith("."):
        raise ValueError(
            f"session_id is {session_id!r}: it names a folder, so give up to 128 letters, digits, blanks and _.:=@+,- "
            "that do not begin with a dot, and neither begin nor end with a blank"
        )
    return session_id


def check_iteration(iteration: SupportsIndex) -> int:
    """Returns an iteration that a name can hold.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is negative or far too large.
    """
    try:
        number = operator.index(iteration)  # of numpy too
    except TypeError:
        number = None
    if number is None or isinstance(iteration, bool):
        raise TypeError(f"iteration is {iteration!r}: give a whole number")
    if not 0 <= number < MAX_NUMBER:
        raise ValueError(f"iteration is {number}: give a number from 0 to {MAX_NUMBER - 1}")
    return number
