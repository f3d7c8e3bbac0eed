"""One of two ranks whose GPU and NCCL are `fake_gpu.c`: torch's own engines, without a GPU. One JSON line each case.

`python -m tests.process.fake_gpu_rank CASE BACKEND RANK PORT`, with the library loaded and FAKE_GPU set.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from tests.waiting import wait_until
from torchelastic.group import communicators
from torchelastic.group.communicators import wait_for_collectives
from torchelastic.p2p.groups import ProcessGroups

FOLDER = Path(os.environ["FAKE_GPU"])
#: Of collectives: no test waits so long.
TIMEOUT = timedelta(seconds=60)


class Rank:
    """Forms groups with the other rank.

    Args:
        backend: of the groups.
        rank: 0 or 1.
        port: of the store, which rank 0 serves.
    """

    def __init__(self, backend: str, rank: int, port: int) -> None:
        self.groups = ProcessGroups(backend, TIMEOUT)
        self.rank = rank
        self.store = TCPStore("127.0.0.1", port, 2, rank == 0, timedelta(seconds=30))
        self.generation = self.meetings = 0

    def form(self) -> None:
        """The next generation."""
        self.generation += 1
        self.groups.form(PrefixStore(f"{self.generation}/", self.store), self.rank, 2)

    def meet(self, name: str) -> None:
        """Wait for the other rank."""
        self.meetings += 1
        key = f"{self.meetings} {name}"
        self.store.add(key, 1)
        wait_until(lambda: self.store.add(key, 0) == 2, what=name)

    def part(self) -> None:
        """Rank 0 has the store, and goes last."""
        if self.rank == 1:
            self.store.set("parted", "")
        else:
            self.store.wait(["parted"])

    def make(self, name: str) -> None:
        """Say something to the fake, once for both."""
        self.meet(f"before {name}")
        (FOLDER / name).touch()

    def remove(self, name: str) -> None:
        """Take it back, once for both."""
        self.meet(f"no more {name}")
        (FOLDER / name).unlink(missing_ok=True)
        self.meet(f"removed {name}")


def outcome(action: Callable[[], object]) -> str:
    """What became of it."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def trains(rank: Rank) -> str:
    """What becomes of a collective whose kernel ends by itself."""
    dist.all_reduce(torch.empty(4, device="cuda"))
    return outcome(wait_for_collectives)


def aborted(rank: Rank) -> dict[str, object]:
    """The group is given up while a kernel waits for a lost peer; then the next one is formed."""
    rank.form()
    before = trains(rank)
    rank.make("busy")
    dist.all_reduce(torch.empty(4, device="cuda"))
    threading.Timer(0.3, rank.groups.abort).start()
    then = outcome(wait_for_collectives)
    rank.groups.destroy()
    rank.remove("busy")
    rank.form()
    return {"before": before, "then": then, "after": trains(rank)}


def given_up(rank: Rank) -> dict[str, object]:
    """Torch finds that a communicator has failed, and gives it up by itself: the kernel ends without an error."""
    rank.form()
    before = trains(rank)
    rank.make("busy")
    dist.all_reduce(torch.empty(4, device="cuda"))
    rank.make("error")
    began_s = time.monotonic()
    then = outcome(wait_for_collectives)
    took_s = time.monotonic() - began_s
    was_ours = communicators._aborted.is_set()
    rank.groups.abort()
    rank.groups.destroy()
    rank.remove("busy")
    rank.remove("error")
    rank.form()
    return {"before": before, "then": then, "after": trains(rank), "was_ours": was_ours, "took_s": took_s}


def seen_by_both(rank: Rank) -> dict[str, object]:
    """As `given_up`, and the group is aborted a moment later: torch is busy with the failure then."""
    rank.form()
    rank.make("busy")
    dist.all_reduce(torch.empty(4, device="cuda"))
    rank.make("error")
    time.sleep(1.2)  # torch looks once a second
    began_s = time.monotonic()
    rank.groups.abort()
    then = outcome(wait_for_collectives)
    return {"then": then, "took_s": time.monotonic() - began_s}


def lost(rank: Rank) -> dict[str, object]:
    """A peer is lost while NCCL connects the default group; then while it connects one of the user's."""
    rank.make("lost")
    told = {"default": _give_up_while_connecting(rank, rank.form)}
    rank.remove("lost")
    rank.groups.destroy()
    rank.form()
    rank.meet("formed")
    (FOLDER / "connecting").unlink(missing_ok=True)
    rank.make("lost")
    told["own"] = _give_up_while_connecting(rank, lambda: dist.new_group(backend=rank.groups.backend))
    rank.remove("lost")
    rank.groups.destroy()
    rank.form()
    return {**told, "after": trains(rank)}


def _give_up_while_connecting(rank: Rank, form: Callable[[], object]) -> str:
    ticks = []

    def give_up() -> None:
        wait_until((FOLDER / "connecting").exists, what="NCCL connects")
        for _ in range(10):
            time.sleep(0.02)
            ticks.append(1)
        rank.groups.abort()

    began_s = time.monotonic()
    threading.Thread(target=give_up, daemon=True).start()
    told = outcome(form)
    took_s = time.monotonic() - began_s
    return told if len(ticks) == 10 and took_s < TIMEOUT.total_seconds() / 2 else f"{told}, {len(ticks)}, {took_s} s"


CASES = {case.__name__: case for case in (aborted, given_up, lost, seen_by_both)}


def main() -> None:
    """Run one case."""
    faulthandler.dump_traceback_later(100, exit=True)
    warnings.simplefilter("ignore")  # torch says that it knows no such GPU
    case, backend, rank, port = sys.argv[1:]
    one = Rank(backend, int(rank), int(port))
    print(json.dumps(CASES[case](one)), flush=True)
    one.part()
    sys.stderr.flush()
    os._exit(0)  # the fake has no end of a process


if __name__ == "__main__":
    main()
