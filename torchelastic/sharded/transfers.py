"""Moves parts of tensors between the ranks of a group: each rank says what it needs of whom, and gets just that."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist

from torchelastic.checkpoint.format.copying import copy_all
from torchelastic.group.messages import all_gather_texts
from torchelastic.model.transfer import chunks, flat_like, scatter
from torchelastic.sharded.offers import Piece

T = TypeVar("T")


def all_gather(group: dist.ProcessGroup, value: T, kind: type[T]) -> list[T]:
    """What each rank says, by rank. Called on every rank of the group.

    Args:
        group: for CPU tensors.
        value: of the types that msgspec can write.
        kind: its type.

    Raises:
        RuntimeError: a peer is lost.
    """
    text = zlib.compress(msgspec.msgpack.encode(value), 1)
    said = all_gather_texts(group, text, _waited)
    return [msgspec.msgpack.decode(zlib.decompress(each), type=kind) for each in said]


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


def exchange_bytes(group: dist.ProcessGroup, given: Mapping[int, bytes], source: int | None) -> bytes | None:
    """Give some ranks what they need, and get what this one does; called on every rank of the group.

    Args:
        group: for CPU tensors.
        given: by the rank that needs it; may be this one.
        source: who has what this rank needs; None: it needs nothing.

    Returns:
        What this rank has got.

    Raises:
        RuntimeError: a peer is lost.
    """
    rank = dist.get_rank(group)
    lengths = {receiver: len(data) for receiver, data in given.items()}
    sizes = [each.get(rank, 0) for each in all_gather(group, lengths, dict[int, int])]
    works: list[dist.Work | None] = []
    mine: torch.Tensor | None = None
    if source is not None and source != rank:
        mine = torch.empty(sizes[source], dtype=torch.uint8)
        works.append(dist.irecv(mine, group=group, group_src=source))
    for receiver, data in sorted(given.items()):
        if receiver != rank:
            sent = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            works.append(dist.isend(sent, group=group, group_dst=receiver))
    for work in works:
        _waited(work)
    return given.get(rank) if mine is None else mine.numpy().tobytes()


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
    wanted: dict[int, list[Piece]] = {}
    for piece in pieces:
        if piece.source != rank:
            wanted.setdefault(piece.source, []).append(piece)
    asked = all_gather(group, wanted, dict[int, list[Piece]])
    operations: list[dist.P2POp] = []
    arriving: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
    for source, those in sorted(wanted.items()):
        for number, chunk in enumerate(chunks([target(piece) for piece in those])):
            is_whole = len(chunk) == 1 and chunk[0].is_contiguous() and chunk[0].device.type == device.type
            message = chunk[0].view(-1) if is_whole else flat_like(chunk, device)
            operations.append(dist.P2POp(dist.irecv, message.view(torch.uint8), source, tag=number))
            arriving.append((message, [] if is_whole else chunk))
    for receiver, of_whom in enumerate(asked):
        for number, chunk in enumerate(chunks([given(piece) for piece in of_whom.get(rank, ())])):
            flat = [tensor.reshape(-1).to(device) for tensor in chunk]
            message = flat[0] if len(flat) == 1 else torch.cat(flat)
            operations.append(dist.P2POp(dist.isend, message.view(torch.uint8), receiver, tag=number))
    works = dist.batch_isend_irecv(operations) if operations else []
    own = [piece for piece in pieces if piece.source == rank]
    copy_all([target(piece) for piece in own], [given(piece) for piece in own])  # while messages are under way
    for work in works:
        work.wait()
    with torch.no_grad():
        for message, parts in arriving:
            if parts:
                scatter(message, parts)
    return sum(message.nbytes for message, _ in arriving)


def _waited(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()
