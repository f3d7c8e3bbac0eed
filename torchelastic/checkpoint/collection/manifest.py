"""Pure: how a checkpoint of several shards is called, and what its manifest says.

The manifest is written after all shards, so a folder with a valid one was completely written. It names the size and the
header digest of each shard (and the header has a checksum of each tensor), so no shard can be exchanged unnoticed.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from types import MappingProxyType

from torchelastic.checkpoint.errors import CorruptCheckpointError

MANIFEST_NAME = "manifest.json"
MANIFEST_VERSION = 1
#: How the names of folders begin that are being written; what is hidden is passed over by readers.
STAGING_PREFIX = ".tmp-"

_NAME = re.compile(r"step-(?P<step>\d{9,19})\.e(?P<epoch>\d{1,19})\.r(?P<round>\d{1,19})\.g(?P<generation>\d{1,19})")
_DIGEST = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, order=True)
class CheckpointName:
    """Which checkpoint it is. Later ones are greater, by epoch, round and generation; not by step and by no clock.

    A run that went back to an older step goes on from there, and its next checkpoint counts more than the newer step
    that was given up.

    Args:
        epoch: how often a job has claimed the folder; see `fence.Fence`.
        round: which group of workers of that job wrote it.
        generation: how many commits the group's state has behind it; or whatever else grows within a round.
        step: committed steps of the run, for people.

    Raises:
        ValueError: a number is negative.

    >>> CheckpointName(epoch=1, round=5, generation=7, step=123).folder_name
    'step-000000123.e1.r5.g7'
    """

    epoch: int
    round: int
    generation: int
    step: int

    def __post_init__(self) -> None:
        if min(self.epoch, self.round, self.generation, self.step) < 0:
            raise ValueError(f"{self!r} has a negative number")

    def __str__(self) -> str:
        return self.folder_name

    @property
    def folder_name(self) -> str:
        """The name of its folder; `parse` is the inverse."""
        return f"step-{self.step:09d}.e{self.epoch}.r{self.round}.g{self.generation}"

    @property
    def staging_name(self) -> str:
        """The name of the hidden folder in which all ranks write it."""
        return STAGING_PREFIX + self.folder_name

    @property
    def token(self) -> tuple[int, int]:
        """Who writes it, as the fence orders writers: epoch and round."""
        return (self.epoch, self.round)

    @classmethod
    def parse(cls, text: str) -> CheckpointName:
        """Reads a folder's name. Raises: ValueError if it is no checkpoint's.

        >>> CheckpointName.parse("step-000000123.e1.r5.g7")
        CheckpointName(epoch=1, round=5, generation=7, step=123)
        """
        match = _NAME.fullmatch(text)
        if match is not None:
            name = cls(**{key: int(number) for key, number in match.groupdict().items()})
            if name.folder_name == text:
                return name
        raise ValueError(f"{text!r} is no name of a checkpoint, such as 'step-000000123.e1.r5.g7'")

    @classmethod
    def find(cls, text: str) -> CheckpointName | None:
        """The same for a name that may be anything else: then None."""
        try:
            return cls.parse(text)
        except ValueError:
            return None

    @classmethod
    def find_staged(cls, text: str) -> CheckpointName | None:
        """The checkpoint that is written in a hidden folder of this name; None if the name is anything else."""
        return cls.find(text.removeprefix(STAGING_PREFIX)) if text.startswith(STAGING_PREFIX) else None


def shard_file_name(rank: int, world_size: int) -> str:
    """The name of a rank's file.

    >>> shard_file_name(3, 8)
    'shard-00003-of-00008.shard'
    """
    return f"shard-{rank:05d}-of-{world_size:05d}.shard"


@dataclass(frozen=True)
class ShardRecord:
    """What the manifest says about one shard.

    Attributes:
        rank: who wrote it.
        file: its name in the folder.
        size_bytes: the length of the shard; a file may be longer where it lies in a slot.
        header_digest: of its header, 32 hexadecimal digits; covers all tensors, since the header has their checksums.
    """

    rank: int
    file: str
    size_bytes: int
    header_digest: str

    def __post_init__(self) -> None:
        if self.rank < 0 or self.size_bytes < 0 or not _DIGEST.fullmatch(self.header_digest):
            raise ValueError(f"{self!r} is no record of a shard")
        if not self.file or PurePath(self.file).name != self.file or self.file.startswith("."):
            raise ValueError(f"{self.file!r} is no name of a file in the checkpoint's folder")


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of.

    Args:
        name: which checkpoint it is.
        run_id: of the run that wrote it.
        world_size: how many ranks wrote it.
        shards: one record per rank, in any order; kept in the order of the ranks.
        metrics: what was measured of this state, for `KeepBest`.
        saved_s: when it was saved, in seconds of wall time; for people and `KeepEverySeconds`, it orders nothing.

    Raises:
        ValueError: there is not exactly one shard per rank; names the ranks.
    """

    name: CheckpointName
    run_id: str
    world_size: int
    shards: tuple[ShardRecord, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)
    saved_s: float = 0.0

    def __post_init__(self) -> None:
        ranks = sorted(record.rank for record in self.shards)
        if self.world_size < 1 or ranks != list(range(self.world_size)):
            raise ValueError(
                f"the checkpoint {self.name} of {self.world_size} rank(s) has shards of the ranks {ranks}: one of each "
                "rank is needed"
            )
        object.__setattr__(self, "shards", tuple(sorted(self.shards, key=lambda record: record.rank)))
        numbers = {key: float(value) for key, value in self.metrics.items()}
        object.__setattr__(self, "metrics", MappingProxyType(numbers))

    @property
    def size_bytes(self) -> int:
        """How long all shards are together."""
        return sum(record.size_bytes for record in self.shards)


def encode_manifest(manifest: Manifest) -> bytes:
    """Writes a manifest as JSON for people and programs; `decode_manifest` is its inverse."""
    document: dict[str, object] = {
        "version": MANIFEST_VERSION,
        "name": manifest.name.folder_name,
        "run_id": manifest.run_id,
        "world_size": manifest.world_size,
        "saved_s": manifest.saved_s,
        "metrics": {key: _number(value) for key, value in sorted(manifest.metrics.items())},
        "shards": [
            {"rank": r.rank, "file": r.file, "size_bytes": r.size_bytes, "header_digest": r.header_digest}
            for r in manifest.shards
        ],
    }
    return _written({**document, "manifest_sha256": _digest(document)})


def decode_manifest(data: bytes) -> Manifest:
    """Reads a manifest.

    Raises:
        CorruptCheckpointError: the bytes are torn, changed (any single one), or none; or of another version.
    """
    try:
        document = json.loads(data)
        if document.pop("manifest_sha256") != _digest(document):
            raise ValueError("its own digest does not match")
        # Every version keeps `version` and `manifest_sha256`; only the rest may change.
        if document["version"] != MANIFEST_VERSION:
            raise CorruptCheckpointError(
                f"the manifest is of version {document['version']}, and this release of torchelastic knows version "
                f"{MANIFEST_VERSION} only; use the release that wrote it, or a newer one"
            )
        manifest = Manifest(
            name=CheckpointName.parse(document["name"]),
            run_id=document["run_id"],
            world_size=document["world_size"],
            shards=tuple(ShardRecord(**record) for record in document["shards"]),
            metrics=document["metrics"],
            saved_s=document["saved_s"],
        )
        if encode_manifest(manifest) != data:
            raise ValueError("it is not written as manifests are")
        return manifest
    except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise CorruptCheckpointError(f"the manifest is damaged: {type(error).__name__}: {error}") from error


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else repr(value)  # JSON has no NaN; float() reads both


def _written(document: Mapping[str, object]) -> bytes:
    return (json.dumps(document, indent=2) + "\n").encode()


def _digest(document: Mapping[str, object]) -> str:
    """The SHA-256 of the one canonical form that a JSON document has here."""
    return hashlib.sha256(json.dumps(document, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
