"""Which checkpoint is restored, and from which copies: the decisions that all kinds of checkpoints share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, cast

import pytest

from torchelastic.checkpoint.engine.durable_copies import DurableCopies
from torchelastic.checkpoint.engine.restorer import Restorer, read_good_copies
from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError
from torchelastic.checkpoint.format.shard_reader import ShardReader
from torchelastic.checkpoint.store.restore_plan import Candidate, ShardSource, candidates
from torchelastic.checkpoint.store.save_id import SaveId, ShardId
from torchelastic.checkpoint.store.tier import TierEntry


def save_at(step: int) -> SaveId:
    return SaveId(1, 1, step, step, "aa")


def found_at(step: int, ranks: tuple[int, ...] = (0, 1), *, is_committed: bool = True) -> Candidate:
    (candidate,) = candidates([[TierEntry(save_at(step), 2, ranks, is_committed)]])
    return candidate


def alone(call: str, work: Callable[[], Any]) -> list[Any]:
    return [work()]


class Durable:
    """What durable storage has, or why it does not answer."""

    def __init__(self, entries: Sequence[TierEntry] = (), silence: str | None = None) -> None:
        self.entries, self.silence = list(entries), silence
        self.restored_steps: list[int] = []

    def inventory(self) -> tuple[list[TierEntry], str | None]:
        return self.entries, self.silence

    def restored(self, step: int) -> None:
        self.restored_steps.append(step)


def restorer_with(durable: Durable) -> Restorer:
    return Restorer(0, alone, cast("DurableCopies", durable))


# --- which checkpoint -------------------------------------------------------------------------------------------------


def test_the_newest_that_can_be_read_is_taken_and_what_that_costs_is_said_last() -> None:
    durable = Durable()
    said: list[str] = []
    restorer = restorer_with(durable)
    restorer.faults[save_at(9)] = "known before"
    tried: list[int] = []

    def read(candidate: Candidate) -> str:
        tried.append(candidate.save.step)
        if candidate.save.step == 6:
            raise CorruptCheckpointError("a bit has flipped")
        return "content"

    found = [found_at(9), found_at(8, is_committed=False), found_at(7, (0,)), found_at(6), found_at(5), found_at(4)]
    restored = restorer.newest(found, read, said.append)
    assert restored == (found[4], "content")
    assert tried == [6, 5], "what is known to be of no use is not read, nor what lacks a shard"
    assert [text.split(":")[0] for text in said[:-1]] == [
        f"{save_at(8)} has no manifest",
        f"{save_at(7)} lacks the shards of rank(s) 1; looking for an older one",
        f"{save_at(6)} is damaged",
    ]
    assert said[-1].endswith(f"since {save_at(8)} cannot be put together: 3 step(s) are trained again")
    assert durable.restored_steps == [5]
    assert [save.step for save in restorer.faults] == [9, 7, 6], "one that was never completed is no fault"
    assert "known before" in restorer.because()


def test_what_is_no_damage_ends_the_search() -> None:
    def read(_: Candidate) -> None:
        raise CheckpointError("permission denied")

    with pytest.raises(CheckpointError, match="permission denied"):
        restorer_with(Durable()).newest([found_at(2), found_at(1)], read, lambda _: None)


@pytest.mark.parametrize(
    ("durable", "error", "text"),
    [
        (Durable(silence="timed out"), CheckpointError, "durable storage does not answer: timed out"),
        (Durable([TierEntry(save_at(3), 2, (0,), place="durable")]), CorruptCheckpointError, "lacks the shards of"),
    ],
    ids=["silent", "damaged"],
)
def test_nobody_starts_from_scratch_where_durable_storage_may_have_a_checkpoint(
    durable: Durable, error: type[CheckpointError], text: str
) -> None:
    restorer = restorer_with(durable)
    assert restorer.look("looking", lambda: ([], "besides")) == ([[]], ["besides"])
    with pytest.raises(error, match=text):
        restorer.newest(candidates([restorer.durable]), lambda _: None, lambda _: None)


def test_nothing_anywhere_is_no_error() -> None:
    assert restorer_with(Durable()).newest([], lambda _: None, lambda _: None) is None


# --- which copies -----------------------------------------------------------------------------------------------------


@dataclass
class Reader:
    """Stands for an open copy."""

    source: ShardSource
    failure: CheckpointError | None = None
    is_closed: bool = False

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.is_closed = True


@dataclass
class Copies:
    """A `ShardAccess`.

    Attributes:
        unopened: where a copy cannot be opened, and why.
        opened: what was.
    """

    unopened: Mapping[ShardSource, CheckpointError] = field(default_factory=dict)
    opened: list[Reader] = field(default_factory=list)

    def open_at(self, shard: ShardId, source: ShardSource) -> ShardReader:
        if source in self.unopened:
            raise self.unopened[source]
        self.opened.append(Reader(source))
        return cast("ShardReader", self.opened[-1])

    def skip(self, shard: ShardId, sources: list[ShardSource], error: CheckpointError) -> tuple[str, bool]:
        return f"{shard.rank}@{sources.pop(0).rank}: {error}", isinstance(error, CorruptCheckpointError)


FIRST, SECOND = (ShardId(save_at(1), rank, 2) for rank in range(2))


def sources(*ranks: int) -> list[ShardSource]:
    return list(map(ShardSource, ranks))


def test_a_copy_that_fails_while_all_are_read_is_skipped_and_all_are_read_again() -> None:
    copies = Copies({ShardSource(0): CorruptCheckpointError("cut")})
    left = {FIRST: sources(0, 1), SECOND: sources(2, 3)}

    def take(readers: Mapping[ShardId, ShardReader]) -> list[int]:
        there = [cast("Reader", reader) for reader in readers.values()]
        for reader in there:
            if reader.source.rank == 2:
                reader.failure = CorruptCheckpointError("a bit has flipped")
                raise reader.failure
        return [reader.source.rank for reader in there]

    assert read_good_copies(left, copies, take) == [1, 3]
    assert left == {FIRST: sources(1), SECOND: sources(3)}, "where they were read"
    assert [reader.source.rank for reader in copies.opened] == [1, 2, 1, 3]
    assert all(reader.is_closed for reader in copies.opened)


@pytest.mark.parametrize("other", [CorruptCheckpointError("cut too"), CheckpointError("no answer")])
def test_without_a_good_copy_it_is_damage_only_if_nothing_else_was_found(other: CheckpointError) -> None:
    copies = Copies({ShardSource(0): CorruptCheckpointError("cut"), ShardSource(1): other})
    with pytest.raises(CheckpointError, match=rf"0@0: cut; 0@1: {other}") as raised:
        read_good_copies({FIRST: sources(0, 1)}, copies, lambda _: None)
    assert type(raised.value) is type(other)


def test_an_error_of_the_reading_program_costs_no_copy() -> None:
    def take(_: Mapping[ShardId, ShardReader]) -> None:
        raise CheckpointError("it does not fit this model")

    left = {FIRST: sources(0, 1)}
    with pytest.raises(CheckpointError, match="does not fit"):
        read_good_copies(left, Copies(), take)
    assert left == {FIRST: sources(0, 1)}
