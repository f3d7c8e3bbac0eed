"""Workers that have torch from their first moment: forked for the agents of the cluster tests by a process that has it.

A worker that is started as users start it imports torch for two to three CPU seconds, and a test starts three and more.
Here the agent is the real command, in a process of its own (`forking_launcher`), and only the starting of a worker is
replaced: it asks a server, which forks. The worker has what the agent's `Popen` would give it (session, descriptors,
environment, folder, limits, network), its script runs as `__main__`, and it ends as an interpreter ends. What differs:
its parent is not the agent (`os.getppid` says that it is), and its command line is the server's.

The server never makes a group, and starts no thread.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import fcntl
import gc
import importlib
import json
import multiprocessing
import os
import resource
import runpy
import select
import signal
import socket
import sys
import tempfile
import types
from functools import cache
from io import TextIOWrapper
from multiprocessing import forkserver, process, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.process.fork_server import started
from tests.waiting import wait_until

#: What the jobs of the tests import, beside what the fork server has.
_IMPORTED = [
    "torch.nn.parallel",
    "torch.utils.data",
    "torchelastic.checkpoint.policy",
    "torchelastic.checkpoint.store",
    "torchelastic.data",
    "torchelastic.lifetime",
    "torchelastic.model",
]
#: The namespaces that a lab's hosts have for themselves.
NAMESPACES = ("net", "uts")


@cache
def server_address() -> str:
    """Where this pytest's server of workers listens; it is started by the first who asks, and ends with pytest."""
    folder = tempfile.mkdtemp(prefix="w-")
    address = f"{folder}/s"
    server = started(_serve, address, daemon=False)
    atexit.register(_remove, server, Path(folder))
    wait_until(lambda: Path(address).exists() or not server.is_alive(), 60, "the server of workers listens")
    assert server.is_alive(), "the server of workers has ended"
    return address


def _remove(server: BaseProcess, folder: Path) -> None:
    server.kill()
    server.join(5)
    for each in folder.iterdir():
        each.unlink()
    folder.rmdir()


def _serve(address: str) -> None:
    for name in _IMPORTED:
        importlib.import_module(name)
    gc.freeze()  # else each collection of garbage in a worker would copy the pages of all this
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(f"{address}-soon")
    listening.listen(128)
    Path(f"{address}-soon").rename(address)
    while True:
        connection, _ = listening.accept()
        while _reaps_one():
            pass
        if os.fork() == 0:
            listening.close()
            _keep(connection)
        connection.close()


def _reaps_one() -> bool:
    try:
        return os.waitpid(-1, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return False


def _keep(connection: socket.socket) -> None:
    """In a fork of the server: fork the worker, wait for its end, and say how it has ended."""
    size, descriptors, _, _ = socket.recv_fds(connection, 8, 4)
    with connection.makefile("rb") as stream:
        wanted = json.loads(stream.read(int.from_bytes(size, "big")))
    worker = os.fork()
    if worker == 0:
        _become(wanted, connection, descriptors)
    for each in descriptors:
        os.close(each)
    _, status = os.waitpid(worker, 0)
    try:
        connection.sendall(os.waitstatus_to_exitcode(status).to_bytes(8, "big", signed=True))
    except OSError:
        pass  # the agent has ended, and the worker with it
    os._exit(0)


def _become(wanted: dict[str, Any], connection: socket.socket, descriptors: list[int]) -> None:
    """In a fork of that: be the worker, to its end."""
    os.setsid()
    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number)
    signals = set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT}
    for each in signals:
        signal.signal(each, signal.SIG_IGN if each in wanted["ignored"] else signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN if signal.SIGINT in wanted["ignored"] else signal.default_int_handler)
    agent = wanted["agent"]
    for name in NAMESPACES:
        _enter(f"/proc/{agent}/ns/{name}")
    os.sched_setaffinity(0, wanted["cpus"])
    for name, limits in wanted["limits"].items():
        resource.setrlimit(int(name), tuple(limits))
    os.environ.clear()
    os.environ.update(wanted["environment"])
    os.chdir(wanted["folder"])
    os.getppid = lambda: int(agent)
    life = _end_with_agent(descriptors[3])
    connection.sendall(os.getpid().to_bytes(8, "big"))
    connection.detach()
    os.closerange(3, life)
    os.closerange(life + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    _be_like_new()
    _run(wanted["command"])


def _enter(namespace: str) -> None:
    if Path(namespace).readlink() != Path("/proc/self/ns", Path(namespace).name).readlink():
        descriptor = os.open(namespace, os.O_RDONLY)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(descriptor, 0):
            raise OSError(ctypes.get_errno(), f"setns to {namespace}")
        os.close(descriptor)


def _end_with_agent(pipe: int) -> int:
    """The kernel kills this process when the agent has ended, which holds the other end of the pipe."""
    life = os.open(f"/proc/self/fd/{pipe}", os.O_RDONLY | os.O_CLOEXEC)
    fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(life, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(life, fcntl.F_SETFL, os.O_ASYNC)
    if select.select([life], [], [], 0)[0]:  # it has ended before
        os.kill(os.getpid(), signal.SIGKILL)
    return life


def _be_like_new() -> None:
    """What an interpreter, multiprocessing and torch take from the environment of their start."""
    import torch
    import torch.distributed as dist

    here = process.current_process()
    here._config.pop("daemon", None)  # type: ignore[attr-defined]
    here._name, here._identity, here._parent_pid = "MainProcess", (), None  # type: ignore[attr-defined]
    process._parent_process = None  # type: ignore[attr-defined]
    forkserver._forkserver.__init__()  # type: ignore[misc]
    resource_tracker._resource_tracker._fd = resource_tracker._resource_tracker._pid = None  # type: ignore[attr-defined]
    multiprocessing.context._default_context._actual_context = None  # type: ignore[attr-defined]
    for number, name in enumerate(("stdout", "stderr"), start=1):
        errors = getattr(sys, f"__{name}__").errors  # by the locale
        binary = open(number, "wb", 0, closefd=False)  # noqa: SIM115  # for the life of the process
        file = TextIOWrapper(binary, encoding="utf-8", errors=errors, write_through=True)  # PYTHONUNBUFFERED
        setattr(sys, name, file)
        setattr(sys, f"__{name}__", file)
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)  # type: ignore[misc]  # noqa: SIM115
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable(2)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))
    torch.seed()  # by chance, as it is when torch is imported
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    dist.set_debug_level_from_env()  # type: ignore[attr-defined]
    libc10 = Path(torch.__file__).parent / "lib" / "libc10.so"
    ctypes.CDLL(str(libc10))["_ZN3c1011initLoggingEv"]()  # c10::initLogging(), by TORCH_CPP_LOG_LEVEL


def _run(command: list[str]) -> None:
    """What `python` does with a script or with `-m MODULE`."""
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    code = 0
    try:
        if command[0] == "-m":
            sys.argv, sys.path[0] = command[1:], str(Path.cwd())
            sys.argv[0] = "-m"
            runpy._run_module_as_main(command[1])  # type: ignore[attr-defined]
        else:
            sys.argv, sys.path[0] = command, str(Path(command[0]).resolve().parent)
            main.__dict__.update(__file__=command[0], __builtins__=__builtins__, __cached__=None)
            exec(compile(Path(command[0]).read_bytes(), command[0], "exec"), main.__dict__)
    except SystemExit as end:
        code = _exit_code(end)
    except BaseException as error:
        error.__traceback__ = _without_ours(error)
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    ctypes.pythonapi.Py_Exit(code)  # waits for threads, runs what atexit knows, takes the interpreter apart


def _exit_code(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)
    return 1


def _without_ours(error: BaseException) -> types.TracebackType | None:
    """Its traceback as an interpreter would print it: from the script on."""
    found = error.__traceback__
    while found is not None and found.tb_frame.f_code.co_filename == __file__:
        found = found.tb_next
    return found or error.__traceback__
