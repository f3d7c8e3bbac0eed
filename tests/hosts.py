"""Several hosts on one machine: network namespaces on a bridge, and what may go wrong with a network, as verbs.

Nothing has a name that others could see, and nothing is left behind, however a test ends: a namespace lives as long as
the processes in it, all of which are tied to this one. The machine's own interfaces are not touched.

Needs root and the commands `ip`, `nsenter` and `unshare`; no packet filter and no traffic shaper of the kernel. Delay
and loss are made by a wire in user space (`tests.wire`), which needs /dev/net/tun.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from tests.wire import Wire, end, enter
from torchelastic.processes import dies_with_parent
from torchelastic.rendezvous.server import EtcdServer

#: The name of the host that runs etcd; every lab has it.
ETCD = "etcd"

COMMANDS = ("ip", "nsenter", "unshare")
#: An address that no host has: what is sent there is lost without a word, as in a network that is cut.
NOBODY = "02:00:00:00:ff:ff"
#: Any port that nobody listens at: a host that is reached says so.
CLOSED_PORT = 9
#: How long killed processes may take to be gone.
GONE_S = 10.0


def why_impossible(*, wires: bool = False) -> str:
    """Why no lab can be had here, and the command that has one elsewhere; empty if it can.

    Args:
        wires: whether delay and loss are wanted.
    """
    elsewhere = "; it takes root on a Linux machine"
    missing = [command for command in COMMANDS if shutil.which(command) is None]
    if missing:
        return f"no {', '.join(missing)} here (Debian: iproute2, util-linux){elsewhere}"
    attempt = ["unshare", "--net", "--uts", "--", "ip", "link", "add", "br0", "type", "bridge"]
    done = subprocess.run(attempt, capture_output=True, text=True, check=False)
    if done.returncode:
        return f"no network namespace with a bridge: {done.stderr.strip()}{elsewhere}"
    if wires and not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return f"no /dev/net/tun, of which a wire with delay and loss is made{elsewhere}"
    return ""


@dataclass(frozen=True)
class Host:
    """One host of a lab.

    Attributes:
        name: its hostname.
        address: its IPv4 address in the lab.
        keeper: the process that holds its namespaces.
        port: the name of its interface at the switch.
        second: name and address of its interface on the second network; empty: it has none.
    """

    name: str
    address: str
    keeper: int
    port: str
    second: tuple[str, ...] = field(default=())

    @property
    def network(self) -> Path:
        """Its network namespace, for setns(2)."""
        return Path(f"/proc/{self.keeper}/ns/net")

    def command(self, argv: Sequence[str]) -> list[str]:
        """What to start, from the main thread, to run a command in there that ends with this process.

        The pid is the command's own: nothing stands between, so that signals go where they should.
        """
        return dies_with_parent(["nsenter", f"--target={self.keeper}", "--net", "--uts", "--", *argv])

    def run(self, *argv: str) -> str:
        """Run a short command in there and return its output. Raises RuntimeError with its complaint if it fails."""
        done = subprocess.run(self.command(argv), capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{self.name}: {' '.join(argv)}: {done.stderr.strip()}")
        return done.stdout

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Be in its network: for sockets that this thread opens, and for threads and processes that it starts."""
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            enter(self.network)
            yield
        finally:
            enter(Path(f"/proc/self/fd/{home}"))
            os.close(home)

    def pids(self) -> list[int]:
        """The processes in its network, without the one that holds it."""
        mine = self.network.readlink()
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and (entry / "ns/net").readlink() == mine:
                    found.append(int(entry.name))
            except OSError:
                continue  # it has ended meanwhile
        return sorted(pid for pid in found if pid != self.keeper)


class Lab:
    """Hosts on one switch, and an etcd on a host of its own. Use it as a context manager, in the main thread.

    Args:
        hosts: their names.
        wires: those that hang on a wire whose delay and loss can be set.
        second: those that are on a second network too (10.78.0.0/24), which etcd is not on: the names of their
            interfaces there.

    Raises:
        RuntimeError: no namespace can be made; see `why_impossible`.
    """

    def __init__(
        self, hosts: Sequence[str], wires: Collection[str] = (), second: Mapping[str, str] | None = None
    ) -> None:
        self._names, self._wired, self._second = (*hosts, ETCD), frozenset(wires), dict(second or {})
        self._hosts: dict[str, Host] = {}
        self._wires: dict[str, Wire] = {}
        self._stack = ExitStack()
        self.etcd: EtcdServer

    def __enter__(self) -> Lab:
        with ExitStack() as stack:
            self._switch = Host("switch", "", _keep(stack, "switch"), "")
            for bridge in ("br0", "br1"):
                self._switch.run("ip", "link", "add", bridge, "type", "bridge")
                self._switch.run("ip", "link", "set", bridge, "up")
            for number, name in enumerate(self._names, start=1):
                self._add(stack, number, name)
            with self._hosts[ETCD].entered():
                self.etcd = stack.enter_context(EtcdServer(host=self._hosts[ETCD].address))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def __getitem__(self, name: str) -> Host:
        return self._hosts[name]

    # --- what can go wrong, and be mended ---------------------------------------------------------

    def link_down(self, name: str) -> None:
        """Pull a host's cables at the switch: nothing reaches it, nothing that it sends arrives, nobody is told."""
        for port in self._ports(name):
            self._switch.run("ip", "link", "set", port, "down")

    def link_up(self, name: str) -> None:
        """Plug them in again."""
        for port in self._ports(name):
            self._switch.run("ip", "link", "set", port, "up")

    def power_off(self, name: str) -> None:
        """End a host as a power cut does: its last words reach nobody. Returns when all of its processes are gone.

        `link_up` gives it its power back: a host with nothing on it.
        """
        self.link_down(name)
        deadline_s = time.monotonic() + GONE_S
        while pids := self._hosts[name].pids():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"{name}: processes {pids} are still there {GONE_S:g} s after they were killed")
            time.sleep(0.01)

    def cut(self, one: str, other: str) -> None:
        """Lose whatever these two hosts send each other, without a word; both still reach everybody else."""
        for host, peer in self._pairs(one, other):
            neighbour = ("lladdr", NOBODY, "dev", "eth0", "nud", "permanent")
            host.run("ip", "neigh", "replace", peer.address, *neighbour)

    def heal(self, one: str, other: str) -> None:
        """Undo `cut`."""
        for host, peer in self._pairs(one, other):
            host.run("ip", "neigh", "del", peer.address, "dev", "eth0")

    def delay_and_loss(self, name: str, delay_ms: float, loss: float) -> tuple[int, int]:
        """Delay each frame to and from a host on a wire, and lose some.

        Args:
            name: one of those named in `wires`.
            delay_ms: in each direction.
            loss: probability for each frame.

        Returns:
            How many frames have passed and how many were lost since the last call.
        """
        return self._wires[name].set(delay_ms, loss)

    def reaches(self, one: str, other: str, timeout_s: float = 1.0) -> bool:
        """Whether a connection attempt is answered."""
        with self._hosts[one].entered():
            try:
                socket.create_connection((self._hosts[other].address, CLOSED_PORT), timeout=timeout_s).close()
            except ConnectionRefusedError:
                return True
            except OSError:
                return False
        return True

    # --- inside -----------------------------------------------------------------------------------

    def _pairs(self, one: str, other: str) -> list[tuple[Host, Host]]:
        return [(self._hosts[one], self._hosts[other]), (self._hosts[other], self._hosts[one])]

    def _ports(self, name: str) -> list[str]:
        host = self._hosts[name]
        return [host.port, f"{host.port}b"] if host.second else [host.port]

    def _add(self, stack: ExitStack, number: int, name: str) -> None:
        second = (self._second[name], f"10.78.0.{number}") if name in self._second else ()
        host = Host(name, f"10.77.0.{number}", _keep(stack, name), f"p{number}", second)
        self._hosts[name] = host
        if name in self._wired:
            ends = [str(host.network), "eth0", str(self._switch.network), host.port]
            self._wires[name] = stack.enter_context(Wire(ends))
        else:
            self._veth(host, host.port, "eth0")
        self._plug(host, host.port, "br0", "eth0", host.address)
        if second:
            self._veth(host, f"{host.port}b", second[0])
            self._plug(host, f"{host.port}b", "br1", *second)

    def _veth(self, host: Host, port: str, interface: str) -> None:
        peer = ("peer", "name", interface, "netns", str(host.keeper))
        self._switch.run("ip", "link", "add", port, "type", "veth", *peer)

    def _plug(self, host: Host, port: str, bridge: str, interface: str, address: str) -> None:
        self._switch.run("ip", "link", "set", port, "master", bridge, "up")
        host.run("ip", "addr", "add", f"{address}/24", "dev", interface)
        host.run("ip", "link", "set", interface, "up")


def _keep(stack: ExitStack, name: str) -> int:
    """Start the process that holds a host's namespaces: they are gone when it and all others in them have ended.

    No IPv6: what it sends by itself would be among the frames that a wire counts.
    """
    prepare = (
        'echo "$0" > /proc/sys/kernel/hostname; echo 1 > /proc/sys/net/ipv6/conf/default/disable_ipv6; '
        "ip link set lo up; echo ready; exec cat"
    )
    process = subprocess.Popen(
        dies_with_parent(["unshare", "--net", "--uts", "--", "sh", "-c", prepare, name]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    stack.callback(end, process)
    assert process.stdout is not None
    if process.stdout.readline() != b"ready\n":
        raise RuntimeError(f"no namespaces for host {name}: {why_impossible() or 'unshare failed'}")
    return process.pid
