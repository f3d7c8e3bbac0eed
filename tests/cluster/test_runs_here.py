"""`torchelastic top` and `status` without an address find the runs of this host, and the launcher says what to type."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.waiting import wait_until
from torchelastic.processes import dies_with_parent

#: Trains until the file `stop` is there.
SCRIPT = """
import pathlib, time, torch, torchelastic

torch.set_num_threads(1)
model = torch.nn.Linear(2, 1)
state = torchelastic.ModelState(model, torch.optim.SGD(model.parameters(), lr=0.01))

def train_step(state):
    if pathlib.Path("stop").exists():
        raise StopIteration
    time.sleep(0.05)

torchelastic.train(torchelastic.CoordinatorP2P("gloo"), train_step, state)
"""

Launch = Callable[..., subprocess.Popen[bytes]]


def variables(folder: Path) -> dict[str, str]:
    """A host of our own, as far as launchers are found by their folders for temporary files."""
    return {**os.environ, "TMPDIR": str(folder), "COLUMNS": "200"}


@pytest.fixture
def host() -> Iterator[Path]:
    """Short: a launcher's socket lies below."""
    with tempfile.TemporaryDirectory(prefix="h-") as folder:
        Path(folder, "train.py").write_text(SCRIPT)
        yield Path(folder)


@pytest.fixture
def launch(host: Path) -> Iterator[Launch]:
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str, *words: str) -> subprocess.Popen[bytes]:
        with (host / f"{name}.txt").open("wb") as output:
            command = [sys.executable, "-m", "torchelastic.launch", "run", "--page=off", f"--rdzv-id={name}", *words]
            command = dies_with_parent([*command, "train.py"])
            started.append(subprocess.Popen(command, cwd=host, env=variables(host), stderr=output, stdout=output))
        return started[-1]

    yield start
    (host / "stop").touch()
    for process in started:
        process.wait(60)


def ask(host: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torchelastic.launch", *words]
    return subprocess.run(command, env=variables(host), capture_output=True, text=True, timeout=60)


def is_open(address: str, port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex((address, port)) == 0


@pytest.mark.long
def test_the_runs_of_this_host_are_found(host: Path, launch: Launch) -> None:
    nobody = ask(host, "status")
    assert nobody.returncode == 2
    [line] = nobody.stderr.splitlines()
    assert line.startswith(
        "torchelastic status: no launcher of this user runs a job on this host: give --rdzv-endpoint"
    )
    first = launch("first", "--log-dir=logs")
    wait_until(lambda: ask(host, "status").returncode == 0, 60, "the one run is found")
    assert "first" in ask(host, "top").stdout  # no terminal: the table once
    told = (host / "first.txt").read_text()
    typed = re.search(r"run first at (\S+); to watch it: (torchelastic top .*) \(or status\)\n", told)
    assert typed is not None, told
    assert typed[2] == f"torchelastic top --rdzv-endpoint {typed[1]} --rdzv-id first"
    assert "\nits report, while it runs or later: torchelastic report logs\n" in told

    launch("second", "--log-format=json")
    wait_until(lambda: ask(host, "status", "--rdzv-id=second").returncode == 0, 60, "the other is found by its name")
    several = ask(host, "status")
    assert several.returncode == 2
    head, *lines = several.stderr.splitlines()
    assert head == "torchelastic status: 2 runs of this user are on this host:"
    assert f"  torchelastic status --rdzv-endpoint {typed[1]} --rdzv-id first" in lines
    assert len(lines) == 2
    records = [json.loads(line) for line in (host / "second.txt").read_text().splitlines()]
    [record] = [record for record in records if record["kind"] == "run"]
    assert record["run_id"] == "second"
    assert f"--rdzv-endpoint {record['endpoint']} --rdzv-id second" in record["text"]

    first.send_signal(signal.SIGKILL)  # leaves its folder behind
    first.wait()
    assert len(list(host.glob("te-*/run"))) == 2
    wait_until(lambda: ask(host, "status").returncode == 0, 60, "the killed launcher's run is not here any more")
    assert "second" in ask(host, "status").stdout

    address, port = typed[1].rsplit(":", 1)
    wait_until(lambda: not is_open(address, int(port)), 60, "the killed launcher's etcd has ended too")
    launch("third", "--log-format=json")  # removes what the killed one has left, and nothing of the second
    wait_until(lambda: ask(host, "status", "--rdzv-id=third").returncode == 0, 60, "the third is found by its name")
    assert {len(list(host.glob(pattern))) for pattern in ("te-*/run", "te-*", "torchelastic-etcd-*")} == {2}
    assert ask(host, "status", "--rdzv-id=second").returncode == 0
    (host / "stop").touch()
    wait_until(lambda: not list(host.glob("te-*")), 60, "launchers that end remove their folders")
    wait_until(lambda: not list(host.glob("torchelastic-etcd-*")), 60, "and their etcd's")
