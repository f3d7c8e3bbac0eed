"""Scripts that are started by themselves: each has a private agent, and behaves like any worker."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.cluster.harness import Job
from tests.cluster.test_status_run import Watcher
from tests.waiting import is_gone, wait_until
from torchelastic.rendezvous.server import EtcdServer

MakeJob = Callable[..., Job]


def agent_of(pid: int) -> int:
    """The private agent of a script."""
    children = psutil.Process(pid).children()
    (agent,) = [child.pid for child in children if "torchelastic.agent" in " ".join(child.cmdline())]
    return int(agent)


def folder_of(agent: int) -> Path:
    """Where its socket is."""
    words = psutil.Process(agent).cmdline()
    return Path(words[words.index("--socket") + 1]).parent


@pytest.mark.long
def test_scripts_without_the_launcher_find_each_other_and_survive_a_kill(
    jobs: MakeJob, etcd: EtcdServer, run_id: str
) -> None:
    job = jobs(gates=[10])
    url = f"etcd://{etcd.endpoint}/{run_id}?min_workers=1&max_workers=2&last_call_timeout=30"
    scripts = [job.start_alone(url, name) for name in ("first", "second")]
    job.wait_for("held", count=2, step=10)
    private_agents = [agent_of(script.pid) for script in scripts]
    folders = [folder_of(pid) for pid in private_agents]
    assert all(folder.is_dir() for folder in folders)
    assert not any("libtorch" in Path(f"/proc/{pid}/maps").read_text() for pid in private_agents)
    watcher = Watcher(etcd, run_id)
    wait_until(lambda: len(watcher.status()["hosts"]) == 2, 30, "each agent publishes its status: there is a group")
    scripts[1].send_signal(signal.SIGKILL)
    job.open_gate(10)
    assert scripts[0].wait(60) == 0, job.output()[-4000:]
    job.check_identity(finishers=1)
    assert {event["world"] for event in job.of("drawn")} == {1, 2}
    wait_until(lambda: all(map(is_gone, private_agents)), 10, "the private agents end with their owners")
    assert not any(folder.exists() for folder in folders)
