"""Where the page listens and what opens it: from the arguments of the command line to a bound socket and a token."""

from __future__ import annotations

import os
import socket
import stat
import time
from dataclasses import dataclass, field
from pathlib import Path

from torchelastic.observe.page.access import Access, checked_token, new_token
from torchelastic.text import host_port

LOOPBACK = "127.0.0.1"
#: So long a file without a token may be one that another agent has just made, and is about to write.
MAKING_S = 1.0


@dataclass(frozen=True)
class PageOptions:
    """A page that can be served.

    Attributes:
        socket: it listens, so early clients wait for the server; owned by the server from its start on.
        token: see `Access`.
        name: as the user has named this host, or its address.
        is_token_new: whether it was made just now, so that nobody knows it yet.
        address: of this host for the others, shown where it listens at all of its addresses; empty: its name is shown.
    """

    socket: socket.socket
    token: str = field(repr=False)
    name: str = LOOPBACK
    is_token_new: bool = False
    address: str = ""

    @property
    def url(self) -> str:
        """Where it is, without the token."""
        is_everywhere = self.name in ("0.0.0.0", "::")  # noqa: S104 - it is only read
        name = (self.address or socket.gethostname()) if is_everywhere else self.name
        return f"http://{host_port(name, self.socket.getsockname()[1])}/"

    @property
    def url_to_open(self) -> str:
        """What a person opens: with the token if nobody knows it yet. Print it on a terminal, never into a log."""
        return f"{self.url}#token={self.token}" if self.is_token_new else self.url

    @property
    def access(self) -> Access:
        """Who may see it."""
        return Access(self.token, frozenset({self.name.lower(), socket.gethostname().lower()}))


def parse_address(text: str) -> tuple[str, int]:
    """The address that `[HOST:]PORT` is. Raises ValueError.

    >>> parse_address("8080"), parse_address("node-1:0"), parse_address("[::1]:80")
    (('127.0.0.1', 8080), ('node-1', 0), ('::1', 80))
    """
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if colon else LOOPBACK
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{text!r} is no address: write PORT or HOST:PORT, with 0 for any free port")
    return host, int(port)


def listening(text: str, token_file: Path | None) -> PageOptions:
    """Take the address, and find the token.

    Args:
        text: `[HOST:]PORT`.
        token_file: holds the token; it is made, for its owner only, if there is none. None: a new token in no file,
            for a person who sees what this program prints.

    Raises:
        ValueError: invalid arguments; the message says what to change.
        OSError: the address cannot be listened on, or the file not be read or written; the message names it.
    """
    host, port = parse_address(text)
    bound = _bound(host, port)
    try:
        if token_file is not None:
            return PageOptions(bound, _token_in(token_file), host)
        return PageOptions(bound, new_token(), host, is_token_new=True)
    except BaseException:
        bound.close()
        raise


def _token_in(path: Path) -> str:
    """The token in that file, or a new one that is put there. Raises ValueError or OSError; see `listening`."""
    try:
        return _read_or_make(path)
    except OSError as error:
        remedy = "name a file that this user may read, or that can be made"
        raise OSError(error.errno, f"--page-token-file {path}: {error.strerror}; {remedy}") from error


def _read_or_make(path: Path) -> str:
    try:
        return _read(path)
    except FileNotFoundError:
        pass
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:  # another agent was quicker
        return _read(path)
    with os.fdopen(descriptor, "w") as file:
        token = new_token()
        file.write(token + "\n")
    return token


def _read(path: Path) -> str:
    until_s = time.monotonic() + MAKING_S
    while not (content := _content(path)) and time.monotonic() < until_s:
        time.sleep(0.02)
    try:
        return checked_token(content.decode("ascii"))
    except ValueError as error:  # a UnicodeDecodeError is one, too, and shows what was there
        why = "it is not ASCII" if isinstance(error, UnicodeDecodeError) else str(error)
        raise ValueError(f"{path} holds no token: {why}; without the file one is made") from None


def _content(path: Path) -> bytes:
    with path.open("rb") as file:
        if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o007:
            raise ValueError(f"every user of this host may use {path}, which holds a token: chmod 600 {path}")
        return file.read(4096)


def _bound(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise OSError(error.errno, f"--page: there is no address {host!r} ({error})") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(64)
    except OSError as error:
        bound.close()
        raise OSError(error.errno, f"--page cannot listen on {host}:{port} ({error.strerror}): name another") from error
    return bound
