"""An agent for one process alone, for scripts that are started without `torchelastic run`."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from torchelastic.rendezvous import wire
from torchelastic.rendezvous.client import AgentError
from torchelastic.rendezvous.credentials import PASSWORD_VARIABLE, CredentialsError, read_file, resolve
from torchelastic.rendezvous.url import RendezvousUrl


def start(url: RendezvousUrl) -> str:
    """Start an agent that serves this process, outlives it to report its end, and then ends too.

    Returns the path of its socket, which may yet appear.

    Raises:
        AgentError: the credentials for etcd cannot be used.
    """
    try:
        credentials = resolve(url.access, os.environ, read_file)
    except CredentialsError as error:
        raise AgentError("unavailable", str(error)) from error
    # short: a Unix socket's path has 107 bytes
    socket_path = Path(tempfile.mkdtemp(prefix="te-")) / "agent"
    command = [
        sys.executable,
        "-m",
        "torchelastic.agent",
        "--url",
        str(url),
        "--socket",
        str(socket_path),
        "--owner-pid",
        str(os.getpid()),
    ]
    # of these the agent has no need: the password comes through the pipe, and a URL in the environment may have it too
    unwanted = (PASSWORD_VARIABLE, wire.INIT_METHOD_VARIABLE)
    environment = {name: value for name, value in os.environ.items() if name not in unwanted}
    # its own session: Ctrl-C at the terminal and a signal to the trainer's process group, SIGKILL included, are for the
    # trainer, whose end the agent then reports to the others; so it must not be ended together with the trainer either
    agent = subprocess.Popen(command, env=environment, start_new_session=True, stdin=subprocess.PIPE)
    assert agent.stdin is not None
    with contextlib.suppress(BrokenPipeError), agent.stdin:  # one that died at once is missed when it does not answer
        agent.stdin.write(credentials.to_pipe())
    return str(socket_path)
