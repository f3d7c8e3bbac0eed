"""A small process that outlives a launcher that is killed, and reports the end of its workers.

`torchelastic run` starts one. The kernel ends the workers of a killed launcher at once, but nobody is left to say so:
without this process the other hosts wait for the lease. It holds no connection and imports no gRPC before it is needed.

The credentials come through standard input, because every user of this host may read a command line; the same pipe
tells of the launcher's end: an end of file without the word `BYE`.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator
from typing import Any

from tenacity import RetryError, Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

from torchelastic.agent.predecessors import Predecessors
from torchelastic.processes.identity import Process
from torchelastic.rendezvous.credentials import Credentials
from torchelastic.rendezvous.dead_agents import declare_dead
from torchelastic.rendezvous.records import Keys
from torchelastic.rendezvous.requests import Ask
from torchelastic.rendezvous.store import CoordinationStore, StoreUnavailableError
from torchelastic.rendezvous.url import RendezvousUrl, parse_url

log = logging.getLogger(__name__)

#: What an agent says that ends in order.
BYE = b"bye\n"
#: Between two looks at whether all processes have ended, in seconds.
POLL_S = 0.02
#: A process that was killed and has not ended after so long, in seconds, hangs in the kernel: the lease ends first.
GIVE_UP_S = 60.0


@contextlib.contextmanager
def watched(url: RendezvousUrl, credentials: Credentials) -> Iterator[None]:
    """Have this process watched by a sentinel until the end of the block; called by the launcher.

    Args:
        url: the run.
        credentials: for its etcd.
    """
    command = [sys.executable, "-m", "torchelastic.agent.sentinel", "--url", str(url), "--agent-pid", str(os.getpid())]
    # its own session: what ends the launcher's process group must not end it
    sentinel = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
    assert sentinel.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # one that has ended costs the others a lease, and nothing else
        sentinel.stdin.write(credentials.to_pipe() + b"\n")
        sentinel.stdin.flush()
    try:
        yield
    finally:
        with contextlib.suppress(BrokenPipeError):
            sentinel.stdin.write(BYE)
        with contextlib.suppress(BrokenPipeError):
            sentinel.stdin.close()
        sentinel.wait()


def main() -> int:
    """Wait for the agent's end; if it was killed, report that of its workers."""
    parser = argparse.ArgumentParser(prog="torchelastic.agent.sentinel", description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--agent-pid", required=True, type=int)
    arguments = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(
            number, signal.SIG_IGN
        )  # sent to all of a job, they are for the launcher, which says when it ends
    agent = Process.of(arguments.agent_pid)
    given = sys.stdin.buffer.readline()
    if sys.stdin.buffer.read() == BYE or not given:
        return 0
    logging.basicConfig(level=logging.WARNING, format="[agent] %(asctime)s %(levelname)s %(message)s")
    log.warning("the launcher (pid %d) was killed: its workers are ended and reported", arguments.agent_pid)
    report(parse_url(arguments.url), Credentials.from_pipe(given), agent)
    return 0


def report(url: RendezvousUrl, credentials: Credentials, agent: Process) -> None:
    """End what is left of the workers of an agent that was killed, and write to the store that they have ended.

    Args:
        url: the run.
        credentials: for its etcd.
        agent: as it was while it lived.
    """
    from torchelastic.agent.etcd_opening import connect

    store = connect(url, credentials)
    retrying = Retrying(
        retry=retry_if_exception_type(StoreUnavailableError), stop=stop_after_delay(GIVE_UP_S), wait=wait_fixed(0.2)
    )
    with contextlib.suppress(RetryError):  # without etcd nobody waits for a lease either
        retrying(_report_to, store, Keys(url.root), agent)
    store.close()


def _report_to(store: CoordinationStore, keys: Keys, agent: Process) -> None:
    deadline_s = time.monotonic() + GIVE_UP_S
    predecessors = Predecessors(store, keys, socket.gethostname(), is_one=lambda _key, process: process == agent)
    predecessors.look()
    while not predecessors.is_empty and time.monotonic() < deadline_s:
        for process in predecessors.living():
            process.signal(signal.SIGKILL)
        for predecessor in predecessors.ended():
            _carry_out(declare_dead(keys, predecessor), store)
        time.sleep(POLL_S)


def _carry_out(coroutine: Coroutine[Ask[Any], Any, Any], store: CoordinationStore) -> None:
    answer: Any = None
    with contextlib.suppress(StopIteration):
        while True:
            answer = coroutine.send(answer).call(store)


if __name__ == "__main__":
    sys.exit(main())
