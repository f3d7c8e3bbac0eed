"""`torchelastic run --iface WHAT`: over which of its networks this host meets the others."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field

from torchelastic.launch.options import UsageError, add
from torchelastic.network.choice import IFACE_VARIABLE, InterfaceError, choose, library_variables
from torchelastic.network.interfaces import interfaces


@dataclass(frozen=True)
class Meant:
    """What is to be done about it.

    Attributes:
        address: at which the others reach this host; empty: on the network that leads to etcd.
        variables: for the workers: gloo, NCCL and whatever else announces an address go by them.
    """

    address: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)


def add_interface(parser: argparse.ArgumentParser) -> None:
    """Add the option."""
    text = "meet the other hosts over this network: an interface or a subnet (default: the one that leads to etcd)"
    add(parser, "iface", metavar="NAME|SUBNET[,..]", help=text)


def meant_interface(text: str | None, environment: Mapping[str, str]) -> Meant:
    """Find it among the interfaces of this host.

    Args:
        text: of the option; None: TORCHELASTIC_IFACE counts.
        environment: of this process.

    Raises:
        UsageError: there is none like that (the message lists those that there are), or GLOO_SOCKET_IFNAME differs.
    """
    asked_by = "--iface" if text is not None else IFACE_VARIABLE
    text = environment.get(IFACE_VARIABLE, "") if text is None else text
    if not text and asked_by == IFACE_VARIABLE:
        return Meant()
    try:
        choice = choose(text, interfaces(), asked_by=asked_by)
        return Meant(choice.address, {IFACE_VARIABLE: text, **library_variables(choice, environment)})
    except InterfaceError as error:
        raise UsageError(str(error)) from error
