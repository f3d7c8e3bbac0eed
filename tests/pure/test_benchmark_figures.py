"""What the benchmarks make of their measurements: percentiles, and slow recoveries that are results and no errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.environment import percentile, summary
from benchmarks.job.controller import Job, Kill, recoveries
from benchmarks.job.events import Event, EventReader
from benchmarks.recovery.ours import Figures, Kills, kill_in_turn
from benchmarks.recovery.progress import Progress
from benchmarks.recovery.stacks import lines_of_workers

RANKS = {100: 0, 101: 1, 102: 2, 103: 3}


class Reader(EventReader):
    def of(self, event: str, since_s: float = 0.0, **fields: Any) -> list[Event]:
        return [{"ms": 20.0, "number": 1}]


class ScriptedJob(Job):
    """A job of four whose recoveries take as long as the script says; it has no processes.

    Args:
        folder: for the agent's output.
        recoveries_s: of the kills in turn; the job ends in the recovery that is not in here.
        regroups: for how many kills the group becomes full again.
    """

    def __init__(self, folder: Path, recoveries_s: list[float], regroups: int = 1000) -> None:
        self.workers, self.agent_log = 4, folder / "agent.txt"
        self.agent_log.write_text("the agent's first line\nthe agent's last line\n")
        self.read = Reader(folder)
        self.script, self.regroups, self.fulls = list(recoveries_s), regroups, 0
        self.joins = 0

    def warm_spares(self) -> int:
        return 5

    def allow(self, kind: str, count: int) -> None:
        self.joins += count

    def wait_full(self, steps: int) -> int:
        self.fulls += 1
        if self.fulls > self.regroups:
            raise self.not_reached("not within 300 s: a group of 4")
        return 1

    def kill(self, rank: int) -> Kill:
        return Kill(100 + rank, rank, RANKS, killed_s=50.0, ended_s=50.1)

    def wait_recovered(self, kill: Kill, meanwhile: Callable[[], None] = lambda: None) -> list[Event]:
        if not self.script:
            raise self.not_reached("the agent ended with exit code 1 before: a recovery")
        took_s = self.script.pop(0)
        phases = {"agree": 1.0, "re_form": 2.0, "sync": 3.0, "step": 4.0}
        return [{"pid": pid, "t": 50.0 + took_s, "noticed": 50.01, "phases": phases} for pid in kill.survivors]

    def wait_until(self, condition: Callable[[], Any], what: str, timeout_s: float = 0.0) -> Any:
        return 7


def run(folder: Path, kills: int, recoveries_s: list[float], regroups: int = 1000) -> tuple[Kills, dict[str, Any]]:
    done = kill_in_turn(ScriptedJob(folder, recoveries_s, regroups), kills, Progress(1, kills))
    document = Figures(10, done, [20.0], [1.0]).document()
    return done, json.loads(json.dumps(document, allow_nan=False))


@pytest.mark.parametrize(
    ("percent", "expected"), [(1, 2), (50, 100), (95, 190), (99, 198), (100, 200)], ids=lambda value: str(value)
)
def test_percentiles_are_values_by_nearest_rank(percent: int, expected: int) -> None:
    assert percentile(list(range(200, 0, -1)), percent) == expected


def test_a_summary_has_the_tail_beside_the_median() -> None:
    assert summary([4.0, 1.0, 2.0, 3.0]) == {
        "median": 2.5, "min": 1.0, "p50": 2.0, "p95": 4.0, "p99": 4.0, "max": 4.0, "runs": 4,
    }  # fmt: skip


def test_a_censored_value_is_larger_than_all_and_never_hides_in_a_percentile() -> None:
    found = summary([1.0] * 98, censored=2)
    assert (found["p50"], found["p95"], found["p99"], found["max"]) == (1.0, 1.0, None, None)
    assert (found["runs"], found["censored"]) == (98, 2)


def test_a_recovery_of_minutes_is_a_result_and_the_next_kill_follows(tmp_path: Path) -> None:
    done, document = run(tmp_path, 3, [0.2, 400.0, 0.3])
    assert len(done) == 3
    assert document["kill_to_committed_ms"]["max"] == pytest.approx(400_000.0)
    assert document["slowest_kill"]["rank"] == 1
    assert document["slowest_kill"]["phases_ms"]["sync"] == 3.0
    assert "ended_early" not in document
    assert "censored" not in document


def test_a_recovery_that_never_ends_is_recorded_and_ends_the_run_without_an_error(tmp_path: Path) -> None:
    done, document = run(tmp_path, 5, [0.2, 0.3])
    assert len(done) == 3
    assert document["kill_to_committed_ms"]["runs"] == 2
    assert document["kill_to_committed_ms"]["max"] is None
    reason = "the agent ended with exit code 1 before: a recovery"
    assert [(one["rank"], one["reason"]) for one in document["censored"]] == [(2, reason)]
    assert document["slowest_kill"]["rank"] == 2
    assert document["ended_early"]["after_kills"] == 3
    assert document["ended_early"]["agent_log"][-1] == "the agent's last line"


def test_a_group_that_does_not_get_full_again_ends_the_run_with_what_was_measured(tmp_path: Path) -> None:
    _, document = run(tmp_path, 5, [0.2] * 5, regroups=2)
    assert document["kill_to_committed_ms"]["runs"] == 2
    assert document["ended_early"]["reason"] == "not within 300 s: a group of 4"
    assert document["ended_early"]["after_kills"] == 2


def test_every_survivor_that_is_alive_is_waited_for_and_one_that_has_ended_is_not() -> None:
    events = [{"pid": 101, "t": 1.0}, {"pid": 101, "t": 1.5}, {"pid": 999, "t": 1.7}, {"pid": 102, "t": 2.0}]
    survivors = [101, 102, 103]
    assert recoveries(events, survivors, alive=[101, 102, 103]) == []
    assert recoveries(events, survivors, alive=[101, 102]) == [events[0], events[3]]
    assert recoveries([], survivors, alive=[]) == []


def test_stacks_are_taken_from_the_lines_of_their_worker_and_nothing_else_is() -> None:
    text = "\n".join(
        [
            "[worker 2] Thread 0x00007f77 [agent] (most recent call first):",
            '[worker 2]   File "/x/client.py", line 176 in _read',
            "[worker 0] Current thread 0x00007f88 (most recent call first):",
            '[worker 2]   File "/x/threading.py", line 1002 in _bootstrap',
            '[worker 0]   File "/x/loop.py", line 5 in train',
            "[worker 0] INFO rank 0: joined",
            '[worker 0]   File "/x/loop.py", line 5, in train',
            "the agent's own line",
        ]
    )
    assert lines_of_workers(text) == {
        2: ["Thread 0x00007f77 [agent] (most recent call first):", '  File "/x/client.py", line 176 in _read'],
        0: ["Current thread 0x00007f88 (most recent call first):", '  File "/x/loop.py", line 5 in train'],
    }
