"""Signs of work over a real store: who asks sees who is busy, and takes nothing that was said before the question."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from torch._C._distributed_c10d import HashStore

from tests.process.test_heartbeat import client_of, make_store
from tests.waiting import wait_until
from torchelastic.p2p.busy import BusySigns
from torchelastic.p2p.hang_location import HangLocation
from torchelastic.p2p.heartbeat import Heartbeat

HERE = HangLocation(0, 7, "train.py:41 evaluate")


class Two:
    """Ranks 0 and 1, a store and a clock."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.store = HashStore()
        clock: Callable[[], float] = lambda: self.now_s  # noqa: E731 - read by both
        self.busy, self.waiting = BusySigns(0, clock), BusySigns(1, clock)

    def exchange(self) -> None:
        self.busy.exchange(self.store)
        self.waiting.exchange(self.store)


def test_who_works_is_named_and_counts_as_busy_from_then_on() -> None:
    two = Two()
    assert two.waiting.idle_s() == 0.0, "counted from the first question"
    two.exchange()
    two.now_s = 3.0
    assert two.waiting.idle_s() == 3.0
    assert not two.waiting.is_busy(10.0)
    two.busy.give(HERE, works=True)
    assert two.busy.due.is_set(), "a beat later it may be too late"
    two.exchange()
    two.now_s = 4.0
    assert two.waiting.idle_s() == 1.0
    assert two.waiting.is_busy(1.5)
    assert not two.waiting.is_busy(1.0)
    assert two.waiting.who() == "rank 0, which works in train.py:41 evaluate"
    two.exchange()
    assert two.waiting.idle_s() == 1.0, "the same sign counts once"


def test_who_stands_is_remembered_and_is_not_busy() -> None:
    two = Two()
    two.waiting.idle_s()
    two.exchange()
    two.now_s = 3.0
    two.busy.give(HERE, works=False)
    two.exchange()
    assert two.waiting.stuck == HERE
    assert two.waiting.works is None
    assert two.waiting.idle_s() == 3.0


def test_who_stands_in_its_own_code_counts_as_busy_for_who_keeps_to_a_time_out() -> None:
    two = Two()
    two.waiting.idle_s()
    two.exchange()
    two.now_s = 3.0
    assert two.waiting.quiet_s() == 3.0
    two.busy.give(HERE, works=False)
    two.exchange()
    two.now_s = 4.0
    assert (two.waiting.quiet_s(), two.waiting.idle_s()) == (1.0, 4.0)
    assert two.waiting.who() == "rank 0, which is in its own code, in train.py:41 evaluate"
    two.exchange()
    assert two.waiting.quiet_s() == 1.0, "one that is stopped says nothing any more"
    two.waiting.rest()
    two.waiting.idle_s()
    two.now_s = 5.0
    assert two.waiting.quiet_s() == 1.0, "what was said before the question says nothing"


def test_what_was_said_before_the_question_or_by_the_rank_itself_or_is_rubbish_says_nothing() -> None:
    two = Two()
    two.busy.give(HERE, works=True)
    two.exchange()
    two.now_s = 1.0
    two.waiting.idle_s()
    two.exchange()
    assert not two.waiting.is_busy(10.0), "it may be of an earlier step"
    two.waiting.give(HangLocation(1, 7, "train.py:60 step"), works=True)
    two.exchange()
    two.exchange()
    two.store.set("busy/works", "rubbish")
    two.exchange()
    assert not two.waiting.is_busy(10.0)
    two.busy.give(HERE, works=True)
    two.exchange()
    assert two.waiting.is_busy(10.0)
    two.waiting.rest()
    assert not two.waiting.is_busy(10.0)
    two.waiting.idle_s()
    assert two.waiting.works is None, "a new question begins anew"


def test_a_slow_section_is_known_when_it_has_begun_and_until_it_ends() -> None:
    server = make_store()
    beats = [Heartbeat(client_of(server), rank, 2) for rank in range(2)]
    busy, waiting = beats[0].busy, beats[1].busy
    assert busy is not None
    assert waiting is not None
    waiting.idle_s()
    began_s = time.monotonic()
    busy.begin_section()
    busy.begin_section()
    assert time.monotonic() - began_s < 0.4, "it does not wait for a beat"
    wait_until(lambda: waiting.is_busy(0.4))
    assert waiting.who() == "a rank in a slow section"
    busy.end_section()
    wait_until(lambda: waiting.is_busy(0.4))
    busy.end_section()
    wait_until(lambda: not waiting.is_busy(0.4))
    busy.idle_s()
    busy.begin_section()
    threading.Event().wait(1.0)
    assert not busy.is_busy(10.0), "one's own says nothing of the others"
    for beat in beats:
        beat.end()


def test_only_a_number_is_taken_for_how_long_steps_take() -> None:
    for text, slowest_s in (("2.500", 2.5), ("1e400", None), ("rubbish", None)):
        two = Two()
        two.store.set("busy/slowest_s", text)
        two.exchange()
        assert two.waiting.slowest_s == slowest_s


def test_a_rank_alone_has_nobody_to_tell() -> None:
    assert Heartbeat(HashStore(), 0, 1).busy is None
