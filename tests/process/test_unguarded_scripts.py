"""Scripts without `if __name__ == "__main__":`, where multiprocessing does not fork: what it starts imports the script.

Python 3.14 has forkserver for its default.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from torchelastic.data.worker_processes import WorkerProcesses
from torchelastic.errors import UnfitError
from torchelastic.p2p import CoordinatorP2P
from torchelastic.rendezvous.handler import EtcdRendezvousHandler

ROOT = Path(__file__).parents[2]
PATIENCE_S = 100.0
REMEDY = 'put what the script runs below `if __name__ == "__main__":`'

SCRIPT = """
import multiprocessing, sys

multiprocessing.set_start_method(sys.argv[1], force=True)
import torch, torchelastic

print("script")
model = torch.nn.Linear(8, 1)
sampler = torchelastic.ElasticBatchSampler(256, global_batch_size=32, epochs=2)
if sys.argv[2] == "this loader":
    loader = torchelastic.ElasticLoader(torch.randn(256, 8), sampler, num_workers=1)
else:
    loader = torch.utils.data.DataLoader(torch.randn(256, 8), 32, num_workers=1)
state = torchelastic.ModelState(model, torch.optim.SGD(model.parameters(), lr=0.01), sampler=sampler)


def train_step(state):
    state.model(next(loader if sys.argv[2] == "this loader" else iter(loader))).sum().backward()
    state.optimizer.step()


torchelastic.train(torchelastic.CoordinatorP2P(), train_step, state)
print("trained")
"""
#: A loop of its own, and a DataLoader of torch's: whatever the script asks first, a group or a process of its own.
OWN_LOOP = """
import multiprocessing, sys
import torch, torchelastic

print("script")
coordinator = torchelastic.CoordinatorP2P("gloo")
coordinator.rendezvous_barrier()
coordinator.init_process_group()
for batch in torch.utils.data.DataLoader(torch.randn(256, 8), 32, num_workers=1, multiprocessing_context=sys.argv[1]):
    print("a batch")
coordinator.signal_training_done()
"""


@pytest.mark.long
@pytest.mark.parametrize("whose", ["this loader", "a DataLoader"])
@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_its_data_worker_processes_do_not_train_and_one_error_names_the_remedy(
    tmp_path: Path, start_method: str, whose: str
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(tmp_path / "train.py"), start_method, whose]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 1
    assert done.stdout.split() == ["script"] * 2, "this process, and one that it has started"
    errors = [line for line in done.stderr.splitlines() if line.startswith("torchelastic.errors.UnfitError: ")]
    of_child, of_script = (error.partition(": ")[2] for error in errors)
    assert of_child == f"a process that multiprocessing has started imports the script, and trains: {REMEDY}"
    assert of_script == (
        f"the data worker processes of {whose} ended before the first batch. multiprocessing starts them by "
        f'{start_method!r}, so they import the script: {REMEDY}, or give multiprocessing_context="fork"; else see '
        "what they have printed"
    )


@pytest.mark.long
@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_they_never_join_a_launchers_run_and_it_ends(tmp_path: Path, start_method: str) -> None:
    (tmp_path / "train.py").write_text(OWN_LOOP)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "torchelastic.launch", "run", "--standalone", "--max-restarts=0"]
    command += [str(tmp_path / "train.py"), start_method]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 1
    assert (done.stdout + done.stderr).count("joined round") <= 1
    assert f"imports the script, and asks for a group: {REMEDY}" in done.stdout + done.stderr


@pytest.fixture
def importing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if `multiprocessing` imported the script in this process."""
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)


def test_a_process_that_imports_the_script_asks_nobody_for_a_group(importing: None) -> None:
    reason = f"a process that multiprocessing has started imports the script, and asks for a group: {REMEDY}"
    coordinator = CoordinatorP2P("gloo")  # at the top of a module it is no harm
    with pytest.raises(UnfitError) as caught:
        coordinator.rendezvous_barrier()
    assert str(caught.value) == reason
    with pytest.raises(UnfitError) as caught:
        EtcdRendezvousHandler("etcd://127.0.0.1:1/run?min_workers=1&max_workers=1").next_rendezvous()
    assert str(caught.value) == reason


class ServerGone(DataLoader[Any]):
    """As in Python 3.14, whose fork server imports the script, and has ended by an error of that import."""

    def __iter__(self) -> Any:
        raise ConnectionResetError("Connection reset by peer")


@pytest.mark.long
@pytest.mark.parametrize("start_method", ["forkserver", "fork"])
def test_a_fork_server_that_has_ended_is_the_same_error(start_method: str) -> None:
    processes = WorkerProcesses("this loader")
    tries: Iterator[int] = iter(range(3))
    dataloader = ServerGone(TensorDataset(torch.zeros(4)), num_workers=1, multiprocessing_context=start_method)

    def draw() -> Any:
        next(tries)
        return next(processes.started_by(dataloader))

    with pytest.raises(UnfitError if start_method == "forkserver" else ConnectionResetError):
        processes.surviving(draw, lambda: None, lambda: "")
    assert list(tries) == [1, 2], "another try would end like this one"
