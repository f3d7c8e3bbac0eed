"""Which interfaces `--iface` selects, and the variables of gloo and NCCL for them. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchelastic.network.interfaces import Interface

#: What `--iface` says, for whoever starts no launcher; the option goes before it. Workers see it as well.
IFACE_VARIABLE = "TORCHELASTIC_IFACE"
GLOO_VARIABLE, NCCL_VARIABLE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


class InterfaceError(ValueError):
    """No interface of this host is meant; the message lists those that there are."""


@dataclass(frozen=True)
class Choice:
    """What was chosen.

    Attributes:
        names: of the interfaces, in the order of the choice.
        address: at which the other hosts reach this one; of the first interface.
    """

    names: tuple[str, ...]
    address: str


def choose(text: str, there: Sequence[Interface], *, asked_by: str = "--iface") -> Choice:
    """Find the interfaces that a text means.

    Args:
        text: names, or subnets such as `10.77.0.0/24` (the interface with an address in it, whatever its name is on
            this host; a single address is one too), separated by commas. gloo and NCCL take all of them.
        there: the interfaces of this host.
        asked_by: for the message.

    Raises:
        InterfaceError: one is not there, is down, has no address, or is not the only one in its subnet.

    >>> there = [Interface("eth0", ("10.0.0.1",)), Interface("ib0", ("10.77.0.1", "fd00::1"))]
    >>> choose("ib0", there)
    Choice(names=('ib0',), address='10.77.0.1')
    >>> choose("10.0.0.0/8", there[:1]).names
    ('eth0',)
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise InterfaceError(f"{asked_by} {text!r} names no interface: {_listed(there)}")
    found = [_one(part, there, f"{asked_by} {text}") for part in parts]
    return Choice(tuple(dict.fromkeys(name for name, _ in found)), found[0][1])


def _one(part: str, there: Sequence[Interface], asked: str) -> tuple[str, str]:
    """Name and address of what one part of a choice means."""
    subnet = _subnet(part)
    if subnet is None:
        named = next((one for one in there if one.name == part), None)
        if named is None:
            raise InterfaceError(f"{asked}: there is no interface {part!r}: {_listed(there)}")
        if not named.is_usable:
            lack = "is down" if named.addresses else "has no address"
            raise InterfaceError(f"{asked}: {part} {lack}: {_listed(there)}")
        # a host has IPv4 and IPv6 in any order, and all hosts should tell the same kind
        return part, min(named.addresses, key=lambda address: ":" in address)
    inside = [(one, address) for one in there if one.is_usable for address in one.addresses if _is_in(address, subnet)]
    # some hosts have addresses of services on lo too, in the subnet of the hosts
    kept = [(one, address) for one, address in inside if not one.is_loopback] or inside
    if not kept:
        raise InterfaceError(f"{asked}: no interface that is up has an address in {subnet}: {_listed(there)}")
    if len({one.name for one, _ in kept}) > 1:
        several = ", ".join(str(one) for one, _ in kept)
        raise InterfaceError(f"{asked}: there are several in {subnet}: {several}; name one of them")
    return kept[0][0].name, kept[0][1]


def _subnet(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None


def _is_in(address: str, subnet: ipaddress.IPv4Network | ipaddress.IPv6Network) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]) in subnet


def _listed(there: Sequence[Interface]) -> str:
    return f"there are {', '.join(map(str, there)) or 'none'}"


def library_variables(choice: Choice, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of workers by which gloo and NCCL use these interfaces. NCCL's is left alone if it is set.

    Raises:
        InterfaceError: see `check_gloo`.

    >>> library_variables(Choice(("eth1", "eth2"), "10.0.0.1"), {"NCCL_SOCKET_IFNAME": "ib"})
    {'GLOO_SOCKET_IFNAME': 'eth1,eth2'}
    >>> library_variables(Choice(("eth1",), "10.0.0.1"), {})
    {'GLOO_SOCKET_IFNAME': 'eth1', 'NCCL_SOCKET_IFNAME': '=eth1'}
    """
    check_gloo(choice, environment)
    names = ",".join(choice.names)
    told = {GLOO_VARIABLE: names}
    if not environment.get(NCCL_VARIABLE):
        told[NCCL_VARIABLE] = f"={names}"  # without "=" they are beginnings of names: eth1 is eth10 too
    return told


def check_gloo(choice: Choice, environment: Mapping[str, str]) -> None:
    """What ranks say at each step goes where this host said that it is reached: raises InterfaceError if it cannot.

    That is so if gloo's variable is set, and names other interfaces. (NCCL may have a network of its own.)
    """
    gloo = environment.get(GLOO_VARIABLE)
    if gloo and [part.strip() for part in gloo.split(",")] != list(choice.names):
        names = ",".join(choice.names)
        raise InterfaceError(f"{GLOO_VARIABLE} is {gloo!r}, but {names} was chosen: unset it, or choose the same")


def nccl_choice(variable: str | None, there: Sequence[Interface]) -> list[Interface]:
    """Which interfaces NCCL takes (its documentation on NCCL_SOCKET_IFNAME).

    The variable is a list of prefixes; with `^` in front, those are left out; with `=`, whole names. Without it, what
    begins with `ib` goes first, then all but docker* and lo, then docker*, then lo.

    Args:
        variable: NCCL_SOCKET_IFNAME; None: not set.
        there: those that can be used.
    """
    if variable is not None:
        return [interface for interface in there if nccl_means(interface.name, variable)]
    ib = [one for one in there if one.name.startswith("ib")]
    docker = [one for one in there if one.name.startswith("docker")]
    lo = [one for one in there if one.name.startswith("lo")]
    others = [one for one in there if one not in ib and one not in docker and one not in lo]
    return next((group for group in (ib, others, docker, lo) if group), [])


def nccl_means(name: str, variable: str) -> bool:
    """Whether a value of NCCL_SOCKET_IFNAME takes the interface of that name; see `nccl_choice`."""
    excludes = variable.startswith("^")
    text = variable.removeprefix("^")
    is_whole = text.startswith("=")
    parts = [part.strip() for part in text.removeprefix("=").split(",") if part.strip()]
    return excludes != any(name == part if is_whole else name.startswith(part) for part in parts)
