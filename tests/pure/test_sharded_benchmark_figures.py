"""What `benchmarks.sharded` makes of its events: ratios to floors, copies beside steps without, memory."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.job.events import Event
from benchmarks.sharded.figures import Move, blocks_of, copies_document, memory_document, moves_document


def part(pid: int, began: float, ended: float, kind: str = "") -> Event:
    return {"pid": pid, "began": began, "ended": ended, "kind": kind, "local": 7}


def metric(name: str, value: float) -> Event:
    return {"name": name, "value": value}


EVENTS = {
    "moved": [part(1, 10.0, 10.5), part(2, 10.25, 10.75)],
    "floor": [
        part(1, 11.0, 11.25, "warm"), part(2, 11.0, 11.125, "warm"), part(1, 12.0, 12.5, "fresh"),
        part(2, 12.0, 12.5, "fresh"), part(1, 13.0, 13.25, "warm"), part(2, 13.0, 13.125, "warm"),
        part(1, 14.0, 14.5, "warm"),
    ],
    "metric": [
        metric("sharded.lost.steps", 2), metric("sharded.lost.steps", 2), metric("sharded.received.bytes", 30),
        metric("sharded.received.bytes", 12), metric("sharded.copy.duration.ms", 5),
    ],
}  # fmt: skip


def test_a_move_lasts_from_the_last_beginning_to_the_last_end_and_is_compared_with_complete_floors() -> None:
    move = Move.of(EVENTS)
    assert (move.ms, move.received_bytes, move.local_bytes, move.repeated_steps) == (500.0, 42, 14, 2)
    assert move.floor_ms == [250.0, 250.0], "the third was not measured by all"
    assert (move.ratio, move.fresh_ratio) == (2.0, 1.0)


@pytest.mark.parametrize("kind", ["floor", "metric"])
def test_where_nothing_moved_or_no_floor_was_measured_there_is_no_ratio(kind: str) -> None:
    move = Move.of({**EVENTS, kind: []})
    document = moves_document([move], [800.0])
    assert move.ratio is None
    assert document["transfer_over_floor"] is None
    assert document["beyond_one_step_and_transfer_ms"]["median"] == 300.0


def block(event: str, way: str, number: int, t: float, copies: int) -> Event:
    return {"e": event, "way": way, "number": number, "t": t, "copies": copies}


def rounds() -> list[Event]:
    return [
        block("block_begins", "none", 0, 0.0, 1), block("block_ends", "none", 0, 99.0, 1),
        block("block_begins", "none", 1, 100.0, 1), block("block_ends", "none", 1, 110.0, 1),
        block("block_begins", "every_5", 1, 111.0, 1), block("block_ends", "every_5", 1, 123.5, 5),
        block("block_begins", "every_1", 1, 124.0, 5),
    ]  # fmt: skip


def test_ways_of_copying_are_compared_within_a_round_and_the_first_is_not_counted() -> None:
    blocks = blocks_of(rounds())
    assert [(each.way, each.copies) for each in blocks] == [("none", 0), ("every_5", 4)]
    stopped: list[Event] = [{"t": t, "value": value} for t, value in ((90.0, 900.0), (112.0, 6.0), (120.0, 8.0))]
    memcpy: list[Event] = [{"number": number, "ms": ms, "bytes": 64} for number, ms in ((0, 900.0), (1, 5.0))]
    document: dict[str, Any] = copies_document(blocks, 20, stopped, memcpy)
    assert document["ways"]["none"]["steps_per_s"]["median"] == 2.0
    assert document["ways"]["every_5"]["relative_to_none"]["median"] == 0.8
    assert document["ways"]["every_5"]["stopped_ms"]["max"] == 8.0
    assert document["ways"]["every_5"]["stopped_over_memcpy"] == 1.4
    assert document["ways"]["every_5"]["copies"] == 4
    assert document["memcpy_ms"]["runs"] == 1


def test_memory_is_that_of_the_rank_which_holds_most() -> None:
    events: list[Event] = [{"shard": 100, "own": 200, "all": 400}, {"shard": 50, "own": 100, "all": 225}]
    assert memory_document(events) == {"shard_bytes": 100, "own_x": 2.0, "all_x": 4.5}
