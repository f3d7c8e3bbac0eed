"""What the doctor makes of etcd's answers, and of what several hosts see of each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.pure.test_doctor_rules import ERROR, GIB, NOTE, OK, WARNING, text_of
from torchelastic.doctor.etcd_rules import EndpointFacts, EtcdFacts, judge_etcd
from torchelastic.doctor.findings import Finding, Level
from torchelastic.doctor.meeting_rules import (
    HostCard,
    MeetingFacts,
    Visit,
    decode_card,
    encode_card,
    judge_meeting,
)


def wrong(findings: Sequence[Finding]) -> list[Level]:
    return [finding.level for finding in findings if finding.level != OK]


# etcd -----------------------------------------------------------------------------------------------------------------

A = EndpointFacts("a:2379", "", False, "3.5.9", 1, 11, 2**20, 2 * GIB)
B = replace(A, endpoint="b:2379")
AWAY = EndpointFacts("c:2379", "connection refused")
GOOD = EtcdFacts((A, B), (), (0.002, 0.003, 0.002), is_encrypted=True, has_certificate=True, asks_for_login=True)


def but(endpoint: EndpointFacts) -> EtcdFacts:
    return replace(GOOD, endpoints=(endpoint,))


@pytest.mark.parametrize(
    ("facts", "level", "said"),
    [
        (replace(GOOD, endpoints=(A, AWAY)), WARNING, "c:2379 is unreachable"),
        (replace(GOOD, endpoints=(AWAY,)), ERROR, "connection refused"),
        (replace(GOOD, endpoints=(A, replace(AWAY, is_refusal=True))), ERROR, "refuses this client"),
        (replace(GOOD, endpoints=(A, replace(B, cluster_id=2))), ERROR, "different clusters"),
        (but(replace(A, leader_id=0)), ERROR, "no leader"),
        (but(replace(A, version="3.3.27")), WARNING, "3.3.27"),
        (but(replace(A, version="3.5.2")), WARNING, "use 3.5.3 or newer, or 3.4"),
        (replace(but(replace(A, version="3.5.2")), is_here=True), NOTE, "advise against 3.5.0 to 3.5.2"),
        (but(replace(A, db_bytes=int(1.7 * GIB))), WARNING, "1.70 GiB of 2.00 GiB"),
        (but(replace(A, db_bytes=int(1.7 * GIB), quota_bytes=None)), WARNING, "quota not known"),
        (replace(GOOD, alarms=("NOSPACE",)), ERROR, "alarm disarm"),
        (replace(GOOD, alarms=("CORRUPT",)), ERROR, "CORRUPT"),
        (replace(GOOD, alarms=None, commit_failure="etcdserver: mvcc: database space exceeded"), ERROR, "NOSPACE"),
        (replace(GOOD, commit_failure="permission denied"), ERROR, "permission denied"),
        (replace(GOOD, commits_s=(0.06, 0.01, 0.07)), WARNING, "SSD"),
        (replace(GOOD, commits_s=(0.7, 0.01, 0.8)), ERROR, "would count as lost"),
        (replace(GOOD, is_encrypted=False, has_certificate=False, user="trainer"), WARNING, "unencrypted"),
        (replace(GOOD, user="trainer", asks_for_login=False), WARNING, "not only trainer"),
        (replace(GOOD, has_certificate=False, asks_for_login=False), NOTE, "everybody who reaches it"),
    ],
)
def test_what_is_wrong_with_an_etcd_is_told_once(facts: EtcdFacts, level: Level, said: str) -> None:
    found = judge_etcd(facts)
    assert wrong(found) == [level]
    assert said in text_of(found)


# Hosts that meet ------------------------------------------------------------------------------------------------------

HERE = HostCard("node-1", "10.0.0.1", (4000,), "boot-1", facts={"torch": "2.13.0"})
THERE = replace(HERE, name="node-2", address="10.0.0.2", boot_id="boot-2")
VISIT = Visit(THERE, {})
MET = MeetingFacts(HERE, 2, 1.0, (VISIT,))


@pytest.mark.parametrize(
    ("facts", "level", "said"),
    [
        (replace(MET, failure="no etcd endpoint serves"), ERROR, "no etcd endpoint serves"),
        (replace(MET, wanted=3, waited_s=8.0), ERROR, "2 of 3 hosts came within 8 s: node-1, node-2"),
        (replace(MET, wanted=3, etcd_is_here=True), ERROR, "on itself"),
        (replace(MET, visits=(replace(VISIT, failures={4000: "timed out"}),)), ERROR, "10.0.0.2:4000"),
        (replace(MET, visits=(replace(VISIT, host=replace(THERE, boot_id="boot-1")),)), NOTE, "on the same host"),
        (
            replace(MET, visits=(replace(VISIT, host=replace(THERE, name="node-1")),)),
            ERROR,
            "2 hosts are called node-1",
        ),
        (
            replace(MET, visits=(replace(VISIT, host=replace(THERE, facts={"torch": "2.12.0"})),)),
            WARNING,
            "2.12.0 on node-2; 2.13.0 on node-1",
        ),
        (replace(MET, visits=(replace(VISIT, host=replace(THERE, facts={})),)), WARNING, "not known on node-2"),
    ],
)
def test_what_is_wrong_between_hosts_is_told_once(facts: MeetingFacts, level: Level, said: str) -> None:
    found = judge_meeting(facts)
    assert wrong(found) == [level]
    assert said in text_of(found)


def test_a_card_survives_the_way_through_etcd() -> None:
    card = replace(HERE, is_done=True)
    assert decode_card(encode_card(card)) == card


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"[]",
        b"7",
        b"{}",
        encode_card(replace(HERE, ports=())),
        encode_card(replace(HERE, ports=(0,))),
        encode_card(replace(HERE, ports=(70000,))),
        encode_card(replace(HERE, name="x" * 401)),
        encode_card(HERE).replace(b'"node-1"', b"7"),
        encode_card(HERE).replace(b"[4000]", b"4000"),
        encode_card(HERE).replace(b'{"torch": "2.13.0"}', b"3"),
        b"[" * 100_000,
    ],
)
def test_what_is_no_card_is_passed_over(data: bytes) -> None:
    assert decode_card(data) is None
