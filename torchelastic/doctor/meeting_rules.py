"""Several hosts check each other: which came, which reach each other, what differs. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
from msgspec import Meta

from torchelastic.doctor.findings import Finding, Level, list_text
from torchelastic.foreign_json import RecordError, Text, checked, decode_json

HOSTS, REACH, ALIKE = "hosts", "reach of hosts", "versions of hosts"
#: A card is no longer; what a host writes about itself needs some hundreds.
MOST_CARD_BYTES = 65_536

Port = Annotated[int, Meta(ge=1, le=65535)]


@dataclass(frozen=True)
class HostCard:
    """What a host writes for the others, in etcd.

    Attributes:
        name: its host name.
        address: where it listens.
        ports: at which it listens.
        boot_id: the same for two processes on one host.
        is_done: whether it has checked the others, so that they need not wait for it.
        facts: what should be the same everywhere, such as the version of torch.
    """

    name: Text
    address: Text
    ports: Annotated[tuple[Port, ...], Meta(min_length=1, max_length=100)]
    boot_id: Text
    is_done: bool = False
    facts: Annotated[Mapping[Text, Text], Meta(max_length=50)] = field(default_factory=dict)


@dataclass(frozen=True)
class Visit:
    """The result of checking another host.

    Attributes:
        host: its card.
        failures: why a port of it was not reached, by port.
    """

    host: HostCard
    failures: Mapping[int, str]


@dataclass(frozen=True)
class MeetingFacts:
    """What came of a meeting.

    Attributes:
        own: the card of this host.
        wanted: how many hosts were to come, this one counted in.
        waited_s: how long this host waited for them.
        visits: one for each other host.
        etcd_is_here: etcd's address is one of this host alone.
        failure: why there was no meeting; "" if there was.
    """

    own: HostCard
    wanted: int
    waited_s: float = 0.0
    visits: tuple[Visit, ...] = ()
    etcd_is_here: bool = False
    failure: str = ""


def encode_card(card: HostCard) -> bytes:
    """A card as JSON."""
    return json.dumps(msgspec.to_builtins(card)).encode()


def decode_card(data: bytes) -> HostCard | None:
    """A card; None if it is none: then somebody else wrote it."""
    try:
        return checked("a card", decode_json("a card", data, most_bytes=MOST_CARD_BYTES), HostCard)
    except RecordError:
        return None


def judge_meeting(facts: MeetingFacts) -> list[Finding]:
    """All findings about the other hosts. Pure."""
    if facts.failure:
        what = "the hosts cannot meet"
        return [Finding(HOSTS, Level.ERROR, what, facts.failure, "see the findings about etcd")]
    came = 1 + len(facts.visits)
    names = list_text(sorted([facts.own.name, *(visit.host.name for visit in facts.visits)]))
    found = []
    if came < facts.wanted:
        what = f"{came} of {facts.wanted} hosts came within {facts.waited_s:.0f} s: {names}"
        if facts.etcd_is_here:
            because = "etcd's address is one of this host alone: every host would look for it on itself"
            remedy = "give an --rdzv-endpoint that all hosts reach"
        else:
            because = "the others did not run the doctor, or do not reach this etcd"
            remedy = (
                f"run it on all {facts.wanted} hosts at once, with the same --rdzv-endpoint and --rdzv-id; or --wait S"
            )
        found.append(Finding(HOSTS, Level.ERROR, what, because, remedy))
    else:
        found.append(Finding(HOSTS, Level.OK, f"{came} hosts came: {names}"))
    found += _judge_names(facts)
    if facts.visits:
        found += [*_judge_reach(facts.visits), *_judge_alike(facts)]
    return found


def _judge_names(facts: MeetingFacts) -> list[Finding]:
    cards = [facts.own, *(visit.host for visit in facts.visits)]
    found = []
    if len({card.boot_id for card in cards}) < len(cards):
        because = "each host of a run has one agent"
        found.append(Finding(HOSTS, Level.NOTE, "some of these doctors run on the same host", because))
    boot_ids: dict[str, set[str]] = {}
    for card in cards:
        boot_ids.setdefault(card.name, set()).add(card.boot_id)
    for name, boots in boot_ids.items():
        if len(boots) > 1:
            because = "agents, logs and `torchelastic drain --host` tell hosts apart by their names"
            what, remedy = f"{len(boots)} hosts are called {name}", "give each a name of its own (hostnamectl hostname)"
            found.append(Finding(HOSTS, Level.ERROR, what, because, remedy))
    return found


def _judge_reach(visits: Sequence[Visit]) -> list[Finding]:
    found = []
    for visit in visits:
        for port, why in visit.failures.items():
            what = f"{visit.host.name} is not reached at {visit.host.address}:{port}"
            remedy = (
                "open all TCP ports between the hosts of a run: gloo, NCCL, torch's TCPStore and replicas take free "
                f"ones (from this host: nc -vz {visit.host.address} {port}); or, if they share another network, --iface"
            )
            found.append(Finding(REACH, Level.ERROR, what, why, remedy))
    return found or [Finding(REACH, Level.OK, f"this host reaches {list_text(visit.host.name for visit in visits)}")]


def _judge_alike(facts: MeetingFacts) -> list[Finding]:
    found = []
    cards = [facts.own, *(visit.host for visit in facts.visits)]
    for name in sorted({name for card in cards for name in card.facts}):
        hosts_of: dict[str, list[str]] = {}
        for card in cards:
            hosts_of.setdefault(card.facts.get(name, "not known"), []).append(card.name)
        if len(hosts_of) > 1:
            because = "; ".join(f"{value} on {list_text(names)}" for value, names in sorted(hosts_of.items()))
            what = f"{name} is not the same on all hosts"
            remedy = "install the same everywhere (one image, one lock file), and mount the same"
            found.append(Finding(ALIKE, Level.WARNING, what, because, remedy))
    names = list_text(sorted(facts.own.facts))
    return found or [Finding(ALIKE, Level.OK, f"the same on all hosts: {names}")]
