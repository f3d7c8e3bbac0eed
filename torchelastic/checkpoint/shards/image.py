"""A shard in memory instead of a file: for sending a state, and for checking what was received."""

from __future__ import annotations

import torch

from torchelastic.checkpoint.errors import CorruptCheckpointError
from torchelastic.checkpoint.shards.batches import checksums_in
from torchelastic.checkpoint.shards.header import PREAMBLE_BYTES, Header, decode_header, decode_preamble
from torchelastic.checkpoint.shards.slot import Slot
from torchelastic.checkpoint.shards.stage import Stage, capacity_for, tensor_at


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
