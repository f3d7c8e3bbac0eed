"""Names, interfaces and ports of this host: what gloo and NCCL will take, and whether others can reach it."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torchelastic.doctor.findings import Finding, Level, list_text
from torchelastic.network.interface_choice import (
    GLOO_VARIABLE,
    NCCL_VARIABLE,
    Choice,
    InterfaceError,
    check_gloo,
    choose,
    nccl_choice,
    nccl_means,
)
from torchelastic.network.interfaces import Interface, address_towards, interfaces, is_loopback

NAME, GLOO, NCCL, PORTS, REVERSE = "host name", "gloo interface", "NCCL interface", "ports", "reverse lookup"
#: A reverse lookup that takes longer than this will be felt in every recovery; a resolver's time-out is 5 s.
SLOW_LOOKUP_S = 1.0
#: How many ports for outgoing connections are few.
FEW_PORTS = 2000


@dataclass(frozen=True)
class NetworkFacts:
    """The network of this host.

    Attributes:
        host_name: its own name.
        name_addresses: what that resolves to; empty: to nothing.
        interfaces: all of them.
        towards_etcd: the address of this host on the network that leads to etcd; None: not asked, or no way there.
        gloo: GLOO_SOCKET_IFNAME; None: not set.
        nccl: NCCL_SOCKET_IFNAME; None: not set.
        iface: what `--iface` or TORCHELASTIC_IFACE says; None: nothing.
        ports_free: for each port that is wanted, why it cannot be had; "": it can.
        local_ports: first and last port for outgoing connections; None: not known.
    """

    host_name: str
    name_addresses: tuple[str, ...]
    interfaces: tuple[Interface, ...]
    towards_etcd: str | None = None
    gloo: str | None = None
    nccl: str | None = None
    iface: str | None = None
    ports_free: Mapping[int, str] | None = None
    local_ports: tuple[int, int] | None = None


def judge_network(facts: NetworkFacts, hosts: int, *, has_gpus: bool) -> list[Finding]:
    """All of it. Pure.

    Args:
        facts: see there.
        hosts: how many there are to be in a run.
        has_gpus: whether NCCL is going to be used here.
    """
    found = [judge_host_name(facts, hosts), judge_gloo(facts, hosts)]
    if has_gpus or facts.nccl is not None:
        found.append(judge_nccl(facts, hosts))
    return [*found, *judge_ports(facts)]


def judge_host_name(facts: NetworkFacts, hosts: int) -> Finding:
    """Whether others who ask for this host by its name find it. Pure."""
    level = Level.WARNING if hosts > 1 else Level.NOTE
    because = "torchelastic itself uses addresses, but other programs (torchrun's MASTER_ADDR, MPI) ask for the name"
    remedy = f"give {facts.host_name} its address in the network's DNS or in /etc/hosts"
    if not facts.name_addresses:
        return Finding(NAME, level, f"{facts.host_name} does not resolve", because, remedy)
    addresses = ", ".join(facts.name_addresses)
    if all(map(is_loopback, facts.name_addresses)):
        what = f"{facts.host_name} resolves to {addresses}, where no other host finds it"
        return Finding(NAME, level, what, because, remedy)
    return Finding(NAME, Level.OK, f"{facts.host_name} resolves to {addresses}")


def judge_gloo(facts: NetworkFacts, hosts: int) -> Finding:
    """Which interface gloo takes: the chosen or named one, else that which leads to etcd. Pure."""
    if facts.iface is not None:
        return _judge_chosen(facts.iface, facts, hosts)
    if facts.gloo is not None:
        return _judge_named(GLOO, GLOO_VARIABLE, facts.gloo, _named(facts.gloo, facts), facts, hosts)
    if facts.towards_etcd is None:
        others = [interface for interface in facts.interfaces if interface.is_usable and not interface.is_loopback]
        if len(others) <= 1:
            return Finding(GLOO, Level.OK, f"{GLOO_VARIABLE} is not set; there is {list_text(map(str, others))}")
        because = f"give --rdzv-endpoint to see which of them: {list_text(map(str, others))}"
        return Finding(GLOO, Level.NOTE, f"{GLOO_VARIABLE} is not set: the one that leads to etcd", because)
    taken = next((one for one in facts.interfaces if facts.towards_etcd in one.addresses), None)
    if taken is None:
        what = f"no interface has {facts.towards_etcd}, the address towards etcd"
        return Finding(GLOO, Level.WARNING, what, "gloo looks the host name up then", f"set {GLOO_VARIABLE}")
    if taken.is_loopback and hosts > 1:
        what, because = f"{taken} leads to etcd", f"{hosts} hosts cannot meet there"
        return Finding(GLOO, Level.ERROR, what, because, "give an --rdzv-endpoint that all hosts reach")
    return Finding(GLOO, Level.OK, f"{taken}, as it leads to etcd")


def _judge_chosen(text: str, facts: NetworkFacts, hosts: int) -> Finding:
    try:
        choice = choose(text, facts.interfaces, asked_by="--iface")
        check_gloo(choice, {} if facts.gloo is None else {GLOO_VARIABLE: facts.gloo})
    except InterfaceError as error:
        return Finding(GLOO, Level.ERROR, str(error), "`torchelastic run` refuses it", "name one that is there")
    named = f"{', '.join(choice.names)} ({choice.address})"
    if hosts > 1 and is_loopback(choice.address):
        because = f"{hosts} hosts cannot meet there"
        return Finding(GLOO, Level.ERROR, f"{named}, as --iface says", because, "name another")
    return Finding(GLOO, Level.OK, f"{named}, as --iface says; the others reach this host there")


def _named(text: str, facts: NetworkFacts) -> list[Interface | str]:
    by_name = {interface.name: interface for interface in facts.interfaces}
    return [by_name.get(name, name) for name in filter(None, (part.strip() for part in text.split(",")))]


def _judge_named(
    check: str, variable: str, text: str, named: Sequence[Interface | str], facts: NetworkFacts, hosts: int
) -> Finding:
    """Whether the interfaces that a variable names can be used; those that are not there come as their names."""
    usable = [one for one in facts.interfaces if one.is_usable and not one.is_loopback]
    remedy = f"set it to one of {list_text(one.name for one in usable)}, or unset it"
    if not named:
        return Finding(check, Level.ERROR, f"{variable} is {text!r}, which names no interface here", "", remedy)
    missing = [one for one in named if isinstance(one, str)]
    if missing:
        what = f"{variable} is {text!r}, and there is no interface {', '.join(missing)}"
        there = list_text(interface.name for interface in facts.interfaces)
        return Finding(check, Level.ERROR, what, f"there are {there}", remedy)
    interfaces = [one for one in named if isinstance(one, Interface)]
    broken = [one for one in interfaces if not one.is_usable]
    if broken:
        what = f"{variable} is {text!r}, and that interface cannot be used"
        return Finding(check, Level.ERROR, what, list_text(map(str, broken)), remedy)
    if hosts > 1 and all(one.is_loopback for one in interfaces):
        return Finding(check, Level.ERROR, f"{variable} is {text!r}", f"{hosts} hosts cannot meet there", remedy)
    return Finding(check, Level.OK, f"{list_text(map(str, interfaces))}, as {variable} says")


def judge_nccl(facts: NetworkFacts, hosts: int) -> Finding:
    """Which interfaces NCCL takes. Pure."""
    if facts.nccl is None and (choice := _chosen(facts)) is not None:
        return Finding(NCCL, Level.OK, f"{', '.join(choice.names)}, as --iface says")
    usable = [interface for interface in facts.interfaces if interface.is_usable]
    taken = nccl_choice(facts.nccl, usable)
    if facts.nccl is not None:
        if not taken and not facts.nccl.startswith("^"):
            # the interface may be there and be down
            named = [one for one in facts.interfaces if nccl_means(one.name, facts.nccl)]
            return _judge_named(NCCL, NCCL_VARIABLE, facts.nccl, named, facts, hosts)
        return _judge_named(NCCL, NCCL_VARIABLE, facts.nccl, taken, facts, hosts)
    if not taken:
        remedy = "give this host a network, or bring its interface up"
        return Finding(NCCL, Level.ERROR, "there is no interface that NCCL could take", "", remedy)
    if len(taken) > 1:
        because = f"where only one of them reaches the other hosts, set {NCCL_VARIABLE}"
        return Finding(NCCL, Level.NOTE, f"NCCL may choose among {list_text(map(str, taken))}", because)
    return Finding(NCCL, Level.OK, f"{taken[0]}, as NCCL chooses by itself")


def _chosen(facts: NetworkFacts) -> Choice | None:
    """What --iface means; None: nothing, or it is wrong, which is a finding about gloo."""
    try:
        return None if facts.iface is None else choose(facts.iface, facts.interfaces)
    except InterfaceError:
        return None


def judge_ports(facts: NetworkFacts) -> list[Finding]:
    """Whether the ports that are wanted are free, and whether there are enough for connections. Pure."""
    found = []
    for port, taken in (facts.ports_free or {}).items():
        if taken:
            remedy = f"end what listens there (`ss -ltnp 'sport = :{port}'`), or choose another port"
            found.append(Finding(PORTS, Level.ERROR, f"port {port} cannot be had", taken, remedy))
        else:
            found.append(Finding(PORTS, Level.OK, f"port {port} is free"))
    if facts.local_ports is not None:
        first, last = facts.local_ports
        if last - first + 1 < FEW_PORTS:
            what = f"{last - first + 1} ports for connections ({first} to {last})"
            because = "every connection between ranks takes one, and keeps it for a minute after its end"
            remedy = 'sysctl -w net.ipv4.ip_local_port_range="32768 60999"'
            found.append(Finding(PORTS, Level.WARNING, what, because, remedy))
    return found


def judge_reverse_lookup(address: str, took_s: float) -> Finding:
    """Whether asking for the name of an address is answered soon. Pure.

    Args:
        address: that was asked for.
        took_s: how long it took; how it ended does not matter.
    """
    if took_s <= SLOW_LOOKUP_S:
        return Finding(REVERSE, Level.OK, f"that of {address} took {took_s * 1000:.0f} ms")
    because = "torch's TCPStore asks for it at every connection, so each recovery waits as long"
    remedy = (
        'have it answered (a local resolver, /etc/hosts), or set RES_OPTIONS="timeout:1 attempts:1" for the workers'
    )
    return Finding(REVERSE, Level.WARNING, f"that of {address} took {took_s:.1f} s", because, remedy)


def gather_network(
    environment: Mapping[str, str],
    endpoint: tuple[str, int] | None,
    ports: Collection[int],
    iface: str | None = None,
) -> NetworkFacts:
    """Ask the host. May block as long as its resolver does."""
    name = socket.gethostname()
    return NetworkFacts(
        name,
        _resolved(name),
        interfaces(),
        None if endpoint is None else _towards(endpoint),
        environment.get(GLOO_VARIABLE),
        environment.get(NCCL_VARIABLE),
        iface,
        {port: why_not_free(port) for port in ports},
        _local_ports(),
    )


def _resolved(name: str) -> tuple[str, ...]:
    try:
        answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(answer[4][0]) for answer in answers))


def _towards(endpoint: tuple[str, int]) -> str | None:
    try:
        return address_towards([endpoint])
    except OSError:
        return None


def why_not_free(port: int) -> str:
    """Why nobody can listen at a port on all addresses; "" if it can be done."""
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return "somebody listens there"
        return error.strerror or str(error)
    return ""


def _local_ports() -> tuple[int, int] | None:
    try:
        first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    except (OSError, ValueError):
        return None
    return int(first), int(last)


def announced_address(endpoint: tuple[str, int], iface: str | None) -> str:
    """The address at which the others reach this host. Raises OSError or InterfaceError."""
    return address_towards([endpoint]) if iface is None else choose(iface, interfaces()).address


def check(
    endpoint: tuple[str, int] | None, hosts: int, ports: Collection[int], iface: str | None = None
) -> Sequence[Finding]:
    """Check this host's network."""
    has_gpus = any(Path("/dev").glob("nvidia[0-9]*"))
    return judge_network(gather_network(os.environ, endpoint, ports, iface), hosts, has_gpus=has_gpus)


def check_reverse_lookup(endpoint: tuple[str, int] | None, iface: str | None = None) -> Sequence[Finding]:
    """Ask for the name of the address on which the others reach this host, as torch's TCPStore does."""
    address = "127.0.0.1"
    with suppress(OSError, InterfaceError):  # another check says so
        address = address if endpoint is None else announced_address(endpoint, iface)
    began_s = time.monotonic()
    try:
        socket.getnameinfo((address, 0), 0)
    except OSError:
        pass  # that there is no name is no matter: how long it took is
    return [judge_reverse_lookup(address, time.monotonic() - began_s)]
