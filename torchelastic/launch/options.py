"""Options that several commands share: where etcd is, and who may speak to it."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping

from torchelastic.rendezvous.credentials import PASSWORD_VARIABLE, Credentials, CredentialsError, read_file, resolve
from torchelastic.rendezvous.url import RendezvousUrl

# option: (the rendezvous URL's name for it, metavar, help)
_ACCESS_OPTIONS = {
    "etcd-cacert": ("cacert", "FILE", "TLS: the authority that signed etcd's certificate (PEM)"),
    "etcd-cert": ("cert", "FILE", "TLS: this client's certificate (PEM), if etcd wants one"),
    "etcd-key": ("key", "FILE", "TLS: its private key (PEM), for nobody else to read"),
    "etcd-user": ("user", "NAME", "log in to etcd; see docs/security.md for the environment's variables"),
    "etcd-password-file": ("password_file", "FILE", "with the password on its one line, for nobody else to read"),
}


class UsageError(Exception):
    """The command's words do not make sense together; the message says what to change."""


def add(parser: argparse._ActionsContainer, name: str, *, short: str | None = None, **settings: object) -> None:
    """Add an option, perhaps with a short name, too; dashes and underscores in its name are the same."""
    spellings = {f"--{name}", f"--{name.replace('-', '_')}"}
    parser.add_argument(*sorted(spellings), *filter(None, [short]), dest=name.replace("-", "_"), **settings)  # type: ignore[arg-type]  # passed through


def add_access(parser: argparse.ArgumentParser) -> None:
    """Add the options about access to etcd, in the last part of the help."""
    group = parser.add_argument_group("access to etcd")
    for name, (_parameter, metavar, what) in _ACCESS_OPTIONS.items():
        add(group, name, metavar=metavar, help=what)


def access(options: argparse.Namespace) -> dict[str, str]:
    """What the options say about access to etcd, in the URL's words."""
    given = {parameter: getattr(options, name.replace("-", "_")) for name, (parameter, *_) in _ACCESS_OPTIONS.items()}
    return {parameter: value for parameter, value in given.items() if value}


def access_words(url: RendezvousUrl) -> list[str]:
    """What to type for the same access to etcd as the URL has it; a password in the environment stays there."""
    given = {name: getattr(url.access, parameter) for name, (parameter, *_) in _ACCESS_OPTIONS.items()}
    return [word for name, value in given.items() if value for word in (f"--{name}", shlex.quote(value))]


def without_password(endpoint: str) -> str:
    """The endpoint as given. Raises UsageError if it has a password in it."""
    if ":" in endpoint.rpartition("@")[0]:
        raise UsageError(
            "every user of this host may read a command line: give no password with --rdzv-endpoint, but "
            f"--etcd-password-file FILE, or the environment's {PASSWORD_VARIABLE}"
        )
    return endpoint


def find_credentials(url: RendezvousUrl, environment: Mapping[str, str]) -> Credentials:
    """What the URL, the environment and files say. Raises UsageError."""
    try:
        return resolve(url.access, environment, read_file)
    except CredentialsError as error:
        raise UsageError(str(error)) from error
