"""Two ranks, one of which stops or dies in the middle of a message of 64 MiB: for test_abortable_group.py."""

from __future__ import annotations

import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from torchelastic.p2p.abandoned import aborted_groups
from torchelastic.p2p.groups import ProcessGroups
from torchelastic.processes.sockets import open_sockets

#: Of the group: what a survivor would wait for if nothing but gloo could free it.
TIMEOUT_S = 4.0
NUMBERS = 16 * 2**20


def broadcast(numbers: torch.Tensor) -> None:
    dist.broadcast(numbers, src=0)


def message(numbers: torch.Tensor) -> None:
    if dist.get_rank() == 0:
        dist.send(numbers, 1)
    else:
        dist.recv(numbers, 0)


def reduce_scatter(numbers: torch.Tensor) -> None:
    """FSDP2's, in each backward pass."""
    getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(numbers.new_empty(NUMBERS // 2), numbers)


def functional_reduce_scatter(numbers: torch.Tensor) -> None:
    """DTensor's."""
    from torch.distributed import _functional_collectives as collectives

    world = dist.group.WORLD
    assert world is not None
    scatter: Any = getattr(collectives, "reduce_scatter_single", collectives.reduce_scatter_tensor)
    (scatter(numbers, "sum", 0, world) + 0).sum()


def all_gather(numbers: torch.Tensor) -> None:
    """FSDP2's, in each forward pass."""
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(numbers.new_empty(2 * NUMBERS), numbers)


def all_to_all(numbers: torch.Tensor) -> None:
    dist.all_to_all_single(torch.empty_like(numbers), numbers)


def ddp(_numbers: torch.Tensor) -> None:
    """What a user wraps by himself: the wait for the gradients is in torch's C++."""
    module = torch.nn.Linear(4096, 4096, bias=False)
    wrapped = torch.nn.parallel.DistributedDataParallel(module, bucket_cap_mb=128)
    wrapped(torch.ones(1, 4096)).sum().backward()


def functional(numbers: torch.Tensor) -> None:
    from torch.distributed import _functional_collectives as collectives

    world = dist.group.WORLD
    assert world is not None
    result = collectives.all_reduce(numbers, "sum", world)
    (result + 0).sum()


def mesh(numbers: torch.Tensor) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    group = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b")).get_group("b")
    dist.all_reduce(numbers, group=group)


def new_group(numbers: torch.Tensor) -> None:
    dist.all_reduce(numbers, group=dist.new_group([0, 1]))


def reduction(_numbers: torch.Tensor) -> None:
    """Our own: of `ModelState`."""
    import torchelastic

    module = torch.nn.Linear(4096, 4096, bias=False)
    state = torchelastic.ModelState(module, torch.optim.SGD(module.parameters(), lr=0.1))
    state.sync(2, dist.get_rank())
    state.snapshot()
    state.model(torch.ones(1, 4096)).sum().backward()


OPERATIONS: dict[str, Callable[[torch.Tensor], None]] = {
    "broadcast": broadcast, "reduce_scatter": reduce_scatter, "functional_reduce_scatter": functional_reduce_scatter,
    "all_gather": all_gather, "all_to_all": all_to_all, "message": message, "ddp": ddp,
    "functional": functional, "mesh": mesh, "new_group": new_group, "reduction": reduction,
}  # fmt: skip


def is_gone(pid: int) -> bool:
    """Stopped, or dead."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "TZX"
    except OSError:
        return True


def be_victim(store: PrefixStore, operation: str, number: signal.Signals) -> None:
    """Go as soon as a small part of the message was sent or has arrived."""
    numbers = torch.ones(NUMBERS) if dist.get_rank() == 0 else torch.zeros(NUMBERS)
    began = moved_bytes()
    store.set("victim", str(os.getpid()))

    def go() -> None:
        while moved_bytes() < began + 2**20:
            pass
        os.kill(os.getpid(), number)

    threading.Thread(target=go, daemon=True).start()
    OPERATIONS[operation](numbers)
    time.sleep(60)


def moved_bytes() -> int:
    """Through all TCP connections of this process, in both directions, as the kernel counts them."""
    total = 0
    for one in open_sockets():
        try:
            descriptor = os.dup(one.descriptor)
        except OSError:
            continue  # another thread has closed it meanwhile
        try:
            connection = socket.socket(fileno=descriptor)
        except OSError:
            os.close(descriptor)
            continue  # and its number is another file's by now
        with connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
                total += sum(struct.unpack_from("QQ", information, 120))  # tcpi_bytes_acked, tcpi_bytes_received
    return total


def be_rank(rank: int, port: int, survivor: int, operation: str, signal_name: str, answer: Connection) -> None:
    """A process of the pair; the survivor answers how it went."""
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
    torch.set_num_threads(1)
    server = TCPStore("127.0.0.1", port, None, True, wait_for_workers=False) if rank == survivor else None
    store = PrefixStore(
        "round", TCPStore("127.0.0.1", port, None, False, timedelta(seconds=20), wait_for_workers=False)
    )
    groups = ProcessGroups("gloo", timedelta(seconds=TIMEOUT_S))
    groups.form(store, rank, 2)
    dist.all_reduce(torch.ones(1))
    if rank != survivor:
        be_victim(store, operation, signal.Signals[signal_name])
    store.wait(["victim"])
    answer.send(survive(groups, int(store.get("victim")), operation))
    del server
    os._exit(0)


def survive(groups: ProcessGroups, victim: int, operation: str) -> dict[str, object]:
    numbers = torch.ones(NUMBERS) if dist.get_rank() == 0 else torch.zeros(NUMBERS)
    times: dict[str, float] = {}

    def cut() -> None:
        while not is_gone(victim):
            time.sleep(0.001)
        time.sleep(0.3)  # what was under way has arrived: now nothing moves any more
        times["arrived"] = float(numbers.count_nonzero()) / NUMBERS
        times["cut"] = time.monotonic()
        groups.abort()

    longest_pause_s = 0.0

    def tick() -> None:
        nonlocal longest_pause_s
        last_s = time.monotonic()
        while True:
            time.sleep(0.002)
            now_s = time.monotonic()
            longest_pause_s, last_s = max(longest_pause_s, now_s - last_s), now_s

    cutter = threading.Thread(target=cut, daemon=True)
    cutter.start()
    threading.Thread(target=tick, daemon=True).start()
    error = ""
    try:
        OPERATIONS[operation](numbers)
    except RuntimeError as raised:
        error = f"{type(raised).__name__}: {raised}".splitlines()[0]
    freed_s = time.monotonic()
    cutter.join()  # where a peer has died, gloo may have noticed by itself before
    began_s = time.monotonic()
    groups.destroy()
    destroyed_s = time.monotonic()
    held = aborted_groups.count
    while aborted_groups.count:
        time.sleep(0.01)
    return {
        "error": error,
        "arrived": times["arrived"],
        "freed_after_s": freed_s - times["cut"],
        "destroyed_after_s": destroyed_s - began_s,
        "abandoned": held,
        "released_after_s": time.monotonic() - destroyed_s,
        "longest_pause_s": longest_pause_s,
    }
