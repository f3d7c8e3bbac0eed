"""Tar files as WebDataset has them: neighbouring members of one name are a sample."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torchelastic.data.sources.files import FileIterator, Files, OpenFile, found, say_shards_are_empty

Sample = dict[str, Any]


@dataclass(frozen=True)
class tar_samples:
    """The samples of tar files: a source of `dict` with the bytes of each member by its extension, and `__key__`.

    Members whose path is the same up to the first dot of the file name, one after the other in the archive, are one
    sample: `a/7.jpg`, `a/7.json` become `{"__key__": "a/7", "jpg": b"..", "json": b".."}`. Nothing is decoded; do that
    with `mapped`. Folders, hidden members and such without an extension are left out.

    File f is in shard f % num_shards, so make more files than shards: with fewer, shards are empty. Position: file, and
    the byte at which the next sample begins.

    Args:
        files: as for `lines`.

    Raises:
        SourceError: (when opened or read) no file matches, an archive is damaged or cut off, a sample has an extension
            twice, or a file is not what it was when the position was taken.
    """

    files: Files

    def __call__(self, shard: int, num_shards: int, position: Any, /) -> Iterator[Sample]:
        """Opens a shard; see `Source`."""
        names = found(self.files, position)
        if shard == len(names):
            say_shards_are_empty("tar files", len(names), num_shards)
        parts = [(number, None) for number in range(shard, len(names), num_shards)]
        return FileIterator(names, parts, position, _samples)


def _samples(file: OpenFile, _: None, at: int | None) -> Iterator[tuple[Sample, int]]:
    sample: Sample = {}
    for key, extension, begin, content in _members(file, at):
        if sample and sample["__key__"] != key:
            yield sample, begin
            sample = {}
        sample.setdefault("__key__", key)
        if extension in sample:
            raise file.error(begin, f"sample {key!r} has an extension twice: {extension!r}")
        sample[extension] = content
    if sample:
        yield sample, file.size


def _members(file: OpenFile, at: int | None) -> Iterator[tuple[str, str, int, bytes]]:
    """The key, the extension, the place and the content of each member that counts."""
    if at == file.size:
        return
    end = file.stream.seek(at or 0)
    try:
        with tarfile.TarFile(fileobj=file.stream) as archive:  # an archive may begin anywhere in its file
            # Python 3.10 seeks to a place before the file if there is no first member
            is_empty = archive.firstmember is None  # type: ignore[attr-defined]
            while not is_empty and (member := archive.next()) is not None:
                end = member.offset
                archive.members.clear()  # type: ignore[attr-defined] # or it keeps them all
                if member.isdir():
                    continue
                if not member.isreg():
                    raise file.error(member.offset, f"member {member.name!r} is a link or a device: pack files")
                folder, slash, name = member.name.rpartition("/")
                key, dot, extension = name.partition(".")
                if key and dot:
                    stream = archive.extractfile(member)
                    assert stream is not None  # a regular file has one
                    yield folder + slash + key, extension, member.offset, stream.read()
            end = archive.offset
    except tarfile.TarError as error:
        raise file.error(end, f"the archive is damaged or cut off ({error})") from None
    # tarfile takes a header that it cannot read for the end; the end that was written is a block of zeros
    file.stream.seek(end)
    if file.stream.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        raise file.error(end, "the archive is damaged or cut off here (no end mark)")
