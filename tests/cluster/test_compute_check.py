"""A worker computes wrong: it is found, named and left out, and the others end where an undisturbed run ends."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch

from tests.cluster.compute_check_job import GLOBAL_BATCH, SAMPLES
from tests.cluster.harness import Job
from tests.waiting import wait_until
from torchelastic.processes.exit_codes import COMPUTES_WRONG
from torchelastic.rendezvous.etcd import EtcdStore
from torchelastic.rendezvous.records import Keys
from torchelastic.rendezvous.server import EtcdServer
from torchelastic.rendezvous.url import DEFAULT_PREFIX
from torchelastic.testing.faults import Fault

PAGE = Path(__file__).parents[2] / "docs" / "silent-corruption.md"
STEPS = SAMPLES // GLOBAL_BATCH
WRONG = re.compile(r"ERROR.*: step (\d+): rank (\d+) \([^)]*\) computes wrong: (.*?); the last check")


class CheckJob(Job):
    module = "tests.cluster.compute_check_job"

    @property
    def named(self) -> tuple[int, int, str]:
        """The step, the rank, and what differed, as said once by those who go on."""
        found = WRONG.findall(self.output())
        assert len(found) == 1, self.output()[-4000:]
        step, rank, what = found[0]
        return int(step), int(rank), what

    def only_weights(self, finishers: int) -> torch.Tensor:
        """What all finishers have ended with."""
        finals = self.final_weights()
        assert len(finals) == finishers, self.output()[-4000:]
        assert all(torch.equal(finals[0], other) for other in finals[1:])
        assert {event["step"] for event in self.of("finished")} == {STEPS}
        return finals[0]


def undisturbed(folder: Path, **options: object) -> torch.Tensor:
    return CheckJob.finished(folder / "undisturbed", [], nproc=1, **options).only_weights(1)


@pytest.mark.long
@pytest.mark.parametrize(
    ("at", "what", "options"),
    [
        pytest.param("gradient", "the gradients of shard", {}, marks=pytest.mark.daily),
        ("output", "the gradients of shard", {}),
        ("output", "the gradients of shard", {"only_large": True}),
        ("buffer", "the gradients of shard", {"batchnorm": True}),
        ("weight", "weights differ", {}),
        ("sent", "gradients after they were averaged differ", {}),
    ],
)
def test_with_logical_shards_a_wrong_worker_is_named_and_nothing_wrong_is_committed(
    tmp_path: Path, at: str, what: str, options: dict[str, object]
) -> None:
    # in the check of step 6 (of 0, 1, ..) rank 1 computes a shard of rank 0
    options = {"logical_shards": 6, "dropout": 0.2, **options}
    job = CheckJob.finished(tmp_path / "job", [], nproc=3, wrong_at=at, **options)
    step, rank, said = job.named
    assert job.of("flipped", rank=1), "nothing was wrong"
    assert (step, rank) == (8 if at == "weight" else 7, 1)
    assert what in said
    plain = {name: value for name, value in options.items() if name != "only_large"}
    assert torch.equal(job.only_weights(2), undisturbed(tmp_path, **plain)), "something wrong was committed"
    assert "is not started again on its host" in job.output()


@pytest.mark.long
def test_the_page_shows_it_as_it_says(tmp_path: Path) -> None:
    (script,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    (command,) = re.findall(r"^torchelastic (run .*) check\.py$", PAGE.read_text(), flags=re.MULTILINE)
    (tmp_path / "check.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "-m", "torchelastic.launch", *command.split(), "check.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"step \d+: rank \d \(\S+, worker 1\) computes wrong: the gradients of shard", done.stderr)
    assert done.stdout.count("done: 40 steps") == 2


@pytest.mark.long
@pytest.mark.parametrize("at", ["gradient", "output"])
def test_without_logical_shards_what_goes_wrong_once_is_found_by_computing_twice(tmp_path: Path, at: str) -> None:
    job = CheckJob.finished(tmp_path / "job", [], nproc=3, wrong_at=at, times=1)
    step, rank, said = job.named
    assert (step, rank) == (7, 1)
    assert "gradients, computed twice, differ" in said
    torch.testing.assert_close(job.only_weights(2), undisturbed(tmp_path), rtol=1e-9, atol=1e-12)


@pytest.mark.long
def test_without_logical_shards_weights_that_were_changed_behind_the_optimizer_are_found(tmp_path: Path) -> None:
    job = CheckJob.finished(tmp_path / "job", [], nproc=3, wrong_at="weight", times=1)
    step, rank, said = job.named
    assert (step, rank, said) == (8, 1, "weights differ")
    torch.testing.assert_close(job.only_weights(2), undisturbed(tmp_path), rtol=1e-9, atol=1e-12)


@pytest.mark.long
@pytest.mark.parametrize("logical_shards", [None, 6])
@pytest.mark.parametrize("mixes", ["by random", "by its own"])
def test_a_step_that_augments_by_random_numbers_now_and_then_accuses_nobody(
    tmp_path: Path, mixes: str, logical_shards: int | None
) -> None:
    options = {} if logical_shards is None else {"logical_shards": logical_shards}
    job = CheckJob.finished(tmp_path / "job", [], nproc=3, mixes=mixes, epochs=4, **options)
    assert "computes wrong" not in job.output()
    assert "the same step gives other bits" not in job.output()
    assert len(job.final_weights()) == 3
    if mixes == "by random":  # which the witness draws as the owner did
        assert "the check of computations is off" not in job.output()


@pytest.mark.long
def test_a_model_that_counts_its_calls_is_compared_and_counts_no_check(tmp_path: Path) -> None:
    job = CheckJob.finished(tmp_path / "job", [], nproc=3, anneals_from=15, logical_shards=6)
    assert "computes wrong" not in job.output()
    assert "check of computations is off" not in job.output()
    assert {event["calls"] for event in job.of("finished")} == {2 * STEPS}, "a check has left a trace"


@pytest.mark.long
def test_a_step_with_two_reductions_is_compared_up_to_the_first(tmp_path: Path) -> None:
    job = CheckJob.finished(tmp_path / "job", [], nproc=2, two_reductions=True)
    assert "check of computations is off" not in job.output()
    assert "computes wrong" not in job.output()
    assert job.of("finished")


@pytest.mark.long
def test_a_newcomer_learns_that_the_check_is_off(tmp_path: Path) -> None:
    fault = Fault("kill", "begin", rank=1, step=6)
    job = CheckJob.finished(tmp_path / "job", [fault], nproc=3, varies="each time", epochs=4, wait_for=3)
    assert {event["step"] for event in job.of("finished")} == {4 * STEPS}
    newcomers = {event["pid"] for event in job.of("started") if event["restart"]}
    assert newcomers & {event["pid"] for event in job.of("trained")}, "nobody has joined"
    assert len(re.findall("the check of computations is off from here on", job.output())) == 1
    assert "failure 2 in a row" not in job.output()


@pytest.mark.long
def test_who_has_another_number_of_threads_is_named_and_not_accused(tmp_path: Path) -> None:
    job = CheckJob.finished(tmp_path / "job", [], nproc=3, logical_shards=6, two_threads_on="1")
    said = re.findall(r"WARNING .*: rank \d \(\S+, worker (\d)\): no other worker has the same", job.output())
    assert said == ["1"], job.output()[-3000:]
    assert "computes wrong" not in job.output()
    job.only_weights(3)


@pytest.mark.long
def test_weights_that_part_between_two_checks_are_found_by_the_digests_of_replicas(tmp_path: Path) -> None:
    job = CheckJob.finished(tmp_path / "job", [], nproc=3, wrong_at="weight", times=1, every=10_000, epochs=10)
    found = re.findall(r"ERROR.*: step \d+: rank (\d) \([^)]*\) computes wrong: (.*?);", job.output())
    assert found == [("1", "weights, or what optimizers keep, differ")], job.output()[-4000:]
    assert len(job.final_weights()) == 2


@pytest.mark.long
def test_of_two_workers_both_are_named_and_the_run_stops_or_goes_on_as_was_chosen(tmp_path: Path) -> None:
    job = CheckJob(tmp_path / "stop", [], wrong_at="gradient", logical_shards=4)
    try:
        job.start("--standalone", nproc=2)
        assert job.wait() == [1]
    finally:
        job.stop()
    name = r"rank \d \([^)]*\)"
    both = rf"the gradients of shard \d differ on {name}, {name}, and it cannot be told who computes wrong"
    assert re.search(both, job.output()), job.output()[-3000:]
    assert {event["restart"] for event in job.of("started")} == {0}, "it was started again"
    goes_on = CheckJob.finished(
        tmp_path / "warn", [], nproc=2, wrong_at="gradient", logical_shards=4, on_doubt="warn", times=1
    )
    goes_on.only_weights(2)
    assert goes_on.of("flipped"), "nothing was wrong"


@pytest.mark.long
def test_a_host_with_only_wrong_workers_ends_with_a_code_of_its_own_and_is_not_taken_again(
    tmp_path: Path, etcd: EtcdServer, run_id: str
) -> None:
    job = CheckJob(tmp_path / "job", [], wrong_at="gradient", logical_shards=6, wrong_host="b", gate=STEPS - 1)
    options = (f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={run_id}", "--nnodes=2:3", "--last-call=0.5")
    try:
        good = job.start(*options, "--min-workers=2", nproc=2, JOB_HOST="a")
        wrong = job.start(*options, "--min-workers=2", nproc=1, JOB_HOST="b")
        assert wrong.wait(90) == COMPUTES_WRONG, job.output()[-4000:]
        assert "this host computes wrong, and takes no further part in the run: " in job.output_of(1)
        started = len(job.of("started"))
        assert job.start(*options, "--min-workers=2", nproc=1, JOB_HOST="b").wait(60) == COMPUTES_WRONG
        assert len(job.of("started")) == started, "a worker was started there"
        job.open_gate(STEPS - 1)
        assert good.wait(90) == 0
    finally:
        job.stop()
    job.only_weights(2)


@pytest.mark.long
def test_a_place_that_was_found_wrong_stays_empty_when_its_launcher_is_started_again(
    tmp_path: Path, etcd: EtcdServer, run_id: str
) -> None:
    job = CheckJob(tmp_path / "job", [], wrong_at="gradient", logical_shards=6, gate=STEPS - 1)
    options = (f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={run_id}", "--nnodes=1", "--min-workers=1")
    try:
        first = job.start(*options, nproc=3)
        wait_until(lambda: WRONG.search(job.output()), 60, "a worker is found")
        wrong = {event["worker"] for event in job.of("flipped")}
        assert len(wrong) == 1
        wait_until(lambda: etcd_has(etcd, run_id), 30, "that is in etcd")
        first.kill()
        first.wait()
        job.open_gate(STEPS - 1)
        started = len(job.of("started"))
        second = job.start(*options, nproc=3)
        assert second.wait(90) == 0, job.output()[-4000:]
        again = [event["worker"] for event in job.of("started")[started:]]
        assert sorted(again) == sorted({0, 1, 2} - wrong)
        assert "is not started: earlier in this run ComputesWrongError" in job.output_of(1)
    finally:
        job.stop()


def etcd_has(etcd: EtcdServer, run_id: str) -> bool:
    """Whether a place of the run is recorded as wrong."""
    with closing(EtcdStore([(etcd.host, etcd.port)])) as store:
        return bool(store.list_prefix(Keys(f"{DEFAULT_PREFIX}/{run_id}").wrong).items)


@pytest.mark.long
@pytest.mark.parametrize("logical_shards", [None, 6])
def test_a_healthy_run_with_kills_and_dropout_accuses_nobody_and_has_the_bits_of_one_without_checks(
    tmp_path: Path, logical_shards: int | None
) -> None:
    faults = [Fault("kill", "begin", rank=1, step=5), Fault("kill", "begin", rank=0, step=12)]
    options = {} if logical_shards is None else {"logical_shards": logical_shards, "dropout": 0.2, "batchnorm": True}
    job = CheckJob.finished(tmp_path / "job", faults, nproc=3, **options)
    said = job.output()
    assert "computes wrong" not in said
    assert "check of computations is off" not in said
    weights = job.only_weights(len(job.of("finished")))
    seldom = undisturbed(tmp_path, every=1000, **options)
    if logical_shards is None:
        torch.testing.assert_close(weights, seldom, rtol=1e-9, atol=1e-12)
    else:
        assert torch.equal(weights, seldom)


@pytest.mark.long
@pytest.mark.parametrize("logical_shards", [None, 6])
@pytest.mark.parametrize("varies", ["each time", "by rank"])
def test_a_model_that_gives_other_bits_each_time_switches_the_check_off_and_accuses_nobody(
    tmp_path: Path, varies: str, logical_shards: int | None
) -> None:
    options = {} if logical_shards is None else {"logical_shards": logical_shards}
    job = CheckJob.finished(tmp_path / "job", [], nproc=3, varies=varies, **options)
    assert "computes wrong" not in job.output()
    is_seen = logical_shards is not None or varies == "each time"  # each rank is compared with itself there
    assert len(re.findall("the check of computations is off from here on", job.output())) == int(is_seen)
    assert job.of("finished")
