"""What counts as a complete checkpoint on a file system, and reading only what is proven to be intact."""

from __future__ import annotations

import errno
import os
import pickle
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from torchelastic.checkpoint.compat.elastic01.output_stream import sha256_of_file
from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError, explained
from torchelastic.checkpoint.store.manifest import (
    MANIFEST_NAME,
    ManifestError,
    StreamRecord,
    UnknownManifestVersionError,
    decode_streams,
)

_LEGACY_KEY = "default"  # the only stream that torchelastic 0.1 ever wrote
_OLD_TORCH_FILE = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # how a file begins that torch before 1.6 has saved

# A missing or unreadable piece says something about the checkpoint; a refused permission says something about the user.
_ERRNOS_OF_DAMAGE = frozenset({errno.EIO, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENODATA})


def find_damage(folder: Path) -> str | None:
    """Tells why a checkpoint folder is not complete, or None if it is, as far as names and sizes can tell.

    A folder with a manifest is complete if every stream has the length that the manifest records. A folder without one
    is complete if 0.1 wrote it and its file is whole by its own format.

    Args:
        folder: a folder `<checkpoint_dir>/<sequence id>`.

    Raises:
        CheckpointError: it cannot be looked at.
    """
    try:
        manifest = _read_manifest(folder)
        if manifest is None:
            with _open_file(folder / _LEGACY_KEY) as file:
                _require_complete_legacy_file(folder, file, read_all=False)
            return None
        for key, record in manifest.items():
            _require_size(folder, key, record, _size_bytes(folder / key))
    except CorruptCheckpointError as error:
        return str(error)
    except UnknownManifestVersionError:
        return None  # complete for whoever wrote it
    return None


def open_verified(folder: Path, key: str) -> BinaryIO:
    """Opens a stream of a checkpoint for reading after it was compared with the digest in the manifest.

    The stream is read once for that. What was compared and what is returned is the same open file.

    Args:
        folder: a folder `<checkpoint_dir>/<sequence id>`.
        key: the stream's key.

    Raises:
        CorruptCheckpointError: the stream is not, or cannot be proven to be, what was saved.
        CheckpointError: the checkpoint has no such stream, a newer release wrote it, or it cannot be read.
    """
    try:
        manifest = _read_manifest(folder)
    except UnknownManifestVersionError as error:
        raise CheckpointError(f"the checkpoint {folder} {error}") from error
    keys = [_LEGACY_KEY] if manifest is None else sorted(manifest)
    if key not in keys:
        raise CheckpointError(f"the checkpoint {folder} has no stream {key!r}; it has {', '.join(map(repr, keys))}")
    file = _open_file(folder / key)
    try:
        with _reading(folder / key):
            if manifest is None:
                _require_complete_legacy_file(folder, file, read_all=True)
            else:
                _require_size(folder, key, manifest[key], os.fstat(file.fileno()).st_size)
                if sha256_of_file(file) != manifest[key].sha256:
                    raise _damaged(folder, f"the digest of its stream {key!r} does not match its manifest")
            file.seek(0)
    except BaseException:
        file.close()
        raise
    return file


def damage_of_torch_file(file: BinaryIO, *, read_all: bool) -> str | None:
    """Tells what shows that a file of `torch.save` is incomplete; None if nothing does.

    Nothing that the file names is run. A file of torch before 1.6 with objects that `weights_only` refuses counts
    as complete: only the program that wrote it can load it and so judge it.

    Args:
        file: open for reading and seekable; its position is moved.
        read_all: also compare the checksums of a zip archive's members, which reads all of it. The older format has no
            checksums: it is loaded in any case, which notices what is missing and not what has changed.
    """
    try:
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                broken_member = archive.testzip() if read_all else None
            return f"the checksum of its member {broken_member} does not match" if broken_member else None
        file.seek(0)
        if file.read(len(_OLD_TORCH_FILE)) != _OLD_TORCH_FILE:
            return "it is neither a complete zip archive nor a file of torch.save"
        import torch  # here: checkpoints of 0.1's kind need it for this alone

        file.seek(0)
        torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        return None
    except Exception as error:  # noqa: BLE001 - damaged bytes fail in arbitrary ways
        return f"it cannot be loaded ({str(error) or type(error).__name__})"
    return None


def _read_manifest(folder: Path) -> dict[str, StreamRecord] | None:
    """The manifest, or None where there is none, as in a folder of 0.1."""
    path = folder / MANIFEST_NAME
    try:
        with _reading(path):
            try:
                return decode_streams(path.read_bytes())
            except FileNotFoundError:
                return None
    except ManifestError as error:
        raise _damaged(folder, f"its manifest is damaged: {error}") from error


def _open_file(path: Path) -> BinaryIO:
    with _reading(path):
        return path.open("rb")


def _size_bytes(path: Path) -> int:
    with _reading(path):
        return path.stat().st_size


def _require_size(folder: Path, key: str, record: StreamRecord, size_bytes: int) -> None:
    if size_bytes != record.size_bytes:
        raise _damaged(folder, f"its stream {key!r} has {size_bytes} bytes, and its manifest says {record.size_bytes}")


def _require_complete_legacy_file(folder: Path, file: BinaryIO, *, read_all: bool) -> None:
    damage = damage_of_torch_file(file, read_all=read_all)
    if damage:
        raise _damaged(folder, f"it has no manifest, and its file {_LEGACY_KEY!r} is not a whole one of 0.1: {damage}")


def _damaged(folder: Path, reason: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"the checkpoint {folder} is damaged: {reason}")


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turns what the operating system raises inside into damage of the checkpoint, or into a failure to read it."""
    try:
        with explained("read the checkpoint", path):
            yield
    except CorruptCheckpointError:
        raise
    except CheckpointError as error:
        if error.errno in _ERRNOS_OF_DAMAGE:
            raise _damaged(path.parent, f"{path.name!r} cannot be read: {os.strerror(error.errno)}") from error
        raise
