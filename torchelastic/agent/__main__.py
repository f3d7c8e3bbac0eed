"""`python -m torchelastic.agent`: a private agent, started by `torchelastic.rendezvous.own_agent`.

The credentials come through standard input, because every user of this host may read a command line.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from functools import partial
from pathlib import Path

from torchelastic.agent.agent import AgentOptions, Outcome
from torchelastic.agent.etcd_opening import connect, say_if_unfit
from torchelastic.agent.private_agent import PrivateAgent
from torchelastic.processes.lifeline import process_end
from torchelastic.processes.own_folder import OwnFolder
from torchelastic.rendezvous.credentials import Credentials
from torchelastic.rendezvous.url import parse_url


def main() -> int:
    """Serve the owner until it ends."""
    parser = argparse.ArgumentParser(prog="torchelastic.agent", description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--socket", required=True, type=Path)
    parser.add_argument("--owner-pid", required=True, type=int)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s agent %(levelname)s %(message)s")
    credentials = Credentials.from_pipe(sys.stdin.buffer.read())
    options = AgentOptions(parse_url(arguments.url), arguments.socket)

    with OwnFolder(arguments.socket.parent):
        if os.getppid() != arguments.owner_pid:
            return 0  # it has ended already, and its number may be another process's
        outcome = asyncio.run(_run(options, credentials, arguments.owner_pid))
    if outcome.message:
        print(outcome.message, file=sys.stderr)  # noqa: T201 - the owner's screen
    return outcome.exit_code


async def _run(options: AgentOptions, credentials: Credentials, owner_pid: int) -> Outcome:
    """Serve the owner, and report its end. One that ends before it was a member leaves nothing to report."""
    store = connect(options.url, credentials, partial(say_if_unfit, is_own=False))
    agent = PrivateAgent(options, store, owner_pid)
    serving = asyncio.ensure_future(agent.run())
    owner_ends = asyncio.ensure_future(process_end(owner_pid))
    await asyncio.wait((serving, owner_ends), return_when=asyncio.FIRST_COMPLETED)
    if not serving.done() and not agent.connections.processes:
        return Outcome(0)  # it may be waiting for etcd
    return await serving


if __name__ == "__main__":
    sys.exit(main())
