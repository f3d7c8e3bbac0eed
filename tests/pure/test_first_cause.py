"""Which of several failures came first, and how that is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest

from torchelastic.agent.causes import (
    FailedWorker,
    FailureReport,
    LostElsewhere,
    Trouble,
    Undone,
    failed_at_s,
    last_account,
    report_of,
)
from torchelastic.agent.failure_reporter import FailureReporter
from torchelastic.agent.host_events import LedgerSampled, LedgerWritten, RoundChanged, WorkerFailed
from torchelastic.log_lines import Position, json_line
from torchelastic.observe.ledger.ledger_events import Failure, Join
from torchelastic.processes.exit_codes import describe_exit
from torchelastic.rendezvous.records import Member, Round, RoundState
from torchelastic.rendezvous.store import StoreUnavailableError

BOOM = ("noise", "Traceback (most recent call last):", '  File "a.py", line 1', "ValueError: boom")
RESET = ("Traceback (most recent call last):", "RuntimeError: [gloo] Connection closed by peer [127.0.0.1]:1")
STACKS = (
    "no step for 9.0 s: this worker is in user code, in a.py:3; its stacks:",
    "Thread 0x00007f00 (most recent call first):", '  File "wait.py", line 1', "",
    "Current thread 0x00007f01 (most recent call first):", '  File "a.py", line 3 in step',
)  # fmt: skip


def failed(worker: int, at_s: float, lines: tuple[str, ...] = BOOM, exit_code: int = 1, **more: object) -> FailedWorker:
    position = Position(worker + 10, 3, 12)
    return FailedWorker(at_s=at_s, worker=worker, exit_code=exit_code, position=position, lines=lines, **more)  # type: ignore[arg-type]


def report(*troubles: Trouble) -> FailureReport:
    found = report_of(troubles)
    assert found is not None
    return found


def test_what_came_first_in_time_is_first_whoever_ended_first() -> None:
    late = failed(0, 100.0)
    early = failed(1, 98.0, log="/logs/worker_1.0.log")
    told = report(late, early)
    assert (told.first, told.others) == (early, (late,))
    assert told.text().splitlines() == [
        "worker 1 failed: exit code 1 (rank 11, round 3, step 12), log /logs/worker_1.0.log",
        *BOOM[1:],
        "then worker 0 failed: exit code 1 (rank 10, round 3, step 12): ValueError: boom",
    ]


def test_a_traceback_counts_from_when_it_began_and_only_if_the_worker_ended_with_it() -> None:
    assert failed_at_s(100.0, 1, 98.0) == 98.0
    assert failed_at_s(100.0, 1, None) == 100.0
    assert failed_at_s(100.0, 1, 60.0) == 100.0, "it went on after that one"
    assert failed_at_s(100.0, -9, 98.0) == 100.0, "it was killed"


def test_a_broken_connection_follows_from_what_broke_it_though_it_was_seen_first() -> None:
    follows, cause = failed(0, 99.0, RESET), failed(1, 100.5)
    assert report(follows, cause).first == cause
    assert report(follows, failed(1, 200.0)).first == follows, "so much later it is another failure"
    assert report(follows, failed(1, 99.5, RESET)).first == follows, "of two alike the earlier one"


@pytest.mark.parametrize(
    ("lines", "exit_code", "why"),
    [
        (BOOM, 1, BOOM[1:]),
        (BOOM, -9, BOOM[1:]),
        (STACKS, -9, STACKS[1:]),
        ((*BOOM, *STACKS), -9, STACKS[1:]),
        ((*STACKS, *BOOM), 1, BOOM[1:]),
        (("Fatal Python error: Segmentation fault", "", *STACKS[4:]), -11, None),
        (("some", "noise"), -9, ()),
        (("usage: train.py", "train.py: error: no data set"), 2, None),
        (tuple(map(str, range(60))), 2, tuple(map(str, range(40, 60)))),
        ((), 1, ()),
    ],
)
def test_the_culprit_comes_with_its_traceback_or_stacks_or_last_words(
    lines: tuple[str, ...], exit_code: int, why: tuple[str, ...] | None
) -> None:
    assert failed(0, 0.0, lines, exit_code).why == (lines if why is None else why)


def test_behind_long_stacks_it_is_said_again_what_has_ended_the_worker() -> None:
    crash = ("Fatal Python error: Segmentation fault", "", *STACKS[1:4] * 8, *STACKS[4:], "", "Extension modules: a, b")
    first, *stacks, last = report(failed(0, 0.0, crash, -11)).text().splitlines()
    assert first == last == "worker 0 failed: killed by SIGSEGV (rank 10, round 3, step 12)"
    assert tuple(stacks) == crash
    assert len(report(failed(0, 0.0, STACKS, -9)).text().splitlines()) == 1 + len(STACKS[1:])


def test_the_tracebacks_of_a_chain_belong_together() -> None:
    chain = (*BOOM[1:], "", "During handling of the above exception, another exception occurred:", "", *RESET)
    assert last_account(["before", *BOOM[1:], *chain]) == chain


def test_each_of_the_others_has_one_line() -> None:
    steps = [Undone(at_s=at_s, position=Position(0, 3, 12), error=f"{at_s}") for at_s in (9.0, 8.0)]
    own = Undone(at_s=6.9, position=Position(11, 3, 12), error="of the culprit itself")
    told = report(*steps, own, failed(1, 7.0), failed(1, 11.0), failed(0, 10.0, RESET))
    assert [line for line in told.text().splitlines() if line.startswith("then")] == [
        "then rank 0 (round 3, step 12): its step was undone: 8.0",
        f"then worker 0 failed: exit code 1 (rank 10, round 3, step 12): {RESET[1]}",
    ]


def test_a_step_that_was_undone_in_a_round_before_has_another_cause() -> None:
    before, after = (Undone(at_s=6.0, position=Position(0, number, 12), error="x") for number in (2, 3))
    assert report(before, failed(1, 7.0)).others == ()
    assert report(after, failed(1, 7.0)).others == (after,)
    unknown = FailedWorker(at_s=7.0, worker=1, exit_code=1)
    assert report(before, unknown).others == (before,), "nobody knows in which round it was"


def test_for_programs_it_is_the_same() -> None:
    told = report(failed(1, 7.0, log="/l"), Undone(at_s=8.0, position=Position(0, 3, 12), error="x"))
    plain = json.loads(json_line(told.to_plain()))
    assert plain["first"] == {
        "what": "failed", "at_s": 7.0, "rank": 11, "round": 3, "step": 12, "how": "exit code 1", "local_rank": 1,
        "exit_code": 1, "restarts": 0, "gave_up": True, "is_hang": False, "error": "ValueError: boom",
        "lines": list(BOOM[1:]), "log": "/l",
    }  # fmt: skip
    assert [(one["what"], one["rank"], one["error"]) for one in plain["others"]] == [("undone", 0, "x")]
    assert plain["is_over"] is False


def test_an_exit_is_described_whatever_the_signal() -> None:
    assert [describe_exit(code) for code in (3, -9, -40, None)] == [
        "exit code 3", "killed by SIGKILL", "killed by signal 40", "exit code None",
    ]  # fmt: skip


# --- gathered by the agent --------------------------------------------------------------------------------------------

MINE, THEIRS = "a-0-aaaaaaaa1", "b-0-bbbbbbbb1"
ROUND = Round(3, RoundState.RUNNING, (MINE, THEIRS))


class Gathered:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.said: list[FailureReport] = []
        self.members: list[Member] = [Member(MINE, "a"), Member(THEIRS, "b")]
        self.reporter = FailureReporter(
            "aaaaaaaa", lambda: self.members, say=self.said.append, wall_s=lambda: self.now_s
        )
        self.reporter.on_event(RoundChanged(ROUND))

    def looks(self, *after_s: float) -> list[int]:
        """How many reports were said by each of these times."""
        counts = []
        for now_s in after_s:
            self.now_s = 100.0 + now_s
            self.reporter.on_event(LedgerSampled())
            counts.append(len(self.said))
        return counts

    def last_words(self) -> FailureReport | None:
        return asyncio.run(self.reporter.last_words())


def lost_elsewhere(of: Callable[[str], Round]) -> list[LostElsewhere]:
    gathered = Gathered()
    gathered.reporter.on_event(RoundChanged(of(THEIRS)))
    gathered.reporter.on_event(RoundChanged(of(THEIRS)))
    gathered.reporter.close()
    return [one for report in gathered.said for one in (report.first, *report.others) if isinstance(one, LostElsewhere)]


def test_a_loss_on_another_host_is_the_first_cause_of_what_it_broke_here() -> None:
    gathered = Gathered()
    gathered.reporter.on_event(RoundChanged(Round(3, RoundState.BROKEN, ROUND.roster, departed=(THEIRS,))))
    gathered.now_s += 0.1
    gathered.reporter.on_event(WorkerFailed(failed(0, gathered.now_s, RESET)))
    told = gathered.last_words()
    assert told is not None
    assert told.text().splitlines() == [
        f"first, {THEIRS} of another launcher has ended (fact) (rank 1, round 3): see that launcher's output",
        f"then worker 0 failed: exit code 1 (rank 10, round 3, step 12): {RESET[1]}",
    ]
    assert told.to_plain()["first"]["member"] == THEIRS
    gathered.reporter.close()
    assert gathered.said == [], "it was in the last words"


def test_what_a_round_tells_of_other_hosts_is_taken_once_and_only_if_it_is_a_loss() -> None:
    def next_one(**more: object) -> Callable[[str], Round]:
        return lambda _name: Round(4, RoundState.RUNNING, (MINE,), **more)  # type: ignore[arg-type]

    broken = lost_elsewhere(lambda name: Round(3, RoundState.BROKEN, ROUND.roster, departed=(name,)))
    assert [(one.member, one.certainty, one.position) for one in broken] == [(THEIRS, "fact", Position(1, 3))]
    assert [one.certainty for one in lost_elsewhere(next_one())] == ["guess"], "its lease is gone"
    assert [one.certainty for one in lost_elsewhere(next_one(lost=(THEIRS,)))] == ["fact"]
    assert lost_elsewhere(lambda _name: Round(3, RoundState.BROKEN, ROUND.roster, departed=(MINE,))) == [], "own"
    assert lost_elsewhere(lambda name: Round(3, RoundState.CLOSED, ROUND.roster, departed=(name,))) == [], "finished"
    left = Gathered()
    left.reporter.on_event(RoundChanged(Round(3, RoundState.GATHERING, ROUND.roster, leaving=(THEIRS,))))
    left.reporter.on_event(RoundChanged(Round(4, RoundState.RUNNING, (MINE,))))
    left.reporter.close()
    assert left.said == [], "it was asked to leave"


def test_a_failure_is_told_once_when_the_next_group_has_stood_for_a_while() -> None:
    gathered = Gathered()
    gathered.reporter.on_event(WorkerFailed(failed(0, 100.0, gave_up=False)))
    gathered.reporter.on_event(
        LedgerWritten(100.1, Failure(at_ns=0, rank=1, round=3, step=12, cause="RuntimeError: reset"))
    )
    gathered.reporter.on_event(LedgerWritten(100.1, Join(at_ns=0, rank=1, round=3)))
    assert gathered.looks(1.0) == [0]
    gathered.reporter.on_event(RoundChanged(Round(4, RoundState.RUNNING, ROUND.roster)))
    assert gathered.looks(2.0, 2.9, 3.0, 50.0) == [0, 0, 1, 1]
    assert [one.who for one in gathered.said[0].others] == ["rank 1"]


@pytest.mark.parametrize(
    ("there", "certainties"),
    [
        ([Member(THEIRS, "b")], []),
        ([Member(THEIRS, "b", departed=True)], ["fact"]),
        ([Member("c-0-cccccccc1", "c")], ["guess"]),
    ],
    ids=["there", "ended", "gone"],
)
def test_in_the_end_who_is_not_registered_any_more_is_the_first_cause(
    there: list[Member], certainties: list[str]
) -> None:
    gathered = Gathered()
    gathered.members = there
    gathered.reporter.on_event(WorkerFailed(failed(0, 100.0, RESET)))
    told = gathered.last_words()
    assert told is not None
    assert [one.certainty for one in (told.first,) if isinstance(one, LostElsewhere)] == certainties
    assert [one.who for one in told.others] == (["worker 0"] if certainties else [])


def test_who_was_asked_to_leave_is_not_lost_in_the_end() -> None:
    gathered = Gathered()
    gathered.reporter.on_event(RoundChanged(Round(3, RoundState.GATHERING, ROUND.roster, leaving=(THEIRS,))))
    gathered.members = []
    gathered.reporter.on_event(WorkerFailed(failed(0, 100.0, RESET)))
    told = gathered.last_words()
    assert told is not None
    assert isinstance(told.first, FailedWorker)


def test_a_loss_elsewhere_that_was_told_long_ago_is_still_the_cause_when_no_group_came_after_it() -> None:
    gathered = Gathered()
    gathered.reporter.on_event(RoundChanged(Round(3, RoundState.BROKEN, ROUND.roster, departed=(THEIRS,))))
    assert gathered.looks(10.0) == [1]
    gathered.reporter.on_event(WorkerFailed(failed(0, 700.0, RESET)))
    told = gathered.last_words()
    assert told is not None
    assert isinstance(told.first, LostElsewhere)


def test_a_store_that_does_not_answer_keeps_no_words_back() -> None:
    def away() -> list[Member]:
        raise StoreUnavailableError("away")

    reporter = FailureReporter("aaaaaaaa", away, wall_s=lambda: 100.0)
    reporter.on_event(WorkerFailed(failed(0, 100.0)))
    told = asyncio.run(reporter.last_words())
    assert told is not None
    assert told.first.who == "worker 0"


@pytest.mark.parametrize(
    ("behind", "told"),
    [
        (["Missing key(s): a", "At:", "  job.py(46): <module>"], "RuntimeError: sizes do not fit"),
        ([f"line {number}" for number in range(20)], "line 19"),  # that error may have been logged only
    ],
)
def test_an_error_is_told_by_the_line_that_was_raised_and_not_by_the_end_of_its_message(
    behind: list[str], told: str
) -> None:
    lines = ("Traceback (most recent call last):", '  File "job.py", line 46, in <module>', "    train()")
    assert failed(0, 1.0, (*lines, "RuntimeError: sizes do not fit", *behind)).last_error == told
