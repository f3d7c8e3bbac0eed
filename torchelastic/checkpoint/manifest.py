"""The manifest of a checkpoint: which streams it has, how long they are, and their digests. Pure.

The manifest is written after the data, so a folder with a valid manifest was completely written. It carries a digest of
itself: a changed byte in the manifest is noticed as surely as one in the data.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

MANIFEST_NAME = "manifest.json"
MANIFEST_VERSION = 1


class ManifestError(ValueError):
    """These bytes are no whole manifest."""


class UnknownManifestVersionError(ValueError):
    """A whole manifest, of a version that this release does not know."""


@dataclass(frozen=True)
class StreamRecord:
    """What a stream held when it was written: its length in bytes and the SHA-256 of them in hexadecimal."""

    size_bytes: int
    sha256: str


def encode_manifest(streams: Mapping[str, StreamRecord]) -> bytes:
    """Writes a manifest as JSON for people and programs; `decode_manifest` is its inverse.

    Args:
        streams: what each stream of the checkpoint holds, by key.
    """
    document: dict[str, object] = {
        "version": MANIFEST_VERSION,
        "streams": {
            key: {"size_bytes": record.size_bytes, "sha256": record.sha256} for key, record in sorted(streams.items())
        },
    }
    document["manifest_sha256"] = _digest(document)
    return (json.dumps(document, indent=2) + "\n").encode()


def decode_manifest(data: bytes) -> dict[str, StreamRecord]:
    """Reads a manifest.

    Args:
        data: the bytes of the file.

    Raises:
        ManifestError: the bytes are torn, changed, or no manifest at all.
        UnknownManifestVersionError: they are a whole manifest of another version.
    """
    try:
        document = json.loads(data)
        if document.pop("manifest_sha256") != _digest(document):
            raise ManifestError("its own digest does not match")
        # Every version keeps `version` and `manifest_sha256`; only the rest may change.
        if document["version"] != MANIFEST_VERSION:
            raise UnknownManifestVersionError(
                f"is of manifest version {document['version']}, and this release of torchelastic knows version "
                f"{MANIFEST_VERSION} only; use the release that wrote it, or a newer one"
            )
        return {key: StreamRecord(**record) for key, record in document["streams"].items()}
    except (AttributeError, KeyError, RecursionError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ManifestError(f"it is no complete manifest: {type(error).__name__}: {error}") from error


def _digest(document: Mapping[str, object]) -> str:
    """The SHA-256 of the one canonical form that a JSON document has here, so that layout does not matter."""
    return hashlib.sha256(json.dumps(document, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
