"""What the parts of a recovery take by themselves on this machine."""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from multiprocessing.connection import Connection

from benchmarks.rendezvous import floor
from benchmarks.rendezvous.crowd import Crowd
from torchelastic.rendezvous.server import EtcdServer

LIMIT_S = 120.0
WARM_UP = 3
REPEATS = 15


def etcd_commits_ms() -> list[float]:
    """Single puts to an etcd that runs as `--standalone` runs it."""
    with EtcdServer() as etcd, Crowd(floor.serve, [(etcd.endpoint,)]) as crowd:
        (answer,) = crowd.ask("measure", LIMIT_S)
    return [float(ms) for ms in answer["put_ms"]]


def gloo_forms_ms(world_size: int) -> list[float]:
    """A gloo group and one barrier in it, from a store that is there already: the slowest rank's time of each."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with Crowd(serve_gloo, [(world_size, port)] * world_size) as crowd:
        crowd.ask("load", LIMIT_S)
        answers = [crowd.ask("form", LIMIT_S) for _ in range(WARM_UP + REPEATS)]
    slowest = [max(answer["ms"] for answer in ranks) for ranks in answers]
    return slowest[WARM_UP:]


def serve_gloo(pipe: Connection, rank: int, world_size: int, port: int) -> None:
    """Be one rank, and answer "form" with milliseconds."""
    pipe.recv()
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    store = TCPStore("127.0.0.1", port, is_master=rank == 0, timeout=timedelta(seconds=30), wait_for_workers=False)
    pipe.send({})
    number = 0
    while True:
        pipe.recv()
        number += 1
        began_s = time.monotonic()
        fresh = PrefixStore(str(number), store)
        dist.init_process_group("gloo", store=fresh, rank=rank, world_size=world_size)
        dist.barrier()
        pipe.send({"ms": 1000 * (time.monotonic() - began_s)})
        dist.destroy_process_group()
