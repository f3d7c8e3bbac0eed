"""One pass of memcpy from a state into a slot: what stops training when a checkpoint is taken.

Stages of a save, in order: flatten (cached by the caller), lay out, `Stage.copy` (the only one that needs the training
thread), checksums, header, preamble, publish.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import xxhash

from torchelastic.checkpoint.errors import CorruptCheckpointError
from torchelastic.checkpoint.format.batches import CHUNK_BYTES, checksum_of, checksums_in, over_batches, pieces_of
from torchelastic.checkpoint.format.copying import PendingCopy, begin_copy, copy_all, is_on_gpu
from torchelastic.checkpoint.format.disk import Disk
from torchelastic.checkpoint.format.header import (
    PREAMBLE_BYTES,
    Entry,
    Header,
    data_offset_bytes,
    decode_header,
    decode_preamble,
    encode_header,
    encode_preamble,
)
from torchelastic.checkpoint.format.slot import Slot
from torchelastic.checkpoint.format.tensor_parts import as_bytes, dtype_named

#: Room that is left behind the header, so that the next save, with more plain values in it, fits into the same slot.
SPARE_HEADER_BYTES = 32 * 1024


def capacity_for(header: Header) -> int:
    """How many bytes a slot needs for a shard with this header."""
    return _reserved_bytes(header) + header.data_bytes


def _reserved_bytes(header: Header) -> int:
    return data_offset_bytes(len(encode_header(header)) + SPARE_HEADER_BYTES)


@dataclass(frozen=True)
class Stage:
    """A slot, with a place for each tensor of a header; made once, used for every save of the same tensors.

    Attributes:
        slot: where the shard is built.
        header: the layout; its checksums and meta are replaced by `seal`.
        data_offset: where the data begins in the slot.
        places: a tensor per entry, which writes into the slot.
    """

    slot: Slot
    header: Header
    data_offset: int
    places: tuple[torch.Tensor, ...]

    @classmethod
    def prepare(cls, slot: Slot, header: Header) -> Stage:
        """Cuts the slot into places. Raises: ValueError if the slot is too small."""
        offset = _reserved_bytes(header)
        if slot.capacity_bytes < offset + header.data_bytes:
            raise ValueError(f"a slot of {slot.capacity_bytes} bytes is too small for {capacity_for(header)}")
        places = tuple(tensor_at(slot.memory, offset, entry) for entry in header.entries)
        return cls(slot, header, offset, places)

    def require_fitting(self, sources: Sequence[torch.Tensor]) -> None:
        """Raises ValueError where a source is of another dtype or shape than its place: torch would convert it."""
        if len(sources) != len(self.places):
            raise ValueError(f"{len(sources)} tensors were given for a shard of {len(self.places)}")
        # one after the other: thousands of shapes that are kept set the garbage collector off, which costs far more
        for source, (shape, dtype), entry in zip(sources, self._expected, self.header.entries, strict=True):
            if source.shape != shape or source.dtype is not dtype:
                raise ValueError(
                    f"{entry.name!r} was laid out as a {dtype} of shape {tuple(shape)} and is now a {source.dtype} of "
                    f"shape {tuple(source.shape)}: lay the state out again"
                )

    @cached_property
    def _expected(self) -> list[tuple[torch.Size, torch.dtype]]:
        return [(place.shape, place.dtype) for place in self.places]

    def invalidate(self) -> None:
        """What the slot held before is no shard any more; call it before the first byte is copied."""
        self.slot.store(0, bytes(PREAMBLE_BYTES))

    def copy(self, sources: Sequence[torch.Tensor], *, just_laid_out: bool = False) -> None:
        """Copies the tensors into the slot, in one pass; when it returns, the sources may change.

        Args:
            sources: as many as the header has entries, with their dtypes and shapes; on the CPU or on GPUs.
            just_laid_out: they came with a header that fits this stage, so they are not compared with it once more.

        Raises:
            ValueError: a source is not what the entry says; nothing was copied.
        """
        self.copy_beside(sources, just_laid_out=just_laid_out).wait()

    def copy_beside(self, sources: Sequence[torch.Tensor], *, just_laid_out: bool = False) -> PendingCopy:
        """The same, but the copy from a GPU may still be running when it returns; on the training thread.

        Let nothing change the sources before it is complete (`PendingCopy`), and seal the stage after that.
        """
        if not just_laid_out:
            self.require_fitting(sources)
        self.invalidate()
        if is_on_gpu(sources):
            self.slot.pin()
        return begin_copy(self.places, sources)

    def copy_and_hash(
        self, sources: Sequence[torch.Tensor], threads: int | None = None, *, just_laid_out: bool = False
    ) -> list[str]:
        """As `copy`, and the checksums on the way: each piece is hashed while it is in the processor's cache."""
        written = self._written()
        if is_on_gpu(sources):
            self.copy(sources, just_laid_out=just_laid_out)
            return over_batches(
                self.header.entries, lambda batch: [checksum_of(written[index]) for index in batch], threads
            )
        if not just_laid_out:
            self.require_fitting(sources)
        self.invalidate()

        def work(batch: range) -> list[str]:
            if len(batch) == 1:
                return [self._copy_and_hash_long(batch[0], sources[batch[0]], written[batch[0]])]
            copy_all(self.places[batch.start : batch.stop], sources[batch.start : batch.stop])
            return [checksum_of(written[index]) for index in batch]

        return over_batches(self.header.entries, work, threads)

    def seal(self, header: Header) -> int:
        """Makes a shard of what was copied: writes the header, then the preamble; returns the length of the shard.

        Args:
            header: the layout of this stage with meta; checksums that it lacks are computed. For the background, since
                that lets the interpreter lock go.

        Raises:
            ValueError: the header has grown out of its reserve; `SlotPool.seal` moves to a larger slot then.
        """
        return seal(self.slot.view(), header, self.data_offset, self.slot.disk)

    @property
    def shard(self) -> memoryview:
        """All bytes of the shard, once it is sealed."""
        return self.slot.view()[: self.data_offset + self.header.data_bytes]

    def _written(self) -> list[memoryview]:
        """The bytes of each tensor in the slot."""
        return pieces_of(self.slot.view(), self.header.entries, self.data_offset)

    def _copy_and_hash_long(self, index: int, source: torch.Tensor, written: memoryview) -> str:
        """One tensor in chunks; one that is not in a row on the CPU is copied as a whole."""
        if not source.is_contiguous() or source.is_conj() or source.is_neg() or source.device.type != "cpu":
            copy_all([self.places[index]], [source])
            return checksum_of(written)
        target, data = as_bytes(self.places[index]), as_bytes(source.detach())
        digest = xxhash.xxh3_64()
        for begin in range(0, data.numel(), CHUNK_BYTES):
            end = begin + CHUNK_BYTES
            target[begin:end].copy_(data[begin:end])
            digest.update(written[begin:end])
        return f"{digest.intdigest():016x}"

    def has_room_for(self, header: Header) -> bool:
        """Whether the header still fits in front of the data: its plain values may have grown since the first save."""
        return PREAMBLE_BYTES + len(encode_header(header)) <= self.data_offset

    def fits(self, header: Header) -> bool:
        """Whether tensors of this layout can go into this stage as it is."""
        return self.header.entries is header.entries or self.header.entries == header.entries


def seal(memory: memoryview, header: Header, data_offset: int, disk: Disk, threads: int | None = None) -> int:
    """Makes a shard of memory that holds its tensors; see `Stage.seal`."""
    if header.lacks_checksums:
        header = header.with_checksums(checksums_in(memory, header.entries, data_offset, threads))
    encoded = encode_header(header)
    if PREAMBLE_BYTES + len(encoded) > data_offset:
        raise ValueError(f"a header of {len(encoded)} bytes does not fit in front of the data at {data_offset}")
    disk.store(memory, PREAMBLE_BYTES, encoded)
    disk.store(memory, 0, encode_preamble(encoded, data_offset, header.data_bytes))
    return data_offset + header.data_bytes


def tensor_at(memory: torch.Tensor, data_offset: int, entry: Entry) -> torch.Tensor:
    """The tensor of an entry where it lies in memory (uint8), behind `data_offset` bytes."""
    begin = data_offset + entry.offset_bytes
    return memory[begin : begin + entry.size_bytes].view(dtype_named(entry.dtype)).view(entry.region.sizes)


# --- a shard in memory instead of a file: for sending a state, and for checking what was received ---------------------


def image_of(header: Header, sources: list[torch.Tensor]) -> torch.Tensor:
    """A shard with these tensors as one row of bytes (uint8), checksums included; copies them once."""
    slot = Slot(capacity_for(header))
    stage = Stage.prepare(slot, header)
    checksums = stage.copy_and_hash(sources)
    return slot.memory[: stage.seal(header.with_checksums(checksums))]


def read_header(memory: memoryview, name: str) -> tuple[Header, int]:
    """The header of a shard in memory, and where its data begins, in bytes.

    Args:
        memory: the shard; what follows behind its end is ignored.
        name: what errors call it.

    Raises:
        CorruptCheckpointError: it is no shard, or it was cut or damaged.
    """
    try:
        preamble = decode_preamble(bytes(memory[:PREAMBLE_BYTES]))
        preamble.shard_bytes(memory.nbytes)
        encoded = bytes(memory[PREAMBLE_BYTES : PREAMBLE_BYTES + preamble.header_bytes])
        return decode_header(encoded, preamble), preamble.data_offset_bytes
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"{name} cannot be used: {error}") from error


def tensors_of(image: torch.Tensor, name: str) -> tuple[Header, dict[str, torch.Tensor]]:
    """Reads a shard in memory; every tensor is compared with its checksum.

    Args:
        image: a contiguous row of bytes (uint8) on the CPU.
        name: what errors call it.

    Returns:
        Its header, and the tensors by name; they share the memory of the image.

    Raises:
        CorruptCheckpointError: it is no shard, or it was cut or damaged.
    """
    memory = memoryview(image.numpy())  # type: ignore[arg-type]
    header, data_offset = read_header(memory, name)
    for entry, checksum in zip(header.entries, checksums_in(memory, header.entries, data_offset), strict=True):
        if checksum != entry.checksum:
            raise CorruptCheckpointError(f"{name} is damaged: the checksum of {entry.name!r} does not match")
    return header, {entry.name: tensor_at(image, data_offset, entry) for entry in header.entries}
