"""Pure: how a save, and a rank's shard of it, are called in every place that checkpoints are stored in."""

from __future__ import annotations

import re
from dataclasses import dataclass

#: How the names of folders begin that are being written; what is hidden is passed over by readers.
STAGING_PREFIX = ".tmp-"

_NAME = re.compile(
    r"step-(?P<step>\d{9,19})\.e(?P<epoch>\d{1,19})\.r(?P<round>\d{1,19})\.g(?P<generation>\d{1,19})"
    r"(?:\.(?P<nonce>[0-9a-f]{8}))?"
)
_SHARD = re.compile(r"shard-(\d{5,9})-of-(\d{5,9})\.shard")


@dataclass(frozen=True, order=True)
class SaveId:
    """Which checkpoint it is. Later ones are greater, by epoch, round and generation; not by step and by no clock.

    A run that went back to an older step goes on from there, and its next checkpoint counts more than the newer step
    that was given up.

    Args:
        epoch: how often a job has claimed the folder; see `fence.Fence`.
        round: which group of workers of that job wrote it.
        generation: how many commits the group's state has behind it; or whatever else grows within a round.
        step: committed steps of the run, for people.
        nonce: 8 random hexadecimal digits, against two histories of one job; empty where nothing but a fence may write.

    Raises:
        ValueError: a number is negative.

    >>> SaveId(epoch=1, round=5, generation=7, step=123).folder_name
    'step-000000123.e1.r5.g7'
    """

    epoch: int
    round: int
    generation: int
    step: int
    nonce: str = ""

    def __post_init__(self) -> None:
        if min(self.epoch, self.round, self.generation, self.step) < 0:
            raise ValueError(f"{self!r} has a negative number")

    def __str__(self) -> str:
        return self.folder_name

    @property
    def folder_name(self) -> str:
        """The name of its folder; `parse` is the inverse."""
        nonce = f".{self.nonce}" if self.nonce else ""
        return f"step-{self.step:09d}.e{self.epoch}.r{self.round}.g{self.generation}{nonce}"

    @property
    def staging_name(self) -> str:
        """The name of the hidden folder in which all ranks write it."""
        return STAGING_PREFIX + self.folder_name

    @property
    def token(self) -> tuple[int, int]:
        """Who writes it, as the fence orders writers: epoch and round."""
        return (self.epoch, self.round)

    @classmethod
    def parse(cls, text: str) -> SaveId:
        """Reads a folder's name. Raises: ValueError if it is no checkpoint's.

        >>> SaveId.parse("step-000000123.e1.r5.g7")
        SaveId(epoch=1, round=5, generation=7, step=123, nonce='')
        """
        match = _NAME.fullmatch(text)
        if match is not None:
            numbers = {key: int(match[key]) for key in ("epoch", "round", "generation", "step")}
            name = cls(**numbers, nonce=match["nonce"] or "")
            if name.folder_name == text:
                return name
        raise ValueError(f"{text!r} is no name of a checkpoint, such as 'step-000000123.e1.r5.g7'")

    @classmethod
    def find(cls, text: str) -> SaveId | None:
        """The same for a name that may be anything else: then None."""
        try:
            return cls.parse(text)
        except ValueError:
            return None

    @classmethod
    def find_staged(cls, text: str) -> SaveId | None:
        """The checkpoint that is written in a hidden folder of this name; None if the name is anything else."""
        return cls.find(text.removeprefix(STAGING_PREFIX)) if text.startswith(STAGING_PREFIX) else None


def shard_file_name(rank: int, world_size: int) -> str:
    """The name of a rank's file.

    >>> shard_file_name(3, 8)
    'shard-00003-of-00008.shard'
    """
    return f"shard-{rank:05d}-of-{world_size:05d}.shard"


def parse_shard_file_name(text: str) -> tuple[int, int] | None:
    """Rank and world size, out of the name of a shard's file; None if it is anything else.

    >>> parse_shard_file_name("shard-00003-of-00008.shard")
    (3, 8)
    """
    match = _SHARD.fullmatch(text)
    if match is None:
        return None
    rank, world_size = map(int, match.groups())
    return (rank, world_size) if rank < world_size and shard_file_name(rank, world_size) == text else None


@dataclass(frozen=True, order=True)
class ShardId:
    """One shard of one checkpoint.

    >>> str(ShardId(SaveId(1, 5, 7, 123), 3, 8))
    'step-000000123.e1.r5.g7/shard-00003-of-00008.shard'
    """

    name: SaveId
    rank: int
    world_size: int

    def __str__(self) -> str:
        return f"{self.name.folder_name}/{shard_file_name(self.rank, self.world_size)}"

    @property
    def stated(self) -> dict[str, str | int]:
        """What the header of the shard says of its name, covered by its checksums; see `reading.require_shard`."""
        return {"checkpoint": str(self.name), "rank": self.rank}

    @classmethod
    def parse(cls, text: str) -> ShardId:
        """The inverse of `str`. Raises: ValueError if it is none."""
        folder, _, file = text.partition("/")
        parsed = parse_shard_file_name(file)
        if parsed is None:
            raise ValueError(f"{text!r} is no shard, such as 'step-000000123.e1.r5.g7/shard-00003-of-00008.shard'")
        return cls(SaveId.parse(folder), *parsed)
