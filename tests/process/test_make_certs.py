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
    assert "CN = client" in client
    assert "Server" not in client, "who has a client's key cannot pose as etcd"
    assert "CA:TRUE" not in openssl("x509", "-in", made / "client.pem", "-noout", "-text")


def test_they_hold_for_as_long_as_was_asked(made: Path) -> None:
    def holds(name: str, days: int) -> bool:
        words = ["openssl", "x509", "-in", str(made / name), "-noout", "-checkend", str(days * 86400)]
        return subprocess.run(words, capture_output=True).returncode == 0

    for name in ("server.pem", "client.pem"):
        assert (holds(name, 29), holds(name, 31)) == (True, False)
    assert (holds("ca.pem", 299), holds("ca.pem", 301)) == (True, False)


def test_keys_are_for_their_owner_alone(made: Path) -> None:
    modes = {path.name: path.stat().st_mode & 0o777 for path in made.iterdir()}
    assert {name: mode for name, mode in modes.items() if name.endswith(".key")} == dict.fromkeys(
        ("ca.key", "server.key", "client.key"), 0o600
    )
    assert made.stat().st_mode & 0o077 == 0


def test_it_overwrites_nothing_and_says_so(made: Path) -> None:
    before = contents(made)
    done = make_certs(made, "etcd-a")
    assert done.returncode == 1
    assert done.stderr == (
        f"make-certs.sh: {made}/client.pem is there already, nothing was made: move it away, or choose another folder\n"
    )
    assert contents(made) == before


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


def test_half_an_authority_is_not_replaced(tmp_path: Path) -> None:
    assert make_certs(tmp_path, "etcd-a").returncode == 0
    (tmp_path / "ca.key").unlink()  # kept elsewhere, as it should be
    before = contents(tmp_path)
    done = make_certs("--client", "other", tmp_path, "etcd-a")
    assert done.returncode == 1
    assert f"{tmp_path}/ca.pem is there already" in done.stderr
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "give [--days N] [--client NAME] FOLDER HOST [HOST ..], as in"),
        (["tls"], "give [--days N] [--client NAME] FOLDER HOST [HOST ..], as in"),
        (["--days", "soon", "tls", "etcd"], "--days is 'soon': give 1 to 9999"),
        (["--days"], "--days wants a value"),
        (["--client", "a/b", "tls", "etcd"], "--client is 'a/b': letters, digits"),
        (["--client", "server", "tls", "etcd"], "--client is 'server', which is the name of another file"),
        (["--force", "tls", "etcd"], "there is no option --force"),
        (["tls", "https://etcd:2379"], "'https://etcd:2379' is no host name and no address: give them without"),
        (["tls", "etcd,DNS:evil"], "'etcd,DNS:evil' is no host name"),
        (["tls", "999.1.1.1"], "openssl x509 has failed"),
    ],
)
def test_words_that_make_no_sense_are_refused_and_nothing_is_made(
    words: list[str], complaint: str, tmp_path: Path
) -> None:
    folder = tmp_path / "tls"
    done = make_certs(*(str(folder) if word == "tls" else word for word in words))
    assert done.returncode == 1
    assert complaint in done.stderr
    assert done.stderr.startswith("make-certs.sh: ")
    assert not done.stdout
    assert not folder.exists() or not list(folder.iterdir())


def test_an_openssl_that_fails_in_the_middle_leaves_nothing_behind(tmp_path: Path) -> None:
    fake = tmp_path / "bin" / "openssl"
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\n[ "$1" = x509 ] && { echo "no space left" >&2; exit 1; }\nexec /usr/bin/openssl "$@"\n')
    fake.chmod(0o755)
    done = make_certs(tmp_path / "tls", "etcd", PATH=f"{fake.parent}:/usr/bin:/bin")
    assert done.returncode == 1
    assert "openssl x509 has failed: no space left" in done.stderr
    assert not list((tmp_path / "tls").iterdir())
