"""What this host's networks are: its interfaces, and the address that leads to another host."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Interface:
    """One network interface.

    Attributes:
        name: of it.
        addresses: IP addresses, without those of the link alone (fe80::).
        is_up: whether it is.
    """

    name: str
    addresses: tuple[str, ...]
    is_up: bool = True

    @property
    def is_loopback(self) -> bool:
        """Whether only this host reaches it."""
        return self.name == "lo" or (bool(self.addresses) and all(map(is_loopback, self.addresses)))

    @property
    def is_usable(self) -> bool:
        """Whether connections can go through it."""
        return self.is_up and bool(self.addresses)

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(self.addresses) or 'no address'}{'' if self.is_up else ', down'})"


def is_loopback(address: str) -> bool:
    """Whether only this host reaches an address; False for what is none.

    >>> is_loopback("127.0.1.1"), is_loopback("::1"), is_loopback("10.0.0.1"), is_loopback("node-3")
    (True, True, False, False)
    """
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def interfaces() -> tuple[Interface, ...]:
    """The interfaces of this host."""
    import psutil  # here, for the agent needs it only where somebody has chosen an interface

    states = psutil.net_if_stats()
    found = []
    for name, addresses in psutil.net_if_addrs().items():
        texts = [entry.address for entry in addresses if entry.family in (socket.AF_INET, socket.AF_INET6)]
        kept = tuple(text for text in texts if not text.startswith("fe80:"))
        found.append(Interface(name, kept, name in states and states[name].isup))
    return tuple(found)


def address_towards(endpoints: Iterable[tuple[str, int]]) -> str:
    """The address of this host on the network that leads to the first of these (host, port) to which there is a way.

    Others who also reach it reach this host there. Sends nothing; may block as long as the resolver does.

    Raises:
        OSError: there is a way to none of them; the message says why, for each.
    """
    failures = []
    for host, port in endpoints:
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)  # sends nothing: it only makes the kernel choose a route
                return str(probe.getsockname()[0])
        except OSError as error:
            failures.append(f"{host}: {error.strerror or error}")
    raise OSError(f"no way leads to {'; '.join(failures) or 'nobody'}: check that name, and the network of this host")
