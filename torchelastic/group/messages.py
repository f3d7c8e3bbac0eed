"""What ranks say to each other over a group: texts to all in a collective, bytes to one; never a pickle."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

#: What every rank sends at once; where more is to be said, all of it follows in a second round.
FRAME_BYTES = 1016
_LENGTH_BYTES = 8
#: How much one message from rank to rank carries: each has to arrive within the time-out of collectives.
CHUNK_BYTES = 64 * 2**20


def all_gather_texts(
    group: dist.ProcessGroup,
    text: bytes,
    wait: Callable[[dist.Work | None], object],
    device: torch.device | str = "cpu",
) -> list[bytes]:
    """Tells all ranks a text, and returns what each of them says, by rank. Collective.

    Args:
        group: any group.
        text: any bytes.
        wait: waits for a collective that has begun; what it raises ends this.
        device: of tensors that the group can send.

    Raises:
        RuntimeError: the group is broken.
    """
    longest, texts = _exchange(group, text, FRAME_BYTES, wait, device)
    return texts if longest <= FRAME_BYTES else _exchange(group, text, longest, wait, device)[1]


def _exchange(
    group: dist.ProcessGroup,
    text: bytes,
    size_bytes: int,
    wait: Callable[[dist.Work | None], object],
    device: torch.device | str,
) -> tuple[int, list[bytes]]:
    """How long the longest text is, and the texts, cut off after `size_bytes`."""
    sent = len(text).to_bytes(_LENGTH_BYTES, "little") + text[:size_bytes].ljust(size_bytes)
    own = torch.frombuffer(bytearray(sent), dtype=torch.uint8).to(device)
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    wait(dist.all_gather(gathered, own, group, async_op=True))
    received = [tensor.cpu().numpy().tobytes() for tensor in gathered]
    lengths = [int.from_bytes(each[:_LENGTH_BYTES], "little") for each in received]
    return max(lengths), [
        each[_LENGTH_BYTES : _LENGTH_BYTES + length] for each, length in zip(received, lengths, strict=True)
    ]


def send_bytes(group: dist.ProcessGroup, data: memoryview, rank: int) -> None:
    """Gives bytes to one rank of the group, which calls `receive_bytes`. Raises: RuntimeError: the group is broken."""
    for begin in range(0, data.nbytes, CHUNK_BYTES):
        # a copy: what is sent may be a read-only map of a file
        chunk = _as_tensor(memoryview(bytearray(data[begin : begin + CHUNK_BYTES])))
        dist.send(chunk, group=group, group_dst=rank)


def receive_bytes(group: dist.ProcessGroup, into: memoryview, rank: int) -> None:
    """Takes as many bytes from one rank of the group, which calls `send_bytes`. Raises: RuntimeError as there."""
    for begin in range(0, into.nbytes, CHUNK_BYTES):
        dist.recv(_as_tensor(into[begin : begin + CHUNK_BYTES]), group=group, group_src=rank)


def _as_tensor(data: memoryview) -> torch.Tensor:
    return torch.frombuffer(data, dtype=torch.uint8) if data.nbytes else torch.empty(0, dtype=torch.uint8)
