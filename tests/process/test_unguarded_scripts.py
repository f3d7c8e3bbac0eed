"""Scripts without `if __name__ == "__main__":`, where multiprocessing does not fork: what it starts imports the script.

Python 3.14 has forkserver for its default.
"""

from __future__ import annotations

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

ROOT = Path(__file__).parents[2]
PATIENCE_S = 100.0
REMEDY = 'put what the script runs below `if __name__ == "__main__":`'

SCRIPT = """
import multiprocessing, sys

multiprocessing.set_start_method(sys.argv[1], force=True)
import torch, torchelastic

model = torch.nn.Linear(8, 1)
sampler = torchelastic.ElasticBatchSampler(256, global_batch_size=32, epochs=2)
loader = torchelastic.ElasticLoader(torch.randn(256, 8), sampler, num_workers=1)
state = torchelastic.ModelState(model, torch.optim.SGD(model.parameters(), lr=0.01), sampler=sampler)


def train_step(state):
    state.model(next(loader)).sum().backward()
    state.optimizer.step()


torchelastic.train(torchelastic.CoordinatorP2P(), train_step, state)
print("trained")
"""


@pytest.mark.long
@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_its_data_worker_processes_do_not_train_and_one_error_names_the_remedy(
    tmp_path: Path, start_method: str
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(tmp_path / "train.py"), start_method]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 1
    assert done.stdout == ""
    errors = [line for line in done.stderr.splitlines() if line.startswith("torchelastic.errors.UnfitError: ")]
    of_child, of_script = (error.partition(": ")[2] for error in errors)
    assert of_child == f"a process that multiprocessing has started imports the script, and trains: {REMEDY}"
    assert of_script == (
        "the data worker processes of this loader ended before the first batch. multiprocessing starts them by "
        f'{start_method!r}, so they import the script: {REMEDY}, or give multiprocessing_context="fork"; else see '
        "what they have printed"
    )


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
        processes.surviving(draw, lambda: None)
    assert list(tries) == [1, 2], "another try would end like this one"
