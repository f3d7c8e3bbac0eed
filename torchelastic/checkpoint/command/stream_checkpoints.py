"""Checkpoints of `FileSystemCheckpointManager`: folders `<id>` with a stream `default`; also those of release 0.1."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torchelastic.checkpoint.command.command_error import CheckpointCommandError
from torchelastic.checkpoint.command.foreign import torch_file
from torchelastic.checkpoint.command.format import Advance, Contents, Format, FoundCheckpoint, TensorRow, still_there
from torchelastic.checkpoint.command.shard_checkpoints import contents_of, is_shard
from torchelastic.checkpoint.compat.elastic01.staging import remove_folder
from torchelastic.checkpoint.compat.elastic01.verification import find_damage, open_verified
from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError, explained
from torchelastic.checkpoint.format.header import place
from torchelastic.checkpoint.format.shard_reader import ShardReader, load_tree
from torchelastic.checkpoint.format.tree import flatten
from torchelastic.checkpoint.store.kinds import Kind, kind_in
from torchelastic.checkpoint.store.manifest import (
    MANIFEST_NAME,
    ManifestError,
    UnknownManifestVersionError,
    decode_streams,
)

#: The stream that `State.save` writes.
DEFAULT = "default"


class StreamFolder(Format):
    """Folders of streams."""

    kind = "streams"
    step_title = "id"

    def find(self, path: Path) -> list[FoundCheckpoint]:
        """One folder of streams, or all that are in a folder."""
        if not path.is_dir():
            return []
        if kind_in(path) is Kind.STREAMS or (path / DEFAULT).is_file():
            return [self._look_at(path)]
        with explained("list the checkpoints", path):
            names = [one.name for one in path.iterdir() if one.name.isdecimal()]
        folders = [path / name for name in sorted(names, key=int, reverse=True)]
        return still_there(folders, lambda one: self._look_at(one) if kind_in(one) is Kind.STREAMS else None)

    def contents(self, found: FoundCheckpoint) -> Contents:
        """Of the stream `default`, if it is a shard or loads without running anything."""
        stream = _default(found)
        if is_shard(stream):
            with ShardReader(stream) as shard:
                return contents_of([shard])
        flat = flatten(torch_file.read(stream, check_all=False))
        rows = [
            TensorRow(entry.name, entry.dtype, entry.shape, entry.size_bytes, (DEFAULT,))
            for entry in place(flat.tensors)
        ]
        return Contents(flat.structure, rows)

    def verify(self, found: FoundCheckpoint, advance: Advance) -> list[str]:
        """Compares every stream with its digest."""
        lines = []
        for path in found.shards:
            try:
                with open_verified(found.path, path.name) as stream:
                    advance(os.fstat(stream.fileno()).st_size)
            except CorruptCheckpointError as error:
                lines.append(str(error))
        if found.damage is not None and found.damage not in lines:
            lines.append(found.damage)  # a stream is missing, or the manifest is damaged
        return lines

    def load(self, found: FoundCheckpoint, *, allow_pickles: bool) -> Any:
        """The stream `default`, after its digest was compared."""
        stream = _default(found)
        open_verified(found.path, DEFAULT).close()
        if is_shard(stream):
            return load_tree(stream, allow_pickles=allow_pickles)
        return torch_file.read(stream, allow_pickles=allow_pickles, check_all=False)

    def remove(self, found: FoundCheckpoint) -> None:
        """Hidden first, then removed."""
        remove_folder(found.path)
        if found.path.exists():
            raise CheckpointError(f"could not remove {found.path}: see the warning above")

    def _look_at(self, folder: Path) -> FoundCheckpoint:
        files = _files_of(folder)
        with explained("look at the checkpoint", folder):
            statuses = [path.stat() for path in files] or [folder.stat()]
        recorded = _recorded(folder)
        streams = tuple(path for path in files if recorded is None or path.name in recorded)
        return FoundCheckpoint(
            format=self,
            path=folder,
            name=folder.name,
            step=int(folder.name) if folder.name.isdecimal() else None,
            world_size=None,
            saved_s=max(status.st_mtime for status in statuses),
            size_bytes=sum(status.st_size for status in statuses),
            damage=find_damage(folder),
            shards=streams,
            facts={} if recorded is not None else {"written by": "release 0.1 (without checksums of its own)"},
        )


def _default(found: FoundCheckpoint) -> Path:
    if found.damage is not None:
        raise CorruptCheckpointError(found.damage)
    stream = found.path / DEFAULT
    if not (is_shard(stream) or torch_file.is_one(stream)):
        raise CheckpointCommandError(
            f"{stream} was written by a State.save of your own, in a form that only your program knows: load it there"
        )
    return stream


def _recorded(folder: Path) -> set[str] | None:
    """The streams that the manifest names, as far as it can be read; None where there is no manifest."""
    try:
        return set(decode_streams((folder / MANIFEST_NAME).read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ManifestError, UnknownManifestVersionError):
        return set()  # `find_damage` says why


def _files_of(folder: Path) -> list[Path]:
    with explained("look at the checkpoint", folder):
        return sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
