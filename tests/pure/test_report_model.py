"""A report's numbers: every nanosecond in its place, failures as one incident each, and what lacks is said."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.few_examples import examples
from tests.pure.report_runs import DAY_NS, MS, Host, Worker, group_of, journals_of, killed_run, steps
from torchelastic.observe.ledger.accounts import Account
from torchelastic.observe.ledger.host_ledger import HostLedger
from torchelastic.observe.ledger.journal import Journal
from torchelastic.observe.report.building import NoRunError, of_one_run, report_of
from torchelastic.observe.report.html_page import html_page
from torchelastic.observe.report.model import Report
from torchelastic.observe.report.segments import Segment


def ms(segment: Segment) -> tuple[float, float, dict[str, float]]:
    """From, to and what it was, in milliseconds."""
    parts = {account.label: ns / MS for account, ns in zip(Account, segment.amounts, strict=True) if ns}
    return segment.from_ns / MS, segment.to_ns / MS, parts


def check(report: Report) -> None:
    """Every life's accounts sum to its time; its cells have no gap and are full, from start to end."""
    assert report.why_wrong() == ""
    for life in report.lives:
        assert sum(life.amounts) == life.wall_ns
        assert not life.wall_ns or (life.cells[0].from_ns, life.cells[-1].to_ns) == (life.began_ns, life.until_ns)
        assert all(one.to_ns == other.from_ns for one, other in pairwise(life.cells))
        assert all(abs(sum(cell.amounts) - (cell.to_ns - cell.from_ns)) < 100 for cell in life.cells)
        assert all(min(cell.amounts) >= 0 for cell in life.cells)
    sums = [life.amounts for life in report.lives] + [sums.amounts for sums in report.earlier.values()]
    assert tuple(map(sum, zip(*sums, strict=True))) == report.seen.amounts
    assert report.seen.worker_ns == sum(report.seen.amounts)


def test_the_lives_of_a_killed_run_are_on_one_clock_although_those_of_its_hosts_differ() -> None:
    report = report_of(journals_of(killed_run()))
    check(report)
    assert report.began_ns == DAY_NS
    assert report.until_ns == 3120 * MS
    assert [life.name for life in report.lives] == ["alpha/0.0", "alpha/1.0", "beta/0.0", "beta/1.0", "beta/1.1"]
    assert [life.began_ns // MS for life in report.lives] == [0, 0, 5, 5, 1100]
    lost = report.lives[3]
    assert lost.is_loss
    assert lost.is_ended
    _from_ms, until_ms, parts = ms(lost.cells[-1])
    assert (until_ms, list(parts)) == (1040, ["replayed"])
    assert [life.is_loss for life in report.lives] == [False, False, False, True, False]


def test_what_another_host_tells_of_a_death_is_time_to_detect_of_that_failure_and_of_no_later_one() -> None:
    hosts = [Host("a"), Host("b", 50_000 * MS)]
    stays, dies = (Worker(host, "0.0") for host in hosts)
    group_of([stays, dies], 0, 1, 0)
    steps([stays, dies], 10, 2)
    dies.ends(300, -9)
    for round_, at_ms in ((2, 320), (3, 700)):
        stays.fails(at_ms)
        group_of([stays], at_ms + 10, round_, 2, "peer")
        stays.trains_again(at_ms + 100, 5, 5, 10)
    report = report_of(journals_of(hosts))
    check(report)
    assert report.lives[0].amounts[Account.DETECT] == 20 * MS
    assert [incident.detect_ns // MS for incident in report.incidents] == [20, 0]


def test_a_worker_that_was_told_of_a_death_in_the_middle_of_its_own_code_was_down_no_longer_than_that() -> None:
    """Its phases begin when it is told, and its step fails when that code has ended."""
    hosts = [Host("a"), Host("b")]
    stays, dies = (Worker(host, "0.0") for host in hosts)
    group_of([stays, dies], 0, 1, 0)
    steps([stays, dies], 10, 2)
    dies.ends(300, -9)
    stays.fails(450)
    group_of([stays], 460, 2, 2, "peer")
    stays.trains_again(600, 150, 5, 10, told_at_ms=305)
    (incident,) = report_of(journals_of(hosts)).incidents
    assert incident.phases_ns["detect"] == 5 * MS
    assert (incident.at_ns, incident.down_ns) == (300 * MS, 300 * MS)


def test_what_three_workers_of_two_hosts_tell_of_one_kill_is_one_failure_with_its_phases_and_its_victim() -> None:
    (incident,) = report_of(journals_of(killed_run())).incidents
    assert incident.at_ns == 1040 * MS
    assert incident.round == 1
    assert incident.step == 5
    assert [(one.name, one.how) for one in incident.lost] == [("beta/1.0", "killed by SIGKILL")]
    assert incident.causes == ("beta-1 has ended (fact)", "connection closed")
    assert (incident.noticed_by, incident.re_formed_by, incident.world_size) == (3, 3, 3)
    assert (incident.detect_ns, incident.replayed_ns) == (80 * MS, 90 * MS)
    assert incident.steps_back == 0
    assert incident.restored_from == "peer"
    assert {name: ns // MS for name, ns in incident.phases_ns.items()} == {
        "detect": 20, "agree": 15, "re_form": 10, "sync": 10, "step": 105,
    }  # fmt: skip
    assert incident.down_ns == 160 * MS


def test_a_whole_group_that_is_lost_with_its_agents_is_down_until_new_ones_train_from_the_checkpoint() -> None:
    old, new = [[Host("a"), Host("b")] for _ in range(2)]
    workers = [Worker(host, "0.0") for host in old]
    group_of(workers, 1_000, 1, 0)
    steps(workers, 1_010, 2)
    for worker in workers:
        worker.saves(1_220, 10)
    steps(workers, 1_220, 3)
    for worker in workers:
        worker.counted()  # the last that is known of them
    again = [Worker(host, "0.0", 60_000) for host in new]
    for worker in again:
        worker.name = worker.name.replace("-a1", "-b2")
    for host in new:
        host.events.clear()
    group_of(again, 143_000, 1, 2, "checkpoint")  # a new etcd counts its rounds anew
    steps(again, 143_510, 100)
    for worker in again:
        worker.counted()
    report = report_of({f"{host.name}-{era}": host.journal() for era, hosts in enumerate((old, new)) for host in hosts})
    check(report)
    (incident,) = report.incidents
    assert [one.how for one in incident.lost] == ["its agent was lost"] * 2
    assert {name: ns // MS for name, ns in incident.phases_ns.items()} == {
        "restart": 143_000 - 1_520, "sync": 10, "step": 600,
    }  # fmt: skip
    assert incident.down_ns == (143_610 - 1_520) * MS
    assert (incident.re_formed_by, incident.world_size, incident.outlived_by) == (2, 2, 0)
    assert (incident.step, incident.steps_back, incident.restored_from) == (5, 3, "checkpoint")
    assert (report.seen.failures, report.seen.restores_from_checkpoint) == (1, 1)


def test_a_worker_lost_before_its_first_group_stops_nobody_and_with_everybody_gone_that_is_said() -> None:
    host = Host("a", configured=2)
    stays = Worker(host, "0.0")
    group_of([stays], 10, 1, 0)
    steps([stays], 20, 3)
    Worker(host, "1.0", 100).ends(200, 1)
    steps([stays], 320, 3)
    stays.over(620)
    stays.ends(630)
    (incident,) = report_of(journals_of([host])).incidents
    assert (incident.round, incident.outlived_by, incident.phases_ns) == (-1, 1, {})
    assert "the others trained on" in html_page(report_of(journals_of([host])))
    stays.host.events.clear()
    alone = Worker(host, "0.0")
    group_of([alone], 10, 1, 0)
    steps([alone], 20, 3)
    alone.ends(330, -9)
    (incident,) = report_of(journals_of([host])).incidents
    assert (incident.outlived_by, incident.phases_ns) == (0, {})
    assert "nobody trained again after it" in html_page(report_of(journals_of([host])))


def test_going_back_to_a_checkpoint_costs_the_steps_since_then_also_of_those_who_are_gone() -> None:
    host = Host("a", configured=2)
    workers = [Worker(host, f"{place}.0") for place in (0, 1)]
    group_of(workers, 0, 1, 0)
    steps(workers, 10, 2)
    for worker in workers:
        worker.saves(220, 10)
    steps(workers, 220, 3)
    workers[1].ends(530, -9)
    workers[0].fails(540)
    workers[0].joins(550, 2, 0, 1)
    workers[0].synchronized(560, 2, "checkpoint")
    workers[0].trains_again(660, 5, 5, 10)
    workers[0].over(660)
    workers[0].ends(660)
    report = report_of(journals_of([host]))
    check(report)
    (incident,) = report.incidents
    assert (incident.step, incident.steps_back, incident.restored_from) == (5, 3, "checkpoint")
    stayed, gone = report.lives
    assert gone.amounts[Account.PRODUCTIVE] == 200 * MS
    assert gone.amounts[Account.REPLAYED] == 310 * MS
    assert stayed.amounts[Account.REPLAYED] == 310 * MS
    assert stayed.amounts[Account.DETECT] == 10 * MS
    assert [mark.kind for mark in report.marks].count("back") == 1


def test_saves_of_all_workers_are_one_row_and_outages_drains_and_stragglers_are_marked() -> None:
    host = Host("a")
    workers = [Worker(host, f"{place}.0") for place in (0, 1)]
    group_of(workers, 0, 1, 0)
    steps(workers, 10, 1)
    workers[0].saves(130, 20, "memory")
    workers[1].saves(150, 40, "memory")
    host.outage(200, 260)
    workers[0].straggles(55.0)
    workers[1].drains(300)
    workers[1].ends(310)
    host.outage(320)
    report = report_of(journals_of([host]))
    check(report)
    (save,) = report.saves
    assert (save.step, save.tier, save.workers) == (1, "memory", 2)
    assert (save.mean_ns, save.longest_ns, save.at_ns) == (30 * MS, 40 * MS, 150 * MS)
    marks = [(mark.kind, mark.at_ns // MS, mark.place) for mark in report.marks]
    assert marks == [
        ("join", 0, "a/0"), ("join", 0, "a/1"), ("straggler", 130, "a/0"), ("outage", 200, ""), ("drain", 300, "a/1"),
        ("end", 310, "a/1"), ("outage", 320, ""),
    ]  # fmt: skip
    assert [mark.took_ns // MS for mark in report.marks if mark.kind == "outage"] == [60, 0]
    assert not report.is_over
    assert report.incidents == ()


def test_of_a_state_that_counts_no_steps_each_checkpoint_is_a_row_and_no_step_is_named() -> None:
    host = Host("a")
    workers = [Worker(host, f"{place}.0") for place in (0, 1)]
    group_of(workers, 0, 1, -1)
    steps(workers, 10, 1)
    for at_ms in (130, 230):
        for worker in workers:
            worker.saves(at_ms, 20, "disk")
    workers[1].drains(300)
    workers[1].ends(310)
    workers[0].ends(320, -9)
    report = report_of(journals_of([host]))
    check(report)
    assert [(save.at_ns // MS, save.step, save.workers) for save in report.saves] == [(130, -1, 2), (230, -1, 2)]
    assert [mark.text for mark in report.marks if mark.kind in ("drain", "loss")] == [
        "a/1.0 left the run in order", "a/0.0 lost, signal 9: killed by SIGKILL",
    ]  # fmt: skip
    lines = {f"{line.worker.replace('-a1', '')} {line.text}" for line in report.events}
    alone = {mark.text for mark in report.marks if mark.kind != "join"}  # joins of several are one line
    assert alone <= lines, "a mark says what the list of events says"
    assert "step -1" not in html_page(report)


# --- what lacks -------------------------------------------------------------------------------------------------------


def test_a_missing_journal_an_open_end_and_a_silent_journal_are_said() -> None:
    journals = journals_of(killed_run())
    alone = report_of({"a": journals["ledger-alpha-a1"], "empty": Host("gamma").journal()}, lacks=["It rained."])
    check(alone)
    assert alone.lacks[0] == "It rained."
    assert any("empty" in sentence and "no worker" in sentence for sentence in alone.lacks)
    assert any("Round 1 had 4 workers, and the journals know of 2" in sentence for sentence in alone.lacks)
    assert report_of(journals).lacks == ()
    host = Host("a")
    worker = Worker(host, "0.0")
    group_of([worker], 10, 1, 0)
    running = report_of(journals_of([host]))
    check(running)
    assert not running.is_over
    assert [sentence for sentence in running.lacks if "a/0.0 is without an end" in sentence]


def test_an_agent_that_was_lost_with_its_workers_is_a_failure_too() -> None:
    hosts = [Host("a"), Host("b")]
    workers = [Worker(host, "0.0") for host in hosts]
    group_of(workers, 0, 1, 0)
    steps(workers, 10, 3)
    workers[1].counted()
    workers[0].fails(20_000)
    workers[0].joins(20_010, 2, 0, 1)
    workers[0].synchronized(20_020, 3, "peer")
    workers[0].trains_again(20_120, 5, 5, 10)
    workers[0].over(30_000)
    workers[0].ends(30_000)
    report = report_of(journals_of(hosts))
    check(report)
    assert report.is_over
    (incident,) = report.incidents
    assert [(one.name, one.how) for one in incident.lost] == [("b/0.0", "its agent was lost")]
    assert report.lives[1].until_ns == 310 * MS


def test_no_journal_several_runs_or_none_that_has_begun_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(NoRunError, match="--log-dir"):
        of_one_run({}, None, "--run-id")
    with pytest.raises(NoRunError, match="no worker has started"):
        report_of({"a": Host("a").journal()})
    both = {**journals_of(killed_run("one")), "other": killed_run("two")[0].journal()}
    with pytest.raises(NoRunError, match="--run-id: one, two"):
        of_one_run(both, None, "--run-id")
    report = report_of(of_one_run(both, "one", "--run-id"))
    assert (report.run_id, len(report.lives)) == ("one", 5)
    with pytest.raises(NoRunError, match="no journal of the run three"):
        of_one_run(both, "three", "--run-id")


def test_what_a_rotated_journal_brings_forward_is_in_the_sums() -> None:
    whole = killed_run()[1].journal()
    for place in range(1, len(whole.events)):
        before = HostLedger().after_all(whole.events[:place])
        rotated = Journal(whole.head, before, whole.events[place:])
        report = report_of({"b": rotated})
        check(report)
        assert report.seen == report_of({"b": whole}).seen


def test_two_agents_of_a_host_and_long_gone_lives_are_told_apart() -> None:
    host = Host("a")
    for life in range(70):
        worker = Worker(host, f"0.{life}", life * 100)
        group_of([worker], life * 100 + 10, life + 1, 0)
        worker.commits(life * 100 + 90)
        worker.ends(life * 100 + 95, -9)
    again = Host("a")
    worker = Worker(again, "0.0", 8_000)
    worker.name = "a-b2/0.0"
    again.events.clear()
    group_of([worker], 8_010, 71, 0)
    report = report_of({"one": host.journal(), "two": again.journal()})
    check(report)
    assert {life.host for life in report.lives} == {"a-a1", "a-b2"}
    (earlier,) = report.earlier.values()
    assert (earlier.lives, earlier.committed) == (6, 6)
    assert len(report.incidents) == 70


# --- whatever happens -------------------------------------------------------------------------------------------------

_ACTS = ("commit", "save", "wait", "fail", "regroup", "back", "kill", "drain", "silence")


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(_ACTS), st.integers(0, 3), st.integers(1, 40)), max_size=40))
def test_whatever_happens_all_cells_are_full(acts: list[tuple[str, int, int]]) -> None:
    hosts = [Host("a"), Host("b", -3_000_000 * MS)]
    workers = [Worker(host, f"{place}.0", place) for host in hosts for place in (0, 1)]
    group_of(workers, 100, 1, 0)
    at_ms, round_ = 110, 1
    for act, who, took_ms in acts:
        if not workers:
            break
        at_ms += 41 + took_ms
        worker = workers[who % len(workers)]
        if act == "commit":
            steps(workers, at_ms - took_ms, 1, took_ms)
        elif act == "save":
            worker.saves(at_ms, took_ms)
        elif act == "wait":
            worker.waited(at_ms, took_ms)
            worker.counted()
        elif act == "silence":
            worker.counted()
        elif act in ("kill", "drain"):
            workers.remove(worker)
            worker.ends(at_ms, -9 if act == "kill" else 0)
        elif act == "fail":
            for one in workers:
                one.fails(at_ms)
        else:
            round_ += 1
            for one in workers:
                one.gathers(at_ms)
            step = max(0, worker.tally.step - (took_ms % 4 if act == "back" else 0))
            group_of(workers, at_ms + 5, round_, step, "checkpoint" if act == "back" else "peer")
            at_ms += 15
    report = report_of(journals_of(hosts))
    check(report)
