"""What each rank does in a step, and what a rank that is asked has to say."""

from __future__ import annotations

import pytest

from torchelastic.group.step_course import (
    END,
    FORWARD,
    REDUCTION,
    SKIP,
    OthersDifferError,
    Passed,
    Point,
    PointAnswer,
    Skip,
    SkippedError,
    StepCourse,
    StepsDifferError,
    answer,
    difference,
    strange_ranks,
)
from torchelastic.model.withdrawn_steps import standing
from torchelastic.rendezvous.records import StateProgress, StateStatus

PARTIAL, INITIAL, UNCOMMITTED, COMPLETE = StateStatus

USUAL = (
    Point(FORWARD, 1, 0, (0,)),
    Point(REDUCTION, 1, 0, (0,)),
    Point(END, 1, 1, (1,)),
)
RETURNS = Point(END, 1, 0, (0,))


@pytest.mark.parametrize(
    ("asked", "place", "point", "present", "before", "said"),
    [
        (5, 1, RETURNS, Passed(5, USUAL[:2]), None, PointAnswer.OTHER),  # it waits in its reduction
        (5, 1, RETURNS, Passed(5, USUAL[:1]), None, PointAnswer.OPEN),  # it is on its way there
        (5, 1, RETURNS, Passed(4, USUAL), None, PointAnswer.OPEN),  # it is a step behind
        (5, 1, USUAL[1], Passed(5, USUAL[:2]), None, PointAnswer.SAME),
        (5, 2, RETURNS, Passed(6, ()), Passed(5, USUAL), PointAnswer.OTHER),  # it has committed
        (5, 2, USUAL[2], Passed(6, ()), Passed(5, USUAL), PointAnswer.SAME),
        (5, 3, RETURNS, Passed(6, ()), Passed(5, USUAL), PointAnswer.OTHER),  # with fewer points
        (5, 0, RETURNS, Passed(6, ()), None, PointAnswer.OTHER),
        (5, 0, RETURNS, Passed(9, ()), Passed(8, USUAL), PointAnswer.OTHER),
    ],
)
def test_a_rank_that_has_passed_a_point_says_how(
    asked: int, place: int, point: Point, present: Passed, before: Passed | None, said: PointAnswer
) -> None:
    assert answer(asked, place, point, present, before) is said


def test_the_ranks_that_differ_are_those_of_the_few() -> None:
    points = {0: USUAL[1], 1: RETURNS, 2: USUAL[1]}
    assert strange_ranks(points) == {1}
    assert difference(points) == "rank 1 ended the step without a backward pass, where ranks 0, 2 averaged gradients"
    assert strange_ranks({0: USUAL[1], 1: RETURNS}) == {0, 1}, "of two nobody knows"
    assert difference({0: RETURNS, 1: USUAL[1]}, strange=0).startswith("rank 0 ended the step")
    assert difference(dict.fromkeys(range(3), USUAL[0])) == ""


class Peers:
    """Others who answer as they are told; what was asked is kept."""

    def __init__(self, result: Skip | RuntimeError | None = None) -> None:
        self.result, self.asked = result, [(0, 0, USUAL[0])][:0]
        self.waits_at: tuple[int, int] | None = None

    def enter(self, course: StepCourse) -> None:
        self.course = course

    def is_asked(self, step: int, place: int) -> bool:
        return self.waits_at == (step, place)

    def ask(self, step: int, place: int, point: Point, reason: str = "") -> Skip | None:
        self.asked.append((step, place, point))
        if isinstance(self.result, RuntimeError):
            raise self.result
        return self.result


class Step:
    """What a step has done so far."""

    batches, reductions, steps = 0, 0, 0

    def __init__(self, peers: Peers | None) -> None:
        self.course = StepCourse(lambda: self.batches, lambda: self.reductions, lambda: (self.steps,))
        self.course.enter(peers)

    def run(self, number: int, *, batches: int = 1, steps: int = 1) -> None:
        self.course.begin(number)
        self.batches, self.reductions, self.steps = batches, 0, 0
        self.course.pass_(FORWARD)
        self.course.pass_(REDUCTION)
        self.reductions, self.steps = 1, steps
        self.course.end()
        self.course.committed()


def test_who_does_the_same_in_each_step_asks_in_the_first_alone() -> None:
    peers = Peers()
    step = Step(peers)
    for number in range(4):
        step.run(number)
    assert peers.asked == [(0, place, point) for place, point in enumerate(USUAL)]


def test_who_does_something_else_asks_there_and_so_does_who_is_asked() -> None:
    peers = Peers()
    step = Step(peers)
    step.run(0)
    peers.asked.clear()
    step.run(1, steps=0)
    assert peers.asked == [(1, 2, Point(END, 1, 1, (0,)))]
    step.run(2)  # the usual course is that of the last step
    peers.asked.clear()
    peers.waits_at = (3, 1)
    step.run(3)
    assert peers.asked == [(3, 1, USUAL[1])]


def test_in_a_new_group_the_first_step_asks_unless_all_are_known_to_have_the_same_course() -> None:
    peers, step = Peers(), Step(Peers())
    step.run(0)
    step.course.is_common = True
    step.course.enter(peers)
    step.run(1)
    assert peers.asked == []
    step.course.enter(peers)
    step.run(2)
    assert len(peers.asked) == 3


def test_a_skip_that_others_do_not_hear_in_time_is_undone_first_and_one_after_the_reduction_is_refused() -> None:
    peers = Peers(StepsDifferError("they are elsewhere"))
    step = Step(None)
    step.course.enter(peers)
    step.course.begin(7)
    step.course.wish_skip("no number", rank=1)
    with pytest.raises(OthersDifferError, match="step 8 is skipped by rank 1: no number"):
        step.course.agree_to_skip()
    step.reductions = 1
    with pytest.raises(StepsDifferError, match="after its gradients were averaged"):
        step.course.agree_to_skip()
    peers.result = skip = Skip(7, "no number", 0, 1)
    assert step.course.agree_to_skip() == skip
    assert peers.asked[-1][2].kind == SKIP


def test_a_step_that_another_rank_skips_ends_at_the_next_point_and_again_where_that_was_caught() -> None:
    peers = Peers(Skip(0, "no number", 1, 1))
    step = Step(peers)
    step.course.begin(0)
    with pytest.raises(SkippedError, match="no number"):
        step.course.pass_(FORWARD)
    with pytest.raises(SkippedError, match="no number"):
        step.course.end()
    assert step.course.agree_to_skip() == peers.result


def test_a_worker_alone_asks_nobody_and_skips_by_itself() -> None:
    step = Step(None)
    step.run(0, batches=2)
    step.course.begin(1)
    step.course.wish_skip("no number", rank=0)
    assert step.course.agree_to_skip().reason == "no number"


def test_a_rank_that_could_not_average_the_rest_of_its_gradients_withdraws_what_others_have_committed() -> None:
    peers = Peers()
    step = Step(peers)
    step.run(0)
    step.course.begin(1)
    step.batches, step.reductions, step.steps = 1, 0, 0
    step.course.pass_(FORWARD)
    peers.result = OthersDifferError("it has ended the step")
    with pytest.raises(OthersDifferError):
        step.course.pass_(END)
    assert step.course.withdrawn == 0, "nothing was averaged"
    step.course.enter(peers)
    step.course.begin(1)
    peers.result = None
    step.course.pass_(FORWARD)
    step.course.pass_(REDUCTION)
    step.reductions, peers.result = 1, OthersDifferError("it has ended the step")
    with pytest.raises(OthersDifferError):
        step.course.pass_(FORWARD)
    step.course.begin(1)  # as each attempt to form a group does
    assert step.course.withdrawn == 2
    step.course.enter(peers)
    assert step.course.withdrawn == 0


@pytest.mark.parametrize(
    ("said", "withdrawn", "source"),
    [
        (((COMPLETE, 5), (COMPLETE, 4)), (0, 5), 1),
        (((COMPLETE, 5), (COMPLETE, 4)), (0, 0), 0),
        (((UNCOMMITTED, 4), (COMPLETE, 4)), (0, 5), 1),  # the weights are those after it
        (((COMPLETE, 4), (COMPLETE, 4)), (0, 5), 0),  # nobody has committed it
        (((COMPLETE, 5), (PARTIAL, 4)), (0, 5), 0),  # what was before it is lost
        (((COMPLETE, 5), (INITIAL, 0), (COMPLETE, 4)), (0, 0, 5), 2),
    ],
)
def test_the_source_is_who_holds_the_state_before_a_step_that_is_withdrawn(
    said: tuple[tuple[StateStatus, int], ...], withdrawn: tuple[int, ...], source: int
) -> None:
    progress = standing([StateProgress.of(*one) for one in said], withdrawn)
    assert progress.index(max(progress)) == source
