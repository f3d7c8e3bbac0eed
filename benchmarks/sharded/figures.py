"""What is made of the events of the workers. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.environment import summary
from benchmarks.job.events import Event


@dataclass(frozen=True)
class Move:
    """What moved between the survivors of one kill.

    Attributes:
        ms: from when the last of them began to move parts until the last one had its own.
        received_bytes: by all of them, from others.
        local_bytes: that each of them had itself and copied, in all; of these the floor knows nothing.
        repeated_steps: committed ones that were computed again.
        floor_ms: the same bytes between the same ranks as plain messages, into warm memory; one of each measurement.
        fresh_floor_ms: the same into fresh memory, as parts move.
    """

    ms: float
    received_bytes: int
    local_bytes: int
    repeated_steps: int
    floor_ms: list[float]
    fresh_floor_ms: list[float]

    @classmethod
    def of(cls, events: Mapping[str, Sequence[Event]]) -> Move:
        """Of the survivors' events in their first group, by kind: moved, floor, metric.

        Args:
            events: with at least one "moved".
        """
        lost = [event["value"] for event in events["metric"] if event["name"] == "sharded.lost.steps"]
        received = [event["value"] for event in events["metric"] if event["name"] == "sharded.received.bytes"]
        return cls(
            span_ms(events["moved"]),
            int(sum(received)),
            sum(event["local"] for event in events["moved"]),
            int(max(lost, default=0)),
            _floors_ms(events["floor"], "warm"),
            _floors_ms(events["floor"], "fresh"),
        )

    @property
    def ratio(self) -> float | None:
        """To the floor; None: nothing had to move, or the floor was not measured."""
        return self.ms / statistics.median(self.floor_ms) if self.floor_ms and self.received_bytes else None

    @property
    def fresh_ratio(self) -> float | None:
        """The same to the floor with fresh memory."""
        return self.ms / statistics.median(self.fresh_floor_ms) if self.fresh_floor_ms and self.received_bytes else None


def span_ms(events: Iterable[Event]) -> float:
    """From when the last rank began until the last one has ended: what all do together takes so long.

    >>> span_ms([{"began": 1.0, "ended": 1.5}, {"began": 1.25, "ended": 1.375}])
    250.0
    """
    all_events = list(events)
    return 1000 * float(max(event["ended"] for event in all_events) - max(event["began"] for event in all_events))


def _floors_ms(events: Sequence[Event], kind: str) -> list[float]:
    """One for each step in which it was measured. A rank's events of a kind are in their order."""
    ranks: dict[int, list[Event]] = {}
    for event in events:
        if event["kind"] == kind:
            ranks.setdefault(event["pid"], []).append(event)
    return [span_ms(together) for together in zip(*ranks.values())]  # noqa: B905 - as many as all ranks have


def moves_document(moves: Sequence[Move], beyond_one_step_ms: Sequence[float]) -> dict[str, Any]:
    """For JSON: what moved, and how long it took beside the floor.

    Args:
        moves: one of each kill.
        beyond_one_step_ms: of the same kills.
    """
    if not moves:
        return {}
    beyond = [whole - move.ms for whole, move in zip(beyond_one_step_ms, moves, strict=True)]
    return {
        "beyond_one_step_and_transfer_ms": summary(beyond),
        "transfer_ms": summary([move.ms for move in moves]),
        "transfer_over_floor": _summary([ratio for move in moves if (ratio := move.ratio) is not None]),
        "transfer_over_floor_in_fresh_memory": _summary(
            [ratio for move in moves if (ratio := move.fresh_ratio) is not None]
        ),
        "floor_ms": _summary([ms for move in moves for ms in move.floor_ms]),
        "floor_in_fresh_memory_ms": _summary([ms for move in moves for ms in move.fresh_floor_ms]),
        "received_bytes": [move.received_bytes for move in moves],
        "local_bytes": [move.local_bytes for move in moves],
        "repeated_steps": [move.repeated_steps for move in moves],
    }


@dataclass(frozen=True)
class Block:
    """Steps of the full group that copied in one way, as one rank saw them.

    Attributes:
        way: a name in `copying.WAYS`.
        number: of the round.
        began_s: on the monotonic clock.
        ended_s: the same.
        copies: that were begun.
    """

    way: str
    number: int
    began_s: float
    ended_s: float
    copies: int


def blocks_of(events: Sequence[Event]) -> list[Block]:
    """The blocks of one rank. The first round is left out: memory is fresh in it.

    Args:
        events: "block_begins" and "block_ends" of one process, by time.
    """
    begun: dict[tuple[int, str], Event] = {}
    found = []
    for event in events:
        key = (event["number"], event["way"])
        if event["e"] == "block_begins":
            begun[key] = event
        elif key in begun and event["number"] > 0:
            first = begun[key]
            copies = event["copies"] - first["copies"]
            found.append(Block(event["way"], event["number"], float(first["t"]), float(event["t"]), copies))
    return found


def copies_document(
    blocks: Sequence[Block], steps: int, stopped: Sequence[Event], memcpy: Sequence[Event]
) -> dict[str, Any]:
    """For JSON: for each way of copying what it costs, beside the way without any in the same round.

    Args:
        blocks: of one rank.
        steps: of each block.
        stopped: "metric" events, how long a copy has stopped training, of all ranks.
        memcpy: of all ranks.
    """
    without_s = {block.number: block.ended_s - block.began_s for block in blocks if block.way == "none"}
    floor_ms = [event["ms"] for event in memcpy if event["number"] > 0]
    document: dict[str, Any] = {}
    for way in dict.fromkeys(block.way for block in blocks):
        own = [block for block in blocks if block.way == way]
        figures: dict[str, Any] = {
            "steps_per_s": summary([steps / (block.ended_s - block.began_s) for block in own], digits=3)
        }
        if way != "none":
            speeds = [without_s[block.number] / (block.ended_s - block.began_s) for block in own]
            times_ms = [
                event["value"]
                for event in stopped
                if any(block.began_s <= event["t"] <= block.ended_s for block in own)
            ]
            figures["relative_to_none"] = summary(speeds, digits=3)
            figures["copies"] = sum(block.copies for block in own)
            figures["stopped_ms"] = _summary(times_ms)
            if times_ms and floor_ms:
                ratio = statistics.median(times_ms) / statistics.median(floor_ms)
                figures["stopped_over_memcpy"] = round(ratio, 2)
        document[way] = figures
    return {
        "ways": document,
        "memcpy_ms": _summary(floor_ms),
        "copied_bytes": max((event["bytes"] for event in memcpy), default=0),
    }


def memory_document(events: Sequence[Event]) -> dict[str, Any]:
    """For JSON: the largest multiples of a rank's shard that its copies have held.

    Args:
        events: "memory", one of each rank.
    """
    return {
        "shard_bytes": max(event["shard"] for event in events),
        "own_x": round(max(event["own"] / event["shard"] for event in events), 2),
        "all_x": round(max(event["all"] / event["shard"] for event in events), 2),
    }


def _summary(values: Sequence[float]) -> dict[str, Any] | None:
    return summary(values) if values else None
