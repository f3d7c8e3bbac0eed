"""What `torchelastic run` writes while a real run has failures: events, workers' lines, and what failed first."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cluster.conftest import MakeJob
from tests.cluster.harness import Job
from torchelastic.rendezvous.server import EtcdServer
from torchelastic.testing.faults import Fault

KILL = Fault("kill", "backward", rank=1, step=7)
CRASH = Fault("crash", "backward", rank=1, step=7)


def documents(job: Job, number: int = 0) -> list[dict[str, Any]]:
    return [json.loads(line) for line in job.output_of(number).splitlines()]


def of(kind: str, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if line["kind"] == kind]


def place_of(job: Job, rank: int) -> int:
    """Which worker of its host had a rank in the first round."""
    return int(next(event["worker"] for event in job.of("synced", round=1, rank=rank)))


@pytest.mark.long
def test_as_json_every_line_of_a_run_is_an_object_and_each_event_says_rank_round_and_step(jobs: MakeJob) -> None:
    job = jobs([KILL])
    job.start("--standalone", "--log-format=json", nproc=2)
    assert job.wait() == [0], job.output()[-4000:]
    lines, killed = documents(job), place_of(job, 1)
    assert all(line["at_s"] > 0 and line["host"] and isinstance(line["text"], str) for line in lines)

    [end] = [line for line in of("end", lines) if line["event"].get("is_loss", True)]
    assert (end["rank"], end["round"], end["step"], end["level"]) == (1, 1, 7, "WARNING")
    assert end["text"] == "lost, signal 9: killed by SIGKILL"
    assert {(line["rank"], line["round"]) for line in of("join", lines)} >= {(0, 1), (1, 1)}
    assert of("re_form", lines)[0]["event"]["phases_ns"]

    [undone] = [line for line in of("log", lines) if "failure 1 in a row" in line["text"]]
    assert (undone["local_rank"], undone["rank"], undone["round"], undone["step"]) == (1 - killed, 0, 1, 7)
    [report] = of("failure_report", lines)
    assert (report["is_over"], report["first"]["local_rank"], report["first"]["exit_code"]) == (False, killed, -9)
    assert (report["first"]["rank"], report["first"]["round"], report["first"]["step"]) == (1, 1, 7)
    assert [(other["what"], other["rank"]) for other in report["others"]] == [("undone", 0)]
    error = report["others"][0]["error"]
    assert "peer" in error or "another worker was lost" in error, "gloo notices it first, or the group is aborted"
    assert (lines[-1]["kind"], lines[-1]["exit_code"]) == ("over", 0)


@pytest.mark.long
def test_the_first_cause_is_told_first_and_who_failed_because_of_it_in_one_line(jobs: MakeJob) -> None:
    job = jobs([CRASH])
    job.start("--standalone", "--max-restarts=0", "--min-workers=2", "--rdzv-timeout=2", nproc=2)
    assert job.wait() == [1]
    crashed, output = place_of(job, 1), job.output()
    head = f"worker {crashed} failed: exit code 1 (rank 1, round 1, step 7)"
    first, *traceback, cause, other = output[output.rindex(head) :].rstrip().splitlines()
    assert first == head
    assert traceback[0] == "Traceback (most recent call last):"
    assert cause.startswith("ValueError: injected")
    assert other.startswith("then rank 0 (round 1, step 7): its step was undone: ")
    assert f"worker {crashed} is not started again; fewer than min_workers=2 are left" in output
    assert f"WARNING worker {crashed} (rank 1, round 1, step 7): lost, exit code 1" in output


@pytest.mark.long
def test_a_host_whose_peer_failed_on_another_host_names_it(jobs: MakeJob, etcd: EtcdServer, run_id: str) -> None:
    job = jobs([CRASH])
    at = [f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={run_id}", "--nnodes=2", "--last-call=60"]
    for _ in range(2):
        job.start(*at, "--max-restarts=0", "--log-format=json", nproc=1)
    assert job.wait() == [1, 1], job.output()[-4000:]
    last = [documents(job, number)[-1] for number in range(2)]
    [culprit] = [line for line in last if line["first"]["what"] == "failed"]
    [other] = [line for line in last if line is not culprit]
    assert culprit["first"]["lines"][-1].startswith("ValueError: injected")
    assert (other["is_over"], other["exit_code"]) == (True, 1)
    assert (other["first"]["what"], other["first"]["rank"]) == ("lost", 1)
    assert other["first"]["member"] in {event["member"] for event in job.of("formed", rank=1)}
    assert other["text"].startswith(f"first, {other['first']['member']} of another launcher ")
    assert [(one["what"], one["rank"]) for one in other["others"]] == [("undone", 0)]
