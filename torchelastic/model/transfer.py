"""Moves a nested state to the ranks that lack it, and to no other; no pickled code is ever executed.

A state is what a checkpoint can hold (see `checkpoint.format.tree`). It travels as a skeleton (the tree with each
tensor replaced by its name, and the tensors' types and shapes) and the tensors' bytes, several in one message.
Receivers get fresh tensors: what they hold stays whole until all has arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist

from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.format.structures import places_of
from torchelastic.checkpoint.format.tensor_parts import dtype_name, dtype_named
from torchelastic.checkpoint.format.tree import flatten, unflatten_beside
from torchelastic.errors import UnfitError
from torchelastic.group.backends import gpu_backend
from torchelastic.group.communicators import wait_for_collectives
from torchelastic.text import shortlist

#: Small tensors travel together up to this size: fewer messages.
CHUNK_BYTES = 32 * 1024 * 1024
#: From this size on a tensor travels alone: sent from where it lies and received where it stays, without a copy of it.
LARGE_BYTES = 1024 * 1024

#: Gives tensors by their places in a state, see `unflatten_beside`.
Own = Callable[[], Mapping[str, torch.Tensor]]
#: In the place of a state that cannot be sent: the reason.
_UNSENT = "unsent"


@dataclass(frozen=True)
class Packed:
    """A state taken apart: the skeleton as bytes, and the tensors in the order of their names there."""

    skeleton: bytes
    tensors: tuple[torch.Tensor, ...]


class _TensorForm(NamedTuple):
    """A tensor without its content."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    is_on_cpu: bool

    def empty(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self.shape, dtype=dtype_named(self.dtype), device=device)


class UnsendableError(UnfitError, CheckpointError):
    """A state holds what no other worker can receive: nothing about it changes in another process."""


def pack(tree: Any) -> Packed:
    """Take a state apart; the tensors are not copied.

    Raises:
        TypeError, ValueError: it holds what cannot even be pickled, or itself.
    """
    flat = flatten(tree, allow_pickles=True)  # who unpacks it refuses them: a newcomer ends by that, and not the source
    forms = [
        _TensorForm(part.name, dtype_name(part.tensor.dtype), tuple(part.tensor.shape), part.tensor.is_cpu)
        for part in flat.tensors
    ]
    return Packed(msgspec.msgpack.encode((flat.structure, forms)), tuple(part.tensor for part in flat.tensors))


def unpack(packed: Packed, own: Own = dict) -> Any:
    """Put a state together again.

    Args:
        packed: what `pack` made.
        own: see `synchronize`.

    Raises:
        UnsendableError: it holds anything but plain values and tensors, or a tensor that cannot be sent.
        CheckpointError: a class of tensors in it is not defined here.
    """
    structure, forms = _read(packed.skeleton)
    if isinstance(structure, dict) and _UNSENT in structure:
        raise UnsendableError(str(structure[_UNSENT]))
    try:
        tensors = {form.name: tensor for form, tensor in zip(forms, packed.tensors, strict=True)}
        return unflatten_beside(structure, tensors, own())
    except CheckpointError as error:
        unloadable = [place for place, _ in places_of(structure, ("pickle",))]
        if not unloadable:
            raise
        raise UnsendableError(
            f"{shortlist(unloadable)} of the state that workers send each other is no plain value or tensor, and "
            "foreign code is not run: keep plain values there, or an object whose state_dict() gives such"
        ) from error


def check_sendable(tree: Any, own: Own = dict) -> None:
    """Raise UnsendableError for what no other worker could receive; nothing is copied."""
    unpack(_packed(tree), own)


def _packed(tree: Any) -> Packed:
    """As `pack`; for what cannot be taken apart the reason, which its receivers raise: whoever sends it goes on."""
    try:
        return pack(tree)
    except (TypeError, ValueError, RuntimeError) as error:
        reason = f"the state of the workers that train cannot be sent to another one: {error}"
        return Packed(msgspec.msgpack.encode(({_UNSENT: reason}, [])), ())


def _read(skeleton: bytes) -> tuple[Any, list[_TensorForm]]:
    return msgspec.msgpack.decode(skeleton, type=tuple[Any, list[_TensorForm]])


def message_device() -> torch.device:
    """Where messages of the default group must lie."""
    uses_gpu = dist.is_available() and dist.is_initialized() and gpu_backend() is not None
    return torch.device("cuda", torch.cuda.current_device()) if uses_gpu else torch.device("cpu")


def all_gathered(mine: torch.Tensor, world_size: int) -> list[torch.Tensor]:
    """What each rank has, by rank; called on every rank of the group. This rank's alone where it is all of the group.

    Args:
        mine: of the same shape and dtype on all ranks.
        world_size: of the group.

    Raises:
        RuntimeError: a peer is lost.
    """
    if world_size == 1:
        return [mine]
    gathered = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(gathered, mine)
    wait_for_collectives()
    return gathered


def gathered_numbers(values: Sequence[int], world_size: int, device: torch.device) -> list[list[int]]:
    """By rank, what each gives: as many numbers of 64 bits with a sign. Called on every rank; raises RuntimeError.

    Args:
        values: of this rank.
        world_size: of the group.
        device: where messages must lie.
    """
    mine = torch.tensor(list(values), dtype=torch.int64, device=device)
    return [row.tolist() for row in all_gathered(mine, world_size)]


def synchronize(
    tree: Any,
    *,
    source: int,
    stale: Sequence[int],
    rank: int,
    world_size: int,
    device: torch.device,
    own: Own = dict,
) -> Any | None:
    """Move the source's state to the stale ranks; called on every rank of the default group.

    Args:
        tree: the state, used on the source only.
        source: rank that has it.
        stale: ranks that lack it; equal on all ranks.
        rank: of this process.
        world_size: of the group.
        device: where messages must lie for the group's backend.
        own: gives this rank's tensors that are made of others, by their places in the tree: what is no plain value in
            one that comes is taken from the one there.

    Returns:
        The state on a stale rank, with tensors on `device`, or on the CPU where the source has them there; None on all
        others. Where all lack it, and on GPUs, it is a broadcast; else who is neither source nor stale takes no part.

    Raises:
        RuntimeError: a peer is lost; nothing has changed here.
    """
    is_taking_part = rank == source or rank in stale
    # NCCL connects each pair that messages go between, and would wait for ever for one that is lost at that moment
    everybody = device.type == "cuda" or len(stale) == world_size - 1
    if not (is_taking_part or everybody):
        return None
    channel = _Channel(source, () if everybody else tuple(stale), is_source=rank == source, device=device)
    packed = _packed(tree) if rank == source else None
    skeleton = channel.bytes(packed.skeleton if packed else None)
    forms = [] if packed else _read(skeleton)[1]
    kept = device if is_taking_part else torch.device("meta")
    tensors = list(packed.tensors) if packed else [form.empty(kept) for form in forms]
    for chunk in chunks(tensors):
        if len(chunk) == 1 and is_taking_part:
            channel.tensor(chunk[0].reshape(-1).to(device))  # a receiver's is contiguous: this is its own memory
            continue
        flat = torch.cat([tensor.reshape(-1).to(device) for tensor in chunk]) if packed else flat_like(chunk, device)
        channel.tensor(flat)
        if rank in stale:
            scatter(flat, chunk)
    if rank not in stale:
        return None
    placed = (tensor.cpu() if form.is_on_cpu else tensor for form, tensor in zip(forms, tensors, strict=True))
    return unpack(Packed(skeleton, tuple(placed)), own)


class _Channel:
    """From one rank to several, by broadcast or by messages."""

    def __init__(self, source: int, receivers: Sequence[int], *, is_source: bool, device: torch.device) -> None:
        self._source, self._receivers, self._is_source, self._device = source, receivers, is_source, device

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        message = tensor.view(torch.uint8)  # backends do not know all types
        if not self._receivers:
            dist.broadcast(message, src=self._source)
        elif self._is_source:
            for work in [dist.isend(message, dst=receiver) for receiver in self._receivers]:
                if work is not None:
                    work.wait()
        else:
            dist.recv(message, src=self._source)
        wait_for_collectives()
        return tensor

    def bytes(self, data: bytes | None) -> bytes:
        length = self.tensor(torch.tensor([len(data) if data is not None else 0], device=self._device))
        if data is not None:
            # a copy, because a tensor over immutable bytes must not be written to
            payload = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device)
        else:
            payload = torch.empty(int(length.item()), dtype=torch.uint8, device=self._device)
        return self.tensor(payload).cpu().numpy().tobytes()


def chunks(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Large tensors alone, small ones of one type up to CHUNK_BYTES together.

    The same on both sides, for only types and shapes count.
    """
    chunks: list[list[torch.Tensor]] = []
    open_chunks: dict[torch.dtype, tuple[list[torch.Tensor], int]] = {}
    for tensor in tensors:
        tensor_bytes = tensor.numel() * tensor.element_size()
        if not tensor_bytes:
            continue
        chunk, size_bytes = open_chunks.get(tensor.dtype, ([], 0))
        if not chunk or tensor_bytes >= LARGE_BYTES or size_bytes + tensor_bytes > CHUNK_BYTES:
            chunks.append([tensor])
            if tensor_bytes < LARGE_BYTES:
                open_chunks[tensor.dtype] = (chunks[-1], tensor_bytes)
        else:
            chunk.append(tensor)
            open_chunks[tensor.dtype] = (chunk, size_bytes + tensor_bytes)
    return chunks


def flat_like(chunk: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The memory for a message with these tensors, which are of one type."""
    return torch.empty(sum(tensor.numel() for tensor in chunk), dtype=chunk[0].dtype, device=device)


def scatter(flat: torch.Tensor, chunk: Sequence[torch.Tensor]) -> None:
    """Copy what has come in one message into the tensors that it is made of."""
    parts = torch.split(flat, [tensor.numel() for tensor in chunk])
    for tensor, part in zip(chunk, parts, strict=True):
        tensor.copy_(part.view(tensor.shape))
