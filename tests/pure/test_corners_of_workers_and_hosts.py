"""Small decisions about a worker, a host and a deadline that no other test asks for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from tests.pure.status_runs import a_host
from torchelastic.agent.causes import LostElsewhere, report_of
from torchelastic.checkpoint.policy.costs import Bound
from torchelastic.data.batch_sampler import ElasticBatchSampler
from torchelastic.data.shares import SecondDeal
from torchelastic.doctor.etcd_rules import EtcdFacts, judge_commits
from torchelastic.doctor.meeting_rules import HostCard, MeetingFacts, judge_meeting
from torchelastic.group.peers import Alone
from torchelastic.lifetime.decision import SaveTarget
from torchelastic.lifetime.iteration_times import guess
from torchelastic.lifetime.sample import Sample
from torchelastic.log_lines import Position
from torchelastic.observe.status.run_status import EventLine
from torchelastic.observe.status.status_format import decode_host, encode_host
from torchelastic.p2p import hang_location, stragglers
from torchelastic.p2p.hang_location import HangLocation
from torchelastic.p2p.hangs import WARM_UP_STEPS
from torchelastic.p2p.step_clock import StepClock
from torchelastic.p2p.stragglers import StragglerPolicy
from torchelastic.testing.clock import FakeClock
from torchelastic.worker_stats import SimpleWorkerStats

# --- hangs and stragglers ---------------------------------------------------------------------------------------------


def test_words_about_a_hang_are_heard_only_if_somebody_noticed_one_and_nobody_is_waited_for() -> None:
    store = HashStore()
    hang_location.publish(store, 0, HangLocation(0, 7, "train.py:52 step"), has_noticed_hang=False)
    assert hang_location.collect(store, 3) == []
    hang_location.publish(store, 2, HangLocation(2, 8, "train.py:41 step"), has_noticed_hang=True)
    store.set("hang/location/1", "rubbish")
    assert hang_location.collect(store, 4) == [
        HangLocation(0, 7, "train.py:52 step"),
        HangLocation(2, 8, "train.py:41 step"),
    ]


def test_the_odd_ones_are_named_in_the_log_and_nothing_is_said_where_all_stood_together(
    caplog: pytest.LogCaptureFixture,
) -> None:
    together = [HangLocation(0, 7, "train.py:52 step"), HangLocation(1, 7, "train.py:52 step")]
    hang_location.log_outliers(together)
    assert caplog.text == ""
    hang_location.log_outliers([*together, HangLocation(2, 8, "train.py:41 step")])
    assert "when the group was aborted, rank 2 was in train.py:41 step (step 8), ranks 0, 1 in" in caplog.text


class RatesOfOthers(Alone):
    """Rank 2 of a group of three; the others tell these progress rates."""

    rank, world_size = 2, 3

    def __init__(self, *others: float | None) -> None:
        super().__init__()
        self._others = others
        self.own: list[float | None] = []

    def all_gather(self, value: Any) -> list[Any]:
        self.own.append(value)
        return [*self._others, value]


@pytest.mark.parametrize(("rate", "logged"), [(9.0, ""), (5.0, "rank 2 is a straggler: it runs at 50 % of the best")])
def test_a_straggler_is_named_with_its_rank_and_who_is_none_is_not(
    caplog: pytest.LogCaptureFixture, rate: float, logged: str
) -> None:
    comparison = stragglers.compare_rates(StragglerPolicy(), rate, 0, RatesOfOthers(10.0, 10.0))
    assert comparison is not None
    assert comparison.is_straggler == bool(logged)
    assert logged in caplog.text
    assert bool(caplog.text) == bool(logged)


@pytest.mark.parametrize("unknown", [None, float("nan"), float("inf"), -1.0])
def test_only_rates_that_are_known_are_compared(unknown: float | None) -> None:
    slowest = StragglerPolicy(threshold=1.0)
    told = RatesOfOthers(0.0, None)
    comparison = stragglers.compare_rates(slowest, 2.5, 0, told)
    assert comparison is not None
    assert (comparison.best, comparison.stragglers) == (2.5, 1)  # who tells no rate is none
    assert stragglers.compare_rates(slowest, unknown, 0, told) is None
    assert told.own == [2.5, None]
    assert stragglers.compare_rates(slowest, unknown, 0, Alone()) is None  # whose rates are none at all


def test_a_failure_between_two_steps_is_no_long_step() -> None:
    clock = FakeClock()
    steps = StepClock(clock)
    for _ in range(WARM_UP_STEPS + 1):
        steps.begin()
        clock.advance(1.0)
        steps.ended()
    steps.rest()
    clock.advance(100.0)
    steps.failed()
    steps.counts_failure(nobody_was_lost=True)
    assert steps.slowest_s == 1.0


def test_the_rate_that_a_worker_reports_is_the_one_it_was_given() -> None:
    assert [SimpleWorkerStats(rate).get_progress_rate() for rate in (2.5, None)] == [2.5, None]


# --- status -----------------------------------------------------------------------------------------------------------


def test_a_status_that_fits_nowhere_is_cut_down_to_the_host_itself() -> None:
    told = tuple(EventLine(at_s=1.0, kind="save", host="alpha", text=f"save {number}") for number in range(20))
    status = replace(a_host("alpha", 0, 1, 2), events=told)
    whole, least = decode_host("k", encode_host(status)), decode_host("k", encode_host(status, 1))
    assert (len(whole.workers), len(whole.events)) == (3, 20)
    assert (least.host, least.workers, least.events) == ("alpha", (), ())


def test_a_loss_elsewhere_that_came_second_is_told_after_what_came_first() -> None:
    first = LostElsewhere(at_s=1.0, member="alpha-1", how="has ended", certainty="fact")
    second = LostElsewhere(at_s=2.0, member="beta-1", how="is silent", certainty="guess", position=Position(3, 4, 5))
    report = report_of([second, first])
    assert report is not None
    assert report.text().splitlines() == [
        f"first, {first.who} has ended (fact): see that launcher's output",
        f"then {second.who} is silent (guess) (rank 3, round 4, step 5)",
    ]


# --- the doctor -------------------------------------------------------------------------------------------------------


def test_of_commits_that_nobody_timed_nothing_is_said() -> None:
    assert judge_commits(EtcdFacts(())) == []
    assert [one.what for one in judge_commits(EtcdFacts((), commits_s=(0.01,)))] != []


def test_a_host_that_met_nobody_is_not_compared_with_anybody() -> None:
    card = HostCard("node-1", "10.0.0.1", (4000,), "boot-1")
    (finding,) = judge_meeting(MeetingFacts(card, 2, 8.0))
    assert "1 of 2 hosts came within 8 s: node-1" in finding.what


# --- deadlines --------------------------------------------------------------------------------------------------------


def sample(*tiers: str) -> Sample:
    found = tuple(SaveTarget(name, guess(4.0, "no save was measured")) for name in tiers)
    return Sample(60.0, 0.5, guess(1.0, "measured here"), 1.0, 1, found, count=10, lived=10)


def test_ranks_agree_on_the_worst_of_each_number_and_say_whose_it_was() -> None:
    mine, other = sample("disk"), replace(sample("disk"), remaining_s=50.0, step=guess(3.0, "measured there"))
    agreed = mine.agreed([max(pair) for pair in zip(mine.numbers(), other.numbers(), strict=True)])
    assert agreed.remaining_s == 50.0
    assert agreed.step is not None
    assert (agreed.step.seconds, agreed.step.because) == (3.0, "the longest of all ranks' bounds")
    assert agreed.tiers[0].bound.because == "no save was measured", "its own number is the worst"


def test_what_one_rank_knows_of_the_steps_goes_before_what_others_think_of_their_first_ones() -> None:
    """Only one of them may see what the life before has left. The margin that counts as reserve is the smallest."""
    known = replace(sample("disk"), step=Bound(2.0, 0.9, False, 9, "seen", margin_s=0.5))
    first = replace(known, step=Bound(90.0, 0.9, False, 1, "one alone", margin_s=30.0), is_step_first=True)
    for own in (known, first):
        together = own.agreed([max(pair) for pair in zip(known.numbers(), first.numbers(), strict=True)])
        assert together.step is not None
        assert (together.step.seconds, together.step.margin_s, together.may_try_step) == (2.0, 0.5, False)
    other = replace(first, step=Bound(80.0, 0.9, False, 1, "one alone", margin_s=20.0))
    together = other.agreed([max(pair) for pair in zip(other.numbers(), first.numbers(), strict=True)])
    assert together.step is not None
    assert (together.step.seconds, together.step.margin_s, together.may_try_step) == (90.0, 20.0, True)
    tried = replace(other, is_step_tried=True)
    assert not first.agreed([max(pair) for pair in zip(tried.numbers(), first.numbers(), strict=True)]).may_try_step


@pytest.mark.parametrize(
    ("left_s", "interval"), [(600.0, 100), (100.0, 100), (99.0, 99), (4.0, 4), (0.5, 1), (-1.0, 1)]
)
def test_however_much_an_exchange_costs_there_is_one_in_time_if_steps_become_a_hundred_times_as_long(
    left_s: float, interval: int
) -> None:
    """A busy machine would exchange in every hundredth step of 5 ms, and half a second each that is 50 s."""
    far = replace(sample("disk"), remaining_s=700.0, usual_s=0.005, interval=100)
    near = replace(far, remaining_s=left_s)
    for own in (far, near):
        assert own.agreed([max(pair) for pair in zip(far.numbers(), near.numbers(), strict=True)]).interval == interval


def test_ranks_with_different_tiers_do_not_agree() -> None:
    with pytest.raises(ValueError, match="the ranks were given different tiers"):
        sample("disk").agreed(sample("disk", "memory").numbers())


# --- data -------------------------------------------------------------------------------------------------------------


def test_a_sampler_says_its_place_and_when_a_batch_was_dealt_out_again() -> None:
    sampler = ElasticBatchSampler(12, 4)
    sampler.set_world(1, 2)
    assert (sampler.rank, sampler.world_size, sampler.deals) == (1, 2, 0)
    assert sampler.pending_units() == ((2, 1), (3, 1))
    sampler.deal_again(SecondDeal(compute=(1,), carried=(3,), postponed=(0,)))
    assert sampler.deals == 1
    assert sampler.pending_units() == ((1, 1),)
    share = sampler.consume()
    assert (share.local_samples, share.global_samples, len(share.carried)) == (1, 3, 1)
    sampler.commit()
    assert sampler.postponed == (ElasticBatchSampler(12, 4).shares(0).load[0],)


@pytest.mark.parametrize("shards", [0, 5])
def test_a_logical_shard_has_at_least_one_sample(shards: int) -> None:
    with pytest.raises(ValueError, match=f"logical_shards={shards} must lie between 1 and global_batch_size=4"):
        ElasticBatchSampler(12, 4).set_logical_shards(shards)
