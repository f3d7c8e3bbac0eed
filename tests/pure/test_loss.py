"""Facts and guesses about a loss are different types, and the rounds and errors that they are read from."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torchelastic.p2p.recovery_time import PHASES, RecoveryTimer
from torchelastic.rendezvous.loss import (
    ConnectionClosed,
    Fact,
    Guess,
    LeaseExpired,
    Left,
    Loss,
    LossWitness,
    MissedProgress,
    ProcessEnded,
    loss_from_error,
    losses,
)
from torchelastic.rendezvous.records import Round, RoundState
from torchelastic.testing.clock import FakeClock

JOINED = Round(number=4, state=RoundState.RUNNING, roster=("a", "b", "c"))


def next_round(*roster: str, evicted: tuple[str, ...] = (), lost: tuple[str, ...] = ()) -> Round:
    return Round(number=5, state=RoundState.RUNNING, roster=roster, evicted=evicted, lost=lost)


def test_a_fact_is_no_guess_and_each_kind_has_a_name_of_its_own() -> None:
    facts, guesses = (ProcessEnded, ConnectionClosed, Left), (LeaseExpired, MissedProgress)
    assert all(issubclass(kind, Fact) and not issubclass(kind, Guess) for kind in facts)
    assert all(issubclass(kind, Guess) and not issubclass(kind, Fact) for kind in guesses)
    assert len({kind.kind for kind in (*facts, *guesses)}) == 5
    same_member: list[Loss] = [ProcessEnded("a"), LeaseExpired("a")]
    assert same_member[0] != same_member[1]


@pytest.mark.parametrize(
    ("now", "departed", "expected"),
    [
        (next_round("a", "b", "c"), (), ()),
        (next_round("a", "c"), ("b",), (ProcessEnded("b"),)),
        (next_round("a", "c"), (), (LeaseExpired("b"),)),
        (next_round("a", "c", lost=("b",)), (), (ProcessEnded("b"),)),
        (replace(next_round("a", "c", lost=("b",)), number=9), (), (LeaseExpired("b"),)),  # of a round in between
        (next_round("a", "c", evicted=("b",)), (), (MissedProgress("b"),)),
        # its agent has ended it by now, because it hung: that is no reason
        (next_round("a", "c", evicted=("b",)), ("b",), (MissedProgress("b"),)),
        (next_round("c", "d"), ("a",), (ProcessEnded("a"), LeaseExpired("b"))),
        # the same round, broken: only whose end is told
        (replace(JOINED, state=RoundState.BROKEN, departed=("c",)), (), (ProcessEnded("c"),)),
        (replace(JOINED, state=RoundState.BROKEN), (), ()),
    ],
)
def test_what_two_rounds_say_about_who_is_gone(
    now: Round, departed: tuple[str, ...], expected: tuple[Loss, ...]
) -> None:
    assert losses(JOINED, now, departed) == expected


def test_who_was_asked_to_leave_and_left_is_not_lost_to_a_silence() -> None:
    assert losses(JOINED, next_round("a", "b"), leaving=("c",)) == (Left("c"),)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:5172", ConnectionClosed("")),
        ("Read error [10.0.0.1]:41: Connection reset by peer", ConnectionClosed("")),
        ("writev [10.0.0.1]:41: Broken pipe", ConnectionClosed("")),
        ("Timed out waiting 1000ms for recv operation to complete", MissedProgress("")),
        ("CUDA out of memory", None),
    ],
)
def test_what_an_error_says_about_a_peer_it_does_not_name(text: str, expected: Loss | None) -> None:
    assert loss_from_error(RuntimeError(text)) == expected


def test_the_witness_keeps_what_the_next_round_does_not_repeat() -> None:
    witness = LossWitness()
    witness.begins(JOINED)
    witness.sees(replace(JOINED, state=RoundState.BROKEN, departed=("b",), edition=2))
    witness.sees(replace(JOINED, number=9, departed=("c",)))  # of another round
    assert witness.explains(JOINED, next_round("a", "c")) == (ProcessEnded("b"),)
    witness.begins(next_round("a", "c"))
    assert witness.explains(next_round("a", "c"), replace(next_round("a"), number=6)) == (LeaseExpired("c"),)


def test_the_first_error_counts_and_only_where_it_tells_more_than_the_rounds() -> None:
    witness = LossWitness()
    witness.begins(JOINED)
    witness.sees_error(RuntimeError("Connection closed by peer"))
    witness.sees_error(RuntimeError("Timed out"))
    assert witness.explains(JOINED, next_round("a", "b", "c")) == (ConnectionClosed(""),)
    assert witness.explains(JOINED, next_round("a", "b")) == (LeaseExpired("c"), ConnectionClosed(""))
    assert witness.explains(JOINED, next_round("a", "b", evicted=("c",))) == (MissedProgress("c"),)
    witness.sees(replace(JOINED, state=RoundState.BROKEN, departed=("c",)))
    assert witness.explains(JOINED, next_round("a", "b")) == (ProcessEnded("c"),)


def test_a_recovery_says_its_cause_and_whether_that_is_a_fact() -> None:
    timer = RecoveryTimer(FakeClock())
    timer.because((ProcessEnded("x"),))  # nothing has failed: somebody left
    timer.noticed()
    timer.because((ProcessEnded("b"), LeaseExpired("c")))
    timer.because((ProcessEnded("b"),))
    recovery = [timer.reached(phase) for phase in PHASES][-1]
    assert recovery is not None
    assert recovery.cause == (ProcessEnded("b"), LeaseExpired("c"))
    assert "b has ended (fact)" in str(recovery)
    assert "c is gone from the store, as if its host were silent (guess)" in str(recovery)
    timer.noticed()
    recovery = [timer.reached(phase) for phase in PHASES][-1]
    assert recovery is not None
    assert recovery.cause == ()
    assert "nobody was lost" in str(recovery)
