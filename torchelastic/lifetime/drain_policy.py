"""The drain policy: which ranks leave a run before a deadline, and when all of them save and stop. Pure.

Deadlines are those of machines: a run may go on without some of its members. When fewer than `min_workers` are left it
cannot; that moment is the deadline of all, and is met by a save (`decision`). A rank whose deadline is clearly earlier
leaves at the end of a step, and the others train on.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torchelastic.lifetime.decision import TRIAL_BELOW_S, StopDecision, decide
from torchelastic.lifetime.sample import MAX_DELAY_S, NEAR_ITERATIONS, Sample

#: Deadlines less than this apart are treated as one, to avoid another rendezvous.
TOGETHER_S = 30.0
#: Draining takes so long besides a few steps: the agent, etcd, and one more round if this member alone has the best
#: state.
LEAVE_S = 5.0
#: How many of the slowest steps draining takes at most.
_LEAVE_STEPS = 4


@dataclass(frozen=True)
class StopPlan:
    """What the ranks of a group do after this step; the same on all of them.

    Attributes:
        stops: whether all of them save and stop now.
        decision: on the end of the run, with its reason and numbers.
        leaving: the ranks that leave by themselves now, so that the others can go on.
        end_s: seconds until fewer than `min_workers` are left, negative if that is over; infinite: never.
        decide_again_in: so many steps may be trained before there is anything to decide again,
        decide_again_s: unless so many seconds pass before.
    """

    stops: bool
    decision: StopDecision
    leaving: frozenset[int]
    end_s: float
    decide_again_in: int = 0
    decide_again_s: float = 0.0


def end_of_run(remaining_s: Sequence[float], min_workers: int) -> tuple[float, frozenset[int]]:
    """How long the run can go on in the present group, and which ranks have to leave clearly before that.

    Args:
        remaining_s: by rank, seconds until its own deadline; infinite: none is known.
        min_workers: with fewer members the run cannot go on.

    Raises:
        ValueError: there are no ranks, or a time is NaN.

    >>> end_of_run([100.0, math.inf, math.inf], min_workers=2)
    (inf, frozenset({0}))
    >>> end_of_run([100.0, math.inf, math.inf], min_workers=3)
    (100.0, frozenset())
    >>> end_of_run([100.0, 101.0, 100.5], min_workers=1)
    (100.0, frozenset())
    """
    if not remaining_s or any(math.isnan(seconds) for seconds in remaining_s):
        raise ValueError(f"remaining_s is {list(remaining_s)}: give the seconds that each rank has left")
    ordered = sorted(remaining_s)
    needed = min(max(1, min_workers), len(ordered))
    last_s = ordered[len(ordered) - needed]
    end_s = min(seconds for seconds in ordered if seconds >= last_s - TOGETHER_S)
    return end_s, frozenset(rank for rank, seconds in enumerate(remaining_s) if seconds < end_s)


def on_hosts(remaining_s: Sequence[float], hosts: Sequence[str]) -> list[float]:
    """By rank, the shortest time of all ranks of its host: they end together, but may not know at the same moment.

    >>> on_hosts([math.inf, 8.0, math.inf], ["a", "a", "b"])
    [8.0, 8.0, inf]
    """
    shortest: dict[str, float] = {}
    for host, seconds in zip(hosts, remaining_s, strict=True):
        shortest[host] = min(seconds, shortest.get(host, math.inf))
    return [shortest[host] for host in hosts]


def leave_lead_s(step_s: float, reserve_s: float) -> float:
    """How long before its deadline a member begins to drain, so that it has left in time and no step is rolled back."""
    return reserve_s + LEAVE_S + _LEAVE_STEPS * step_s


def plan_stop(
    remaining_s: Sequence[float],
    common: Sample,
    *,
    min_workers: int,
    reserve_s: float,
    at_once_s: Sequence[float] | None = None,
    may_try: Collection[str] = (),
    trial_below_s: float = TRIAL_BELOW_S,
    is_saved: bool = False,
) -> StopPlan:
    """What to do after this step.

    Args:
        remaining_s: by rank, seconds until its own deadline.
        common: what the ranks have agreed on: how long a step and the saves take.
        min_workers: with fewer members the run cannot go on.
        at_once_s: by rank, `Sample.at_once_s`: where it is finite, it is not known when that rank ends, so it leaves at
            once if the others can go on, and else all save at once; None: all is known.
        reserve_s: see `decision.decide`, as for the others.
        may_try: see there.
        trial_below_s: see there.
        is_saved: see there.

    Raises:
        ValueError: see `end_of_run`.
    """
    end_s, early = end_of_run(remaining_s, min_workers)
    unsure_s = [math.inf] * len(remaining_s) if at_once_s is None else at_once_s
    staying_s = min((seconds for rank, seconds in enumerate(unsure_s) if rank not in early), default=math.inf)
    at_once = None if staying_s == math.inf else staying_s
    decision = decide(
        end_s,
        common.step,
        common.tiers,
        reserve_s=reserve_s,
        at_once_s=at_once,
        may_try=may_try,
        trial_below_s=trial_below_s,
        may_try_step=common.may_try_step,
        is_saved=is_saved,
    )
    step_s = 0.0 if common.step is None else common.step.seconds
    save_s = max(tier.bound.seconds for tier in common.tiers)
    lead_s = leave_lead_s(step_s, reserve_s)
    slack_s = end_s - step_s - save_s - reserve_s
    if early and slack_s <= lead_s - reserve_s:
        leaving = early  # they would be gone in the middle of the others' save
    else:
        leaving = frozenset(rank for rank in early if remaining_s[rank] <= lead_s or unsure_s[rank] < math.inf)
        if leaving:  # who would follow at once leaves at the same step
            leaving |= frozenset(rank for rank in early if remaining_s[rank] <= lead_s + LEAVE_S)
    if decision.stops and (not leaving or slack_s < -reserve_s / 2.0):
        return StopPlan(True, decision, frozenset(), end_s)
    until_s = min([slack_s, *(remaining_s[rank] - lead_s for rank in early - leaving)])
    wait_s = min(until_s / 2.0, MAX_DELAY_S)
    slowest_s = max(step_s, common.usual_s)
    steps = max(0, int(wait_s / slowest_s)) if slowest_s > 0.0 else 0  # that surely take less
    return StopPlan(False, decision, leaving, end_s, steps, wait_s if steps else 0.0)


def near_below_s(sample: Sample, reserve_s: float, *, may_leave: bool = True) -> float:
    """With less time left than this, a rank notifies the others, so that all know before there is a decision to take.

    Args:
        sample: of this rank, or of all.
        reserve_s: see `decision.decide`.
        may_leave: whether the others may go on without a rank that leaves.
    """
    step_s = 0.0 if sample.step is None else sample.step.seconds
    save_s = max(tier.bound.seconds for tier in sample.tiers)
    # sent in one agreement and read in the next, each at most MAX_DELAY_S or one step after the other
    until_known_s = 2.0 * MAX_DELAY_S + NEAR_ITERATIONS * sample.far_s
    lead_s = leave_lead_s(step_s, reserve_s) if may_leave else reserve_s
    return step_s + save_s + lead_s + until_known_s


def who_requeues(jobs: Sequence[str], going: Collection[int]) -> frozenset[int]:
    """The ranks that requeue their job: one of each job all of whose ranks leave.

    Args:
        jobs: by rank, the id of the scheduler's job that it belongs to; "": none.
        going: the ranks that leave.

    >>> sorted(who_requeues(["7", "7", "8", "8", ""], {0, 1, 3, 4}))
    [0]
    """
    found = set()
    for job in set(jobs) - {""}:
        ranks = [rank for rank, name in enumerate(jobs) if name == job]
        if all(rank in going for rank in ranks):
            found.add(ranks[0])
    return frozenset(found)
