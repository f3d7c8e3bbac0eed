"""What a replica's way to another process costs beside a plain TCP stream: MiB/s over loopback, and the ratio.

    python -m benchmarks.replica_transfer [--mib 256] [--runs 5] [--tensors 4096]

The receiver is another process with warm memory. In each run follow each other: a plain stream (sendall and recv_into
in pieces of the same size, nothing else), a push of one object, a push of as many bytes that were copied together from
`--tensors` tensors (flat, so the number should not matter; the copying is not counted), and a pull.
`ratio` is the plain stream's time over ours; the target is 0.7.
"""

from __future__ import annotations

import argparse
import multiprocessing
import secrets
import socket
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch

from benchmarks.environment import print_result, summary
from torchelastic.checkpoint.replicas.protocol import PIECE_BYTES
from torchelastic.checkpoint.replicas.replica_client import ReplicaClient
from torchelastic.checkpoint.replicas.replica_server import ReplicaServer

TARGET = 0.7
PATIENCE_S = 60.0


class WarmSlot:
    """A shelf with one slot, touched before; it forgets what it got, so that each push travels."""

    def __init__(self, size_bytes: int) -> None:
        self.slot = memoryview(bytearray(b"\x01") * size_bytes)

    def destination(self, _: str, size_bytes: int) -> memoryview:
        return self.slot[:size_bytes]

    def received(self, *_: str) -> None:
        pass

    def abort(self, object_id: str) -> None:
        raise AssertionError(f"{object_id} was abandoned")

    def source(self, _: str) -> memoryview | None:
        return self.slot

    def digest(self, _: str) -> str | None:
        return None

    def ids(self) -> list[str]:
        return []


def receive(pipe: Connection, token: str, size_bytes: int) -> None:
    """The other process: a plain receiver and a replica server."""
    shelf = WarmSlot(size_bytes)
    listener = socket.create_server(("127.0.0.1", 0))
    with ReplicaServer(shelf, token, host="127.0.0.1") as server:
        pipe.send((listener.getsockname(), server.address))
        while pipe.recv() == "plain":
            accepted, _ = listener.accept()
            with accepted:
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                filled = 0
                while filled < size_bytes:
                    filled += accepted.recv_into(shelf.slot[filled:], min(PIECE_BYTES, size_bytes - filled))
                accepted.sendall(b".")


def send_plainly(address: tuple[str, int], content: memoryview) -> None:
    with socket.create_connection(address, PATIENCE_S) as connected:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for offset in range(0, content.nbytes, PIECE_BYTES):
            connected.sendall(content[offset : offset + PIECE_BYTES])
        assert connected.recv(1) == b"."


def seconds(action: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    action()
    return time.perf_counter() - start_s


def flat_copy_of_tensors(size_bytes: int, tensors: int) -> memoryview:
    content = bytearray(size_bytes)
    for part in torch.frombuffer(content, dtype=torch.uint8).chunk(tensors):
        part.copy_(torch.randint(0, 256, (part.numel(),), dtype=torch.uint8))
    return memoryview(content)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--tensors", type=int, default=4096)
    options = parser.parse_args()
    size_bytes, token = options.mib << 20, secrets.token_hex(16)
    one, many = memoryview(secrets.token_bytes(size_bytes)), flat_copy_of_tensors(size_bytes, options.tensors)
    into = memoryview(bytearray(b"\x01") * size_bytes)
    spawn = multiprocessing.get_context("spawn")
    pipe, other_end = spawn.Pipe()
    child = spawn.Process(target=receive, args=(other_end, token, size_bytes), daemon=True)
    child.start()
    plain_address, address = pipe.recv()
    client = ReplicaClient(address, token)

    def plain() -> None:
        pipe.send("plain")
        send_plainly(plain_address, one)

    cases: dict[str, Callable[[], object]] = {
        "plain": plain,
        "push_one_object": lambda: client.push("one", one, token_round=1),
        "push_many_tensors": lambda: client.push("many", many, token_round=1),
        "pull": lambda: client.pull("one", lambda _: into),
    }
    for action in cases.values():
        action()  # warm up
    runs = [{name: seconds(action) for name, action in cases.items()} for _ in range(options.runs)]
    pipe.send("end")
    child.join(PATIENCE_S)
    print_result(
        "replica_transfer",
        mib=options.mib,
        tensors=options.tensors,
        mib_per_s={name: summary([options.mib / run[name] for run in runs], 0) for name in cases},
        ratio={
            name: round(statistics.median([run["plain"] / run[name] for run in runs]), 3)
            for name in cases
            if name != "plain"
        },
        target=TARGET,
    )


if __name__ == "__main__":
    main()
