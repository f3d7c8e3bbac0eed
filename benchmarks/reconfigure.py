"""What torch's own way to give a group other members costs, `_reconfigure` of torch 2.14 and later, beside our re-form.

    python -m benchmarks.reconfigure [--ranks 2,4,8] [--rounds 15]

In the same processes, by turns: our group is destroyed and formed anew; a group that was made with
`enable_reconfigure=True` is given the same members again. Both over gloo, each up to the end of the first all-reduce of
4 bytes, and of all ranks the last one counts. How the ranks learn of each other is in neither. Then all but the last
rank wait in an all-reduce for that one, and give the group up after 0.2 s: `freed_ms` is how long the slowest of them
waits on, up to the time-out of 5 s. The private names of torch are called here, and nowhere else.
"""

from __future__ import annotations

import argparse
import socket
import sys
import threading
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.environment import print_result, summary
from benchmarks.rendezvous.crowd import Crowd

LIMIT_S = 300.0
TIMEOUT = timedelta(seconds=5)
WAITS_S = 0.2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4,8", help="sizes of the group")
    parser.add_argument("--rounds", type=int, default=15, help="of each kind")
    options = parser.parse_args()
    import torch
    import torch.distributed as dist

    if not hasattr(dist.distributed_c10d, "_reconfigure"):
        sys.exit(f"torch {torch.__version__} has no _reconfigure: this needs torch 2.14 or later")
    sizes = {size: measured(int(size), options.rounds) for size in options.ranks.split(",")}
    print_result("reconfigure", torch=torch.__version__, sizes=sizes)


def measured(size: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of each round, and of the end of a wait."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with Crowd(serve, [(size, port, rounds)] * size) as crowd:
        answers = crowd.ask("measure", LIMIT_S)
    found: dict[str, Any] = {
        kind: summary([max(answer[kind][number] for answer in answers) for number in range(rounds)])
        for kind in ("re_form_ms", "reconfigure_ms")
    }
    found["ratio_of_medians"] = round(found["reconfigure_ms"]["p50"] / found["re_form_ms"]["p50"], 2)
    for kind in ("freed_ms", "freed_reconfigurable_ms"):
        found[kind] = round(max(answer[kind] for answer in answers[:-1]), 1)
    return found


def serve(pipe: Connection, rank: int, size: int, port: int, rounds: int) -> None:
    """Be one of the ranks."""
    pipe.recv()
    import torch
    from torch._C._distributed_c10d import TCPStore

    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=rank == 0, timeout=timedelta(seconds=60), wait_for_workers=False)
    one = Rank(store, rank, size)
    answer: dict[str, Any] = {"re_form_ms": [], "reconfigure_ms": []}
    for _ in range(rounds):
        answer["re_form_ms"].append(one.re_form())
        answer["reconfigure_ms"].append(one.reconfigure())
    answer["freed_ms"] = one.freed_ms()
    answer["freed_reconfigurable_ms"] = one.freed_reconfigurable_ms()
    pipe.send(answer)
    pipe.recv()


class Rank:
    """One rank, with our group and then torch's, by turns: a process has one default group at a time."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        from torchelastic.p2p.groups import ProcessGroups

        self.store, self.rank, self.size = store, rank, size
        self.groups = ProcessGroups("gloo", TIMEOUT)
        self.number = 0
        self.theirs: Any = None

    def re_form(self) -> float:
        """Milliseconds of ours, from one generation to the next."""
        self._form()
        self._meet()
        began_s = time.monotonic()
        self.groups.destroy()
        self._form()
        self._all_reduce()
        took_ms = 1000 * (time.monotonic() - began_s)
        self.groups.destroy()
        return took_ms

    def reconfigure(self) -> float:
        """Milliseconds of torch's."""
        self._make_theirs()
        handles = self._handles()
        self._meet()
        began_s = time.monotonic()
        self._reconfigure(handles)
        self._all_reduce()
        took_ms = 1000 * (time.monotonic() - began_s)
        self._end_theirs()
        return took_ms

    def freed_ms(self) -> float:
        """How long this rank waits after the group was given up; -1 on the last rank, for which the others wait."""
        self._form()
        waited_ms = self._waits(self.groups.abort)
        self.groups.destroy()
        return waited_ms

    def freed_reconfigurable_ms(self) -> float:
        """The same with torch's abort."""
        import torch.distributed as dist

        self._make_theirs()
        world: Any = dist.group.WORLD
        waited_ms = self._waits(world.abort)
        self._end_theirs()
        return waited_ms

    def _waits(self, abort: Any) -> float:
        self._meet()
        if self.rank == self.size - 1:
            self._meet()
            return -1.0
        given_up_s: list[float] = []

        def give_up() -> None:
            given_up_s.append(time.monotonic())
            abort()

        timer = threading.Timer(WAITS_S, give_up)
        timer.start()
        try:
            self._all_reduce()
        except RuntimeError:
            pass
        ended_s = time.monotonic()
        timer.join()
        waited_ms = max(0.0, 1000 * (ended_s - given_up_s[0]))  # 0: it has failed by itself before
        self._meet()
        return waited_ms

    def _form(self) -> None:
        self.groups.form(self._fresh("group"), self.rank, self.size)

    def _make_theirs(self) -> None:
        import torch.distributed as dist

        make: Any = dist.init_process_group
        make(
            "gloo",
            store=self._fresh("group"),
            rank=self.rank,
            world_size=self.size,
            timeout=TIMEOUT,
            enable_reconfigure=True,
        )
        self._reconfigure(self._handles())

    def _handles(self) -> list[str]:
        """Of all ranks; the group is given to those that have them."""
        import torch.distributed as dist

        c10d: Any = dist.distributed_c10d
        shared = self._fresh("handles")
        shared.set(str(self.rank), c10d._get_reconfigure_handle())
        return [shared.get(str(rank)).decode() for rank in range(self.size)]

    def _reconfigure(self, handles: list[str]) -> None:
        import torch.distributed as dist

        c10d: Any = dist.distributed_c10d
        c10d._reconfigure(uuid=self.number, handles=handles, timeout=TIMEOUT).wait()

    def _end_theirs(self) -> None:
        import torch.distributed as dist

        try:
            dist.destroy_process_group()
        except RuntimeError as error:
            print(f"rank {self.rank}: the end of torch's group: {error}", file=sys.stderr)

    def _all_reduce(self) -> None:
        import torch
        import torch.distributed as dist

        dist.all_reduce(torch.ones(1))

    def _meet(self) -> None:
        self._fresh("meeting")
        key = f"meeting {self.number}"
        self.store.add(key, 1)
        while self.store.add(key, 0) < self.size:
            time.sleep(0.001)

    def _fresh(self, kind: str) -> Any:
        from torch._C._distributed_c10d import PrefixStore

        self.number += 1
        return PrefixStore(f"{kind} {self.number}", self.store)


if __name__ == "__main__":
    main()
