"""Several hosts on one machine: network namespaces on a bridge, and what may go wrong with a network, as verbs.

Nothing has a name that others could see, and nothing is left behind, however a test ends: a namespace lives as long as
the processes in it, all of which are tied to this one. The machine's own interfaces are not touched.

Needs root and the commands `ip`, `nsenter` and `unshare`; no packet filter and no traffic shaper of the kernel. Delay
and loss are made by a wire in user space (`python -m tests.cluster.network`, started by `Lab`), which needs
/dev/net/tun.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import selectors
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from torchelastic.processes import dies_with_parent
from torchelastic.rendezvous.server import EtcdServer

#: The name of the host that runs etcd; every lab has it.
ETCD = "etcd"

ROOT = Path(__file__).parents[2]
COMMANDS = ("ip", "nsenter", "unshare")
CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
#: An address that no host has: what is sent there is lost without a word, as in a network that is cut.
NOBODY = "02:00:00:00:ff:ff"
#: Any port that nobody listens at: a host that is reached says so.
CLOSED_PORT = 9


def why_impossible(*, wires: bool = False) -> str:
    """Why no lab can be had here, and the command that has one elsewhere; empty if it can.

    Args:
        wires: whether delay and loss are wanted.
    """
    elsewhere = "; as root on a Linux machine: python -m pytest tests/cluster/test_partitions.py"
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
    """

    name: str
    address: str
    keeper: int
    port: str

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
            _enter(self.network)
            yield
        finally:
            _enter(Path(f"/proc/self/fd/{home}"))
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

    Raises:
        RuntimeError: no namespace can be made; see `why_impossible`.
    """

    def __init__(self, hosts: Sequence[str], wires: Collection[str] = ()) -> None:
        self._names, self._wired = (*hosts, ETCD), frozenset(wires)
        self._hosts: dict[str, Host] = {}
        self._wires: dict[str, _Wire] = {}
        self._stack = ExitStack()
        self.etcd: EtcdServer

    def __enter__(self) -> Lab:
        with ExitStack() as stack:
            self._switch = Host("switch", "", _keep(stack, "switch"), "")
            self._switch.run("ip", "link", "add", "br0", "type", "bridge")
            self._switch.run("ip", "link", "set", "br0", "up")
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
        """Pull a host's cable at the switch: nothing reaches it, nothing that it sends arrives, nobody is told."""
        self._switch.run("ip", "link", "set", self._hosts[name].port, "down")

    def link_up(self, name: str) -> None:
        """Plug it in again."""
        self._switch.run("ip", "link", "set", self._hosts[name].port, "up")

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

    def _add(self, stack: ExitStack, number: int, name: str) -> None:
        host = Host(name, f"10.77.0.{number}", _keep(stack, name), f"p{number}")
        self._hosts[name] = host
        if name in self._wired:
            self._wires[name] = stack.enter_context(_Wire(host, self._switch))
        else:
            peer = ("peer", "name", "eth0", "netns", str(host.keeper))
            self._switch.run("ip", "link", "add", host.port, "type", "veth", *peer)
        self._switch.run("ip", "link", "set", host.port, "master", "br0", "up")
        host.run("ip", "addr", "add", f"{host.address}/24", "dev", "eth0")
        host.run("ip", "link", "set", "eth0", "up")


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
    stack.callback(_end, process)
    assert process.stdout is not None
    if process.stdout.readline() != b"ready\n":
        raise RuntimeError(f"no namespaces for host {name}: {why_impossible() or 'unshare failed'}")
    return process.pid


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _enter(network: Path) -> None:
    """setns(2) for the calling thread; Python has it from 3.12 on."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(network, os.O_RDONLY)
    try:
        if libc.setns(descriptor, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {network}")
    finally:
        os.close(descriptor)


# --- a wire with delay and loss ---------------------------------------------------------------------------------------


class _Wire:
    """The process that connects a host's interface with its port at the switch."""

    def __init__(self, host: Host, switch: Host) -> None:
        ends = [str(host.network), "eth0", str(switch.network), host.port]
        self._process = subprocess.Popen(
            dies_with_parent([sys.executable, "-m", "tests.cluster.network", *ends]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        self.set(0.0, 0.0)  # answered as soon as both ends are there

    def __enter__(self) -> _Wire:
        return self

    def __exit__(self, *_: object) -> None:
        _end(self._process)

    def set(self, delay_ms: float, loss: float) -> tuple[int, int]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{delay_ms} {loss}\n".encode())
        self._process.stdin.flush()
        passed, lost = self._process.stdout.readline().split()
        return int(passed), int(lost)


class _Frames:
    """What is on its way: frames by the time at which they arrive."""

    def __init__(self) -> None:
        self.delay_s = self.loss = 0.0
        self.passed = self.lost = 0
        self._queue: list[tuple[float, int, int, bytes]] = []
        self._count = 0

    def take(self, source: int, target: int) -> None:
        """Read what the source has sent; each frame is lost, or due at the target after the delay."""
        for _ in range(64):  # then the others get their turn
            try:
                frame = os.read(source, 65536)
            except OSError:
                return  # no more at present, or the interface is down
            if random.random() < self.loss:
                self.lost += 1
            else:
                self.passed += 1
                self._count += 1  # keeps the order of what arrives at the same time
                heapq.heappush(self._queue, (time.monotonic() + self.delay_s, self._count, target, frame))

    def deliver(self) -> float | None:
        """Hand over what is due; returns the seconds until the next is, None: nothing is on its way."""
        while self._queue:
            wait_s = self._queue[0][0] - time.monotonic()
            if wait_s > 0:
                return wait_s
            _, _, target, frame = heapq.heappop(self._queue)
            try:
                os.write(target, frame)
            except OSError:
                pass  # that end is down
        return None


def _open_tap(network: str, name: str) -> int:
    _enter(Path(network))
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return descriptor


def _be_a_wire(network: str, name: str, other_network: str, other_name: str) -> None:
    """Connect two TAP devices until standard input ends; each line "DELAY_MS LOSS" is answered with the counts."""
    one, other = _open_tap(network, name), _open_tap(other_network, other_name)
    frames, orders = _Frames(), b""
    with selectors.DefaultSelector() as selector:
        for descriptor in (0, one, other):
            selector.register(descriptor, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select(frames.deliver()):
                if key.fd != 0:
                    frames.take(key.fd, other if key.fd == one else one)
                    continue
                order = os.read(0, 4096)
                if not order:
                    return
                orders += order
                while b"\n" in orders:
                    line, _, orders = orders.partition(b"\n")
                    print(frames.passed, frames.lost, flush=True)
                    frames.delay_s, frames.loss = float(line.split()[0]) / 1000, float(line.split()[1])
                    frames.passed = frames.lost = 0


if __name__ == "__main__":
    _be_a_wire(*sys.argv[1:])
