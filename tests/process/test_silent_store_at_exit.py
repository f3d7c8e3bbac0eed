"""A process may end while a thread of it waits for the store of a host that is silent, or releases tensors.

Python ends a thread that comes back from C++ from then on, in the middle of what it does there, and C++ ends the
process for that (SIGABRT): a worker that has finished training would have failed.
"""

from __future__ import annotations

import gc
import socket
import subprocess
import sys
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import TCPStore

from tests.older_torch import needs_released_interpreter
from tests.process.test_heartbeat import server_and_client
from tests.waiting import wait_until
from torchelastic.p2p.groups import ProcessGroups

ENDS = """
import os, signal, sys, threading, time
from datetime import timedelta
from torch._C._distributed_c10d import TCPStore
from tests.waiting import pause
from torchelastic.group.store_mailbox import StoreMailbox
from torchelastic.p2p.groups import ProcessGroups
from torchelastic.p2p.heartbeat import BEAT_S, Heartbeat

who, port, server = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
store = TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)


class Last:
    def __del__(self, kill=os.kill, server=server, number=signal.SIGKILL, sleep=time.sleep):
        kill(server, number)  # whoever waits for it is freed
        sleep(0.5)


if who == "heartbeat":
    Heartbeat(store, 1, 2).silent_s()
    time.sleep(2 * BEAT_S)
    pause([server])
    time.sleep(3 * BEAT_S)
elif who == "note":
    notes = StoreMailbox(store, answer_s=600.0)
    notes.post("key", b"words")
    pause([server])
    threading.Thread(target=notes.look, args=("key",), daemon=True).start()
    time.sleep(1)
else:
    groups = ProcessGroups("gloo", timedelta(seconds=60))
    threading.Timer(1.0, groups.abort).start()
    try:
        groups.form(store, 0, 2)  # its peer does not come
    except RuntimeError:
        groups.destroy()
last = Last()  # goes after all that Python does at its end
print(sum(thread.name != "MainThread" for thread in threading.enumerate()), flush=True)
"""


@needs_released_interpreter
@pytest.mark.long
@pytest.mark.parametrize("who", ["heartbeat", "note", "formation"])
def test_it_ends_as_usual(who: str) -> None:
    with server_and_client() as (server, of_group):
        command = [sys.executable, "-c", ENDS, who, str(of_group.port), str(server)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) > 0, "a thread waited"


def test_the_store_of_a_group_ends_with_it() -> None:
    """Its peers learn from that, too, that it is over: nothing here keeps the store for the end of the process."""
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=20), wait_for_workers=False)
    address, groups = ("127.0.0.1", store.port), ProcessGroups("gloo", timedelta(seconds=20))
    groups.form(store, 0, 1)
    groups.destroy()
    del store

    def is_gone() -> bool:
        gc.collect()
        with socket.socket() as client:
            return client.connect_ex(address) != 0

    wait_until(is_gone, 20, "nobody listens")


RELEASES = """
import sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
from torchelastic.p2p.groups import ProcessGroups

ProcessGroups("gloo", timedelta(seconds=60)).form(dist.HashStore(), 0, 1)
sys.setswitchinterval(1000)  # the main thread keeps the interpreter, for which gloo's thread then waits
dist.group.WORLD._inner.allgather([[torch.zeros(1 << 22)]], [torch.ones(1 << 22)])
until_s = time.monotonic() + 0.2
while time.monotonic() < until_s:
    pass
"""


def test_a_process_may_end_while_gloo_releases_the_tensors_of_the_last_collective() -> None:
    ended = subprocess.run([sys.executable, "-c", RELEASES], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
