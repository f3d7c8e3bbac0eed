"""What `torchelastic doctor` says of names, interfaces and ports."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.pure.test_doctor_rules import ERROR, NOTE, OK, WARNING, levels, text_of
from torchelastic.doctor.findings import Level
from torchelastic.doctor.network import (
    NetworkFacts,
    judge_gloo,
    judge_host_name,
    judge_network,
    judge_ports,
)
from torchelastic.network.interface_choice import nccl_choice
from torchelastic.network.interfaces import Interface

LO, ETH0, ETH1 = (
    Interface("lo", ("127.0.0.1", "::1")),
    Interface("eth0", ("10.0.0.1",)),
    Interface("eth1", ("10.1.0.1",)),
)
DOWN, BARE, DOCKER = (
    Interface("eth2", ("10.2.0.1",), False),
    Interface("eth3", ()),
    Interface("docker0", ("172.17.0.1",)),
)
IB = Interface("ib0", ("10.9.0.1",))
NETWORK = NetworkFacts("node-1", ("10.0.0.1",), (LO, ETH0, DOWN, BARE, DOCKER))


@pytest.mark.parametrize(
    ("addresses", "alone", "together"),
    [(("10.0.0.1",), OK, OK), (("127.0.1.1", "::1"), NOTE, WARNING), ((), NOTE, WARNING), (("::1", "fd00::1"), OK, OK)],
)
def test_a_host_name_has_to_lead_somewhere_if_there_are_others(
    addresses: tuple[str, ...], alone: Level, together: Level
) -> None:
    facts = replace(NETWORK, name_addresses=addresses)
    assert (judge_host_name(facts, 1).level, judge_host_name(facts, 2).level) == (alone, together)


@pytest.mark.parametrize(
    ("settings", "hosts", "level", "said"),
    [
        ({"towards_etcd": "10.0.0.1"}, 2, OK, "eth0 (10.0.0.1), as it leads to etcd"),
        ({"towards_etcd": "127.0.0.1"}, 1, OK, "lo"),
        ({"towards_etcd": "127.0.0.1"}, 2, ERROR, "cannot meet"),
        ({"towards_etcd": "10.7.7.7"}, 1, WARNING, "10.7.7.7"),
        ({}, 1, NOTE, "eth0 (10.0.0.1), docker0 (172.17.0.1)"),
        ({"interfaces": (LO, ETH0)}, 1, OK, "there is eth0"),
        ({"gloo": "eth0"}, 2, OK, "as GLOO_SOCKET_IFNAME says"),
        ({"gloo": "eth0,docker0"}, 2, OK, "docker0"),
        ({"gloo": "eht0"}, 1, ERROR, "no interface eht0"),
        ({"gloo": "eth0,eht0"}, 1, ERROR, "set it to one of eth0, docker0"),
        ({"gloo": "eth2"}, 1, ERROR, "down"),
        ({"gloo": "eth3"}, 1, ERROR, "no address"),
        ({"gloo": "lo"}, 1, OK, "lo"),
        ({"gloo": "lo"}, 2, ERROR, "cannot meet"),
        ({"gloo": " , "}, 1, ERROR, "names no interface"),
    ],
)
def test_gloo_takes_what_is_named_or_what_leads_to_etcd(
    settings: dict[str, object], hosts: int, level: Level, said: str
) -> None:
    finding = judge_gloo(replace(NETWORK, **settings), hosts)  # type: ignore[arg-type]  # names of NetworkFacts
    assert finding.level == level
    assert said in text_of([finding])


@pytest.mark.parametrize(
    ("variable", "there", "taken"),
    [
        (None, [LO, ETH0, ETH1, DOCKER], [ETH0, ETH1]),
        (None, [LO, ETH0, IB], [IB]),
        (None, [LO, DOCKER], [DOCKER]),
        (None, [LO], [LO]),
        (None, [], []),
        ("eth", [LO, ETH0, ETH1], [ETH0, ETH1]),
        ("eth1,lo", [LO, ETH0, ETH1], [LO, ETH1]),
        ("=eth", [LO, ETH0], []),
        ("=eth0", [LO, ETH0], [ETH0]),
        ("^docker,lo", [LO, ETH0, DOCKER], [ETH0]),
        ("^=eth0", [LO, ETH0], [LO]),
    ],
)
def test_nccl_chooses_as_its_documentation_says(
    variable: str | None, there: list[Interface], taken: list[Interface]
) -> None:
    assert nccl_choice(variable, there) == taken


def test_a_port_that_is_taken_is_an_error_and_few_ports_are_a_warning() -> None:
    facts = replace(NETWORK, ports_free={80: "", 81: "somebody listens there"}, local_ports=(32768, 60999))
    found = judge_ports(facts)
    assert levels(found) == [OK, ERROR]
    assert "port 81" in found[1].what
    assert levels(judge_ports(replace(NETWORK, local_ports=(1000, 2998)))) == [WARNING]
    assert levels(judge_ports(replace(NETWORK, local_ports=(1000, 2999)))) == []


def test_no_fact_about_a_network_makes_the_rules_fail() -> None:
    source = random.Random(7)
    names = [None, "", "eth0", "^", "=", "eth0,", "lo", "^=lo", "nowhere"]
    for _ in range(500):
        facts = replace(
            NETWORK,
            interfaces=tuple(source.sample([LO, ETH0, ETH1, DOWN, BARE, DOCKER, IB], source.randrange(8))),
            gloo=source.choice(names),
            nccl=source.choice(names),
            towards_etcd=source.choice([None, "10.0.0.1", "127.0.0.1"]),
        )
        assert judge_network(facts, source.choice([1, 3]), has_gpus=True)
