"""`python -m tests.cluster.forking_launcher ADDRESS run ..`: the launcher, whose workers a server forks.

See `forked_workers`. Imports no torch: agents do without.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torchelastic.agent import supervisor
from torchelastic.launch.main import console
from torchelastic.processes.lifeline import dies_with_parent

#: A process with another variable of this kind has to be started: what it says is read when an interpreter starts.
_UNDERSTOOD = frozenset({"PYTHONUNBUFFERED", "PYTHONFAULTHANDLER", "PYTHONDONTWRITEBYTECODE"})
#: Before the command itself, see `dies_with_parent`.
_BEFORE = len(dies_with_parent(["command"])) - 1


class ForkedWorker:
    """What the supervisor uses of `subprocess.Popen`: a worker that the server has forked.

    Args:
        address: of the server.
        argv: as `dies_with_parent` makes it.
        environment: of the worker.
        stdin: as `Popen` takes it.
    """

    def __init__(self, address: str, argv: Sequence[str], environment: Mapping[str, str], stdin: int | None) -> None:
        out, theirs_out = os.pipe()
        error, theirs_error = os.pipe()
        theirs_life, self._life = os.pipe()
        given = os.dup(0) if stdin is None else os.open(os.devnull, os.O_RDONLY)
        theirs = [given, theirs_out, theirs_error, theirs_life]
        request = json.dumps(_wanted(argv, environment)).encode()
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(address)
        socket.send_fds(self._connection, [len(request).to_bytes(8, "big")], theirs)
        self._connection.sendall(request)
        for each in theirs:
            os.close(each)
        self.stdout, self.stderr = os.fdopen(out, "rb"), os.fdopen(error, "rb")
        self.pid = self._number()
        self.returncode: int | None = None

    def wait(self) -> int:
        """How it has ended; waits for it."""
        if self.returncode is None:
            self.returncode = self._number()
            self._connection.close()
            os.close(self._life)
        return self.returncode

    def _number(self) -> int:
        with self._connection.makefile("rb", buffering=0) as stream:
            said = stream.read(8) or b""
        if len(said) != 8:
            raise RuntimeError("the server of workers has not forked one: see the end of its pytest's output")
        return int.from_bytes(said, "big", signed=True)


def _wanted(argv: Sequence[str], environment: Mapping[str, str]) -> dict[str, Any]:
    ignored, cpus = ([int(one) for one in filter(None, argv[at].split(","))] for at in (_BEFORE - 2, _BEFORE - 1))
    limits = [number for name, number in vars(resource).items() if name.startswith("RLIMIT_")]
    return {
        "agent": os.getpid(),
        "command": list(argv[_BEFORE + 1 :]),
        "environment": dict(environment),
        "folder": str(Path.cwd()),
        "ignored": ignored,
        "cpus": cpus or sorted(os.sched_getaffinity(0)),
        "limits": {number: resource.getrlimit(number) for number in limits},
    }


def _is_script(argv: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether a server that has imported torch can be what `argv` would start: Python with a script or a module."""
    command = argv[_BEFORE:]
    is_python = len(command) > 1 and command[0] == sys.executable and (command[1] == "-m" or command[1][0] != "-")
    variables = {name for name in environment if name.startswith("PYTHON")}
    return is_python and "torchelastic.agent.plain_member" not in command and variables <= _UNDERSTOOD


def main() -> None:
    address = sys.argv.pop(1)

    def popen(argv: Sequence[str], *, env: Mapping[str, str], stdin: int | None, **options: Any) -> Any:
        if _is_script(argv, env):
            return ForkedWorker(address, argv, env, stdin)
        return subprocess.Popen(argv, env=env, stdin=stdin, **options)

    supervisor.subprocess = SimpleNamespace(  # type: ignore[assignment, attr-defined]
        Popen=popen, PIPE=subprocess.PIPE, DEVNULL=subprocess.DEVNULL
    )
    sys.argv[0] = "torchelastic"
    console()


if __name__ == "__main__":
    main()
