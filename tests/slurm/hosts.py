"""A real SLURM whose nodes are hosts of their own: network namespaces with addresses, names and links that can be cut.

Processes see each other's pids and files; whatever goes over the network does so between the addresses.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests import hosts
from tests.hosts import Lab
from tests.slurm.cluster import PATIENCE_S, POLL_S, Place, Slurm, why_impossible
from tests.waiting import wait_until

CONTROLLER = "ctl"
#: SLURM's own; in a network of one's own nobody else has them.
CONTROLLER_PORT, NODE_PORT = 6817, 6818


def why_no_hosts() -> str:
    """Why there can be no such SLURM here; "" if there can."""
    return why_impossible() or hosts.why_impossible().replace("tests/cluster/test_partitions.py", "tests/slurm")


class SlurmHosts(Slurm):
    """As `Slurm`; each node and the controller are hosts of a lab, which find each other by name.

    Args:
        folder: as there.
        lab: with the hosts `CONTROLLER`, n1, n2, ..
        nodes: how many.
    """

    silence_s, message_s = 6, 5

    def __init__(self, folder: Path, lab: Lab, nodes: int) -> None:
        super().__init__(folder, nodes)
        self.lab = lab
        self.lost: set[str] = set()
        lines = [f"{lab[name].address} {name}" for name in (CONTROLLER, hosts.ETCD, *self.names)]
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))

    def lose(self, node: str) -> None:
        """Take a node away at one blow: its link, and with SIGKILL all that runs there."""
        self.lab.link_down(node)
        pids = self.lab[node].pids()
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it died of the death of another
        self.lost.add(node)

    def kill_agent(self, node: str) -> None:
        """SIGKILL a node's `torchelastic run`, with which its workers die."""
        (agent,) = [pid for pid in self.lab[node].pids() if "torchelastic.launch" in psutil.Process(pid).cmdline()]
        os.kill(agent, signal.SIGKILL)

    def bring_back(self) -> None:
        """Switch the lost nodes on again, and wait until all are idle."""
        for node in sorted(self.lost):
            self.lab.link_up(node)
            self.start_node(node)
        self.lost.clear()
        self.wait_until_idle()

    def cancel_all(self) -> None:
        """Kill all jobs."""
        self._run("scancel", "--full", "--signal=KILL", "--user=root")

    def wait_until_down(self, node: str) -> None:
        """Wait until SLURM has seen that a node is lost."""
        wait_until(lambda: node in self.in_state("down"), PATIENCE_S, f"{node} is down", self.logs, every_s=POLL_S)

    def inhabitants(self, node: str) -> list[str]:
        """The names of the processes on a node."""
        return sorted(psutil.Process(pid).name() for pid in self.lab[node].pids() if psutil.pid_exists(pid))

    def _places(self) -> list[Place]:
        controller = Place(CONTROLLER, self.lab[CONTROLLER].address, CONTROLLER_PORT)
        return [controller, *(Place(name, self.lab[name].address, NODE_PORT) for name in self.names)]

    def _at(self, command: Sequence[str], node: str = "") -> list[str]:
        names = ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"']
        return self.lab[node or CONTROLLER].command([*names, str(self.folder / "hosts"), *command])


@contextmanager
def running_hosts(folder: Path, nodes: int) -> Iterator[SlurmHosts]:
    """A SLURM of hosts, all idle; it is ended at the end of the block, with all its jobs and hosts."""
    with Lab([CONTROLLER, *(f"n{n}" for n in range(1, nodes + 1))]) as lab:
        slurm = SlurmHosts(folder, lab, nodes)
        try:
            slurm.start()
            yield slurm
        finally:
            slurm.end()
