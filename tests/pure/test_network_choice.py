"""Which interfaces `--iface` means, what gloo and NCCL are told of it, and what the doctor says."""

from __future__ import annotations

import pytest

from torchelastic.network.interface_choice import Choice, InterfaceError, choose, library_variables, nccl_choice
from torchelastic.network.interfaces import Interface

LO = Interface("lo", ("127.0.0.1", "::1"))
ETH0 = Interface("eth0", ("10.0.0.1",))
RAIL = Interface("rail0", ("fd00::7", "10.78.0.7", "10.79.0.7"))
DOWN = Interface("eth2", ("10.2.0.1",), is_up=False)
BARE = Interface("eth3", ())
THERE = (LO, ETH0, RAIL, DOWN, BARE)


@pytest.mark.parametrize(
    ("text", "names", "address"),
    [
        ("eth0", ("eth0",), "10.0.0.1"),
        ("rail0", ("rail0",), "10.78.0.7"),
        (" rail0 , eth0 ", ("rail0", "eth0"), "10.78.0.7"),
        ("eth0,rail0", ("eth0", "rail0"), "10.0.0.1"),
        ("10.79.0.0/16", ("rail0",), "10.79.0.7"),
        ("10.79.0.200/24", ("rail0",), "10.79.0.7"),
        ("10.0.0.1", ("eth0",), "10.0.0.1"),
        ("fd00::/64", ("rail0",), "fd00::7"),
        ("10.0.0.0/24,eth0", ("eth0",), "10.0.0.1"),
        ("lo", ("lo",), "127.0.0.1"),
        ("127.0.0.0/8", ("lo",), "127.0.0.1"),
    ],
)
def test_a_choice_is_names_or_subnets_and_the_first_is_told_to_the_others(
    text: str, names: tuple[str, ...], address: str
) -> None:
    assert choose(text, THERE) == Choice(names, address)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("eth1", "there is no interface 'eth1'"),
        ("eth", "there is no interface 'eth'"),
        ("eth0,eth9", "there is no interface 'eth9'"),
        ("eth2", "eth2 is down"),
        ("eth3", "eth3 has no address"),
        ("10.2.0.0/24", "no interface that is up has an address in 10.2.0.0/24"),
        ("10.0.0.0/8", "there are several in 10.0.0.0/8: eth0 (10.0.0.1), rail0"),
        ("10.0.0.0/33", "there is no interface '10.0.0.0/33'"),
        (" , ", "names no interface"),
        ("", "names no interface"),
    ],
)
def test_what_means_no_interface_is_refused_with_those_that_there_are(text: str, said: str) -> None:
    with pytest.raises(InterfaceError) as refused:
        choose(text, THERE, asked_by="TORCHELASTIC_IFACE")
    assert said in str(refused.value)
    assert "eth0 (10.0.0.1)" in str(refused.value)
    assert str(refused.value).startswith("TORCHELASTIC_IFACE ")


@pytest.mark.parametrize("gloo", [None, "", "eth0,rail0", " eth0, rail0"])
@pytest.mark.parametrize("nccl", [None, ""])
def test_gloo_and_nccl_are_told_the_same_interfaces(gloo: str | None, nccl: str | None) -> None:
    given = {"GLOO_SOCKET_IFNAME": gloo, "NCCL_SOCKET_IFNAME": nccl}
    environment = {name: value for name, value in given.items() if value is not None}
    told = library_variables(choose("eth0,rail0", THERE), environment)
    assert told["GLOO_SOCKET_IFNAME"] == "eth0,rail0"
    also = Interface("eth01", ("10.5.0.1",))  # begins like one of them
    assert nccl_choice(told["NCCL_SOCKET_IFNAME"], (*THERE[:3], also)) == [ETH0, RAIL]


@pytest.mark.parametrize("gloo", ["rail0", "eth0", "rail0,eth0"])
def test_another_network_for_gloo_is_a_contradiction(gloo: str) -> None:
    with pytest.raises(InterfaceError, match=f"GLOO_SOCKET_IFNAME is '{gloo}', but eth0,rail0 was chosen"):
        library_variables(choose("eth0,rail0", THERE), {"GLOO_SOCKET_IFNAME": gloo})
