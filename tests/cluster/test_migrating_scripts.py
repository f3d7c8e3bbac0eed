"""examples/migrating: each script before and after the move, as real jobs, with the same weights at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
import torch

from examples.migrating.ddp.after import GLOBAL_BATCH_SIZE, make_dataset, make_model
from tests.waiting import wait_until
from torchelastic.network.ports import unused_ports
from torchelastic.rendezvous.server import EtcdServer

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "examples" / "migrating"
RUN = ("-m", "torchelastic.launch", "run", "--standalone", "--page", "off", "--nproc-per-node", "2")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
EPOCHS = 100

pytestmark = pytest.mark.timeout(300)  # torchrun takes its time to notice a death, and to start anew

Weights = dict[str, torch.Tensor]


class Started:
    """One command, with what it says in a file."""

    def __init__(self, command: Sequence[str | Path], log: Path, **environment: str) -> None:
        variables = {k: v for k, v in os.environ.items() if k != "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"}
        self.log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [str(word) for word in command],
                cwd=ROOT,
                env={**variables, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **environment},
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def is_running(self) -> bool:
        return self.process.poll() is None

    def wait_while_running(self, condition: Callable[[], object], what: str) -> None:
        wait_until(lambda: condition() or not self.is_running(), 90, f"{what}: {self.output()[-3000:]}")
        assert self.is_running(), f"over before {what}: {self.output()[-3000:]}"

    def worker(self, local_rank: int) -> psutil.Process:
        """The process with this LOCAL_RANK."""

        def find() -> psutil.Process | None:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                try:
                    if child.environ().get("LOCAL_RANK") == str(local_rank):
                        return child
                except psutil.Error:  # it has just ended
                    continue
            return None

        found: psutil.Process = wait_until(find, 30, f"worker {local_rank}: {self.output()[-3000:]}")
        return found

    def finish(self) -> str:
        """Wait for its good end; returns what it has said."""
        try:
            code = self.process.wait(150)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"does not end: {self.output()[-5000:]}") from None
        assert code == 0, self.output()[-5000:]
        return self.output()

    def end(self) -> None:
        """Kill what is left, with its descendants."""
        if self.is_running():
            for child in psutil.Process(self.process.pid).children(recursive=True):
                child.kill()
            self.process.kill()
            self.process.wait()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    """Starts commands that are ended with the test."""
    with ExitStack() as stack:
        made: list[Started] = []

        def begin(*words: str | Path, python: str | Path = sys.executable, **environment: str) -> Started:
            made.append(Started((python, *words), tmp_path / f"output-{len(made)}.txt", **environment))
            stack.callback(made[-1].end)
            return made[-1]

        yield begin


def single_process(epochs: int, *, decay_every: int | None = None) -> Weights:
    """The curve's training on one process without any of the libraries."""
    inputs, targets = make_dataset().tensors
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, decay_every or sys.maxsize, gamma=0.9)
    for _ in range(epochs):
        for at in range(0, len(inputs), GLOBAL_BATCH_SIZE):
            batch = slice(at, at + GLOBAL_BATCH_SIZE)
            loss = torch.nn.functional.mse_loss(model(inputs[batch]), targets[batch])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            optimizer.step()
            scheduler.step()
    return model.state_dict()


def read(path: Path) -> Weights:
    weights: Weights = torch.load(path, weights_only=True)
    return weights


def check_equal(weights: Weights, expected: Weights) -> None:
    torch.testing.assert_close(weights, expected, rtol=1e-9, atol=1e-12)


# ----------------------------------------------------------------------------------------------------------- plain DDP


@pytest.mark.slow
def test_plain_ddp_ends_with_these_weights(start: Callable[..., Started], tmp_path: Path) -> None:
    checkpoint = tmp_path / "curve.pt"
    start(*TORCHRUN, SCRIPTS / "ddp" / "before.py", "--epochs", str(EPOCHS), "--checkpoint", checkpoint).finish()
    check_last_epoch(checkpoint)


@pytest.mark.long
def test_what_plain_ddp_becomes_ends_with_the_same_weights_though_rank_0_is_killed(
    start: Callable[..., Started], tmp_path: Path
) -> None:
    checkpoint = tmp_path / "curve.pt"
    after = start(*RUN, SCRIPTS / "ddp" / "after.py", "--epochs", str(EPOCHS), "--checkpoint", checkpoint)
    after.wait_while_running(checkpoint.exists, "the first epoch's file")
    after.worker(0).kill()
    assert "SIGKILL" in after.finish()
    check_last_epoch(checkpoint)


def check_last_epoch(checkpoint: Path) -> None:
    saved = torch.load(checkpoint, weights_only=True)
    assert saved["epoch"] == EPOCHS
    check_equal(saved["model"], single_process(EPOCHS))


# ------------------------------------------------------------------------------------------------------------ torchrun


@pytest.mark.slow
def test_a_script_of_torchrun_starts_all_anew_and_ends_with_these_weights(
    start: Callable[..., Started], tmp_path: Path
) -> None:
    checkpoint, weights = tmp_path / "curve.pt", tmp_path / "weights.pt"
    words = ("--epochs", str(EPOCHS), "--checkpoint", checkpoint, "--weights", weights)
    # without it, torch 2.13 hands the new workers the addresses of the dead ones
    shared = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    before = start(*TORCHRUN, "--max-restarts", "3", SCRIPTS / "torchrun" / "before.py", *words, **shared)
    before.wait_while_running(checkpoint.exists, "the first checkpoint")
    first = {rank: before.worker(rank).pid for rank in (0, 1)}
    os.kill(first[1], signal.SIGKILL)
    before.finish()
    check_equal(read(weights), single_process(EPOCHS, decay_every=100))


@pytest.mark.long
def test_the_same_script_under_our_launcher_starts_all_anew_and_ends_with_these_weights(
    start: Callable[..., Started], tmp_path: Path
) -> None:
    checkpoint, weights = tmp_path / "curve.pt", tmp_path / "weights.pt"
    words = ("--epochs", str(EPOCHS), "--checkpoint", checkpoint, "--weights", weights)
    before = start(*RUN, SCRIPTS / "torchrun" / "before.py", *words)
    before.wait_while_running(checkpoint.exists, "the first checkpoint")
    first = {rank: before.worker(rank).pid for rank in (0, 1)}
    os.kill(first[1], signal.SIGKILL)
    before.wait_while_running(lambda: not psutil.pid_exists(first[0]), "the end of the other worker")
    assert "worker 1: killed by SIGKILL; no worker has asked for a group" in before.finish()
    check_equal(read(weights), single_process(EPOCHS, decay_every=100))


@pytest.mark.slow
def test_what_it_becomes_survives_one_and_then_the_loss_of_all(start: Callable[..., Started], tmp_path: Path) -> None:
    checkpoints, weights = tmp_path / "curve", tmp_path / "weights.pt"
    words = ("--epochs", str(EPOCHS), "--save-every", "20", "--checkpoint", checkpoints, "--weights", weights)

    def has_saved(number: int) -> Callable[[], bool]:
        return lambda: any(int(path.name) >= number for path in checkpoints.glob("[0-9]*"))

    first = start(*RUN, SCRIPTS / "torchrun" / "after.py", *words)
    first.wait_while_running(has_saved(0), "the first checkpoint")
    first.worker(1).kill()
    first.wait_while_running(has_saved(5), "a checkpoint of the survivor")
    first.process.kill()  # the launcher, its etcd and its workers
    first.process.wait()
    assert not weights.exists()

    start(*RUN, SCRIPTS / "torchrun" / "after.py", *words).finish()
    check_equal(read(weights), single_process(EPOCHS, decay_every=100))


# ------------------------------------------------------------------------------------------------- torchft and Horovod


@pytest.mark.slow
@pytest.mark.skipif(
    "TORCHFT_PYTHON" not in os.environ,
    reason="no torchft: python -m venv FOLDER && FOLDER/bin/pip install torch==2.13.0 torchft (a CPU build of torch), "
    "and TORCHFT_PYTHON=FOLDER/bin/python",
)
def test_a_script_of_torchft_ends_with_these_weights(start: Callable[..., Started], tmp_path: Path) -> None:
    python, weights = os.environ["TORCHFT_PYTHON"], tmp_path / "weights.pt"
    (port,) = unused_ports("127.0.0.1")
    lighthouse = Path(python).with_name("torchft_lighthouse")
    start("--bind", f"127.0.0.1:{port}", "--min_replicas", "2", python=lighthouse)
    variables = {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}", "NUM_REPLICA_GROUPS": "2"}
    script = (SCRIPTS / "torchft" / "before.py", "--epochs", "50", "--weights", weights)
    groups = [start(*script, python=python, REPLICA_GROUP_ID=str(group), **variables) for group in range(2)]
    for group in groups:
        group.finish()
    check_equal(read(weights), single_process(50))


@pytest.mark.slow
@pytest.mark.parametrize("system", ["torchft", "horovod"])
def test_what_scripts_of_torchft_and_horovod_become_survives_a_kill(
    system: str, start: Callable[..., Started], tmp_path: Path
) -> None:
    weights = tmp_path / "weights.pt"
    after = start(*RUN, SCRIPTS / system / "after.py", "--epochs", str(EPOCHS), "--weights", weights)
    after.wait_while_running(lambda: "epoch 2" in after.output(), "the third epoch")
    after.worker(1).kill()
    assert "SIGKILL" in after.finish()
    check_equal(read(weights), single_process(EPOCHS))


# ---------------------------------------------------------------------------------------------------- torchelastic 0.1

LINE = {"weight": torch.arange(1.0, 9.0, dtype=torch.float64).unsqueeze(0)}


def run_the_line(start: Callable[..., Started], script: Path, url: str, folder: Path, **environment: str) -> Path:
    """Two workers without a launcher, one of which is killed; returns the weights of the other."""
    checkpoints, epochs = folder / "checkpoints", 60
    words = ("--epochs", str(epochs), "--init-method", url, "--checkpoints", checkpoints)
    workers = [start(script, *words, "--weights", folder / f"{n}.pt", **environment) for n in range(2)]
    workers[0].wait_while_running(lambda: (checkpoints / "1").exists(), "the second checkpoint")
    assert workers[1].is_running(), workers[1].output()[-3000:]
    workers[1].process.kill()
    said = workers[0].finish()
    # each of two workers has 8 batches in an epoch, one alone has 16
    assert epochs * 8 < said.count("[line]: loss=") <= epochs * 16
    return folder / "0.pt"


@pytest.mark.long
def test_a_script_of_0_1_with_its_imports_changed_survives_a_kill(
    start: Callable[..., Started], etcd: EtcdServer, run_id: str, tmp_path: Path
) -> None:
    url = f"etcd://{etcd.endpoint}/{run_id}?min_workers=1&max_workers=2&last_call_timeout=30"
    weights = run_the_line(start, SCRIPTS / "torchelastic_0_1" / "after.py", url, tmp_path)
    check_equal(read(weights), LINE)


@pytest.mark.slow
@pytest.mark.skipif(
    "TORCHELASTIC_0_1" not in os.environ,
    reason="no torchelastic 0.1: pip install --no-deps --target FOLDER torchelastic==0.1.0rc1 python-etcd==0.4.5 "
    "dnspython urllib3, and TORCHELASTIC_0_1=FOLDER",
)
def test_the_script_of_0_1_runs_on_0_1(start: Callable[..., Started], run_id: str, tmp_path: Path) -> None:
    with EtcdServer(options=("--enable-v2",)) as etcd:
        url = f"etcd://{etcd.endpoint}/{run_id}?min_workers=1&max_workers=2&last_call_timeout=2"
        script = tmp_path / "before.py"  # away from the repository, whose torchelastic is another one
        script.write_text((SCRIPTS / "torchelastic_0_1" / "before.py").read_text())
        weights = run_the_line(start, script, url, tmp_path, PYTHONPATH=os.environ["TORCHELASTIC_0_1"])
    check_equal(read(weights), LINE)
