"""One of two ranks that form a group, give it up while one of them waits, and form the next: for test_reform_leaks.py.

Usage: reforming_rank.py RANK PORT TIMES; prints JSON: what was open early on, and at the end.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from torchelastic.p2p.abandoned import aborted_groups
from torchelastic.p2p.groups import ProcessGroups

#: By then everything that is made once has been made.
EARLY = 20
#: So many looks, 10 ms apart, without anything being closed.
LOOKS = 100


def open_now() -> dict[str, int]:
    """What is open when nothing was closed for a second: released groups and the store's server close theirs later."""
    gc.collect()
    while aborted_groups.count:  # released on a thread of its own
        time.sleep(0.01)
    folders = {"descriptors": "/proc/self/fd", "threads": "/proc/self/task"}
    fewest = {what: len(list(Path(folder).iterdir())) for what, folder in folders.items()}
    looks_left = LOOKS
    while looks_left:
        looks_left -= 1
        time.sleep(0.01)
        for what, folder in folders.items():
            if (now := len(list(Path(folder).iterdir()))) < fewest[what]:
                fewest[what], looks_left = now, LOOKS
    return fewest


def reform(groups: ProcessGroups, rank: int, port: int, number: int) -> bool:
    """One generation; whether the rank that waited was woken."""
    # as the rendezvous does it: a connection of its own for each round, also on the host of the store
    client = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=20), wait_for_workers=False)
    store = PrefixStore(f"round/{number}", client)
    groups.form(store, rank, 2)
    sums = torch.ones(1000)
    dist.all_reduce(sums)
    assert sums[0] == 2.0
    woken = False
    if rank == 0:
        store.wait(["waits"])
        assert groups.abort() > 0, "there was no connection to cut"
    else:
        store.set("waits", "1")
        try:
            dist.all_reduce(torch.ones(1000))  # rank 0 never comes
        except RuntimeError:
            woken = True
    groups.destroy()
    return woken or rank == 0


def main() -> None:
    rank, port, times = map(int, sys.argv[1:])
    torch.set_num_threads(1)
    server = TCPStore("127.0.0.1", port, None, True, wait_for_workers=False) if rank == 0 else None
    groups = ProcessGroups("gloo", timedelta(seconds=20))
    woken, early = 0, {}
    for number in range(times):
        woken += reform(groups, rank, port, number)
        if number + 1 == EARLY:
            early = open_now()
    print(json.dumps({"woken": woken, "early": early, "end": open_now()}), flush=True)
    if server is not None:
        sys.stdin.readline()  # the other rank's last words go through this store


if __name__ == "__main__":
    main()
