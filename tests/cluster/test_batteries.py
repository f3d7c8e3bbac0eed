"""What users add to a train step, each with a worker killed in it: the result is that of an undisturbed run."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from tests.cluster.battery_job import EPOCHS, SAMPLES, Setup, make_sampler, one_step, result_of
from tests.cluster.elastic_job import make_dataset
from tests.cluster.harness import Job, batch_indices
from torchelastic.testing.faults import Fault


class BatteryJob(Job):
    module = "tests.cluster.battery_job"

    @property
    def batteries(self) -> list[str]:
        return list(self.job_options["batteries"])

    def check_batteries(self, finishers: int) -> dict[str, torch.Tensor]:
        """Every finisher ends with the same of everything, to the last bit, and with what one process alone gets."""
        finals = [torch.load(path, weights_only=True) for path in sorted(self.folder.glob("battery-*.pt"))]
        assert len(finals) == finishers, self.output()[-4000:]
        own = ("running_mean", "running_var")  # with each rank's own last batch in them
        for other in finals[1:]:
            assert other.keys() == finals[0].keys()
            for name, value in finals[0].items():
                assert name.endswith(own) or torch.equal(value, other[name]), f"{name} differs between workers"
        if "batchnorm" not in self.batteries:  # it normalises over a rank's share, so other splits train otherwise
            for name, value in self.reference().items():
                torch.testing.assert_close(finals[0][name], value, rtol=1e-8, atol=1e-11, msg=name)
        assert {event["seen"] for event in self.of("finished")} == {SAMPLES * EPOCHS}
        return dict(finals[0])

    def reference(self) -> dict[str, torch.Tensor]:
        """One process, no torchelastic, no compiler; the source of the first round is its rank 0."""
        first = min(self.of("synced", rank=0), key=lambda event: float(event["t"]))
        setup = Setup([name for name in self.batteries if name != "compile"], seed=first["worker"] + 2)
        sampler = make_sampler()
        inputs, targets = make_dataset(SAMPLES).tensors
        numbers = [(epoch, number) for epoch in range(EPOCHS) for number in range(sampler.batches_per_epoch)]
        chosen = [batch_indices(sampler, *number) for number in numbers]
        batches = [(inputs[indices], targets[indices]) for indices in chosen]
        for step in range(len(batches) // setup.accumulation):
            drawn = batches[step * setup.accumulation : (step + 1) * setup.accumulation]
            one_step(setup, setup.net, drawn, step)
        return result_of(setup)


MakeJob = Callable[..., BatteryJob]


@pytest.fixture
def battery_jobs(tmp_path: Path) -> Iterator[MakeJob]:
    made: list[BatteryJob] = []

    def make(batteries: Sequence[str], faults: Sequence[Fault], **options: object) -> BatteryJob:
        made.append(BatteryJob(tmp_path / f"job-{len(made)}", faults, batteries=batteries, **options))
        return made[-1]

    yield make
    for job in made:
        job.stop()


def run(job: BatteryJob, faults: Sequence[Fault], workers: int) -> dict[str, torch.Tensor]:
    """Run it; every fault must have struck, and who was killed must be back in the end."""
    job.start("--standalone", nproc=workers)
    assert job.wait() == [0], job.output()[-4000:]
    assert job.plan.struck() == list(range(len(faults))), job.output()[-3000:]
    assert min(job.rounds().values()) == workers - 1
    kills = sum(fault.verb == "kill" for fault in faults)
    # nobody stays in a collective of gloo's whose connections were cut, so nobody has to be ended
    assert "did not get ready in time" not in job.output()
    assert len(job.of("started")) == workers + kills
    return job.check_batteries(finishers=workers)


@pytest.mark.long
def test_scaler_two_optimizers_accumulation_and_ema_at_once_in_a_loop_of_ones_own(battery_jobs: MakeJob) -> None:
    faults = [
        # one optimizer has stepped on every worker, so every survivor is half-way through its weights
        Fault("kill", "second backward 1", rank=0, step=6),
        # and where a scaler has unscaled what it must unscale again
        Fault("raise", "second optimizer", rank=1, step=11, incarnation=None),
    ]
    job = battery_jobs(
        ["scaler", "two", "accumulation", "ema"], faults, loop="steps", wait_for_newcomer_at=[9], full_world=3
    )
    final = run(job, faults, workers=3)
    assert final["scaler"][0] != 1024, "it has grown, and shrunk after the infinite step"
    assert "it stands" not in job.output()
    told = [event["changes"] for event in job.of("finished")]
    assert sorted(told) == [[[0, 3]], [[0, 3], [3, 2], [2, 3]], [[0, 3], [3, 2], [2, 3]]]


@pytest.mark.long
def test_batch_norm_and_an_ema_of_it(battery_jobs: MakeJob) -> None:
    faults = [Fault("kill", "all backward 0", rank=1, step=6)]
    job = battery_jobs(["batchnorm", "ema"], faults, wait_for_newcomer_at=[9])
    final = run(job, faults, workers=2)
    steps = EPOCHS * make_sampler().batches_per_epoch
    assert final["net.first.1.num_batches_tracked"] == steps
    assert final["ema.n_averaged"] == steps


@pytest.mark.long
@pytest.mark.parametrize("before", [0, 1, 2], ids=["at the step", "at the one before", "at the next"])
def test_losses_that_are_sums_with_a_scaler_two_optimizers_and_accumulation(battery_jobs: MakeJob, before: int) -> None:
    """Step 4 is the one that the scaler skips; two workers become one, and two again."""
    faults = [
        Fault("kill", "first backward 1", rank=0, step=(4, 3, 5)[before]),
        Fault("kill", "second backward 0", rank=1, step=(10, 9, 11)[before], incarnation=None),
    ]
    batteries = ["scaler", "two", "accumulation", "tokens"]
    run(battery_jobs(batteries, faults, wait_for_newcomer_at=[7, 14]), faults, workers=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batteries", "phase", "loop", "rank"),
    [
        (["scaler"], "all backward 0", "steps", 0),
        (["two"], "second backward 0", "train", 1),
        (["accumulation"], "all backward 1", "steps", 1),
        (["ema"], "all backward 0", "train", 0),
    ],
)
def test_each_alone(battery_jobs: MakeJob, batteries: list[str], phase: str, loop: str, rank: int) -> None:
    faults = [Fault("kill", phase, rank=rank, step=6)]
    run(battery_jobs(batteries, faults, loop=loop, wait_for_newcomer_at=[9]), faults, workers=2)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on the CPU needs g++")
def test_a_compiled_model(battery_jobs: MakeJob) -> None:
    faults = [Fault("kill", "all backward 0", rank=1, step=6)]
    job = battery_jobs(["compile", "ema"], faults, wait_for_newcomer_at=[9], timeout_ms=60000)
    run(job, faults, workers=2)
