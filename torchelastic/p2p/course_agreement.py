"""The ranks of a group ask each other whether they do the same in a step, over the store of the round.

Only a rank that is at a point where it was not in the step before asks; see `group.step_course`. It announces the
point, and every rank that comes to it says what it has there. One that has passed it already cannot: it may wait in a
reduction for the very rank that asks. Its thread of the heartbeat answers in its stead, and gives the group up if the
steps differ, which frees it.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from torch.distributed.distributed_c10d import Store

from torchelastic.errors import is_retryable
from torchelastic.group.step_course import (
    END,
    SKIP,
    OthersDifferError,
    Point,
    PointAnswer,
    Skip,
    StepCourse,
    answer,
    differ_error,
    difference,
    strange_ranks,
)

#: For so long who asks is given the time to read why the group is given up.
HEARD_S = 0.2
#: How often an answer is looked for: soon at first, then ever more rarely.
FIRST_LOOK_S = 0.0002
LAST_LOOK_S = 0.05
_ASKED = "course/asked"
_ALL = "all"


class _Question(NamedTuple):
    """A rank waits for the others at a point of a step."""

    step: int
    place: int
    rank: int
    point: Point
    reason: str

    @property
    def key(self) -> str:
        return f"course/{self.step}/{self.place}"


class CourseAgreement:
    """One per group. `look` is for the thread of the heartbeat, all else for the training thread.

    Args:
        store: of the round.
        rank: of this worker.
        world_size: of the group; more than one.
        raise_if_ended: raises RuntimeError if the others come no more.
        cut: gives the group up, from any thread.
        sleep: lets time pass.

    Attributes:
        parted: why this rank's thread has given the group up; None: it has not.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        raise_if_ended: Callable[[], None],
        cut: Callable[[], object],
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._raise_if_ended, self._cut, self._sleep = raise_if_ended, cut, sleep
        self.parted: RuntimeError | None = None
        self._course: StepCourse | None = None
        self._heard = 0
        self._asked: dict[tuple[int, int], list[_Question]] = {}
        self._lock = threading.Lock()
        self._answered: set[tuple[int, int]] = set()
        self._has_ended = False

    def enter(self, course: StepCourse) -> None:
        """See `step_course.Agreement`."""
        self._course = course

    def cause_of(self, error: Exception) -> Exception:
        """Why a step has failed on this rank, whose error may come from the group being given up."""
        parted = self.parted
        if parted is None or not is_retryable(error) or error is parted:
            return error
        parted.__cause__ = error
        return parted

    def end(self) -> None:
        """This worker leaves the group: nothing is given up any more."""
        with self._lock:
            self._has_ended = True

    def is_asked(self, step: int, index: int) -> bool:
        """See `step_course.Agreement`."""
        return self.parted is not None or (bool(self._asked) and (step, index) in self._asked)

    def ask(self, step: int, index: int, point: Point, reason: str = "") -> Skip | None:
        """See `step_course.Agreement`."""
        mine = _Question(step, index, self._rank, point, reason)
        self._raise_if_parted()
        self._answer(self._store, mine)
        number = self._store.add(_ASKED, 1)
        self._store.set(f"{_ASKED}/{number}", json.dumps(mine))
        verdict = self._wait_for(f"{mine.key}/verdict")
        if verdict != _ALL.encode():
            self._store.set(f"{mine.key}/heard", "")
            asker, passer = (_asked(each) for each in json.loads(verdict))
            raise self._parted_by(asker, passer, mine)
        answers = self._store.multi_get([f"{mine.key}/{rank}" for rank in range(self._world_size)])
        return _agreed(step, self._rank, [_asked(each) for each in answers])

    def look(self, store: Store) -> None:
        """PointAnswer for the training thread what it cannot answer any more.

        Args:
            store: a connection of the thread's own.
        """
        course, asked = self._course, store.add(_ASKED, 0)
        while self._heard < asked and store.check([f"{_ASKED}/{self._heard + 1}"]):
            self._heard += 1
            one = _asked(store.get(f"{_ASKED}/{self._heard}"))
            if one.rank != self._rank and (one.step, one.place) not in self._answered:
                self._asked.setdefault((one.step, one.place), []).append(one)
        if course is None or self.parted is not None:
            return
        for one in [one for ones in list(self._asked.values()) for one in ones]:
            if (one.step, one.place) in self._answered:  # by the training thread, meanwhile
                self._asked.pop((one.step, one.place), None)
                continue
            said = answer(one.step, one.place, one.point, course.passed, course.before)
            if said is PointAnswer.SAME:
                self._answer(store, one._replace(rank=self._rank))
            elif said is PointAnswer.OTHER:
                self._part(store, course, one)
                return

    def _part(self, store: Store, course: StepCourse, one: _Question) -> None:
        """A rank asks at a point that this one has passed otherwise: none of them can go on in this group."""
        passed = course.passed if one.step == course.passed.step else course.before
        points = passed.points if passed is not None else ()
        point = points[one.place] if one.place < len(points) else Point(END, 0, 0, ())
        mine = one._replace(rank=self._rank, point=point)
        self.parted = self._parted_by(one, mine, mine)
        store.set(f"{one.key}/verdict", json.dumps([one, mine]))
        for _ in range(int(HEARD_S / LAST_LOOK_S * 10)):
            if self._has_ended or store.check([f"{one.key}/heard"]):
                break
            self._sleep(LAST_LOOK_S / 10)
        with self._lock:
            if not self._has_ended:
                self._cut()

    def _parted_by(self, asker: _Question, passer: _Question, mine: _Question) -> RuntimeError:
        """The error of this rank, after one has asked at a point that another one has passed otherwise."""
        point = asker.point
        if self._course is not None:
            self._course.differs()
        if point.kind == SKIP and mine != asker:
            return OthersDifferError(Skip(asker.step, asker.reason, asker.rank, point.batches).text)
        what = difference({asker.rank: point, passer.rank: passer.point}, strange=asker.rank)
        is_own, is_in_parts = (
            mine.point != passer.point,
            passer.point.kind == END != point.kind and point.reductions > 0,
        )
        return differ_error(asker.step, what, is_own=is_own, is_in_parts=is_in_parts)

    def _answer(self, store: Store, mine: _Question) -> None:
        """Say what this rank has at a point, once."""
        with self._lock:
            if (mine.step, mine.place) in self._answered:
                return
            self._answered.add((mine.step, mine.place))
        store.set(f"{mine.key}/{self._rank}", json.dumps(mine))
        if store.add(f"{mine.key}/count", 1) == self._world_size:
            store.set(f"{mine.key}/verdict", _ALL)

    def _wait_for(self, key: str) -> bytes:
        pause_s = FIRST_LOOK_S
        while not self._store.check([key]):
            self._raise_if_parted()
            self._raise_if_ended()
            self._sleep(pause_s)
            pause_s = min(1.5 * pause_s, LAST_LOOK_S)
        return bytes(self._store.get(key))

    def _raise_if_parted(self) -> None:
        if self.parted is not None:
            raise self.parted


def _agreed(step: int, rank: int, answers: list[_Question]) -> Skip | None:
    """What becomes of a step at a point to which all ranks have come; raises RuntimeError if they differ."""
    points = {number: one.point for number, one in enumerate(answers)}
    skips = [one for one in answers if one.point.kind == SKIP]
    if skips and len({point.batches for point in points.values()}) == 1:
        return Skip(step, skips[0].reason, answers.index(skips[0]), skips[0].point.batches)
    what = difference(points)
    if what:
        raise differ_error(step, what, is_own=rank in strange_ranks(points))
    return None


def _asked(words: Any) -> _Question:
    step, index, rank, point, reason = json.loads(words) if isinstance(words, bytes) else words
    return _Question(int(step), int(index), int(rank), _point(point), str(reason))


def _point(fields: Any) -> Point:
    kind, batches, reductions, steps = fields
    return Point(str(kind), int(batches), int(reductions), tuple(int(each) for each in steps))
