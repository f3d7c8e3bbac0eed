"""A wire with delay and loss, in user space: two TAP devices and a process between them.

For kernels without a traffic shaper. Needs root and /dev/net/tun.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import selectors
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from torchelastic.processes import dies_with_parent

CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a child and close its pipes."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def enter(network: Path) -> None:
    """setns(2) for the calling thread; Python has it from 3.12 on."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(network, os.O_RDONLY)
    try:
        if libc.setns(descriptor, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {network}")
    finally:
        os.close(descriptor)


class Wire:
    """The process that connects two interfaces. Use it as a context manager, in the main thread.

    Args:
        ends: network namespace and name of the one, and of the other; both interfaces are made.
    """

    def __init__(self, ends: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            dies_with_parent([sys.executable, __file__, *ends]),  # by its path: `tests` is in no installed package
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.set(0.0, 0.0)  # answered as soon as both ends are there

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        end(self._process)

    def set(self, delay_ms: float, loss: float) -> tuple[int, int]:
        """See `Lab.delay_and_loss`."""
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
    enter(Path(network))
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
