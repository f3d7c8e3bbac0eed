"""Pure: what the manifest of a checkpoint says: its shards, or its streams where one rank has saved as 0.1 does.

The manifest is written last, so a folder with a valid one was completely written. It carries a digest of itself, and
names the size and a digest of each file, so nothing can be changed or exchanged unnoticed.
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
from typing import Any

from torchelastic.checkpoint.errors import CorruptCheckpointError
from torchelastic.checkpoint.store.save_id import SaveId

MANIFEST_NAME = "manifest.json"
MANIFEST_VERSION = 1

_DIGEST = re.compile(r"[0-9a-f]{32}")


class ManifestError(ValueError):
    """These bytes are no whole manifest."""


class UnknownManifestVersionError(ValueError):
    """A whole manifest, of a version that this release does not know."""


@dataclass(frozen=True)
class StreamRecord:
    """What a stream held when it was written: its length in bytes and the SHA-256 of them in hexadecimal."""

    size_bytes: int
    sha256: str


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

    name: SaveId
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

    def found_in(self, sizes: Mapping[str, int | None]) -> tuple[list[ShardRecord], list[ShardRecord]]:
        """Which of its shards are whole in one place, and which were cut; the others are not there.

        Args:
            sizes: of the files in that place, as far as they are known.
        """
        here = [record for record in self.shards if record.file in sizes]
        whole = [record for record in here if (sizes[record.file] or 0) >= record.size_bytes]
        return whole, [record for record in here if (sizes[record.file] or 0) < record.size_bytes]


def encode_manifest(manifest: Manifest) -> bytes:
    """Writes a manifest as JSON for people and programs; `decode_manifest` is its inverse."""
    return _signed(
        {
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
    )


def decode_manifest(data: bytes) -> Manifest:
    """Reads a manifest.

    Raises:
        CorruptCheckpointError: the bytes are torn, changed (any single one), or none; or of another version.
    """
    try:
        document = _opened(data)
        manifest = Manifest(
            name=SaveId.parse(document["name"]),
            run_id=document["run_id"],
            world_size=document["world_size"],
            shards=tuple(ShardRecord(**record) for record in document["shards"]),
            metrics=document["metrics"],
            saved_s=document["saved_s"],
        )
        if encode_manifest(manifest) != data:
            raise ValueError("it is not written as manifests are")
        return manifest
    except UnknownManifestVersionError as error:
        raise CorruptCheckpointError(f"it {error}") from error
    except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise CorruptCheckpointError(f"the manifest is damaged: {type(error).__name__}: {error}") from error


def encode_streams(streams: Mapping[str, StreamRecord]) -> bytes:
    """Writes the manifest of streams, given by key; `decode_streams` is its inverse."""
    records = {key: {"size_bytes": record.size_bytes, "sha256": record.sha256} for key, record in streams.items()}
    return _signed({"version": MANIFEST_VERSION, "streams": dict(sorted(records.items()))})


def decode_streams(data: bytes) -> dict[str, StreamRecord]:
    """Reads the manifest of streams.

    Raises:
        ManifestError: the bytes are torn, changed, or no manifest at all.
        UnknownManifestVersionError: they are a whole manifest of another version.
    """
    try:
        return {key: StreamRecord(**record) for key, record in _opened(data)["streams"].items()}
    except (ManifestError, UnknownManifestVersionError):
        raise
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise ManifestError(f"it is no complete manifest: {type(error).__name__}: {error}") from error


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else repr(value)  # JSON has no NaN; float() reads both


def _signed(document: Mapping[str, object]) -> bytes:
    return (json.dumps({**document, "manifest_sha256": _digest(document)}, indent=2) + "\n").encode()


def _opened(data: bytes) -> dict[str, Any]:
    """The inverse of `_signed`; what is no JSON object at all raises what Python makes of it."""
    document: dict[str, Any] = json.loads(data)
    if document.pop("manifest_sha256") != _digest(document):
        raise ManifestError("its own digest does not match")
    # Every version keeps `version` and `manifest_sha256`; only the rest may change.
    if document["version"] != MANIFEST_VERSION:
        raise UnknownManifestVersionError(
            f"is of manifest version {document['version']}, and this release of torchelastic knows version "
            f"{MANIFEST_VERSION} only; use the release that wrote it, or a newer one"
        )
    return document


def _digest(document: Mapping[str, object]) -> str:
    """The SHA-256 of the one canonical form that a JSON document has here, so that layout does not matter."""
    return hashlib.sha256(json.dumps(document, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
