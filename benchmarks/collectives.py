"""What it costs that a wait in a collective can be given up: our group beside the plain one that it is made of.

    python -m benchmarks.collectives [--blocks 41] [--calls 100]

Blocks of calls through `AbortableGroup` and through the group of torch's inside it follow each other in the same two
processes, over the same connections. `cost_us` is the median block of the one less the median block of the other;
target: 10 us for a collective. A message larger than 16 KiB is waited for on another thread, which is shown too.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.environment import print_result, summary
from benchmarks.rendezvous.crowd import Crowd

LIMIT_S = 300.0
WARM_UP = 50
#: What is called, with how many numbers of 4 bytes.
CASES = {"all_reduce_4_bytes": 1, "all_reduce_1_mib": 2**18, "message_4_bytes": 1, "message_64_kib": 2**14}
TARGETS = {"collective_us": 10}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=41, help="of each kind")
    parser.add_argument("--calls", type=int, default=100, help="in a block")
    options = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with Crowd(serve, [(port, options.blocks, options.calls)] * 2) as crowd:
        answer, _ = crowd.ask("measure", LIMIT_S)
    cases = {
        name: {
            "ours_us": summary(blocks["ours"]),
            "plain_us": summary(blocks["plain"]),
            "cost_us": round(statistics.median(blocks["ours"]) - statistics.median(blocks["plain"]), 2),
        }
        for name, blocks in answer.items()
    }
    print_result("collectives", calls_per_block=options.calls, cases=cases, targets=TARGETS)


def serve(pipe: Connection, rank: int, port: int, blocks: int, calls: int) -> None:
    """Be one of two ranks, and answer with the microseconds of a call in each block."""
    pipe.recv()
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    from torchelastic.p2p.abortable import AbortableGroup
    from torchelastic.p2p.groups import ProcessGroups

    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=rank == 0, timeout=timedelta(seconds=30), wait_for_workers=False)
    groups = ProcessGroups("gloo", timedelta(seconds=60))
    groups.form(store, rank, 2)
    ours: Any = dist.group.WORLD
    assert isinstance(ours, AbortableGroup)
    kinds: dict[str, Any] = {"ours": ours, "plain": ours._inner}
    answer: dict[str, dict[str, list[float]]] = {}
    for name, numbers in CASES.items():
        tensor = torch.ones(numbers)
        calls_of = {kind: _call(name, group, tensor, rank) for kind, group in kinds.items()}
        for call in calls_of.values():
            _measure(call, WARM_UP)
        answer[name] = {kind: [] for kind in kinds}
        for _ in range(blocks):
            for kind, call in calls_of.items():
                answer[name][kind].append(_measure(call, calls))
    pipe.send(answer)
    pipe.recv()


def _call(name: str, group: Any, tensor: Any, rank: int) -> Callable[[], None]:
    import torch.distributed as dist

    options = dist.AllreduceOptions()

    def all_reduce() -> None:
        group.allreduce([tensor], options).wait()
        tensor.fill_(1.0)

    def message() -> None:
        """There and back."""
        for sender in (0, 1):
            (group.send if rank == sender else group.recv)([tensor], 1 - rank, 0).wait()

    return all_reduce if name.startswith("all_reduce") else message


def _measure(call: Callable[[], None], calls: int) -> float:
    """Microseconds of one call."""
    began_s = time.perf_counter()
    for _ in range(calls):
        call()
    return 1e6 * (time.perf_counter() - began_s) / calls


if __name__ == "__main__":
    main()
