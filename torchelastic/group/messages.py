"""What ranks say to each other over a group, in a collective; never a pickle."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

#: What every rank sends at once; where more is to be said, all of it follows in a second round.
FRAME_BYTES = 1016
_LENGTH_BYTES = 8


def all_gather_tensors(mine: torch.Tensor, world_size: int) -> list[torch.Tensor]:
    """A tensor of each rank of the default group, as large on each, by rank. Collective, but for one rank alone."""
    if world_size == 1:
        return [mine]
    gathered = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(gathered, mine)
    return gathered


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
