"""Pure: the format of a shard file.

    0     64 bytes   preamble: magic, length and digest of the header, where the data begins and how long it is
    64    ...        header: JSON; the structure of the state, and name, dtype, shape, place and checksum of each tensor
    ...   zeros      up to a multiple of the page size
    data             the tensors' raw bytes, row-major, little-endian, each at a multiple of 64 bytes

The preamble is written last, so a file that was torn at any moment has none that fits. Every byte that a reader relies
on is covered: the preamble by its own digest, the header by the preamble's, each tensor by the header's. (The zeros
between are read by nobody.) Digests are xxh3 (xxhash.com): they find damage, not forgery.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import msgspec
import xxhash
from msgspec import structs

from torchelastic.checkpoint.errors import CorruptCheckpointError
from torchelastic.checkpoint.format.regions import Length, Region
from torchelastic.checkpoint.format.tensor_parts import NOT_STORED, dtype_name, dtype_named
from torchelastic.checkpoint.format.tree import Flat, NamedTensor

PAGE_BYTES = 4096
ALIGNMENT_BYTES = 64  # a cache line, and more than any dtype or vector instruction asks for
VERSION = 1
NO_CHECKSUM = "0" * 16

_MAGIC = b"TESHARD\0"
_PREAMBLE = struct.Struct("<8sIIQ16sQQ")  # magic, version, 0, header bytes, header digest, data offset, data bytes
_DIGEST = struct.Struct("<Q")
PREAMBLE_BYTES = 64
_MOST_ELEMENTS = 2**62  # torch counts them in 64 bits with a sign


class NotAShardError(CorruptCheckpointError):
    """The file does not begin as a shard does: never finished, cut, or something else."""


class Entry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """One tensor in a shard.

    Attributes:
        name: its path in the state.
        dtype: as torch spells it, without `torch.`.
        shape: of the whole tensor.
        region: the part that is stored here.
        offset_bytes: where it begins, counted from the beginning of the data.
        size_bytes: how long it is.
        checksum: xxh3_64 of its bytes, as 16 hexadecimal digits.
        is_shard: whether the state marked it as a part, so that other ranks hold other parts.
    """

    name: str
    dtype: str
    shape: tuple[Length, ...]
    region: Region
    offset_bytes: Length
    size_bytes: Length
    checksum: str = NO_CHECKSUM
    is_shard: bool = False

    @classmethod
    def of(cls, name: str, dtype: str, shape: tuple[int, ...], region: Region, *, is_shard: bool) -> Entry:
        """The same before it has a place."""
        return cls(name, dtype, shape, region, 0, region.numel * dtype_named(dtype).itemsize, is_shard=is_shard)

    @classmethod
    def of_bytes(cls, name: str, size_bytes: int, offset_bytes: int = 0) -> Entry:
        """A row of bytes."""
        return cls(name, "uint8", (size_bytes,), Region.whole((size_bytes,)), offset_bytes, size_bytes)


@dataclass(frozen=True)
class Header:
    """What a shard says about itself.

    Attributes:
        structure: the state without its tensors; see `tree.unflatten`. None in a shard that holds only tensors.
        entries: the tensors, in the order of their bytes.
        meta: what the writer adds: iteration, rank, world size, fencing token; JSON can hold it.
    """

    structure: Any
    entries: tuple[Entry, ...]
    meta: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def data_bytes(self) -> int:
        """How many bytes of data follow, with the gaps between the tensors."""
        return max((entry.offset_bytes + entry.size_bytes for entry in self.entries), default=0)

    @property
    def lacks_checksums(self) -> bool:
        """Whether the checksum of a tensor is still to come."""
        return any(entry.checksum == NO_CHECKSUM for entry in self.entries)

    def with_checksums(self, checksums: Sequence[str]) -> Header:
        """The same header with the checksums that were computed, in the order of the entries."""
        pairs = zip(self.entries, checksums, strict=True)
        return replace(self, entries=tuple(structs.replace(entry, checksum=checksum) for entry, checksum in pairs))


@dataclass(frozen=True)
class Preamble:
    """The first 64 bytes of a shard."""

    header_bytes: int
    header_digest: bytes
    data_offset_bytes: int
    data_bytes: int

    def shard_bytes(self, stored_bytes: int) -> int:
        """How long the shard is.

        Args:
            stored_bytes: how much there is of it, or of the slot that it lies in.

        Raises:
            CorruptCheckpointError: that is not all of it.
        """
        end = self.data_offset_bytes + self.data_bytes
        if stored_bytes < end:
            raise CorruptCheckpointError(f"it has {stored_bytes} bytes of {end}: it was cut")
        return end


def lay_out(flat: Flat, meta: Mapping[str, Any]) -> Header:
    """Gives each tensor its place; the checksums are still to come."""
    return Header(flat.structure, place(flat.tensors), MappingProxyType(dict(meta)))


def place(tensors: Iterable[NamedTensor]) -> tuple[Entry, ...]:
    """Puts tensors one behind the other, each aligned."""
    return placed(
        Entry.of(named.name, dtype_name(named.tensor.dtype), named.shape, named.region, is_shard=named.is_shard)
        for named in tensors
    )


def placed(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """The same of entries without places."""
    found, offset = [], 0
    for entry in entries:
        found.append(structs.replace(entry, offset_bytes=offset))
        offset = align(offset + entry.size_bytes, ALIGNMENT_BYTES)
    return tuple(found)


def align(number: int, to: int) -> int:
    """The next multiple.

    >>> align(65, 64)
    128
    """
    return -(-number // to) * to


def data_offset_bytes(header_bytes: int) -> int:
    """Where the data begins behind a header of this length."""
    return align(PREAMBLE_BYTES + header_bytes, PAGE_BYTES)


class _Document(msgspec.Struct, forbid_unknown_fields=True):
    """A header as JSON; meta is raw since Python's own writes and reads more, such as numbers of any length."""

    structure: Any
    meta: msgspec.Raw
    tensors: tuple[Entry, ...]


_DOCUMENT = msgspec.json.Decoder(_Document)


def encode_header(header: Header) -> bytes:
    """The header as bytes; its length does not depend on the checksums."""
    meta = json.dumps(dict(header.meta), separators=(",", ":"), allow_nan=False).encode()
    return msgspec.json.encode(_Document(header.structure, msgspec.Raw(meta), header.entries))


def encode_preamble(encoded_header: bytes, data_offset: int, data_bytes: int) -> bytes:
    """The first 64 bytes of a shard with this header."""
    digest = xxhash.xxh3_128_digest(encoded_header)
    fields = _PREAMBLE.pack(_MAGIC, VERSION, 0, len(encoded_header), digest, data_offset, data_bytes)
    return fields + _DIGEST.pack(xxhash.xxh3_64_intdigest(fields))


def decode_preamble(data: bytes) -> Preamble:
    """Reads the first 64 bytes.

    Raises:
        NotAShardError: they are not those of a finished shard.
        CorruptCheckpointError: a newer version wrote it.
    """
    if len(data) != PREAMBLE_BYTES or data[: len(_MAGIC)] != _MAGIC:
        raise NotAShardError("it does not begin like a finished shard")
    fields, digest = data[: _PREAMBLE.size], data[_PREAMBLE.size :]
    if _DIGEST.pack(xxhash.xxh3_64_intdigest(fields)) != digest:
        raise NotAShardError("its first 64 bytes are damaged")
    _, version, _, header_bytes, header_digest, data_offset, data_bytes = _PREAMBLE.unpack(fields)
    if version != VERSION:
        raise CorruptCheckpointError(
            f"its format is version {version}; this release reads version {VERSION}; use the release that wrote it"
        )
    return Preamble(header_bytes, header_digest, data_offset, data_bytes)


def decode_header(data: bytes, preamble: Preamble) -> Header:
    """Reads and checks a header.

    Raises:
        CorruptCheckpointError: it is not what was written.
    """
    if len(data) != preamble.header_bytes or xxhash.xxh3_128_digest(data) != preamble.header_digest:
        raise CorruptCheckpointError("its header is damaged")
    return _decoded(data, preamble)


def header_of(encoded: bytes) -> Header:
    """The inverse of `encode_header`, for what a peer has just sent; of a file `decode_header` reads it, and checks it.

    Raises:
        ValueError, TypeError, msgspec.DecodeError: it is none.
    """
    document = _DOCUMENT.decode(encoded)
    meta = json.loads(bytes(document.meta))
    if not isinstance(meta, dict):
        raise TypeError("what its writer has added is no object")
    return Header(document.structure, document.tensors, MappingProxyType(meta))


@lru_cache(maxsize=4)  # finding the newest checkpoint and loading it read the same header several times
def _decoded(data: bytes, preamble: Preamble) -> Header:
    try:
        header = header_of(data)
        _check(header, preamble)
    except (ValueError, TypeError, msgspec.DecodeError, RecursionError, MemoryError) as error:
        raise CorruptCheckpointError(f"its header is damaged: {error!r}") from error
    return header


def _check(header: Header, preamble: Preamble) -> None:
    if preamble.data_offset_bytes < PREAMBLE_BYTES + preamble.header_bytes:
        raise ValueError("its data begins inside of its header")
    if len({entry.name for entry in header.entries}) != len(header.entries):
        raise ValueError("two of its tensors have one name")
    end = 0
    for entry in header.entries:
        dtype = dtype_named(entry.dtype)
        expected = entry.region.numel * dtype.itemsize
        if dtype in NOT_STORED or math.prod(filter(None, entry.shape)) >= _MOST_ELEMENTS:
            raise ValueError(f"no tensor {entry.dtype} of shape {entry.shape} is stored as {entry.name!r}")
        if entry.size_bytes != expected or not entry.region.fits_into(entry.shape):
            raise ValueError(f"{entry.name!r} has {entry.size_bytes} bytes, and {entry.region} of {entry.shape}")
        if entry.offset_bytes != align(end, ALIGNMENT_BYTES):
            raise ValueError(f"{entry.name!r} does not follow the tensor before it")
        end = entry.offset_bytes + entry.size_bytes
    if end > preamble.data_bytes:
        raise ValueError("its tensors end behind its data")
