"""Each recipe of docs/cookbook.md as a reader would start it, with two workers of which one is killed on the way."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cluster.conftest import MakeJob

PAGE = Path(__file__).parents[2] / "docs" / "cookbook.md"
BLOCKS = re.findall(r"^```python\n# (\w+)\.py\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
RECIPES = [name for name, _ in BLOCKS if name != "common"]
STEPS_OF_AN_EPOCH, EPOCHS = 12, 3

#: Comes behind common.py. One worker, that with rank VICTIM, kills itself where CALL (which all ranks call) is called
#: for the TIMES-th time by it, once in the folder; at its end each worker leaves its weights.
KILLS = """

import atexit, os, signal, __main__
torch.set_num_threads(1)
calls = []

def die(*_):
    calls.append(1)
    if len(calls) == {times} and coordinator.rank == {victim}:
        try:
            os.close(os.open("killed", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)

if {call!r} == "evaluate":
    evaluates = evaluate
    def evaluate(*arguments):
        die()
        return evaluates(*arguments)
elif {call!r} == "optimizer":
    from torch.optim.optimizer import register_optimizer_step_pre_hook
    register_optimizer_step_pre_hook(die)

def leave_weights():
    torch.save(__main__.state.module.state_dict(), "weights-" + os.environ.get("LOCAL_RANK", "alone") + ".pt")

atexit.register(leave_weights)
"""


def write(folder: Path, *, call: str = "", times: int = 0, victim: int = 0) -> None:
    folder.mkdir()
    for name, text in BLOCKS:
        more = KILLS.format(call=call, times=times, victim=victim) if name == "common" else ""
        (folder / f"{name}.py").write_text(text + more)


def numbers(line: str) -> list[float]:
    return [float(word) for word in re.findall(r"[-+.\de]*\d", line)]


class Ran:
    """A recipe that has run, with a kill in it, and what it does when nothing happens.

    Attributes:
        folder: where it ran.
        results: the numbers behind RESULT of each worker, by local rank.
        expected: the same of a worker alone that nobody disturbs.
    """

    def __init__(
        self, jobs: MakeJob, tmp_path: Path, recipe: str, *launcher: str, tolerance: float = 1e-12, **kill: Any
    ) -> None:
        self.folder, alone = tmp_path / "killed", tmp_path / "alone"
        write(alone)
        write(self.folder, **kill)
        done = subprocess.run(
            [sys.executable, f"{recipe}.py"], cwd=alone, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        [line] = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
        self.expected = numbers(line)
        job = jobs()
        words = "cd '{}' && exec {} -m torchelastic.launch run --standalone --nproc-per-node 2 {} {}.py"
        command = words.format(self.folder, sys.executable, " ".join(launcher), recipe)
        job.agents.append(job._popen(["sh", "-c", command], "agent-0.txt", {}))
        assert job.wait(120) == [0], job.output()[-4000:]
        self.output = job.output()
        assert (self.folder / "killed").exists(), "nobody was killed"
        assert "killed by SIGKILL" in self.output
        self.results = {
            int(worker): numbers(line) for worker, line in re.findall(r"\[worker (\d)\] RESULT(.*)", self.output)
        }
        # one that came when the others had finished has nothing to show, and says so
        late = {int(one) for one in re.findall(r"\[worker (\d)\].* its state is no result", self.output)}
        expected = torch.load(alone / "weights-alone.pt")
        assert self.results.keys() - late
        for worker in self.results.keys() - late:
            weights = torch.load(self.folder / f"weights-{worker}.pt")
            for name, value in expected.items():
                torch.testing.assert_close(weights[name], value, rtol=1e-9, atol=tolerance, msg=f"{worker}: {name}")

        self.tolerance = tolerance

    def check_both(self) -> None:
        """Both workers have the result of an undisturbed one."""
        assert sorted(self.results) == [0, 1]
        for result in self.results.values():
            assert result == pytest.approx(self.expected, rel=max(1e-9, self.tolerance))


def needs(module: str) -> Any:
    """A module of the package that a recipe is about, or skip with how to run it."""
    try:
        return pytest.importorskip(module)
    except pytest.skip.Exception:
        package = module.partition(".")[0]
        pytest.skip(
            f"{package} is not installed; elsewhere: pip install --target FOLDER {package}; "
            f"PYTHONPATH=FOLDER pytest -m 'long or not long' tests/cluster/test_cookbook.py -k {package}"
        )


def slow(*values: object) -> object:
    """Parameters of a test that only `make test-all` runs with them."""
    return pytest.param(*values, marks=pytest.mark.slow)


def test_every_recipe_has_a_test() -> None:
    tests = {name for name in globals() if name.startswith("test_")}
    named = {recipe for recipe in RECIPES if any(recipe in test for test in tests)}
    assert named == set(RECIPES)


@pytest.mark.long
def test_evaluate_on_all_ranks_with_a_kill_in_the_evaluation(jobs: MakeJob, tmp_path: Path) -> None:
    ran = Ran(jobs, tmp_path, "evaluate_on_all_ranks", "--min-workers=2", call="evaluate", times=3, victim=1)
    ran.check_both()
    assert len(ran.expected) == 2 * (EPOCHS + 1), "epoch and loss, once each, with the one before the training"


@pytest.mark.long
@pytest.mark.parametrize(("call", "times"), [("evaluate", 3), slow("optimizer", 2 * STEPS_OF_AN_EPOCH + 1)])
def test_evaluate_on_rank_0_with_rank_0_killed(jobs: MakeJob, tmp_path: Path, call: str, times: int) -> None:
    ran = Ran(jobs, tmp_path, "evaluate_on_rank_0", "--min-workers=2", call=call, times=times, victim=0)
    ran.check_both()
    assert len(ran.expected) == 2 * (EPOCHS + 1)


@pytest.mark.long
def test_skip_a_bad_batch_with_a_kill_between_two(jobs: MakeJob, tmp_path: Path) -> None:
    ran = Ran(jobs, tmp_path, "skip_a_bad_batch", "--min-workers=2", call="optimizer", times=15, victim=0)
    ran.check_both()
    assert ran.expected[0] == EPOCHS * STEPS_OF_AN_EPOCH
    assert (
        len(set(re.findall(r"step \d+ is skipped by rank \d: the loss is no number \(32 samples\)", ran.output)))
        >= EPOCHS
    )


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["contrastive", "own_gradients"])
def test_contrastive_and_own_gradients_with_a_kill(jobs: MakeJob, tmp_path: Path, recipe: str) -> None:
    Ran(jobs, tmp_path, recipe, "--min-workers=2", call="optimizer", times=15, victim=0).check_both()


@pytest.mark.long
def test_hugging_face(jobs: MakeJob, tmp_path: Path) -> None:
    needs("transformers")
    kill = {"call": "optimizer", "times": 15, "victim": 1}
    # Transformers computes the loss in float32, whatever the model is
    Ran(jobs, tmp_path, "hugging_face", "--min-workers=2", tolerance=1e-5, **kill).check_both()


@pytest.mark.long
@pytest.mark.parametrize(("call", "times"), [slow("evaluate", 2), ("optimizer", STEPS_OF_AN_EPOCH + 1)])
def test_early_stopping_and_the_best_checkpoint(jobs: MakeJob, tmp_path: Path, call: str, times: int) -> None:
    ran = Ran(jobs, tmp_path, "early_stopping", "--min-workers=2", call=call, times=times, victim=0)
    ran.check_both()
    assert 2 < len(ran.expected) < 2 * (EPOCHS + 1), "it stops after an epoch and before the last"
    best = torch.load(ran.folder / "best.pt")
    epochs, losses = ran.expected[::2], ran.expected[1::2]
    assert best["loss"] == pytest.approx(min(losses), rel=1e-9)
    assert best["epoch"] == epochs[losses.index(min(losses))]
    assert not (ran.folder / "best.pt.new").exists()


@pytest.mark.long
def test_tensorboard_log(jobs: MakeJob, tmp_path: Path) -> None:
    accumulator = needs("tensorboard.backend.event_processing.event_accumulator")
    ran = Ran(jobs, tmp_path, "tensorboard_log", "--min-workers=2", call="optimizer", times=20, victim=0)
    folder = ran.folder / "runs" / "cookbook"
    assert len(list(folder.glob("events.*"))) == 2, "one of each process that was rank 0"
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    logged = [event.step for event in events.Scalars("train/loss")]
    assert logged == sorted(set(logged)), "no step twice"
    assert len(set(range(1, EPOCHS * STEPS_OF_AN_EPOCH + 1)) - set(logged)) <= 1


@pytest.mark.long
def test_wandb_log(jobs: MakeJob, tmp_path: Path) -> None:
    needs("wandb")
    ran = Ran(jobs, tmp_path, "wandb_log", "--min-workers=2", call="optimizer", times=20, victim=0)
    runs = list((ran.folder / "wandb").glob("offline-run-*"))
    assert len(runs) == 2, "one of each process that was rank 0"
    [run_id] = {run.name.split("-", 3)[3] for run in runs}
    assert run_id in ran.output, "the launcher's"


@pytest.mark.long
def test_mlflow_log(jobs: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = needs("mlflow")
    ran = Ran(jobs, tmp_path, "mlflow_log", "--min-workers=2", call="optimizer", times=20, victim=0)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = mlflow.MlflowClient(tracking_uri=f"file:{ran.folder}/mlruns")
    experiment = client.get_experiment_by_name("cookbook")
    [run] = client.search_runs([experiment.experiment_id])
    logged = [metric.step for metric in client.get_metric_history(run.info.run_id, "train/loss")]
    assert logged == sorted(set(logged)), "no step twice"
    assert len(set(range(1, EPOCHS * STEPS_OF_AN_EPOCH + 1)) - set(logged)) <= 1


@pytest.mark.long
def test_clipping_and_schedule_with_a_changing_world_size(jobs: MakeJob, tmp_path: Path) -> None:
    ran = Ran(jobs, tmp_path, "clipping_and_schedule", "--min-workers=1", call="optimizer", times=20, victim=1)
    assert re.search(r"round \d as rank 0, world size 1", ran.output), "the survivor has trained alone"
    assert any(result == pytest.approx(ran.expected, rel=1e-9) for result in ran.results.values())
    assert ran.expected[0] == EPOCHS * STEPS_OF_AN_EPOCH


@pytest.mark.long
def test_token_loss_with_a_changing_world_size(jobs: MakeJob, tmp_path: Path) -> None:
    ran = Ran(jobs, tmp_path, "token_loss", "--min-workers=1", call="optimizer", times=20, victim=1)
    assert re.search(r"round \d as rank 0, world size 1", ran.output), "the survivor has trained alone"
    assert any(result == pytest.approx(ran.expected, rel=1e-9) for result in ran.results.values())
    assert ran.expected[0] == EPOCHS * STEPS_OF_AN_EPOCH


@pytest.mark.long
@pytest.mark.parametrize(
    ("times", "where"), [slow(25, "before the first optimizer"), (26, "between the two optimizers")]
)
def test_own_state(jobs: MakeJob, tmp_path: Path, times: int, where: str) -> None:
    ran = Ran(jobs, tmp_path, "own_state", "--min-workers=2", call="optimizer", times=times, victim=1)
    ran.check_both()
    assert ran.expected == [40], where
