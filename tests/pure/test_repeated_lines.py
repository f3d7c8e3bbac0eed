"""Lines that workers say again and again: what of them is shown, and when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchelastic.agent.repeats import MOST_TEXT, Again, Repeats, Said

WORDS = "NCCL WARN the same words"


def err(text: str, worker: int = 0) -> Said:
    return Said(worker, "stderr", text)


def shown(repeats: Repeats, *lines: Said, now_s: float = 0.0) -> list[Said | Again]:
    return [part for line in lines for part in repeats.said(line, now_s)]


def test_a_line_is_shown_at_once_the_first_times_and_then_counted() -> None:
    repeats = Repeats(shown=3, within_s=10.0)
    lines = [err(WORDS, worker) for worker in (0, 1, 0, 2, 3, 3)]
    assert shown(repeats, *lines) == lines[:3]
    assert repeats.due(9.9) == []
    assert repeats.due(10.0) == [Again((2, 3), "stderr", WORDS, 3)]
    assert repeats.due(30.0) == [], "it is told once"


def test_who_goes_on_goes_on_being_counted_and_who_was_quiet_is_shown_again() -> None:
    repeats = Repeats(shown=1, within_s=10.0)
    assert shown(repeats, err(WORDS), err(WORDS)) == [err(WORDS)]
    assert repeats.due(10.0) == [Again((0,), "stderr", WORDS, 1)]
    assert shown(repeats, err(WORDS, 1), now_s=12.0) == []
    assert repeats.due(20.0) == [Again((1,), "stderr", WORDS, 1)]
    assert repeats.due(30.0) == []
    assert shown(repeats, err(WORDS), now_s=31.0) == [err(WORDS)]


@pytest.mark.parametrize(
    ("one", "other", "are_same"),
    [
        ("2026-11-22 10:00:01,123 WARNING slow", "2026-11-22 10:00:02,456 WARNING slow", True),
        ("[2026-11-22T10:00:01.1Z] slow", "[2026-11-22T10:00:09.9Z] slow", True),
        ("W1122 10:00:01.000001 slow", "W1122 10:00:01.000002 slow", True),
        ("[rank0]: ValueError: x", "[rank12]: ValueError: x", True),
        ("[rank0]:[W1122 10:00:01.1 a.cpp:7] x", "[rank1]:[W1122 10:00:02.2 a.cpp:7] x", True),
        ("WARNING rank 0, round 1, step 7: x", "WARNING rank 1, round 1, step 8: x", True),
        ("step 7 loss 0.5", "step 8 loss 0.5", False),
        ("eta 10:00:01", "eta 10:00:02", False),
        ("2026-11-22 step 1", "2026-11-22 step 2", False),
    ],
)
def test_the_time_of_day_and_the_rank_at_the_beginning_make_no_other_line(one: str, other: str, are_same: bool) -> None:
    repeats = Repeats(shown=1)
    assert len(shown(repeats, err(one), err(other))) == (1 if are_same else 2)


def test_what_else_makes_lines_the_same_may_be_said() -> None:
    repeats = Repeats(shown=1)
    lines = [Said(0, "stderr", f'{{"at_s": {at_s}}}', "slow") for at_s in (1, 2)]
    assert shown(repeats, *lines) == lines[:1]
    assert repeats.rest() == [Again((0,), "stderr", "slow", 1)]


TRACEBACK = [
    "Traceback (most recent call last):", '  File "a.py", line 3, in <module>', "    f()", "    ^^^", "",
    "The above exception was the direct cause of the following exception:", "",
    "Traceback (most recent call last):", '  File "a.py", line 9, in <module>', "    g()", "    ^^^", "ValueError: x",
]  # fmt: skip


def test_a_traceback_is_whole_though_its_frames_come_again_and_again_in_it() -> None:
    repeats = Repeats(shown=1)
    chained = [*TRACEBACK[:-1], "KeyError: y", *TRACEBACK[4:7], TRACEBACK[0], "  other", "ValueError: x"]
    assert shown(repeats, *map(err, chained)) == list(map(err, chained))


def test_the_same_traceback_of_many_workers_becomes_one_count() -> None:
    repeats = Repeats(shown=1)
    lines = [err(line, worker) for worker in (3, 1, 2) for line in TRACEBACK]
    assert [part for part in shown(repeats, *lines) if isinstance(part, Said)] == lines[: len(TRACEBACK)]
    (again,) = repeats.rest()
    assert isinstance(again, Again)
    assert (again.workers, again.times, again.text) == ((1, 2), 2, TRACEBACK[0])
    assert str(again) == f"2 more times: {TRACEBACK[0]} .. and {again.lines - 1} more lines after it"


def test_when_a_worker_ends_its_count_is_told_and_its_last_line_is_there() -> None:
    repeats = Repeats(shown=1)
    last = err("out of memory: " + "x" * 500, 1)
    assert shown(repeats, err(WORDS), err(last.text), err(WORDS, 1), err(WORDS, 1), last)[2:] == []
    assert repeats.ended(1) == [Again((1,), "stderr", WORDS, 2), last]
    assert repeats.ended(1) == [], "a second process of the worker begins anew"
    assert repeats.ended(0) == []
    assert repeats.rest() == []


def test_a_last_line_that_was_shown_or_told_of_is_not_shown_twice() -> None:
    repeats = Repeats(shown=1, within_s=10.0)
    shown(repeats, err(WORDS), err(WORDS), err("bye"))
    assert repeats.ended(0) == [Again((0,), "stderr", WORDS, 1)]
    shown(repeats, err(WORDS), now_s=1.0)
    assert repeats.due(10.0) == [Again((0,), "stderr", WORDS, 1)]
    assert repeats.ended(0) == []


def test_a_long_day_of_lines_takes_little_memory_and_loses_no_count() -> None:
    repeats = Repeats(shown=1, most=4)
    told = shown(repeats, *(err(f"{n:04} " + "x" * 10_000) for n in range(1000) for _ in range(2)))
    assert len(repeats._lines) == 4
    assert max(len(line.text) for line in repeats._lines.values()) == MOST_TEXT
    assert sum(part.times * part.lines for part in [*told, *repeats.rest()] if isinstance(part, Again)) == 1000


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from("abcdef"), st.floats(0.0, 8.0)), max_size=60))
def test_whatever_is_said_is_shown_or_counted_once(said: list[tuple[int, str, float]]) -> None:
    repeats, now_s, told = Repeats(shown=2, within_s=10.0, most=3), 0.0, list[Said | Again]()
    for worker, text, after_s in said:
        now_s += after_s
        told += repeats.said(err(text, worker), now_s)
        told += repeats.due(now_s)
        if text == "f":
            told += repeats.ended(worker)
    told += repeats.rest()
    assert sum(part.times * part.lines if isinstance(part, Again) else 1 for part in told) == len(said)
