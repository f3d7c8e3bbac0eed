"""How a run shows its etcd who it is: certificates, user and password, from the rendezvous URL, environment and files.

Secrets go one way: they come in here and leave only towards etcd, or through a pipe to a private agent. No repr, no
message and no command line has them.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

CA_CERT_VARIABLE = "TORCHELASTIC_ETCD_CACERT"
CERT_VARIABLE = "TORCHELASTIC_ETCD_CERT"
KEY_VARIABLE = "TORCHELASTIC_ETCD_KEY"
USER_VARIABLE = "TORCHELASTIC_ETCD_USER"
PASSWORD_VARIABLE = "TORCHELASTIC_ETCD_PASSWORD"  # noqa: S105 - the name of a variable
PASSWORD_FILE_VARIABLE = "TORCHELASTIC_ETCD_PASSWORD_FILE"  # noqa: S105 - as above


class CredentialsError(ValueError):
    """Credentials that cannot be used; the message names the part, its source and the remedy, never a secret."""


@dataclass(frozen=True)
class AccessParameters:
    """What a rendezvous URL says about access to etcd; None: nothing. The names are those of torch's own etcd URLs.

    Attributes:
        protocol: "http" or "https".
        cacert: path of the PEM file with the authority that signed etcd's certificate.
        cert: path of this client's certificate.
        key: path of its private key.
        user: name to log in with.
        password_file: path of the file with the password.
        password: from `user:password@host`; in no repr, and not in `str` of a `RendezvousUrl`.
    """

    protocol: str | None = None
    cacert: str | None = None
    cert: str | None = None
    key: str | None = None
    user: str | None = None
    password_file: str | None = None
    password: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Credentials:
    """How to reach and convince etcd; without any of it, neither TLS nor a login.

    Attributes:
        ca_cert: path of the PEM file with the authority that signed etcd's certificate; None: no TLS.
        cert_cert: path of this client's certificate.
        cert_key: path of its private key.
        user: name to log in with.
        password: its password; in no repr.

    Raises:
        CredentialsError: half of a pair, or certificates for a connection that would not be encrypted.
    """

    ca_cert: str | None = None
    cert_cert: str | None = None
    cert_key: str | None = None
    user: str | None = None
    password: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if (self.user is None) != (self.password is None):
            raise CredentialsError("give both user and password, or neither")
        if (self.cert_cert is None) != (self.cert_key is None):
            raise CredentialsError("give both cert_cert and cert_key, or neither")
        if self.cert_cert is not None and self.ca_cert is None:
            raise CredentialsError(
                "cert_cert and cert_key need ca_cert: without it the connection would not be encrypted"
            )

    @property
    def who(self) -> str:
        """Whom etcd takes us for, for its refusals; etcd reads a user from a certificate where none logs in."""
        if self.user is not None:
            return f"user {self.user!r}"
        return "a client without a user" if self.cert_cert is None else f"the client with certificate {self.cert_cert}"

    def to_pipe(self) -> bytes:
        """All of it, the password too: for a pipe that only one process reads."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_pipe(cls, data: bytes) -> Credentials:
        """What `to_pipe` wrote. Raises CredentialsError; its message has nothing of the data."""
        try:
            document = json.loads(data)
            return cls(**{name: None if value is None else str(value) for name, value in document.items()})
        except (ValueError, TypeError, AttributeError, RecursionError):
            raise CredentialsError("what came through the pipe are no credentials") from None


#: Neither TLS nor a login.
NO_CREDENTIALS = Credentials()


@dataclass(frozen=True)
class FileContent:
    """A file as `resolve` needs it: `mode` has its permission bits."""

    data: bytes
    mode: int


ReadFile = Callable[[str], FileContent]


def read_file(path: str) -> FileContent:
    """Read a file. Raises OSError."""
    with Path(path).open("rb") as file:
        return FileContent(file.read(), stat.S_IMODE(os.fstat(file.fileno()).st_mode))


@dataclass(frozen=True)
class _SourcedValue:
    """A value and how its user knows it."""

    value: str = field(repr=False)
    source: str


def resolve(parameters: AccessParameters, environment: Mapping[str, str], read: ReadFile) -> Credentials:
    """The credentials of a run. A setting of the URL goes before that of the environment; an empty one counts as none.

    Args:
        parameters: What the URL says.
        environment: The TORCHELASTIC_ETCD_* variables.
        read: Reads a file.

    Raises:
        CredentialsError: half of a pair, a contradiction, a file that cannot be read, is no PEM file, or holds a secret
            that every user of this host may read.
    """
    cacert, cert, key = _certificates(parameters, environment)
    if cacert is not None:
        _check_pem(cacert, read, b"CERTIFICATE-----")
    if cert is not None and key is not None:
        _check_pem(cert, read, b"CERTIFICATE-----")
        _check_pem(key, read, b"PRIVATE KEY-----", secret=True)
    user = _first((parameters.user, "user"), (environment.get(USER_VARIABLE), USER_VARIABLE))
    password = _password(parameters, environment, read)
    if user is not None and password is None:
        raise CredentialsError(
            f"{user.source} is {user.value!r}, but there is no password: give password_file in the URL "
            f"(--etcd-password-file), {PASSWORD_FILE_VARIABLE} or {PASSWORD_VARIABLE}"
            f" (the launcher does not hand the latter on to its workers)"
        )
    if user is None and password is not None:
        raise CredentialsError(
            f"there is a password from {password.source}, but no user: give user in the URL (--etcd-user) or "
            f"{USER_VARIABLE}"
        )
    values = [None if setting is None else setting.value for setting in (cacert, cert, key, user, password)]
    return Credentials(*values)


def _certificates(
    parameters: AccessParameters, environment: Mapping[str, str]
) -> tuple[_SourcedValue | None, _SourcedValue | None, _SourcedValue | None]:
    in_url = {name: value for name in ("cacert", "cert", "key") if (value := getattr(parameters, name))}
    if parameters.protocol == "http":
        if in_url:
            raise CredentialsError(f"protocol=http contradicts {next(iter(in_url))}=..: leave one of them out")
        return None, None, None
    cacert = _first((parameters.cacert, "cacert"), (environment.get(CA_CERT_VARIABLE), CA_CERT_VARIABLE))
    # a pair from one place: half of the URL's with half of the environment's would be two identities
    pair = [(parameters.cert, "cert"), (parameters.key, "key")]
    if not (parameters.cert or parameters.key):
        pair = [(environment.get(name), name) for name in (CERT_VARIABLE, KEY_VARIABLE)]
    cert, key = _first(pair[0]), _first(pair[1])
    if (cert is None) != (key is None):
        given, lacking = (pair[0][1], pair[1][1]) if key is None else (pair[1][1], pair[0][1])
        raise CredentialsError(f"{given} is given, but {lacking} is not: a client certificate needs both")
    if cert is not None and cacert is None:
        raise CredentialsError(
            f"{cert.source} is given, but cacert is not (--etcd-cacert, {CA_CERT_VARIABLE}): without the authority "
            "that signed etcd's certificate the connection would not be encrypted"
        )
    if parameters.protocol == "https" and cacert is None:
        raise CredentialsError(
            f"protocol=https needs cacert=FILE (--etcd-cacert, {CA_CERT_VARIABLE}): the authority that signed etcd's "
            "certificate; if that is a public one, the system's bundle"
        )
    return cacert, cert, key


def _password(parameters: AccessParameters, environment: Mapping[str, str], read: ReadFile) -> _SourcedValue | None:
    sources = (
        (parameters.password, "the URL", parameters.password_file, "password_file"),
        (
            environment.get(PASSWORD_VARIABLE),
            PASSWORD_VARIABLE,
            environment.get(PASSWORD_FILE_VARIABLE),
            PASSWORD_FILE_VARIABLE,
        ),
    )
    for password, source, file, file_source in sources:
        if password and file:
            raise CredentialsError(f"two passwords, from {source} and from {file_source}: leave one of them out")
        if password:
            return _checked_text(_SourcedValue(password, source))
        if file:
            return _read_password(_SourcedValue(file, file_source), read)
    return None


def _checked_text(password: _SourcedValue) -> _SourcedValue:
    try:
        password.value.encode()
    except (
        UnicodeEncodeError
    ):  # bytes of the environment that are no UTF-8; protobuf would quote the value in its error
        raise CredentialsError(f"the password from {password.source} is no UTF-8 text") from None
    return password


def _read_password(file: _SourcedValue, read: ReadFile) -> _SourcedValue:
    data = _read(file, read, secret=True)
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise CredentialsError(f"{file.source}: {file.value!r} is no UTF-8 text") from None
    password = text.removesuffix("\n").removesuffix("\r")
    if not password or "\n" in password:
        raise CredentialsError(
            f"{file.source}: {file.value!r} must hold the password on its one line, and nothing else"
        )
    return _SourcedValue(password, file.source)


def _check_pem(file: _SourcedValue, read: ReadFile, mark: bytes, *, secret: bool = False) -> None:
    data = _read(file, read, secret=secret)
    if mark not in data:
        kind = "private key" if secret else "certificate"
        raise CredentialsError(f"{file.source}: there is no {kind} in PEM form in {file.value!r}")
    if secret and b"ENCRYPTED" in data:
        raise CredentialsError(
            f"{file.source}: the private key {file.value!r} is encrypted, and nobody is there to ask for its "
            f"passphrase: write it decrypted (`openssl pkey -in .. -out ..`) into a file that only you may read"
        )


def _read(file: _SourcedValue, read: ReadFile, *, secret: bool) -> bytes:
    try:
        content = read(file.value)
    except OSError as error:
        raise CredentialsError(f"{file.source}: cannot read {file.value!r}: {error.strerror}") from error
    if secret and content.mode & stat.S_IRWXO:
        raise CredentialsError(
            f"{file.source}: {file.value!r} holds a secret, but every user of this host may use it "
            f"(mode {content.mode:04o}): chmod o= {file.value}"
        )
    return content.data


def _first(*candidates: tuple[str | None, str]) -> _SourcedValue | None:
    for value, source in candidates:
        if value:
            return _SourcedValue(value, source)
    return None
