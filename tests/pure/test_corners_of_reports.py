"""Reports of runs that are unlike others: outages, marks upon marks, a flat loss, sums that are wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.pure.report_runs import DAY_NS, MS, Host, Worker, group_of, journals_of, killed_run, steps
from torchelastic.observe.ledger.accounts import NOTHING, Account, plus
from torchelastic.observe.ledger.counters import Counters
from torchelastic.observe.ledger.host_ledger import Earlier, HostLedger
from torchelastic.observe.ledger.journal import Journal
from torchelastic.observe.ledger.ledger_events import Counted, End, Start
from torchelastic.observe.report.building import report_of
from torchelastic.observe.report.charts import loss_chart
from torchelastic.observe.report.html_page import html_page
from torchelastic.observe.report.losses import LossFileError, curve_of, read_losses
from torchelastic.observe.report.model import Mark, Report
from torchelastic.observe.report.plain import to_plain
from torchelastic.observe.report.svg import write
from torchelastic.observe.report.timeline import timeline
from torchelastic.text import percent


def test_an_outage_of_etcd_is_drawn_with_what_it_was_and_how_long() -> None:
    host = Host("alpha")
    worker = Worker(host, "0.0")
    group_of([worker], 10, 1, 0)
    steps([worker], 20, 2)
    host.outage(100, 400)
    worker.ends(1000)
    drawn = write(timeline(report_of(journals_of([host]))))
    assert drawn.count('class="outage"') == 1
    assert "(300 ms)" in drawn


def test_of_many_marks_close_to_each_other_the_first_is_drawn_and_no_loss_is_left_out() -> None:
    report = report_of(journals_of(killed_run()))
    place = report.lives[0].place
    marks = [Mark(at_ns=500 * MS + number, kind="drain", place=place, text=f"drain {number}") for number in range(3)]
    marks += [Mark(at_ns=at_ms * MS, kind="loss", place=place, text=f"loss at {at_ms}") for at_ms in (600, 610)]
    marks += [
        Mark(at_ns=1, kind="drain", place="nowhere", text="not here"),
        Mark(at_ns=1, kind="?", place=place, text="new"),
    ]
    drawn = write(timeline(replace(report, marks=tuple(marks))))
    assert ">drain 0<" in drawn
    assert ">loss at 600<" in drawn
    assert ">loss at 610<" in drawn
    for text in (">drain 1<", ">drain 2<", ">not here<", ">new<"):
        assert text not in drawn


def test_a_loss_that_never_changes_is_a_line_in_the_middle_and_steps_are_whole_numbers() -> None:
    drawn = write(loss_chart(curve_of([(3, 2.0), (4, 2.0)]), ()))
    assert ">1.5<" in drawn or ">1.6<" in drawn
    assert ">2<" in drawn
    assert [drawn.count(text) for text in (">3<", ">4<", ">3.5<")] == [1, 1, 0]


def run_that_began_late(end_ns: int) -> Report:
    """The process of its worker began 100 ns before the worker looked at a clock for the first time."""
    host = Host("alpha")
    tally = Counters.begun(100)
    host.events += [
        Start(at_ns=0, worker="alpha-a1/0.0"),
        Counted(at_ns=100, worker="alpha-a1/0.0", tally=tally),
        End(at_ns=end_ns, worker="alpha-a1/0.0", exit_code=0, is_loss=False),
    ]
    return report_of(journals_of([host]))


@pytest.mark.parametrize("end_ns", [100, 101, 400])
def test_what_a_worker_did_before_it_could_count_was_its_start(end_ns: int) -> None:
    report = run_that_began_late(end_ns)
    (life,) = report.lives
    assert report.why_wrong() == ""
    assert (life.wall_ns, life.amounts) == (end_ns, plus(NOTHING, Account.START_UP, end_ns))
    assert (life.cells[0].from_ns, life.cells[-1].to_ns) == (0, end_ns)


def test_what_came_before_the_first_count_is_not_spread_over_what_came_after_it() -> None:
    host, name = Host("alpha"), "alpha-a1/0.0"
    tally = Counters.begun(100 * MS).left(110 * MS, Account.IDLE).entered(120 * MS, 1, 0, 1).synchronized(130 * MS, 0)
    host.events += [
        Start(at_ns=0, worker=name),
        Counted(at_ns=230 * MS, worker=name, tally=tally.commits(230 * MS)),
        End(at_ns=230 * MS, worker=name, exit_code=0, is_loss=False),
    ]
    (life,) = report_of(journals_of([host])).lives
    early = [cell for cell in life.cells if cell.to_ns <= 100 * MS]
    assert all(cell.amounts == plus(NOTHING, Account.START_UP, cell.to_ns - cell.from_ns) for cell in early)
    assert early[-1].to_ns > 99 * MS
    assert all(cell.amounts[Account.PRODUCTIVE] for cell in life.cells[len(early) + 1 :])


def test_sums_that_are_wrong_are_said_and_named() -> None:
    host = Host("alpha")
    Worker(host, "0.0").ends(50)
    wrong = HostLedger(earlier=Earlier(lives=2, wall_ns=70))
    report = report_of({"ledger-alpha-a1": Journal(host.head(), wrong, tuple(host.events))})
    assert any("The accounts of alpha do not sum up" in one and "ended earlier" in one for one in report.lacks)
    assert report.why_wrong() == "alpha, earlier"
    plain = to_plain(report)
    assert plain["sums_are_exact"] is False
    assert plain["earlier"][0]["wall_ns"] == 70
    assert set(plain["earlier"][0]["amounts_ns"].values()) == {0}
    assert "do not sum up" in html_page(report)


def test_a_life_whose_accounts_do_not_sum_to_its_time_is_named() -> None:
    report = report_of(journals_of(killed_run()))
    first = report.lives[0]
    without = replace(report, lives=(replace(first, amounts=plus(first.amounts, Account.IDLE, 1)), *report.lives[1:]))
    assert without.why_wrong() == first.name
    assert report.began_ns == DAY_NS


def test_a_share_that_is_no_number_is_a_dash() -> None:
    assert [percent(share) for share in (float("nan"), float("inf"), 0.5)] == ["-", "-", "50.0 %"]


# --- the loss from files ----------------------------------------------------------------------------------------------


def test_a_loss_is_read_from_tables_and_lines_and_the_mean_is_taken(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("step,loss,lr\n1,2.0,x\n2,nan,x\n,1.0,x\n3.5,1.0,x\n-1,1.0,x\n")
    lines = ['{"step": 1, "loss": 4.0}', '{"iteration": 4, "train/loss": "0.5"}', "[1]", '{"step": true, "loss": 1}']
    torn = '{"step": 5, "lo'
    (tmp_path / "b.jsonl").write_text("\n".join([*lines, '{"step": "x", "loss": 1}', torn]))
    (tmp_path / "notes.txt").write_text("step,loss\n9,9\n")
    curve = read_losses(tmp_path)
    assert [(point.step, point.mean) for point in curve.points] == [(1, 3.0), (4, 0.5)]
    assert curve.left_out == 1
    assert [point.step for point in read_losses(tmp_path / "notes.txt").points] == [9]


def test_a_file_without_a_loss_is_refused_with_what_to_give(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(LossFileError, match=r"there is no loss in .*: give a CSV file with columns step and loss"):
        read_losses(path)


def test_a_table_with_a_field_without_an_end_is_no_table(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("step,loss\n1," + "9" * 200_000 + "\n")
    with pytest.raises(LossFileError, match="is no CSV file"):
        read_losses(path)
