"""A single shard file, such as `save_tree` writes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from torchelastic.checkpoint.command.format import Advance, Contents, Format, FoundCheckpoint
from torchelastic.checkpoint.command.shard_checks import contents_of, damages_of
from torchelastic.checkpoint.errors import CheckpointError, explained
from torchelastic.checkpoint.shards.header import encode_preamble
from torchelastic.checkpoint.shards.reading import ShardReader, load_tree

#: A file of this name that does not begin like a shard is a torn one.
SUFFIX = ".shard"
_START = encode_preamble(b"", 0, 0)[:8]


class ShardFile(Format):
    """One file."""

    kind = "shard"

    def find(self, path: Path) -> list[FoundCheckpoint]:
        """The file, if it is one."""
        return [found_shard(self, path)] if is_shard(path) else []

    def contents(self, found: FoundCheckpoint) -> Contents:
        """Out of its header."""
        with ShardReader(found.path) as shard:
            return contents_of([shard])

    def verify(self, found: FoundCheckpoint, advance: Advance) -> list[str]:
        """Compares header and tensors."""
        return damages_of([partial(ShardReader, found.path)], advance)

    def load(self, found: FoundCheckpoint, *, allow_pickles: bool) -> Any:
        """All of it, if it is whole."""
        return load_tree(found.path, allow_pickles=allow_pickles)


def is_shard(path: Path) -> bool:
    """Whether a path is a shard file, also a torn one."""
    if not path.is_file():
        return False
    if path.suffix == SUFFIX:
        return True
    with explained("read the file", path), path.open("rb") as file:
        return file.read(len(_START)) == _START


def found_shard(owner: Format, path: Path) -> FoundCheckpoint:
    """What the header of a shard file says."""
    with explained("look at the checkpoint", path):
        status = path.stat()
    meta: dict[str, Any] = {}
    damage = None
    try:
        with ShardReader(path) as shard:
            meta = dict(shard.header.meta)
    except CheckpointError as error:
        damage = str(error)
    return FoundCheckpoint(
        format=owner,
        path=path,
        name=path.name,
        step=first_number(meta, "step", "iteration"),
        world_size=first_number(meta, "world_size"),
        saved_s=status.st_mtime,
        size_bytes=status.st_size,
        damage=damage,
        shards=(path,),
        facts=meta,
    )


def first_number(meta: dict[str, Any], *names: str) -> int | None:
    """The first of some numbers that a header has."""
    return next((meta[name] for name in names if type(meta.get(name)) is int), None)
