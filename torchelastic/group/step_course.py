"""What each rank does in a train step, compared before a step in which one of them does something else can count.

A step is a row of points: a forward pass, where it sends buffers, the reduction of gradients, the end. (Where a model
is sharded: the forward pass, the backward pass, of which the reduction is a part, what precedes the optimizers, the
end.) At each point stands what the rank has done so far in this step: batches drawn, reductions begun, optimizer steps.
As long as every point is the one of the step before, a rank asks nobody: its peers take part in the same reductions, so
they are at the same point. At any other one it asks all ranks, before it takes part in a reduction or commits: whether
it is theirs too. So a rank that returns early, leaves out its optimizer or draws twice is found in that very step, and
two reductions that belong to different steps never meet.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol

from torchelastic.errors import RetryableException
from torchelastic.text import listed

#: Kinds of points.
FORWARD, BACKWARD, REDUCTION, END, SKIP = "forward", "backward", "reduction", "end", "skip"
#: In place of BACKWARD or REDUCTION, of a loss that has a count.
COUNTED = "counted"


class Point(NamedTuple):
    """What a rank has done in a step when it comes to this point.

    Attributes:
        kind: see above.
        batches: global batches drawn.
        reductions: of gradients, begun before this point.
        optimizer_steps: of each optimizer.
    """

    kind: str
    batches: int
    reductions: int
    optimizer_steps: tuple[int, ...]


class Passed(NamedTuple):
    """The points that a rank has passed, or waits at, in the step that begins after `step` committed ones."""

    step: int
    points: Sequence[Point]


@dataclass(frozen=True)
class Skip:
    """A step that is to be left out.

    Attributes:
        step: committed steps before it.
        reason: in the user's words.
        rank: who has asked for it.
        batches: that are left out with it.
    """

    step: int
    reason: str
    rank: int
    batches: int

    @property
    def text(self) -> str:
        """For people."""
        return f"step {self.step + 1} is skipped by rank {self.rank}: {self.reason}"


class PointAnswer(Enum):
    """What another rank's point is to a rank that is asked."""

    SAME = "it was at the same point, and has gone on"
    OTHER = "it has passed that point otherwise"
    OPEN = "it is not there yet, or waits there"


def answer(asked: int, index: int, point: Point, present: Passed, before: Passed | None) -> PointAnswer:
    """What a rank that is asked has to say. Pure.

    Args:
        asked: the step in question, by the committed ones before it.
        index: of the point in that step.
        point: of the rank that asks.
        present: of the rank that is asked.
        before: the same of its step before; None: it has committed none in this group.
    """
    passed = present if asked >= present.step else before
    if asked > present.step:
        return PointAnswer.OPEN
    if passed is None or passed.step != asked:
        return PointAnswer.OTHER
    if index < len(passed.points):
        return PointAnswer.SAME if passed.points[index] == point else PointAnswer.OTHER
    return PointAnswer.OPEN if passed is present else PointAnswer.OTHER


def difference(points: Mapping[int, Point], strange: int = -1) -> str:
    """How ranks differ at a point of their steps, for people; empty: they do not. Pure.

    Args:
        points: by rank.
        strange: a rank that is known to have done what it did not in its step before.

    >>> difference({0: Point("reduction", 1, 0, (0,)), 1: Point("end", 1, 0, (0,))})
    'rank 1 ended the step without a backward pass, where rank 0 averaged gradients'
    """
    groups: dict[Point, list[int]] = {}
    for rank, point in sorted(points.items()):
        groups.setdefault(point, []).append(rank)
    if len(groups) < 2:
        return ""
    (usual, many), *others = sorted(groups.items(), key=lambda pair: (strange in pair[1], -len(pair[1])))
    return "; ".join(f"{_who(few)} {_against(point, usual, _who(many))}" for point, few in others)


def digest_of_usual(points: Sequence[Point]) -> int:
    """A number that is equal where these are; 0: there are none. Pure."""
    return zlib.crc32(repr(tuple(points)).encode()) if points else 0


def strange_ranks(points: Mapping[int, Point]) -> frozenset[int]:
    """The ranks that are not at the point of most; where two points have equally many, all are strange. Pure."""
    counts: dict[Point, int] = {}
    for point in points.values():
        counts[point] = counts.get(point, 0) + 1
    most = max(counts.values())
    usual = [point for point, count in counts.items() if count == most]
    return frozenset(rank for rank, point in points.items() if len(usual) > 1 or point != usual[0])


def _who(ranks: Sequence[int]) -> str:
    return listed(list(ranks)) if len(ranks) < 6 else f"{len(ranks)} ranks"


def _against(point: Point, usual: Point, others: str) -> str:
    """What is different, the first thing that is."""
    if point.batches != usual.batches:
        return f"drew {_batches(point.batches)}, and {others} {_batches(usual.batches)}"
    if point.kind != usual.kind:
        return f"{_DOES[point.kind](point)}, where {others} {_DOES[usual.kind](usual)}"
    if point.reductions != usual.reductions:
        return f"had {point.reductions} backward passes with a reduction, and {others} {usual.reductions}"
    steps, usual_steps = sum(point.optimizer_steps), sum(usual.optimizer_steps)
    if not steps or not usual_steps:
        return (
            f"{'called' if steps else 'left out'} optimizer.step(), which {others} {'left out' if steps else 'called'}"
        )
    return f"called optimizer.step() {steps} times, and {others} {usual_steps} times"


def _batches(count: int) -> str:
    return f"{count} batch" if count == 1 else f"{count} batches"


def _ends(point: Point) -> str:
    if not point.reductions:
        return "ended the step without a backward pass"
    return "ended the step" if sum(point.optimizer_steps) else "ended the step without optimizer.step()"


_DOES: Mapping[str, Callable[[Point], str]] = {
    FORWARD: lambda _: "went forward through the model",
    BACKWARD: lambda _: "went backward through the model",
    REDUCTION: lambda _: "averaged gradients",
    COUNTED: lambda _: "called state.backward()",
    END: _ends,
    SKIP: lambda _: "skipped the step",
}


class StepsDifferError(RuntimeError):
    """This rank has done something else in a step than the others; it is undone on all of them, and repeated."""


class OthersDifferError(RetryableException):
    """Another rank has: the step is undone here, too, and repeated."""


class SkippedError(Exception):
    """Ends the user's code in a step that is left out."""


class RehearsedError(Exception):
    """Ends a step that was computed only to compare it with the next attempt: it is undone, in the same group."""


def differ_error(step: int, what: str, *, is_own: bool, is_in_parts: bool = False) -> RuntimeError:
    """The error that undoes a step in which ranks have parted.

    Args:
        step: committed steps before it.
        what: from `difference`.
        is_own: whether it is this rank that is strange.
        is_in_parts: whether the strange rank has more gradients to average, when the others have ended the step.
    """
    undone = ", so it is undone on all of them and repeated; "
    remedy = "to leave a batch out on purpose call state.skip_step(reason) before backward()"
    if is_in_parts:
        remedy = "put forward and backward passes of all micro batches but the last under state.no_sync()"
    text = f"step {step + 1}: {what}. A step has to do the same on every rank{undone}{remedy}"
    return StepsDifferError(text) if is_own else OthersDifferError(text)


class Agreement(Protocol):
    """How the ranks of a group ask each other; `p2p.course_agreement` has the real one."""

    def enter(self, course: StepCourse) -> None:
        """PointAnswer for this course from now on."""

    def is_asked(self, step: int, index: int) -> bool:
        """Whether another rank is known to wait for an answer at this point. Costs next to nothing."""

    def ask(self, step: int, index: int, point: Point, reason: str = "") -> Skip | None:
        """Wait until all ranks are at this point of their steps, or one is known not to be.

        Returns:
            None: all are, and go on. Else the step is left out, by all.

        Raises:
            RuntimeError: they differ, or a peer is lost.
        """


def nowhere(_: str) -> None:
    """Of points that nobody wants to know."""


class StepCourse:
    """The course of one state's steps. On the training thread; `passed` and `before` are read from any.

    Args:
        batches: how many global batches this step has drawn.
        reductions: how many reductions of gradients it has begun.
        optimizer_steps: how often each optimizer has stepped in it.
        check_end: raises RuntimeError where the step cannot end as it is.

    Attributes:
        passed: of the step under way.
        before: of the last one that was committed in this group; None: none was.
        skip: the step under way is to be left out; None: it is not.
        is_common: whether all ranks of the group that is being synchronized are known to have the same usual course.
        withdrawn: the number of a step that must not count where others have committed it, since they had only a part
            of this rank's gradients; 0: there is none.
        goes_back: whether the sync that has ended went back behind such a step.
    """

    def __init__(
        self,
        batches: Callable[[], int],
        reductions: Callable[[], int],
        optimizer_steps: Callable[[], tuple[int, ...]],
        check_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._batches, self._reductions, self._optimizer_steps = batches, reductions, optimizer_steps
        self._check_end = check_end
        self.passed = Passed(0, ())
        self.before: Passed | None = None
        self.skip: Skip | None = None
        self.is_common = self.goes_back = False
        self.withdrawn = 0
        self._is_wished = False
        self._points: list[Point] = []
        self._usual: Sequence[Point] = ()
        self._agreement: Agreement | None = None

    def enter(self, agreement: Agreement | None) -> None:
        """A new group is in sync.

        Args:
            agreement: of the group; None: this worker is alone in it, or the coordinator has none.
        """
        self._agreement, self.before, self.skip, self.withdrawn = agreement, None, None, 0
        if not self.is_common:
            self._usual = ()  # so that the first step asks at each point
        self.is_common = False
        if agreement is not None:
            agreement.enter(self)

    @property
    def usual(self) -> Sequence[Point]:
        """The points of the last step that was compared, or was as that one."""
        return self._usual

    def begin(self, step: int) -> None:
        """A step begins, after so many committed ones."""
        self.skip, self._is_wished = None, False
        self._points = []
        self.passed = Passed(step, self._points)

    def pass_(self, kind: str) -> None:
        """This rank is at a point of its step: called before it takes part in what belongs to it.

        Raises:
            SkippedError: the step is left out.
            RuntimeError: the ranks differ, or a peer is lost.
        """
        agreement = self._agreement
        if agreement is None:
            return
        points, usual = self._points, self._usual
        index, point = len(points), Point(kind, self._batches(), self._reductions(), self._optimizer_steps())
        points.append(point)  # first: from here on it is the answer to whoever asks
        if index < len(usual) and usual[index] == point and not agreement.is_asked(self.passed.step, index):
            return
        try:
            skip = agreement.ask(self.passed.step, index, point)
        except RuntimeError:
            if kind != END and point.reductions:  # the others may have taken what it has averaged for the whole
                self.withdrawn = self.passed.step + 1
            raise
        if skip is not None:
            self.skip = skip
            raise SkippedError(skip.reason)

    def end(self) -> None:
        """The user's code of the step has returned; raises what `pass_` does, and what `check_end` does."""
        if self.skip is not None:  # the user's code has caught the error that ends a step which is left out
            raise SkippedError(self.skip.reason)
        self._check_end()
        self.pass_(END)

    def wish_skip(self, reason: str, rank: int) -> SkippedError:
        """This rank wants to leave the step out. Returns what ends the user's code; then comes `agree_to_skip`."""
        self.skip, self._is_wished = Skip(self.passed.step, reason, rank, self._batches()), True
        return SkippedError(reason)

    def agree_to_skip(self) -> Skip:
        """The user's code has ended in a step that is to be left out: asks the others, where this rank has wished it.

        Where they have not asked, and may be in a reduction, the step is undone by all: in the next attempt, the first
        of its group, every rank asks at every point, and hears it in time.

        Returns:
            What all ranks leave out now.

        Raises:
            RuntimeError: the step is undone, and comes again; or a peer is lost.
        """
        skip, agreement = self.skip, self._agreement
        assert skip is not None
        if agreement is None or not self._is_wished:
            return skip
        point = Point(SKIP, skip.batches, self._reductions(), self._optimizer_steps())
        place = len(self._points)
        self._points.append(point)
        try:
            return agreement.ask(self.passed.step, place, point, skip.reason) or skip
        except StepsDifferError as error:
            if point.reductions:
                raise StepsDifferError(
                    f"step {skip.step + 1}: rank {skip.rank} skips it ({skip.reason}) after its gradients were "
                    "averaged, and not every rank does: call state.skip_step before backward(), or on all ranks alike"
                ) from error
            raise OthersDifferError(skip.text) from error

    def differs(self) -> None:
        """The ranks have parted in the step under way: the next one of this state asks at every point."""
        self._usual = ()

    def committed(self) -> None:
        """The step counts, or was left out by all."""
        self.before = self.passed
        if self._points and self._points[-1].kind == END:
            self._usual = self._points

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_agreement": None}  # of this process's group
