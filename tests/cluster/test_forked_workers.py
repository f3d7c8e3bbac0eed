"""A worker that the tests' server forks is what the launcher would start, as far as the worker can tell."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.forked_workers import server_address
from tests.cluster.harness import ROOT
from tests.waiting import is_gone, wait_until

SCRIPT = """
import __main__, atexit, faulthandler, json, multiprocessing, os, resource, signal, sys, threading, time
from pathlib import Path
import torch
import torch.distributed as dist
out = Path(sys.argv[1])
rank = os.environ["LOCAL_RANK"]
names = [name for name in os.environ if name.startswith(("OMP", "PYTHON", "TORCH", "LOCAL", "ROLE", "RANK", "WORLD"))]
facts = {
    "environment": sorted(names),
    "leads a session": os.getsid(0) == os.getpid() == os.getpgrp(),
    "parent": os.getppid() == int(os.environ["TORCHELASTIC_LEDGER"].partition(":")[0]),
    "folder": os.getcwd(),
    "umask": os.umask(0o22),
    "limits": [resource.getrlimit(number) for number in range(16)],
    "cpus": sorted(os.sched_getaffinity(0)),
    "network": os.readlink("/proc/self/ns/net"),
    "argv": sys.argv,
    "path": sys.path[0],
    "file": __file__,
    "main": sys.modules["__main__"].rank == rank and __main__ is sys.modules["__main__"],
    "ignored": [int(each) for each in signal.valid_signals() if signal.getsignal(each) == signal.SIG_IGN],
    "handled": [int(each) for each in signal.valid_signals() if callable(signal.getsignal(each))],
    "faults": faulthandler.is_enabled(),
    "descriptors": [stream.fileno() for stream in (sys.stdin, sys.stdout, sys.stderr)],
    "encoding": [stream.encoding for stream in (sys.stdin, sys.stdout, sys.stderr)],
    "errors": [sys.stdout.errors, sys.stderr.errors],
    "writes through": [sys.stdout.write_through, sys.stderr.write_through],
    "input": sys.stdin.read(),
    "threads": [threading.active_count(), torch.get_num_threads()],
    "process": [multiprocessing.current_process().name, multiprocessing.parent_process()],
    "daemon": multiprocessing.current_process().daemon,
    "method": multiprocessing.get_start_method(),
    "group": dist.is_initialized(),
    "agent's": [name for name in ("grpc", "google.protobuf", "etcd3") if name in sys.modules],
}
(out / f"seed-{rank}").write_text(str(torch.initial_seed()))
(out / f"facts-{rank}").write_text(json.dumps(facts))
atexit.register((out / f"ended-{rank}").write_text, "in order")
print("a word on standard output")
if sys.argv[2] == "raises":
    raise ValueError("an error of the script")
if sys.argv[2] == "says why":
    sys.exit("this is why")
if sys.argv[2] == "kills itself":
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[2] == "hangs":
    (out / f"pid-{rank}").write_text(str(os.getpid()))
    time.sleep(60)
"""


def launched(folder: Path, how: str, forked: bool) -> subprocess.Popen[str]:
    (folder / "train.py").write_text(SCRIPT)
    program = ["tests.cluster.forking_launcher", server_address()] if forked else ["torchelastic.launch"]
    options = ["run", "--standalone", "--page=off", "--nproc-per-node=2", "--max-restarts=0"]
    out = folder / ("forked" if forked else "started")
    out.mkdir()
    command = [sys.executable, "-m", *program, *options, str(folder / "train.py"), str(out), how]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)


def ended(folder: Path, how: str, forked: bool) -> tuple[int, str, dict[str, Any]]:
    """The exit status, what was said, and what worker 0 has found; the paths that differ are made equal."""
    launcher = launched(folder, how, forked)
    said, _ = launcher.communicate(timeout=60)
    out = folder / ("forked" if forked else "started")
    facts = json.loads((out / "facts-0").read_text().replace(str(out), "OUT"))
    facts["ended"] = (out / "ended-0").exists()
    return launcher.returncode, said, facts


def test_it_finds_what_a_started_worker_finds(tmp_path: Path) -> None:
    status, said, facts = ended(tmp_path, "ends", forked=True)
    assert (status, facts) == ended(tmp_path, "ends", forked=False)[::2], said
    assert status == 0
    assert len({path.read_text() for path in tmp_path.glob("*/seed-*")}) == 4, "each draws random numbers of its own"
    assert "[worker 1] a word on standard output" in said


@pytest.mark.parametrize(
    ("how", "says", "in_order"),
    [
        ("raises", "worker 0 failed: exit code 1\nTraceback", True),
        ("says why", "this is why", True),
        ("kills itself", "killed by SIGKILL", False),
    ],
)
def test_it_ends_as_its_script_does(tmp_path: Path, how: str, says: str, in_order: bool) -> None:
    status, said, facts = ended(tmp_path, how, forked=True)
    assert status != 0
    assert says in said
    assert facts["ended"] is in_order
    assert "forked_workers" not in said, "a traceback begins in the script"


def test_it_ends_with_its_launcher(tmp_path: Path) -> None:
    launcher = launched(tmp_path, "hangs", forked=True)
    files = [tmp_path / "forked" / f"pid-{rank}" for rank in range(2)]
    wait_until(lambda: all(file.exists() and file.read_text() for file in files), 60, "both have begun")
    launcher.send_signal(signal.SIGKILL)
    for file in files:
        pid = int(file.read_text())
        wait_until(lambda pid=pid: is_gone(pid), 10, f"{pid} has ended")  # type: ignore[misc]
    launcher.communicate(timeout=10)
