"""A host that is stopped after its workers have finished, while those of another host have not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import wait_until
from torchelastic.rendezvous.server import EtcdServer

SCRIPT = """
import os, time
import torch, torchelastic
model = torch.nn.Linear(1, 1)
steps = iter(range(2))
def train_step(state):
    step = next(steps, None)
    if step is None:
        open(os.environ["MARK"], "w").close()
        time.sleep(float(os.environ["LATE_S"]))
        raise StopIteration
    state.model(torch.ones(1, 1)).sum().backward()
    state.optimizer.step()
state = torchelastic.ModelState(model, torch.optim.SGD(model.parameters(), lr=0.1))
torchelastic.train(torchelastic.CoordinatorP2P(), train_step, state)
"""


@pytest.mark.long
def test_its_launcher_ends_soon_after_the_grace_and_the_other_host_finishes(
    etcd: EtcdServer, run_id: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = [f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={run_id}", "--nnodes=2", "--term-grace=1", "train.py"]
    marks = [tmp_path / "finished", tmp_path / "late"]
    hosts = [
        subprocess.Popen(
            [sys.executable, "-m", "torchelastic", "run", *words],
            cwd=tmp_path,
            env={**os.environ, "MARK": str(mark), "LATE_S": late_s},
        )
        for mark, late_s in zip(marks, ("0", "30"), strict=True)
    ]
    try:
        wait_until(lambda: all(mark.exists() for mark in marks), 60, "one has finished, one is late")
        hosts[0].send_signal(signal.SIGTERM)
        assert hosts[0].wait(20) == 128 + signal.SIGTERM
        assert hosts[1].poll() is None, "it is late"
        assert hosts[1].wait(60) == 0
    finally:
        for host in hosts:
            host.kill()
