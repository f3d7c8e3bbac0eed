"""Pure: which shard of which save a file holds, as its name says it.

A save is told apart by more than its iteration: after a rollback the same iteration is saved again. So every save has a
generation, a counter that all ranks agree on and that never falls, and a random id against two histories of one job.
"""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass
from typing import Any, NamedTuple, SupportsIndex

SUFFIX = ".shard"
MAX_NUMBER = 10**12

_NAME = re.compile(
    r"iter_(?P<iteration>\d{7,12})_(?P<rank>\d{4,12})_of_(?P<world_size>\d{4,12})"
    r"_gen_(?P<generation>\d{8,12})_(?P<token>[0-9a-f]{8})_local\.shard"
)
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


@dataclass(frozen=True, order=True)
class LocalSave:
    """One call of `save`, the same on all ranks. Ordered by age: the newest is the largest.

    Attributes:
        generation: how many saves there were before in this session, as far as anybody knew; agreed by all ranks.
        iteration: of training.
        world_size: how many ranks saved, so how many shards there are.
        token: 8 random hexadecimal digits.
    """

    generation: int
    iteration: int
    world_size: int
    token: str

    def shard(self, rank: int) -> Shard:
        """One rank's part of it."""
        return Shard(self, rank)

    def __str__(self) -> str:
        return f"iteration {self.iteration} (save {self.generation} of {self.world_size} rank(s))"


@dataclass(frozen=True, order=True)
class Shard:
    """One rank's part of a save."""

    save: LocalSave
    rank: int

    @property
    def file_name(self) -> str:
        """The name of its file; `parse` is the inverse."""
        save = self.save
        return (
            f"iter_{save.iteration:07d}_{self.rank:04d}_of_{save.world_size:04d}"
            f"_gen_{save.generation:08d}_{save.token}_local{SUFFIX}"
        )

    @classmethod
    def parse(cls, file_name: str) -> Shard | None:
        """Reads a file's name; None if it is none of ours."""
        match = _NAME.fullmatch(file_name)
        if match is None:
            return None
        numbers = {name: int(match[name]) for name in ("iteration", "rank", "world_size", "generation")}
        save = LocalSave(numbers["generation"], numbers["iteration"], numbers["world_size"], match["token"])
        shard = cls(save, numbers["rank"])
        return shard if shard.file_name == file_name and shard.rank < save.world_size else None

    def meta(self, session_id: str) -> dict[str, Any]:
        """The same for the header of the shard, which is covered by its digest."""
        save = self.save
        return {
            "session": session_id,
            "iteration": save.iteration,
            "rank": self.rank,
            "world_size": save.world_size,
            "generation": save.generation,
            "save_id": save.token,
        }

    def __str__(self) -> str:
        return f"the shard of rank {self.rank} of {self.save}"


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
