"""What an agent costs a host: resident memory, and CPU while nothing happens, over a process that only imports Python.

    python -m benchmarks.agent_footprint [--runs 5] [--idle-s 5]

Targets: at most 60 MB resident; CPU of an idle agent not measurable (below 1 % of a core).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import psutil

from benchmarks.environment import print_result, summary
from torchelastic.rendezvous.server import EtcdServer

SLEEPER = """
import time
from torchelastic.p2p import CoordinatorP2P
coordinator = CoordinatorP2P()
coordinator.rendezvous_barrier()
time.sleep(600)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--idle-s", type=float, default=5.0)
    options = parser.parse_args()
    with EtcdServer() as etcd, tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "sleeper.py"
        script.write_text(SLEEPER)
        runs = [measure(etcd.endpoint, script, options.idle_s) for _ in range(options.runs)]
    print_result(
        "agent_footprint",
        resident_mb=summary([run["resident_mb"] for run in runs]),
        bare_python_mb=summary([run["bare_python_mb"] for run in runs]),
        idle_cpu_percent=summary([run["cpu_percent"] for run in runs], 3),
        target_mb=60,
    )


def measure(endpoint: str, script: Path, idle_s: float) -> dict[str, float]:
    command = [sys.executable, "-m", "torchelastic.launch", "run", "-v", "--rdzv-endpoint", endpoint]
    # its worker trains nothing, so it comes to no step at which it could leave
    command += ["--rdzv-id", uuid.uuid4().hex, "--nproc-per-node", "1", "--term-grace", "1", str(script)]
    bare = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    agent = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert agent.stderr is not None
        for line in agent.stderr:
            if "round 1 is running" in line:
                break
        process = psutil.Process(agent.pid)
        time.sleep(1.0)  # what follows the forming of a round is not idleness yet
        before = process.cpu_times()
        time.sleep(idle_s)
        after = process.cpu_times()
        used_s = after.user + after.system - before.user - before.system
        return {
            "resident_mb": process.memory_info().rss / 1e6,
            "bare_python_mb": psutil.Process(bare.pid).memory_info().rss / 1e6,
            "cpu_percent": 100 * used_s / idle_s,
        }
    finally:
        agent.terminate()
        agent.wait(20)
        bare.kill()
        bare.wait()


if __name__ == "__main__":
    main()
