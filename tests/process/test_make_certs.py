"""The script that makes certificates: what it makes, for whom, and that it never takes anything away."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.process.made_certificates import make_certs


def openssl(*words: str | Path) -> str:
    return subprocess.run(["openssl", *map(str, words)], capture_output=True, text=True, check=True).stdout


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls") / "new"
    done = make_certs("--days", "30", folder, "etcd-a", "*.example", "10.0.0.7", "::1")
    assert done.returncode == 0, done.stderr
    return folder


def test_it_makes_an_authority_and_what_a_server_and_a_client_need(made: Path) -> None:
    assert sorted(contents(made)) == ["ca.key", "ca.pem", "client.key", "client.pem", "server.key", "server.pem"]
    openssl("verify", "-x509_strict", "-CAfile", made / "ca.pem", made / "server.pem", made / "client.pem")
    server = openssl("x509", "-in", made / "server.pem", "-noout", "-ext", "subjectAltName,extendedKeyUsage")
    for text in ("DNS:etcd-a", "DNS:*.example", "10.0.0.7", "0:0:0:0:0:0:0:1", "Server Authentication"):
        assert text in server
    assert "Client Authentication" in server, "members are each other's clients"
    client = openssl("x509", "-in", made / "client.pem", "-noout", "-subject", "-ext", "extendedKeyUsage")
    assert "CN=client" in client.replace(" = ", "="), "OpenSSL 3.5 writes no spaces"
    assert "Server" not in client, "who has a client's key cannot pose as etcd"
    assert "CA:TRUE" not in openssl("x509", "-in", made / "client.pem", "-noout", "-text")


def test_keys_are_for_their_owner_alone(made: Path) -> None:
    modes = {path.name: path.stat().st_mode & 0o777 for path in made.iterdir()}
    assert {name: mode for name, mode in modes.items() if name.endswith(".key")} == dict.fromkeys(
        ("ca.key", "server.key", "client.key"), 0o600
    )
    assert made.stat().st_mode & 0o077 == 0


def test_one_more_client_and_a_renewed_server_come_from_the_same_authority(tmp_path: Path) -> None:
    assert make_certs(tmp_path, "etcd-a").returncode == 0
    before = contents(tmp_path)
    assert make_certs("--client", "trainer", tmp_path, "etcd-a").returncode == 0
    assert contents(tmp_path).keys() - before.keys() == {"trainer.pem", "trainer.key"}
    for name in ("server.pem", "server.key"):
        (tmp_path / name).rename(tmp_path / f"old-{name}")
    assert make_certs("--client", "other", tmp_path, "etcd-b").returncode == 0
    after = contents(tmp_path)
    assert (after["ca.pem"], after["ca.key"], after["client.pem"]) == tuple(
        before[name] for name in ("ca.pem", "ca.key", "client.pem")
    )
    openssl("verify", "-CAfile", tmp_path / "ca.pem", tmp_path / "trainer.pem", tmp_path / "server.pem")
    assert "DNS:etcd-b" in openssl("x509", "-in", tmp_path / "server.pem", "-noout", "-ext", "subjectAltName")
