"""What `show` and `verify` read out of open shards."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import xxhash

from torchelastic.checkpoint.command.format import Advance, Contents, TensorRow
from torchelastic.checkpoint.errors import CorruptCheckpointError
from torchelastic.checkpoint.shards.batches import over_batches
from torchelastic.checkpoint.shards.boxes import Box
from torchelastic.checkpoint.shards.header import PREAMBLE_BYTES, Entry, decode_preamble
from torchelastic.checkpoint.shards.reading import ShardReader
from torchelastic.checkpoint.shards.tensors import dtype_named


def contents_of(shards: Sequence[ShardReader]) -> Contents:
    """What shards of one checkpoint hold together."""
    rows: dict[str, TensorRow] = {}
    for shard in shards:
        for entry in shard.header.entries:
            place = shard.path.name if entry.box.sizes == entry.shape else f"{shard.path.name}{_ranges(entry.box)}"
            before = rows[entry.name].shards if entry.name in rows else ()
            size_bytes = math.prod(entry.shape) * dtype_named(entry.dtype).itemsize
            rows[entry.name] = TensorRow(entry.name, entry.dtype, entry.shape, size_bytes, (*before, place))
    structure = next((shard.header.structure for shard in shards if shard.header.structure is not None), None)
    return Contents(structure, list(rows.values()))


def damages_of(openers: Iterable[Callable[[], ShardReader]], advance: Advance) -> list[str]:
    """Compares every shard with its checksums, and goes on behind what is damaged; a line for each damage."""
    lines = []
    for opened in openers:
        try:
            with opened() as shard:
                lines += _damage_of(shard, advance)
        except CorruptCheckpointError as error:
            lines.append(str(error))
    return lines


def described_part(ranks: Iterable[int], world_size: int) -> str | None:
    """What is here of a checkpoint, of which the rest may be elsewhere; None for all of it."""
    here = sorted(set(ranks))
    if len(here) == world_size:
        return None
    return f"only the shards of rank(s) {', '.join(map(str, here)) or 'none'} of {world_size} are here"


def _damage_of(shard: ShardReader, advance: Advance) -> list[str]:
    """Compares every tensor of a shard with its checksum; one line for each that differs."""
    entries = shard.header.entries
    with shard.view() as view:
        offset = decode_preamble(bytes(view[:PREAMBLE_BYTES])).data_offset_bytes

        def look(batch: range) -> list[str | None]:
            lines = [_difference(shard, entries[index], view, offset) for index in batch]
            advance(sum(entries[index].size_bytes for index in batch))
            return lines

        return [line for line in over_batches(entries, look) if line is not None]


def _difference(shard: ShardReader, entry: Entry, view: memoryview, offset: int) -> str | None:
    begin = offset + entry.offset_bytes
    with view[begin : begin + entry.size_bytes] as data:
        found = f"{xxhash.xxh3_64_intdigest(data):016x}"
    if found == entry.checksum:
        return None
    return f"{shard.path}: tensor {entry.name!r} is damaged (checksum {found} instead of {entry.checksum})"


def _ranges(box: Box) -> str:
    pairs = zip(box.offsets, box.sizes, strict=True)
    return f"[{', '.join(f'{offset}:{offset + size}' for offset, size in pairs)}]"
