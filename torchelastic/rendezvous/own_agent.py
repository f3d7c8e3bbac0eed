"""Which agent serves this process: its launcher's, or, for another run than that or without one, a private agent.

A script may name its run itself (`init_method="etcd://..."`), started by `torchelastic run` or not.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress

from torchelastic.processes.own_folder import make_folder
from torchelastic.rendezvous import wire
from torchelastic.rendezvous.client import AgentError
from torchelastic.rendezvous.credentials import PASSWORD_VARIABLE, CredentialsError, read_file, resolve
from torchelastic.rendezvous.url import RendezvousUrl, RendezvousUrlError, parse_url

log = logging.getLogger(__name__)

ONE_RUN_PER_START = (
    "each start of `torchelastic run` trains one run: put both phases into one train(), or into two scripts"
)
#: The sockets of launchers whose run is over for this process: it has finished, or has left it.
over_here: set[str] = set()

#: What a script and its launcher may say differently of one run.
_SIZES = ("min_workers", "max_workers", "multiple_of")

#: Of an agent's folder below the folder for temporary files. Short: a Unix socket's path has 107 bytes.
FOLDER_PREFIX = "te-"
#: The launcher reads at once; one that does not hang up so soon is not waited for.
NOTIFY_S = 5.0


def launchers_socket(url: RendezvousUrl, environment: Mapping[str, str]) -> str | None:
    """Where the launcher's agent serves this run; None: there is no launcher, or its run is another one.

    It is the same run if the name is the same, and an etcd of the one is an etcd of the other. The launcher's settings
    count then; a warning says so where the script's differ.
    """
    launchers = _launchers_run(environment)
    if launchers is None or launchers.root != url.root or set(launchers.endpoints).isdisjoint(url.endpoints):
        return None
    names = [name for name in _SIZES if getattr(url, name) != getattr(launchers, name)]
    if names:
        here, there = (", ".join(f"{name}={getattr(one, name)}" for name in names) for one in (url, launchers))
        log.warning(
            "init_method has %s, but `torchelastic run`, whose run it names, has %s, which counts: leave init_method "
            "out of the script", here, there,
        )  # fmt: skip
    return environment[wire.SOCKET_VARIABLE]


def notify_launcher(url: RendezvousUrl, environment: Mapping[str, str], *, is_closed: bool) -> None:
    """Tell the launcher, if there is one, that this process asks for a group of another run than the launcher's.

    Args:
        url: that run.
        environment: of this process.
        is_closed: that run was finished before this process came.
    """
    if _launchers_run(environment) is None:
        return
    message = {"op": "elsewhere", **wire.who(environment), "run": f"{url.run_id} at {url.endpoints_text}"}
    with suppress(OSError), socket.socket(socket.AF_UNIX) as connection:  # it has ended: there is nobody to notify
        connection.settimeout(NOTIFY_S)
        connection.connect(environment[wire.SOCKET_VARIABLE])
        connection.sendall(wire.encode({**message, "closed": is_closed}))
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)  # it hangs up when it has taken that in


def start_private_agent(url: RendezvousUrl) -> str:
    """Start an agent that serves this process, outlives it to report its end, and then ends too.

    Returns the path of its socket, which may yet appear.

    Raises:
        AgentError: the credentials for etcd cannot be used.
    """
    try:
        credentials = resolve(url.access, os.environ, read_file)
    except CredentialsError as error:
        raise AgentError("unavailable", str(error)) from error
    socket_path = make_folder(FOLDER_PREFIX) / "agent"
    about = ["--url", str(url), "--socket", str(socket_path), "--owner-pid", str(os.getpid())]
    # of these the agent has no need: the password comes through the pipe, and a URL in the environment may have it too
    unwanted = (PASSWORD_VARIABLE, wire.INIT_METHOD_VARIABLE)
    environment = {name: value for name, value in os.environ.items() if name not in unwanted}
    # its own session: Ctrl-C at the terminal and a signal to the trainer's process group, SIGKILL included, are for the
    # trainer, whose end the agent then reports to the others; so it must not be ended together with the trainer either
    agent = subprocess.Popen(
        [sys.executable, "-m", "torchelastic.agent", *about],
        env=environment, start_new_session=True, stdin=subprocess.PIPE,
    )  # fmt: skip
    assert agent.stdin is not None
    with suppress(BrokenPipeError), agent.stdin:  # one that died at once is missed when it does not answer
        agent.stdin.write(credentials.to_pipe())
    return str(socket_path)


def _launchers_run(environment: Mapping[str, str]) -> RendezvousUrl | None:
    text = environment.get(wire.INIT_METHOD_VARIABLE)
    if not text or not environment.get(wire.SOCKET_VARIABLE):
        return None
    try:
        return parse_url(text)
    except RendezvousUrlError:
        return None
