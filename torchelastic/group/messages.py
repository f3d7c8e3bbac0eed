"""What ranks say to each other over a group, in a collective: texts, or the largest of some numbers; never a pickle."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from torchelastic.group import under_way
from torchelastic.group.watched_group import WatchedGroup

#: What every rank sends at once; where more is to be said, all of it follows in a second round.
FRAME_BYTES = 1016
_LENGTH_BYTES = 8


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


class LaggedMax:
    """The element-wise maximum over all ranks, begun by making this; used by one thread, by all ranks in step.

    It is read in a later call, in the same calls on every rank; so a rank that is in step with the others waits for
    none of them, and the all-reduce may share a group with the collectives of training.

    Args:
        group: whose ranks it is of.
        number: of this maximum; no other one of the group's user has it.
        values: tells the others these numbers, as many on every rank.

    Attributes:
        group: as given.
        number: as given.

    Raises:
        RuntimeError: the group is broken.
    """

    def __init__(self, group: WatchedGroup, number: int, values: Sequence[float]) -> None:
        self.group, self.number = group, number
        self._values = torch.tensor(values, dtype=torch.float64, device=group.device)
        self._work = dist.all_reduce(self._values, dist.ReduceOp.MAX, group.group, async_op=True)
        under_way.hold(self._work)  # the last one of a run is never finished

    def finish(self) -> list[float]:
        """The largest of each number over all ranks.

        Raises:
            RanksMissingError: a rank has not begun it within the time limit.
            RuntimeError: the group is broken, for example because a rank has died.
        """
        self.group.wait(self._work, f"maximum-{self.number}")
        under_way.release_ended()
        return [float(value) for value in self._values.tolist()]
