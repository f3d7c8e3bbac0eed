"""What `torchelastic run` tells its workers of this host's networks, and which address it tells to the others."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.few_examples import some_daily
from tests.waiting import wait_until
from torchelastic.agent.signals import catches
from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.replicas.topology import own_address
from torchelastic.launch.run_options import chosen_network
from torchelastic.network.interface_choice import GLOO_VARIABLE, IFACE_VARIABLE, NCCL_VARIABLE
from torchelastic.network.interfaces import address_towards, interfaces
from torchelastic.observe.page.listening import PageOptions
from torchelastic.p2p.options import choose_interface
from torchelastic.rendezvous.wire import INIT_METHOD_VARIABLE
from torchelastic.usage import UsageError

NAMES = (IFACE_VARIABLE, GLOO_VARIABLE, NCCL_VARIABLE)


@pytest.fixture
def of_its_own(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment in which nobody has chosen a network."""
    for name in (*NAMES, "MASTER_ADDR", INIT_METHOD_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def seen_by_a_worker(folder: Path, *options: str, **environment: str) -> dict[str, str]:
    """The variables about networks of a worker of `torchelastic run`."""
    script = folder / "show.py"
    script.write_text(
        f"import json, os\n"
        f"found = {{name: os.environ[name] for name in {NAMES} if name in os.environ}}\n"
        f"open({str(folder / 'seen.json')!r}, 'w').write(json.dumps(found))\n"
    )
    command = [sys.executable, "-m", "torchelastic.launch", "run", "--standalone", "--page=off", *options, str(script)]
    mine = {key: value for key, value in os.environ.items() if key not in NAMES}
    done = subprocess.run(command, env={**mine, **environment}, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads((folder / "seen.json").read_text())
    return found


def test_workers_are_told_the_network_that_was_chosen(tmp_path: Path) -> None:
    assert seen_by_a_worker(tmp_path) == {}
    told = {IFACE_VARIABLE: "127.0.0.0/8", GLOO_VARIABLE: "lo", NCCL_VARIABLE: "=lo"}
    assert seen_by_a_worker(tmp_path, "--iface=127.0.0.0/8") == told
    over_the_variable = seen_by_a_worker(tmp_path, "--iface=lo", TORCHELASTIC_IFACE="nosuch0", NCCL_SOCKET_IFNAME="ib")
    assert over_the_variable == {IFACE_VARIABLE: "lo", GLOO_VARIABLE: "lo", NCCL_VARIABLE: "ib"}


@pytest.mark.parametrize(
    ("text", "variables", "said"),
    [
        ("nosuch0", {}, "--iface nosuch0: there is no interface 'nosuch0': there are lo (127.0.0.1"),
        ("", {}, "--iface '' names no interface"),
        (None, {IFACE_VARIABLE: "nosuch1"}, "TORCHELASTIC_IFACE nosuch1: there is no interface"),
        ("lo", {GLOO_VARIABLE: "eth7"}, "GLOO_SOCKET_IFNAME is 'eth7', but lo was chosen"),
    ],
)
def test_a_choice_that_cannot_be_is_a_mistake_in_the_words(
    text: str | None, variables: dict[str, str], said: str
) -> None:
    with pytest.raises(UsageError) as refused:
        chosen_network(text, variables)
    assert said in str(refused.value)


def test_an_etcd_whose_name_nobody_knows_is_waited_for_and_then_named(tmp_path: Path) -> None:
    script = tmp_path / "never.py"
    script.write_text("raise AssertionError('it was started')")
    words = ["run", "--rdzv-endpoint=nowhere.invalid:2379", "--rdzv-id=x", "--connect-timeout=1", str(script)]
    command = [sys.executable, "-m", "torchelastic.launch", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "nowhere.invalid:2379" in done.stderr
    assert "the run was not started" in done.stderr


@pytest.mark.parametrize("number", some_daily([signal.SIGTERM, signal.SIGINT, signal.SIGHUP], signal.SIGTERM.__eq__))
def test_a_launcher_that_waits_for_etcd_heeds_a_signal_and_nothing_of_it_stays(
    tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "train.py").write_text("")
    words = ["run", "--rdzv-endpoint=127.0.0.1:1", "--rdzv-id=x", str(tmp_path / "train.py")]
    launcher = subprocess.Popen(
        [sys.executable, "-m", "torchelastic.launch", *words],
        stderr=subprocess.PIPE,
        preexec_fn=lambda: [signal.signal(one, signal.SIG_DFL) for one in (signal.SIGINT, signal.SIGHUP)],
    )
    try:
        status = Path(f"/proc/{launcher.pid}/status")
        wait_until(lambda: catches(status.read_text(), signal.SIGUSR1), 30, "it heeds signals")
        launcher.send_signal(number)
        _, said = launcher.communicate(timeout=15)  # to the end of what it has started, too
    finally:
        launcher.kill()
    assert launcher.returncode == 128 + number, said
    assert said.decode().endswith(f"\nstopped by {number.name}\n")


def test_the_way_to_the_first_endpoint_that_can_be_found_counts() -> None:
    assert address_towards([("nowhere.invalid", 1), ("127.0.0.1", 1)]) == "127.0.0.1"
    with pytest.raises(OSError, match=r"no way leads to nowhere\.invalid: .*; nowhere2\.invalid: "):
        address_towards([("nowhere.invalid", 1), ("nowhere2.invalid", 1)])


def test_checkpoint_servers_listen_where_the_others_reach_this_host(of_its_own: pytest.MonkeyPatch) -> None:
    of_its_own.setattr("socket.gethostbyname", lambda _: "127.0.1.1")
    of_its_own.setenv(INIT_METHOD_VARIABLE, f"etcd://{routable()}:2379/run?min_workers=1")
    assert own_address() == routable()
    of_its_own.setenv(IFACE_VARIABLE, "lo")
    assert own_address() == "127.0.0.1"
    of_its_own.setenv(IFACE_VARIABLE, "nosuch0")
    with pytest.raises(CheckpointError, match="there is no interface 'nosuch0'"):
        own_address()


def routable() -> str:
    """An address of this host that others reach; skips where there is none."""
    found = [one for one in interfaces() if one.is_usable and not one.is_loopback]
    if not found:
        pytest.skip("this host has loopback only")
    return min(found[0].addresses, key=lambda address: ":" in address)


def test_a_page_that_listens_everywhere_is_told_by_the_chosen_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        everywhere = "0.0.0.0"
        assert PageOptions(listener, "token", everywhere, address="10.1.0.1").url == f"http://10.1.0.1:{port}/"
        assert PageOptions(listener, "token", everywhere, address="fd00::1").url == f"http://[fd00::1]:{port}/"
        assert PageOptions(listener, "token", everywhere).url == f"http://{socket.gethostname()}:{port}/"
        assert PageOptions(listener, "token", "node-1", address="10.1.0.1").url == f"http://node-1:{port}/"


@pytest.mark.parametrize(
    ("variables", "address", "told"),
    [
        ({}, "127.0.0.1", {GLOO_VARIABLE: "lo"}),
        ({}, "192.0.2.1", {}),
        ({}, "", {}),
        ({GLOO_VARIABLE: "eth7"}, "127.0.0.1", {GLOO_VARIABLE: "eth7"}),
        (
            {IFACE_VARIABLE: "lo", NCCL_VARIABLE: ""},
            "192.0.2.1",
            {IFACE_VARIABLE: "lo", GLOO_VARIABLE: "lo", NCCL_VARIABLE: "=lo"},
        ),
    ],
)
def test_a_worker_without_a_launcher_tells_gloo_and_nccl_itself(
    of_its_own: pytest.MonkeyPatch, variables: dict[str, str], address: str, told: dict[str, str]
) -> None:
    of_its_own.setattr(os, "environ", {**os.environ, **variables})
    choose_interface(address)
    assert {name: os.environ[name] for name in NAMES if name in os.environ} == told
