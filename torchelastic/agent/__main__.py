"""`python -m torchelastic.agent`: a private agent, started by `torchelastic.rendezvous.private_agent`.

The credentials come through standard input, because every user of this host may read a command line.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from pathlib import Path

from torchelastic.agent.agent import Agent, AgentOptions
from torchelastic.agent.etcd_connection import connect
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
    options = AgentOptions(parse_url(arguments.url), arguments.socket, owner_pid=arguments.owner_pid)

    async def run() -> int:
        outcome = await Agent(options, connect(options.url, credentials)).run()
        if outcome.message:
            print(outcome.message, file=sys.stderr)  # noqa: T201 - the owner's screen
        return outcome.exit_code

    return asyncio.run(run())


if __name__ == "__main__":
    sys.exit(main())
