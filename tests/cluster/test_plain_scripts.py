"""Scripts of torchrun as they are, started by `torchelastic run` on one host, with no variable set by hand."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.harness import wait_until
from torchelastic.network.ports import unused_ports
from torchelastic.rendezvous.server import EtcdServer

ROOT = Path(__file__).parents[2]
RUN = (sys.executable, "-m", "torchelastic.launch", "run", "--nproc-per-node", "2")
SETS = [
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
]
#: By hand nothing is set, neither here nor by who runs the tests.
NOT_SET = (*SETS, "MASTER_ADDR", "MASTER_PORT", "ROLE_NAME")

#: Two workers meet as torch's would, in a hundredth of the time: rank 0 serves, rank 1 connects. Then CASE.
MEETS = """
import os, signal, socket, sys, time
rank, life = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
print("rank", rank, "life", life, "port", address[1], flush=True)
if rank == 0:
    server = socket.create_server(address)
    peer, _ = server.accept()
else:
    peer = socket.socket()
    while peer.connect_ex(address):
        time.sleep(0.02)
    peer.sendall(b"x")
"""

DDP = """
import os, torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
model(torch.full((1, 2), float(dist.get_rank()))).sum().backward()
print("gradient", model.module.weight.grad.tolist(), "of", dist.get_world_size(), flush=True)
dist.destroy_process_group()
"""

LIGHTNING = """
import torch
from lightning.pytorch import LightningModule, Trainer

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, _):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", max_steps=3, **quiet)
trainer.fit(Model(), torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=8))
print("rank", trainer.global_rank, "of", trainer.world_size, "step", trainer.global_step, flush=True)
"""

ACCELERATE = """
import accelerate, torch

accelerator = accelerate.Accelerator(cpu=True)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.randn(48, 4), batch_size=8)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
step = 0
for batch in loader:
    accelerator.backward(model(batch).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    step += 1
print("rank", accelerator.process_index, "of", accelerator.num_processes, "step", step, flush=True)
accelerator.end_training()
"""

TRANSFORMERS = """
import os, sys, torch
os.environ["HF_HUB_OFFLINE"] = "1"
from transformers import Trainer, TrainingArguments

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x):
        return {"loss": self.layer(x).square().mean()}

data = [{"x": torch.randn(4)} for _ in range(64)]
arguments = TrainingArguments(
    sys.argv[1], max_steps=3, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True
)
trainer = Trainer(Model(), arguments, train_dataset=data)
trainer.train()
print("rank", arguments.process_index, "of", arguments.world_size, "step", trainer.state.global_step, flush=True)
"""


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in NOT_SET}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run(folder: Path, text: str, *options: str, arguments: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(text)
    return subprocess.run(
        [*RUN, *options, "train.py", *arguments],
        cwd=folder, env=environment(), capture_output=True, text=True, timeout=200,
    )  # fmt: skip


def lives(output: str) -> list[tuple[int, int, int]]:
    """(life, rank, port) of each process that has begun."""
    found = re.findall(r"rank (\d) life (\d) port (\d+)", output)
    return sorted((int(life), int(rank), int(port)) for rank, life, port in found)


@pytest.fixture
def etcd() -> Iterator[str]:
    with EtcdServer(port=unused_ports("127.0.0.1")[0]) as server:
        yield server.endpoint


# --- what is set ------------------------------------------------------------------------------------------------------


def test_workers_see_what_torchrun_would_set(tmp_path: Path) -> None:
    done = run(tmp_path, f"import os; print([os.environ[name] for name in {SETS}], os.environ['ROLE_NAME'])")
    assert done.returncode == 0, done.stderr
    seen = sorted(re.findall(r"\[worker \d\] (.*)", done.stdout))
    assert seen == [f"{[str(rank)] * 2 + ['0', str(rank)] + ['2', '2', '1', '2']} default" for rank in (0, 1)]


# --- a loss -----------------------------------------------------------------------------------------------------------


def test_a_loss_starts_all_again_at_a_new_port_even_who_has_finished_or_ignores_sigterm(tmp_path: Path) -> None:
    fails = """
if life == 0 and rank == 1:
    sys.exit(0)
if life == 0:
    peer.recv(1), time.sleep(1.5)
    os.kill(os.getpid(), signal.SIGKILL)
if life == 1 and rank == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)
if life == 1:
    sys.exit(3)
"""
    done = run(tmp_path, MEETS + fails)
    assert done.returncode == 0, done.stdout + done.stderr
    begun = lives(done.stdout)
    assert [(life, rank) for life, rank, _ in begun] == [(life, rank) for life in (0, 1, 2) for rank in (0, 1)]
    assert len({port for _, _, port in begun}) == 3
    said = [line for line in done.stderr.splitlines() if "initialises by the environment" in line]
    assert len(said) == 2
    assert "worker 0: killed by SIGKILL; no worker has asked for a group" in said[0]
    assert "all 2 workers are started again, as torchrun would (restart 1 of 3)" in said[0]
    assert "with torchelastic.train only the lost one would be" in said[0]
    assert "worker 1: exit code 3; " in said[1]
    assert "(restart 2 of 3)" in said[1]


def test_when_the_restarts_are_used_up_the_others_are_ended_and_the_error_is_the_last_word(tmp_path: Path) -> None:
    done = run(tmp_path, MEETS + "if rank: raise ValueError('on purpose')\ntime.sleep(60)", "--max-restarts", "1")
    assert done.returncode == 1, done.stdout + done.stderr
    assert [(life, rank) for life, rank, _ in lives(done.stdout)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert "all 2 workers are ended: the restarts are used up (--max-restarts 1)" in done.stderr
    assert done.stderr.rstrip().endswith("ValueError: on purpose")


def test_a_script_that_fails_before_it_meets_anybody_is_not_started_again(tmp_path: Path) -> None:
    done = run(tmp_path, "import os; print('rank', os.environ['RANK'], 'life 0 port 0'); 1 / 0")
    assert done.returncode == 1
    assert lives(done.stdout) == [(0, 0, 0), (0, 1, 0)]
    assert "ZeroDivisionError" in done.stderr


def test_a_launcher_that_is_stopped_starts_none_again(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(MEETS + "time.sleep(1.5); print('meets', flush=True); time.sleep(60)")
    log = tmp_path / "output"
    with log.open("wb") as file, subprocess.Popen(
        [*RUN, "train.py"], cwd=tmp_path, env=environment(), stdout=file, stderr=subprocess.STDOUT
    ) as launcher:  # fmt: skip
        try:
            wait_until(lambda: log.read_text().count("meets") == 2, 60, log.read_text())
            launcher.send_signal(signal.SIGTERM)
            assert launcher.wait(30) == 128 + signal.SIGTERM
        finally:
            launcher.kill()
    assert len(lives(log.read_text())) == 2
    assert "started again" not in log.read_text()


# --- several hosts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", ["import os; os.environ['RANK']", "raise ValueError('environment variable RANK expected, but not set')"]
)
def test_where_others_may_take_part_the_missing_ranks_are_explained(tmp_path: Path, etcd: str, error: str) -> None:
    done = run(tmp_path, error, "--rdzv-endpoint", etcd, "--rdzv-id", "plain", "--nnodes", "1:2")
    assert done.returncode == 1
    (said,) = {line.partition(": ")[2] for line in done.stderr.splitlines() if "initialises by the environment" in line}
    assert "is set on one host alone: start it without --rdzv-endpoint and --nnodes, with torchrun on several" in said


# --- the real packages ------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.timeout(250)
def test_plain_ddp_runs_as_it_is(tmp_path: Path) -> None:
    done = run(tmp_path, DDP)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("gradient [[0.5, 0.5]] of 2") == 2


@pytest.mark.long
@pytest.mark.timeout(250)
@pytest.mark.parametrize(
    ("package", "text"),
    [("lightning", LIGHTNING), ("accelerate", ACCELERATE), ("transformers", TRANSFORMERS)],
    ids=["lightning", "accelerate", "transformers"],
)
def test_a_trainer_of_a_framework_runs_as_it_is(tmp_path: Path, package: str, text: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"no {package}")
    done = run(tmp_path, text, arguments=(str(tmp_path / "out"),))
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(re.findall(r"rank \d of \d step \d", done.stdout)) == ["rank 0 of 2 step 3", "rank 1 of 2 step 3"]
