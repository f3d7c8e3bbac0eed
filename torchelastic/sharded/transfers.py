"""Moves parts of tensors between the ranks of a group: each rank says what it needs of whom, and gets just that."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from torchelastic.checkpoint.shards.tensors import copyable
from torchelastic.group.messages import all_gather_texts
from torchelastic.sharded.regions import Piece, piece_from_plain, piece_to_plain

#: From this size on a piece travels alone: sent from where it lies and received where it stays, if it is contiguous.
LARGE_BYTES = 1024 * 1024
#: Smaller ones travel together up to this size.
CHUNK_BYTES = 32 * 1024 * 1024


def all_gather_plain(group: dist.ProcessGroup, value: Any) -> list[Any]:
    """What each rank says, by rank; JSON must be able to hold it. Called on every rank of the group.

    Raises:
        RuntimeError: a peer is lost.
    """
    text = zlib.compress(json.dumps(value, separators=(",", ":")).encode(), 1)
    return [json.loads(zlib.decompress(each)) for each in all_gather_texts(group, text, _waited)]


def broadcast_bytes(group: dist.ProcessGroup, data: bytes | None, source: int) -> bytes:
    """Tell all ranks what one of them has; called on every rank of the group.

    Args:
        group: for CPU tensors.
        data: on the source; not looked at on the others.
        source: rank that has it.

    Raises:
        RuntimeError: a peer is lost.
    """
    size = torch.tensor([0 if data is None else len(data)])
    dist.broadcast(size, group=group, group_src=source)
    # a copy, because a tensor over immutable bytes must not be written to
    mine = bytearray(int(size)) if data is None else bytearray(data)
    if mine:
        dist.broadcast(torch.frombuffer(mine, dtype=torch.uint8), group=group, group_src=source)
    return bytes(mine)


def move(
    pieces: Sequence[Piece],
    *,
    group: dist.ProcessGroup,
    device: torch.device,
    given: Callable[[Piece], torch.Tensor],
    target: Callable[[Piece], torch.Tensor],
) -> int:
    """Get all pieces, and give those that other ranks need; called on every rank of the group.

    Args:
        pieces: what this rank needs, and of whom.
        group: of CPU tensors, for the requests; pieces travel in the default group.
        device: where messages of the default group must lie.
        given: the piece as this rank has it, where it is the source.
        target: the memory into which a piece has to come.

    Returns:
        How many bytes this rank has received from others.

    Raises:
        RuntimeError: a peer is lost; the targets are half written then.
    """
    rank = dist.get_rank(group)
    for piece in pieces:
        if piece.source == rank:
            _copy(target(piece), given(piece))
    wanted: dict[int, list[Piece]] = {}
    for piece in pieces:
        if piece.source != rank:
            wanted.setdefault(piece.source, []).append(piece)
    said = {str(source): [piece_to_plain(piece) for piece in those] for source, those in wanted.items()}
    told = all_gather_plain(group, said)
    operations: list[dist.P2POp] = []
    arrived: list[Callable[[], None]] = []
    received_bytes = 0
    for source, those in sorted(wanted.items()):
        for number, chunk in enumerate(_chunks([target(piece) for piece in those])):
            message, unpack = _receiving(chunk, device)
            operations.append(dist.P2POp(dist.irecv, message, source, tag=number))
            arrived.append(unpack)
            received_bytes += message.nbytes
    for receiver, said_there in enumerate(told):
        asked = [piece_from_plain(rank, plain) for plain in said_there.get(str(rank), ())]
        for number, chunk in enumerate(_chunks([given(piece) for piece in asked])):
            operations.append(dist.P2POp(dist.isend, _sent(chunk, device), receiver, tag=number))
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    for unpack in arrived:
        unpack()
    return received_bytes


def _chunks(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Large ones alone, the others together; the same on both sides, for only sizes and order count."""
    small: list[torch.Tensor] = []
    small_bytes = 0
    for tensor in tensors:
        if tensor.nbytes >= LARGE_BYTES:
            yield [tensor]
            continue
        if small and small_bytes + tensor.nbytes > CHUNK_BYTES:
            yield small
            small, small_bytes = [], 0
        small.append(tensor)
        small_bytes += tensor.nbytes
    if small:
        yield small


def _receiving(chunk: Sequence[torch.Tensor], device: torch.device) -> tuple[torch.Tensor, Callable[[], None]]:
    """The memory for a message, and what brings it to where it belongs."""
    if len(chunk) == 1 and chunk[0].is_contiguous() and chunk[0].device.type == device.type:
        return _flat(chunk[0]), lambda: None
    message = torch.empty(sum(tensor.nbytes for tensor in chunk), dtype=torch.uint8, device=device)

    def unpack() -> None:
        begin = 0
        for tensor in chunk:
            part = message[begin : begin + tensor.nbytes]
            # a copy where the part does not begin at a multiple of the size of an element
            typed = (part if part.storage_offset() % tensor.element_size() == 0 else part.clone()).view(tensor.dtype)
            _copy(tensor, typed.view(tensor.shape))
            begin += tensor.nbytes

    return message, unpack


def _sent(chunk: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    if len(chunk) == 1:
        return _flat(chunk[0].contiguous()).to(device)
    return torch.cat([_flat(tensor.contiguous()).to(device) for tensor in chunk])


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


@torch.no_grad()
def _copy(target: torch.Tensor, value: torch.Tensor) -> None:
    copyable(target).copy_(copyable(value))


def _waited(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()
