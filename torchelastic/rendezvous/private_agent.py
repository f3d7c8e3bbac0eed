"""An agent for one process alone, for scripts that are started without `torchelastic run`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from torchelastic.processes.lifeline import dies_with_parent
from torchelastic.rendezvous.url import RendezvousUrl


def start(url: RendezvousUrl) -> str:
    """Start an agent that serves this process and ends with it.

    Returns the path of its socket, which may yet appear.
    """
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
    # its own session: Ctrl-C at the terminal is for the trainer, whose end the agent then reports to the others
    subprocess.Popen(dies_with_parent(command), start_new_session=True, stdin=subprocess.DEVNULL)
    return str(socket_path)
