"""What the ranks of a stream exchange for each batch.

A rank reads its own shards and must know of all: how many samples the others' gave, since the weights of the gradients
and the end of the epoch depend on it, and at which place they are now, since it may hold them next, when their rank is
lost. Nobody can know that beforehand, so it is one message for each batch: 40 bytes a shard, summed over the ranks
(each fills in its own shards and leaves zeros elsewhere). Positions, which have any length, come in a second one, every
`POSITION_EVERY` batches, and not at all where they are mere numbers of samples. Both are collectives of the group, as
those for gradients are: given up with it when a peer is lost, with the same error.

They are waited for in `next`, where every rank is at the same place: later, at the first use of a weight, some ranks
might be in another collective already.

With gloo it is the default group. With NCCL it is a gloo group beside it: a message through the GPU would wait for all
that was put on its stream before, which is the whole step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist

from torchelastic.data.stream_progress import ShardPlace
from torchelastic.group.backends import gpu_backend

#: number + 1 of the batch, drawn, digest, ended, and the length of a new position's text: 0 for none, -1 for a number.
_NOTHING = [0] * 5
_NUMBER = -1

Rows = list[list[int]]


class StreamExchange:
    """The messages of one rank about one stream; on the training thread of every rank, at the same batches."""

    def __init__(self) -> None:
        self._world_size = 1
        self._default: dist.ProcessGroup | None = None
        self._group: dist.ProcessGroup | None = None

    def enter(self, world_size: int) -> None:
        """Talk to the ranks of the present default group from now on; called on every rank of it.

        Raises:
            ValueError: the group has another size, or there is none.
        """
        self._world_size = world_size
        if world_size == 1:
            self._default = self._group = None
            return
        size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if size != world_size:
            raise ValueError(
                f"the stream is to be shared by {world_size} ranks, but the default process group has {size}: the "
                "ranks exchange how much each shard has given, so make the group of exactly these ranks first"
            )
        default = dist.group.WORLD
        if self._default is not default:
            self._group = default if gpu_backend() is None else dist.new_group(backend="gloo")
            self._default = default

    def places(
        self, number: int, before: Sequence[ShardPlace], mine: Mapping[int, ShardPlace], absent: Collection[int]
    ) -> tuple[ShardPlace, ...]:
        """The places of all shards behind one batch.

        Args:
            number: of the batch, to see that all ranks are at the same one.
            before: the places of all shards before it; equal on all ranks.
            mine: the places behind it of those shards that this rank reports.
            absent: shards that give nothing, that no rank reports; equal on all ranks.

        Raises:
            RuntimeError: a peer is lost; or the ranks do not fit together.
        """
        if self._world_size == 1:
            return tuple(mine.get(shard, place) for shard, place in enumerate(before))
        reported = [_row(number, old, mine[shard]) if shard in mine else _NOTHING for shard, old in enumerate(before)]
        table = torch.tensor(reported, dtype=torch.int64)
        dist.all_reduce(table, group=self._group)
        rows: Rows = table.tolist()
        wrong = [s for s, row in enumerate(rows) if row[0] != (0 if s in absent else number + 1)]
        if wrong:
            raise RuntimeError(
                f"batch {number} of the stream: logical shards {wrong} were not read by exactly one rank, so the ranks "
                "are not at the same batch: every rank calls next(stream) equally often"
            )
        texts = self._texts([max(row[4], 0) for row in rows], mine)
        return tuple(_mark(*one) for one in zip(before, rows, texts, strict=True))

    def _texts(self, lengths: Sequence[int], mine: Mapping[int, ShardPlace]) -> list[str]:
        """The new positions of all shards; "" where there is none."""
        if not any(lengths):
            return [""] * len(lengths)
        flat = torch.zeros(sum(lengths), dtype=torch.uint8)
        parts = torch.split(flat, list(lengths))
        for shard, place in mine.items():
            if lengths[shard]:
                parts[shard].copy_(torch.frombuffer(bytearray(place.position.encode()), dtype=torch.uint8))
        dist.all_reduce(flat, group=self._group)
        return [part.numpy().tobytes().decode() for part in parts]

    def __getstate__(self) -> dict[str, object]:
        return {"_world_size": self._world_size, "_default": None, "_group": None}


def _row(number: int, before: ShardPlace, place: ShardPlace) -> list[int]:
    is_new = place.at != before.at
    length = 0 if not is_new else _NUMBER if place.position == str(place.at) else len(place.position.encode())
    return [number + 1, place.drawn, place.digest, int(place.ended), length]


def _mark(before: ShardPlace, row: Sequence[int], text: str) -> ShardPlace:
    number, drawn, digest, ended, length = row
    if not number:
        return before
    if not length:
        return ShardPlace(before.position, before.at, drawn, digest, bool(ended))
    return ShardPlace(str(drawn) if length == _NUMBER else text, drawn, drawn, digest, bool(ended))
