"""Scripts of torchrun as they are, started by `torchelastic run` on one host, with no variable set by hand."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.framework_scripts import LIGHTNING_SHARDED
from tests.older_torch import needs_fsdp2_on_cpus
from tests.waiting import wait_until
from torchelastic.network.ports import unused_ports
from torchelastic.rendezvous.server import EtcdServer

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


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in NOT_SET}


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
    assert done.stderr.splitlines()[-1].startswith("no worker has asked for a group, as torchelastic.train does")


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


#: Four workers meet as torch's would: rank 0 serves, the others connect. Then CASE, and all wait for rank 0's end.
MEETS_ON_TWO = """
import os, signal, socket, sys, time
rank, life, hosts = (int(os.environ[name]) for name in ("RANK", "TORCHELASTIC_RESTART_COUNT", "GROUP_WORLD_SIZE"))
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
print(f"rank {rank} of {os.environ['WORLD_SIZE']}, life {life}, port {address[1]}, host {os.environ['GROUP_RANK']} of "
      f"{hosts}, local rank {os.environ['LOCAL_RANK']} of {os.environ['LOCAL_WORLD_SIZE']}", flush=True)
if rank == 0:
    server = socket.create_server(address)
    peers = [server.accept()[0] for _ in range(int(os.environ["WORLD_SIZE"]) - 1)]
else:
    peer = socket.socket()
    while peer.connect_ex(address):
        time.sleep(0.02)
CASE
if rank == 0 and not all(peer.recv(1) for peer in peers):
    sys.exit("a peer was lost")
for peer in peers if rank == 0 else [peer]:
    peer.sendall(b"x")
if rank > 0 and not peer.recv(1):
    sys.exit("rank 0 was lost")
"""
SAYS = r"rank (\d) of 4, life (\d+), port (\d+), host (\d) of 2, local rank (\d) of 2"


def run_on_two(folder: Path, text: str, words: tuple[str, ...], *each: tuple[str, ...]) -> tuple[list[int], str]:
    """Two launchers, as two hosts, with the same words and with each one's own; exit codes, and what all have said."""
    (folder / "train.py").write_text(text)
    said = folder / "said.txt"
    commands = [[*RUN, *words, *own, "train.py"] for own in each or ((), ())]
    with said.open("wb") as file:
        hosts = [
            subprocess.Popen(command, stdout=file, stderr=file, cwd=folder, env=environment()) for command in commands
        ]
        try:
            return [host.wait(90) for host in hosts], said.read_text()
        finally:
            for host in hosts:
                host.kill()


@pytest.mark.parametrize(
    ("case", "lives"),
    [
        pytest.param("", 1, id="undisturbed", marks=pytest.mark.long),
        pytest.param("if rank == 3 and life == 0: os.kill(os.getpid(), signal.SIGKILL)", 2, id="one is killed"),
        pytest.param("if rank == 0 and life == 0: sys.exit('an error')", 2, id="rank 0 fails", marks=pytest.mark.long),
        pytest.param(
            "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
            "if rank == 3 and life == 0: os.kill(os.getpid(), signal.SIGKILL)\n"
            "if life == 0: time.sleep(60)",
            2,
            id="one is killed, and the others take SIGTERM as a notice and end with 0",
            marks=pytest.mark.long,
        ),
    ],
)
def test_on_two_hosts_all_workers_have_ranks_and_are_started_again_as_one_group(
    tmp_path: Path, etcd: str, case: str, lives: int
) -> None:
    words = ("--rdzv-endpoint", etcd, "--rdzv-id", "plain", "--nnodes", "2")
    codes, said = run_on_two(tmp_path, MEETS_ON_TWO.replace("CASE", case), words)
    assert codes == [0, 0], said
    found = [tuple(map(int, one)) for one in re.findall(SAYS, said)]
    ranks = [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)]
    assert {(rank, host, local) for rank, _, _, host, local in found} == set(ranks), (
        "the ranks of a host are neighbours"
    )
    last = max(life for _, life, *_ in found)  # who is slow may not say anything in the life in which another fails
    assert sorted((rank, host, local) for rank, life, _, host, local in found if life == last) == ranks
    assert len({life for _, life, *_ in found}) == len({port for _, _, port, *_ in found}) == lives, said
    assert said.count("this script initialises by the environment (RANK, MASTER_ADDR)") == 2, "once on each host"


@pytest.mark.long
def test_on_two_hosts_a_script_that_fails_after_the_others_have_finished_is_a_failure_of_its_host(
    tmp_path: Path, etcd: str
) -> None:
    case = "if rank < 3: sys.exit(0)\ntime.sleep(2)\nsys.exit('its part could not be saved')"
    words = ("--rdzv-endpoint", etcd, "--rdzv-id", "plain", "--nnodes", "2")
    codes, said = run_on_two(tmp_path, MEETS_ON_TWO.replace("CASE", case), words)
    assert sorted(codes) == [0, 1], said
    assert "\nworker 1 failed: exit code 1" in said, "the last word of its launcher"


@pytest.mark.long
@pytest.mark.parametrize("backend", ["c10d", "static"])
def test_two_hosts_meet_at_one_of_them_as_with_torchrun(tmp_path: Path, backend: str) -> None:
    (port,) = unused_ports("127.0.0.1")
    each: tuple[tuple[str, ...], ...] = ()
    words = ("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}")
    if backend == "static":
        words = ("--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={port}")
        each = (("--node-rank=0",), ("--node-rank=1",))
    late = "if rank == 0: time.sleep(2)"
    codes, said = run_on_two(tmp_path, MEETS_ON_TWO.replace("CASE", late), words, *each)
    assert codes == [0, 0], said
    assert len(re.findall(SAYS, said)) == 4
    assert said.count(f"starts an etcd at port {port}") == 2
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)), "it has ended with the launchers"


@pytest.mark.long
def test_on_two_hosts_a_script_that_fails_again_and_again_fails(tmp_path: Path, etcd: str) -> None:
    text = "import os, sys; os.environ['RANK']; sys.exit('an error')"
    (tmp_path / "train.py").write_text(text)
    done = run(
        tmp_path,
        text,
        "--rdzv-endpoint",
        etcd,
        "--rdzv-id",
        "fails",
        "--nnodes",
        "1:2",
        "--max-restarts",
        "1",
        "--last-call",
        "1",
    )
    assert done.returncode == 1
    assert "an error" in done.stderr


# --- a real package; unsharded models of DDP and the frameworks run in test_ordinary_scripts.py -----------------------


@pytest.mark.long
@pytest.mark.timeout(450)
@needs_fsdp2_on_cpus
def test_a_sharded_model_of_lightning_goes_on_from_memory_in_its_next_life(tmp_path: Path) -> None:
    """FSDP2: all workers are started again, each with its part, at the step that the killed one was in."""
    if importlib.util.find_spec("lightning") is None:
        pytest.skip("no lightning")
    weights = []
    for word in ("undisturbed", "killed"):
        done = run(tmp_path, LIGHTNING_SHARDED, arguments=(str(tmp_path / word), word))
        assert done.returncode == 0, done.stdout + done.stderr
        weights.append(set(re.findall(r"weights ([\d.]+)", done.stdout)))
    assert len(weights[0]) == 1
    assert weights[0] == weights[1]
    steps = [(int(life), int(step)) for life, step in re.findall(r"rank 1 life (\d) step (\d+)", done.stdout)]
    assert steps == [(0, step) for step in range(7)] + [(1, step) for step in range(7, 12)]
