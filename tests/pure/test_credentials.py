"""Where the credentials for etcd come from, which of two goes first, and what is said of those that cannot be used."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from torchelastic.rendezvous.credentials import (
    AccessParameters,
    Credentials,
    CredentialsError,
    FileContent,
    read_file,
    resolve,
)

PASSWORD = "correct horse"
CERT, KEY = b"-----BEGIN CERTIFICATE-----\nMII", b"-----BEGIN EC PRIVATE KEY-----\nMHc"

FILES = {
    "ca.pem": FileContent(CERT, 0o644),
    "other-ca.pem": FileContent(CERT, 0o644),
    "me.pem": FileContent(CERT, 0o644),
    "me.key": FileContent(KEY, 0o600),
    "no.key": FileContent(CERT, 0o600),
    "group.key": FileContent(KEY, 0o640),
    "everybody.key": FileContent(KEY, 0o644),
    "locked.key": FileContent(b"-----BEGIN ENCRYPTED PRIVATE KEY-----\nMII", 0o600),
    "old-locked.key": FileContent(b"-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\n", 0o600),
    "text.pem": FileContent(b"hello", 0o644),
    "password": FileContent(b"correct horse\n", 0o440),
    "windows": FileContent(b"correct horse\r\n", 0o600),
    "empty": FileContent(b"\n", 0o600),
    "two lines": FileContent(b"correct horse\nbattery\n", 0o600),
    "latin": FileContent(b"caf\xe9", 0o600),
    "everybody": FileContent(b"correct horse", 0o601),
}


def read(path: str) -> FileContent:
    if path == "forbidden":
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
    if path not in FILES:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    return FILES[path]


def environment(**variables: str) -> dict[str, str]:
    return {f"TORCHELASTIC_ETCD_{name}": value for name, value in variables.items()}


def test_everything_may_come_from_the_url_or_from_the_environment() -> None:
    whole = Credentials("ca.pem", "me.pem", "me.key", "trainer", PASSWORD)
    in_url = AccessParameters(cacert="ca.pem", cert="me.pem", key="me.key", user="trainer", password_file="password")
    assert resolve(in_url, {}, read) == whole
    variables = environment(CACERT="ca.pem", CERT="me.pem", KEY="me.key", USER="trainer", PASSWORD_FILE="windows")
    assert resolve(AccessParameters(protocol="https"), variables, read) == whole
    assert resolve(AccessParameters(user="trainer", password=PASSWORD), {}, read).password == PASSWORD
    assert resolve(AccessParameters(), environment(USER="u", PASSWORD=PASSWORD), read).password == PASSWORD


def test_the_url_goes_before_the_environment() -> None:
    parameters = AccessParameters(cacert="other-ca.pem", cert="me.pem", key="group.key", user="trainer", password="p")
    variables = environment(CACERT="ca.pem", CERT="no", KEY="no", USER="somebody", PASSWORD="x", PASSWORD_FILE="no")
    expected = Credentials("other-ca.pem", "me.pem", "group.key", "trainer", "p")
    assert resolve(parameters, variables, read) == expected


def test_http_in_the_url_leaves_out_the_environments_certificates() -> None:
    variables = environment(CACERT="ca.pem", CERT="me.pem", KEY="me.key")
    assert resolve(AccessParameters(protocol="http"), variables, read) == Credentials()


@pytest.mark.parametrize(
    ("parameters", "variables", "names"),
    [
        (AccessParameters(cacert="nowhere.pem"), {}, "cacert: cannot read 'nowhere.pem': No such file"),
        (AccessParameters(), environment(CACERT="forbidden"), "ETCD_CACERT: cannot read 'forbidden': Permission"),
        (AccessParameters(cacert="text.pem"), {}, "no certificate in PEM form in 'text.pem'"),
        (AccessParameters(cacert="ca.pem", cert="me.pem"), {}, "cert is given, but key is not"),
        (AccessParameters(cacert="ca.pem", key="me.key"), {}, "key is given, but cert is not"),
        (AccessParameters(cacert="ca.pem", cert="me.pem"), environment(KEY="me.key"), "cert is given, but key is not"),
        (AccessParameters(cacert="ca.pem"), environment(KEY="me.key"), "ETCD_KEY is given, but .*ETCD_CERT is not"),
        (AccessParameters(cert="me.pem", key="me.key"), {}, "cacert is not .*would not be encrypted"),
        (AccessParameters(protocol="https"), {}, "protocol=https needs cacert=FILE"),
        (AccessParameters(protocol="http", cacert="ca.pem"), {}, "protocol=http contradicts cacert"),
        (AccessParameters(cacert="ca.pem", cert="me.pem", key="no.key"), {}, "no private key in PEM form in 'no.key'"),
        (AccessParameters(cacert="ca.pem", cert="me.pem", key="everybody.key"), {}, r"mode 0644\): chmod o= every"),
        (AccessParameters(cacert="ca.pem", cert="me.pem", key="locked.key"), {}, "'locked.key' is encrypted"),
        (AccessParameters(cacert="ca.pem", cert="me.pem", key="old-locked.key"), {}, "'old-locked.key' is encrypted"),
        (AccessParameters(user="trainer"), {}, "user is 'trainer', but there is no password: give password_file"),
        (AccessParameters(), environment(USER="trainer"), "ETCD_USER is 'trainer', but there is no password"),
        (AccessParameters(), environment(PASSWORD=PASSWORD), "password from .*ETCD_PASSWORD, but no user"),
        (AccessParameters(password_file="password"), {}, "password from password_file, but no user"),
        (AccessParameters(user="u", password=PASSWORD, password_file="password"), {}, "two passwords, from the URL"),
        (AccessParameters(user="u"), environment(PASSWORD=PASSWORD, PASSWORD_FILE="password"), "two passwords"),
        (AccessParameters(user="u", password_file="nowhere"), {}, "password_file: cannot read 'nowhere'"),
        (AccessParameters(user="u", password_file="everybody"), {}, r"every user .* \(mode 0601\): chmod o= everybody"),
        (AccessParameters(user="u", password_file="empty"), {}, "'empty' must hold the password on its one line"),
        (AccessParameters(user="u", password_file="two lines"), {}, "'two lines' must hold the password on its one"),
        (AccessParameters(user="u", password_file="latin"), {}, "'latin' is no UTF-8 text"),
        (AccessParameters(user="u"), environment(PASSWORD="caf\udce9"), "password from .*_PASSWORD is no UTF-8"),
    ],
)  # fmt: skip
def test_credentials_that_cannot_be_used_give_one_error_that_names_part_and_remedy(
    parameters: AccessParameters, variables: dict[str, str], names: str
) -> None:
    with pytest.raises(CredentialsError, match=names) as caught:
        resolve(parameters, variables, read)
    assert not any(part in str(caught.value) for part in (PASSWORD, "battery", "caf"))


def test_no_repr_has_the_password() -> None:
    assert PASSWORD not in repr(AccessParameters(user="u", password=PASSWORD))
    assert PASSWORD not in repr(Credentials(user="u", password=PASSWORD))


def test_who_we_are_is_the_user_or_else_the_certificate() -> None:
    assert Credentials("ca", "me.pem", "key", "u", PASSWORD).who == "user 'u'"
    assert "me.pem" in Credentials("ca", "me.pem", "key").who
    assert Credentials().who == "a client without a user"


def test_what_goes_through_the_pipe_comes_out_the_same_and_garbage_is_not_repeated() -> None:
    whole = Credentials("ca.pem", "me.pem", "me.key", "trainer", 'p"\\\n\u00e9')
    assert Credentials.from_pipe(whole.to_pipe()) == whole
    assert Credentials.from_pipe(Credentials().to_pipe()) == Credentials()
    for garbage in (
        b"",
        b"correct horse",
        b'["correct horse"]',
        b'{"password":"correct horse"}',
        b'{"x":"correct horse"}',
    ):
        with pytest.raises(CredentialsError) as caught:
            Credentials.from_pipe(garbage)
        assert "correct" not in str(caught.value)
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__


def test_a_file_is_read_with_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.write_bytes(b"x\n")
    path.chmod(0o640)
    assert read_file(str(path)) == FileContent(b"x\n", 0o640)
