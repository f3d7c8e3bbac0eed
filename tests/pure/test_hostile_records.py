"""Whatever stands in a field of a record in etcd, of any magnitude and depth: refused by name, or good to decide on."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from rich.console import Console

from tests.pure.hostile_json import VALUES, taken, with_field
from torchelastic.agent.predecessors import ProcessRecord, decode
from torchelastic.launch.events import clock_text
from torchelastic.observe.status.run_screen import Screen
from torchelastic.observe.status.run_status import EventLine, HostStatus, WorkerStatus, combined
from torchelastic.observe.status.status_format import decode_host, encode_host, host_to_plain
from torchelastic.processes.identity import Process, this_place
from torchelastic.rendezvous.protocol import Publish, advance
from torchelastic.rendezvous.records import (
    MAX_ID,
    Member,
    RecordError,
    Round,
    RoundState,
    StateStatus,
    decode_member,
    decode_round,
    encode_member,
    encode_round,
    round_to_dict,
)
from torchelastic.rendezvous.view import MembersChanged, RoundPublished, Settings, Tick, View

KEY = "/t/run/members/m1"
MEMBER = json.loads(encode_member(Member("m1", "h1", "h1:1", 2, 7, StateStatus.COMPLETE, leaving=True)))
ROUND = Round(
    1, RoundState.RUNNING, ("m0", "m1"), "h0:1", 7, StateStatus.COMPLETE, (1,), 1, ("m2",), "2 members", ("m1",), 3,
    leaving=("m1",), lost=("m3",),
)  # fmt: skip
OTHERS = tuple(Member(f"m{n}", f"h{n}", f"h{n}:1", 2, 7, StateStatus.COMPLETE, arrival=n) for n in (0, 2))


def decide(members: tuple[Member, ...], round_: Round) -> None:
    """The leader decides on them, again and again: what it publishes, everybody can read."""
    view = View(Settings(2, 3))
    view, _ = advance(view, MembersChanged((*OTHERS, *members)), 0.0)
    view, actions = advance(view, RoundPublished(round_), 0.0)
    for now_s in (1.0, 1e4, 1e10, 1e11):
        for action in actions:
            if isinstance(action, Publish):
                assert decode_round("/t/run/round", encode_round(action.round)) == action.round
                view, _ = advance(view, RoundPublished(action.round), now_s)
        view, actions = advance(view, Tick(), now_s)


@pytest.mark.parametrize("name", MEMBER)
@given(value=VALUES)
def test_whatever_a_field_of_a_member_holds(name: str, value: str) -> None:
    member = taken(KEY, lambda: decode_member(KEY, with_field(MEMBER, name, value), 17))
    if member is None:
        return
    assert decode_member(KEY, encode_member(member), 17) == member
    decide((member,), ROUND)
    decide((member,), replace(ROUND, state=RoundState.BROKEN))
    decide((member,), Round())


@pytest.mark.parametrize("name", round_to_dict(ROUND))
@given(value=VALUES)
def test_whatever_a_field_of_a_round_holds(name: str, value: str) -> None:
    round_ = taken(KEY, lambda: decode_round(KEY, with_field(round_to_dict(ROUND), name, value)))
    if round_ is None:
        return
    # the largest number there is cannot be followed by another one
    assume(max(round_.number, round_.edition) < 2**53 - 100)
    assert decode_round(KEY, encode_round(round_)) == round_
    decide((), round_)


@pytest.mark.parametrize("member_id", ["x" * (MAX_ID + 1), "\udcff\udcfe"])
def test_an_id_that_no_round_can_hold_is_refused(member_id: str) -> None:
    with pytest.raises(RecordError, match="no id of a member"):
        decode_member(f"/t/run/members/{member_id}", encode_member(Member("", "h")), 1)


@given(st.lists(st.integers(0, MAX_ID - 1), min_size=3, max_size=3, unique=True))
def test_three_members_with_the_longest_ids_fit_into_the_text_of_a_round(cuts: list[int]) -> None:
    names = tuple("n" * cut + "o" + "n" * (MAX_ID - 1 - cut) for cut in cuts)
    members = [Member(name, "h", "h:1", 2, 2**52, StateStatus.UNCOMMITTED, arrival=n) for n, name in enumerate(names)]
    for member in members:
        assert decode_member(f"/x/{member.member_id}", encode_member(member), member.arrival) == member
    decide(tuple(members), Round(1, RoundState.RUNNING, names, "h:1"))
    decide((), Round(1, RoundState.RUNNING, names, "h:1"))
    decide(tuple(replace(member, leaving=True) for member in members), Round(1, RoundState.GATHERING, names, "h:1"))


PROCESSES = json.loads(ProcessRecord(this_place(), Process(7, 70), 9, {"m1": Process(8, 80)}).encode())


@pytest.mark.parametrize("name", PROCESSES)
@given(value=VALUES)
def test_whatever_a_field_of_the_record_that_outlives_an_agent_holds(name: str, value: str) -> None:
    key = "/t/run/processes/h/a"
    record = taken(key, lambda: decode(key, with_field(PROCESSES, name, value)))
    if record is None:
        return
    assert decode(key, record.encode()) == record
    assert {process.has_ended for process in (record.agent, *record.members.values())} <= {True, False}


STATUS = HostStatus(host="h", incarnation="3f0a77c1", at_s=1.0)


@pytest.mark.parametrize("name", [*host_to_plain(STATUS), "round", "workers"])
@given(value=VALUES)
def test_whatever_a_field_of_a_status_holds(name: str, value: str) -> None:
    status = taken(KEY, lambda: decode_host(KEY, with_field(host_to_plain(STATUS), name, value)))
    if status is None:
        return
    assert encode_host(status)
    shown_to_people(status)


def shown_to_people(status: HostStatus) -> None:
    run = combined("run", 1e9, Round(), (), [replace(status, at_s=1e9)])
    Console(file=io.StringIO(), width=120).print(Screen(run))
    for line in run.events:
        assert clock_text(line.at_s)


EVENT = vars(EventLine(at_s=1.0, kind="end", text="lost"))
WORKER = {**vars(WorkerStatus(worker="h-3f0a77c1/0.0")), "amounts": [0] * 9}


@pytest.mark.parametrize(
    ("part", "name"), [*(("events", name) for name in EVENT), *(("workers", name) for name in WORKER)]
)
@given(value=VALUES)
def test_whatever_a_field_of_an_event_or_a_worker_holds(part: str, name: str, value: str) -> None:
    fields = with_field(EVENT if part == "events" else WORKER, name, value).decode()
    status = taken(KEY, lambda: decode_host(KEY, with_field(host_to_plain(STATUS), part, f"[{fields}]")))
    if status is not None:
        shown_to_people(status)
