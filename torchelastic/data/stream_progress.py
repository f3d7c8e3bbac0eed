"""The progress of a stream: the place of each logical shard, known on every rank for all shards. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torchelastic.errors import UnfitStateError

#: Nothing of the shard has been read yet, so there is nothing to compare with.
NO_DIGEST = -1
_COMPACT = json.JSONEncoder(separators=(",", ":"))


class ShardPlace(NamedTuple):
    """A place in one shard: a position of its iterator, and how many samples were drawn since.

    The position is taken anew every few batches only; who opens the shard draws the samples from there on and throws
    them away.

    Attributes:
        position: what the iterator was opened with, or gave for a position, as JSON.
        at: how many samples of the epoch lie before that position.
        drawn: how many were drawn from the shard in this epoch.
        digest: of the first sample behind the position; `NO_DIGEST`: that was not read yet.
        ended: whether no sample is left.
    """

    position: str = "0"
    at: int = 0
    drawn: int = 0
    digest: int = NO_DIGEST
    ended: bool = False


@dataclass(frozen=True)
class StreamProgress:
    """A place in the whole stream; equal on all ranks.

    Attributes:
        epoch: of the next batch.
        number: of that batch in its epoch.
        places: of all logical shards, in order.
    """

    epoch: int
    number: int
    places: tuple[ShardPlace, ...]

    @classmethod
    def start(cls, epoch: int, shards: int) -> StreamProgress:
        """The beginning of an epoch."""
        return cls(epoch, 0, (ShardPlace(),) * shards)

    @property
    def present(self) -> tuple[int, ...]:
        """The shards that have samples left, as far as is known: which ones are empty shows when they are opened."""
        return tuple(shard for shard, place in enumerate(self.places) if not place.ended)

    def advanced(self, places: Sequence[ShardPlace]) -> StreamProgress:
        """Behind one more batch, or at the start of the next epoch where no shard has anything left.

        Args:
            places: of all shards, behind that batch.
        """
        if all(place.ended for place in places):
            return StreamProgress.start(self.epoch + 1, len(places))
        return StreamProgress(self.epoch, self.number + 1, tuple(places))

    def to_state(self) -> dict[str, int | str]:
        """The place as a few plain values: quick to copy before each step, however many shards there are."""
        rows = (
            f"[{place.position},{place.at},{place.drawn},{place.digest},{int(place.ended)}]" for place in self.places
        )
        return {
            "epoch": self.epoch,
            "number": self.number,
            "logical_shards": len(self.places),
            "shards": f"[{','.join(rows)}]",
        }

    @classmethod
    def from_state(cls, state: Mapping[str, object], shards: int) -> StreamProgress:
        """The inverse.

        Args:
            state: what `to_state` gave.
            shards: how many the stream has.

        Raises:
            ValueError: it is something else, damaged, or of another number of shards.
        """
        names = ("epoch", "number", "logical_shards", "shards")
        missing = [name for name in names if name not in state]
        if missing:
            raise ValueError(f"not the state of an ElasticStream: {', '.join(missing)} missing")
        if state["logical_shards"] != shards:
            raise UnfitStateError(
                f"logical_shards is {shards} here but {state['logical_shards']} in the saved state, so its shards hold "
                "other samples: construct the stream with the saved number, or start a new run"
            )
        try:
            epoch, number, text = state["epoch"], state["number"], state["shards"]
            if not isinstance(epoch, int) or not isinstance(number, int) or min(epoch, number) < 0:
                raise ValueError("an epoch or a number of batches that is none")
            places = tuple(_place_of(row) for row in json.loads(str(text)))
            if len(places) != shards:
                raise ValueError(f"{len(places)} shards")
        except (TypeError, ValueError) as error:
            raise ValueError(f"the state of the stream is damaged ({error}): give what state_dict() gave") from error
        return cls(epoch, number, places)


def samples_between(before: Sequence[ShardPlace], after: Sequence[ShardPlace]) -> tuple[int, ...]:
    """How many samples each shard has given between two places in one epoch."""
    return tuple(later.drawn - earlier.drawn for earlier, later in zip(before, after, strict=True))


def position_text(position: object) -> str:
    """A position as compact JSON. Raises TypeError where it holds anything but plain values."""
    _check_plain(position)
    return _COMPACT.encode(position)


def _check_plain(value: object) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):  # JSON would make it a string, and the iterator would not find it
                raise TypeError(f"a dict key {key!r} that is no string")
            _check_plain(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            _check_plain(inner)
    elif value is not None and not isinstance(value, (bool, int, float, str)):
        raise TypeError(f"a {type(value).__name__}")


def _place_of(row: object) -> ShardPlace:
    if not isinstance(row, list) or len(row) != 5:
        raise ValueError("a shard that is no list of five")
    position, *numbers = row
    if not all(type(value) is int for value in numbers):
        raise ValueError("numbers of samples that are none")
    at, drawn, digest, ended = numbers
    if not 0 <= at <= drawn or digest < NO_DIGEST or ended not in (0, 1):
        raise ValueError("numbers of samples that cannot be")
    return ShardPlace(position_text(position), at, drawn, digest, bool(ended))
