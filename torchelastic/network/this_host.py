"""What this process's environment says of this host's networks, looked up among its interfaces."""

from __future__ import annotations

import os

from torchelastic.network.interface_choice import IFACE_VARIABLE, Choice, check_gloo, choose
from torchelastic.network.interfaces import interfaces


def chosen_interfaces() -> Choice | None:
    """What `TORCHELASTIC_IFACE` means on this host; None: it is not set.

    Raises:
        InterfaceError: it means no interface of this host, or GLOO_SOCKET_IFNAME names others.
    """
    text = os.environ.get(IFACE_VARIABLE)
    if not text:
        return None
    choice = choose(text, interfaces(), asked_by=IFACE_VARIABLE)
    check_gloo(choice, os.environ)
    return choice


def chosen_address() -> str:
    """At which address the other hosts reach this one, if somebody chose; else empty. Raises InterfaceError."""
    choice = chosen_interfaces()
    return "" if choice is None else choice.address
