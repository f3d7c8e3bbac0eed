"""What the rendezvous does where something is not as it should be: foreign keys, old news, a store that refuses."""

from __future__ import annotations

import logging
import os
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import pytest

from tests.memory_store import MemoryStore
from tests.simulation.tree import Tree, check_txn
from torchelastic.rendezvous.credentials import Credentials, CredentialsError
from torchelastic.rendezvous.host import Host
from torchelastic.rendezvous.protocol import RULES
from torchelastic.rendezvous.records import (
    NO_ROUND,
    AgentRecord,
    Keys,
    Member,
    Round,
    RoundState,
    encode_member,
    encode_round,
)
from torchelastic.rendezvous.requests import Ask, EndWatches, Message, Receive, Sleep, get
from torchelastic.rendezvous.round_document import RoundDocument, StartOverError
from torchelastic.rendezvous.store import (
    CompactedError,
    Delete,
    EventKind,
    KeyValue,
    LeaseLostError,
    Put,
    StoreAccessError,
    StoreError,
    StoreEvent,
)
from torchelastic.rendezvous.url import parse_url
from torchelastic.rendezvous.view import MembersChanged, RoundPublished, Settings, View, absorb, is_waiting
from torchelastic.rendezvous.wire import MAX_LINE_BYTES, WireError, decode, encode, who

KEYS = Keys("/torchelastic/run")


class Stage:
    """One host and its store; its coroutine goes on when it is told to, and time passes when `now_s` is set.

    Attributes:
        refusal: the store's answer to the next request, which has no effect.
        lost_answer: the answer to the request that next makes this host the leader gets lost.
        contacts: when the signs of life were sent for which the host may go on.
    """

    def __init__(self, ttl_s: float = 10.0, **started_with: str) -> None:
        self.store = MemoryStore(clock=lambda: 0.0)
        self.now_s = 0.0
        self.posted: list[Message] = []
        self.rounds: list[Round] = []
        self.contacts: list[float] = []
        self.refusal: StoreError | None = None
        self.lost_answer: StoreError | None = None
        self.host = Host(
            KEYS,
            Settings(1, 4, ttl_s=ttl_s),
            name="h",
            agent_id="a",
            incarnation="word",
            clock=lambda: self.now_s,
            jitter=lambda: 0.5,
            post=self.posted.append,
            on_round=self.rounds.append,
            on_contact=self.contacts.append,
            about=AgentRecord(1, started_with),
        )
        self._run: Coroutine[Any, Any, None] | None = None

    def go(self, answer: object = None, coroutine: Coroutine[Any, Any, object] | None = None) -> object:
        """Answers what the store can; gives the first request that needs a test, or what the coroutine returned."""
        if coroutine is None:
            coroutine = self._run = self._run or self.host.run()
        try:
            request = coroutine.send(answer)
            while not isinstance(request, (Receive, Sleep, EndWatches)):
                if isinstance(request, Ask) and self.refusal is not None:
                    error, self.refusal = self.refusal, None
                    request = coroutine.throw(error)
                elif isinstance(request, Ask):
                    led, reply = self.store.get(KEYS.leader), request.call(self.store)
                    if self.lost_answer is not None and led != self.store.get(KEYS.leader):
                        error, self.lost_answer = self.lost_answer, None
                        request = coroutine.throw(error)
                    else:
                        request = coroutine.send(reply)
                else:
                    request = coroutine.send(None)
        except StopIteration as end:
            return end.value
        return request

    def hears(self, kind: EventKind, key: str, value: bytes = b"", lease_id: int = 0, revision: int = 1000) -> object:
        """The next request after a watch has reported this."""
        return self.go([[StoreEvent(kind, KeyValue(key, value, revision, revision, 1, lease_id))]])


def a_round(number: int, *, epoch: int = 0) -> Round:
    return replace(NO_ROUND, number=number, state=RoundState.RUNNING, roster=("m",), edition=epoch)


def test_who_only_looks_reads_the_round_and_writes_nothing() -> None:
    stage = Stage()
    revision = stage.store.put(KEYS.round, encode_round(a_round(3)))
    assert stage.go(coroutine=stage.host.look()) == stage.host.round
    assert stage.host.round.number == 3
    assert stage.store.list_prefix("/").revision == revision


def test_a_store_that_refuses_is_named_as_that_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    stage = Stage()
    stage.refusal = StoreAccessError("permission denied")
    assert isinstance(stage.go(), EndWatches)
    assert "etcd refuses this agent (permission denied)" in caplog.text
    assert isinstance(stage.go(), Sleep)
    assert isinstance(stage.go(), Receive)
    assert stage.host.leads


def test_a_leaders_key_without_a_lease_is_nobodys_and_is_removed_so_that_one_can_lead(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stage = Stage()
    stage.store.put(KEYS.leader, b"somebody")
    assert isinstance(stage.go(), Receive)
    assert not stage.host.leads
    assert stage.store.get(KEYS.leader) is None
    assert "written by somebody who is no agent" in caplog.text
    stage.hears(EventKind.DELETE, KEYS.leader)
    assert stage.host.leads


def test_a_leaders_key_that_loses_its_lease_later_is_removed_too() -> None:
    stage = Stage()
    lease_id = stage.store.grant_lease(10.0).lease_id
    stage.store.put(KEYS.leader, b"another", lease_id)
    stage.go()
    stage.store.put(KEYS.leader, b"another")
    kv = stage.store.get(KEYS.leader)
    assert kv is not None
    stage.go([[StoreEvent(EventKind.PUT, kv)]])
    assert stage.store.get(KEYS.leader) is None


def test_a_leader_that_hears_of_another_one_starts_over() -> None:
    stage = Stage()
    stage.go()
    assert stage.host.leads
    assert isinstance(stage.hears(EventKind.PUT, KEYS.leader, b"another", 77), EndWatches)
    assert not stage.host.leads


def test_a_host_that_was_started_with_something_else_than_the_leader_says_so_once_for_each_leader(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stage = Stage(max_workers="4", version="1")
    others = {"as-here-1": {"max_workers": "4"}, "n-1": {"max_workers": "8", "version": "1"}, "n-2": {"version": "2"}}
    for name, started_with in others.items():
        stage.store.put(f"{KEYS.agents}{name[:-2]}/{name}", AgentRecord(1, started_with).encode())
    stage.store.put(f"{KEYS.agents}n/n-3", b"no record")
    lease_id = stage.store.grant_lease(10.0).lease_id
    stage.store.put(KEYS.leader, b"as-here-1", lease_id)
    stage.go()
    for leader in (b"n-1", b"n-1", b"n-2", b"n-3", b"n-4", b"\xff" * 10_000):
        stage.hears(EventKind.PUT, KEYS.leader, leader, lease_id)
    assert [record.message.partition(": ")[0] for record in caplog.records if "started with" in record.message] == [
        f"this host was started with {here}, and {name}, which decides for the run, with {there}"
        for here, name, there in (("max_workers=4", "n-1", "max_workers=8"), ("version=1", "n-2", "version=2"))
    ]
    assert f"ignored: {KEYS.agents}n/n-3" in caplog.text


@pytest.mark.parametrize("leads", [True, False])
def test_an_agent_that_fails_leaves_the_lead_to_another_host_if_it_has_it(
    caplog: pytest.LogCaptureFixture, leads: bool
) -> None:
    stage = Stage()
    if not leads:
        stage.store.put(KEYS.leader, b"another", stage.store.grant_lease(10.0).lease_id)
    stage.go()
    assert stage.host.leads is leads
    gives_up = stage.host.abort()
    assert isinstance(stage.go(coroutine=gives_up), EndWatches)
    stage.go(coroutine=gives_up)
    leader = stage.store.get(KEYS.leader)
    assert (None if leader is None else leader.value) == (None if leads else b"another")
    assert ("stops leading run" in caplog.text) is leads


def test_a_host_finds_itself_the_leader_by_the_watch_if_the_answer_to_its_own_write_was_lost() -> None:
    stage = Stage()
    lease_id = stage.store.grant_lease(10.0).lease_id
    stage.store.put(KEYS.leader, b"another", lease_id)
    stage.go()
    assert not stage.host.leads
    stage.hears(EventKind.PUT, KEYS.leader, b"a", 5)
    assert stage.host.leads


@pytest.mark.parametrize(
    ("kind", "key"), [(EventKind.DELETE, KEYS.round), (EventKind.PUT, f"{KEYS.root}/roundabout"), (EventKind.PUT, "/x")]
)
def test_a_round_that_was_deleted_and_keys_of_others_change_nothing(kind: EventKind, key: str) -> None:
    stage = Stage()
    stage.go()
    before = stage.host.round
    assert isinstance(stage.hears(kind, key), Receive)
    assert (stage.host.round, stage.rounds) == (before, [])


def test_a_member_that_comes_and_goes_within_one_batch_is_gone_and_what_is_none_is_ignored(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stage = Stage()
    stage.go()
    assert stage.host.leads
    comes = KeyValue(KEYS.member("m"), encode_member(Member("m", "h", store_address="h:1", ready_for=1)), 7, 7, 1)
    goes, odd = replace(comes, value=b"", mod_revision=8), KeyValue(KEYS.member("x"), b"[", 7, 9, 1)
    news = [StoreEvent(EventKind.PUT, comes), StoreEvent(EventKind.DELETE, goes), StoreEvent(EventKind.PUT, odd)]
    waits = stage.go([news])
    assert isinstance(waits, Receive)
    assert waits.until_s is None, "there is nobody to wait for"
    assert "ignored: /torchelastic/run/members/x does not hold JSON" in caplog.text
    still_waits = stage.go([[StoreEvent(EventKind.PUT, comes)]])
    assert isinstance(still_waits, Receive)
    assert still_waits.until_s == 30.0, "now there is one: the last call runs"


# --- the round's document ---------------------------------------------------------------------------------------------


def read(store: MemoryStore, document: RoundDocument) -> None:
    coroutine = document.read()
    request = coroutine.send(None)
    with pytest.raises(StopIteration):
        coroutine.send(request.call(store))


def test_a_round_that_is_known_already_is_told_once() -> None:
    store, told = MemoryStore(clock=lambda: 0.0), list[Round]()
    document = RoundDocument(KEYS, told.append)
    store.put(KEYS.round, encode_round(a_round(2)))
    read(store, document)
    read(store, document)
    assert [round_.number for round_ in told] == [2]


def test_a_round_older_than_the_known_one_starts_the_session_over_and_what_is_none_is_ignored(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told: list[Round] = []
    document = RoundDocument(KEYS, told.append)
    document.take(KeyValue(KEYS.round, encode_round(a_round(4)), 5, 5, 1))
    document.take(KeyValue(KEYS.round, b"{", 5, 6, 2))
    assert "does not hold JSON" in caplog.text
    document.take(KeyValue(KEYS.round, encode_round(a_round(9)), 5, 5, 1))  # older than what was seen: our own write
    assert [round_.number for round_ in told] == [4]
    with pytest.raises(StartOverError, match="round 3 has come after round 4"):
        document.take(KeyValue(KEYS.round, encode_round(a_round(3)), 5, 7, 3))
    assert document.round.number == 4


def test_what_is_no_round_in_the_store_counts_as_lost_and_the_known_one_is_put_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = MemoryStore(clock=lambda: 0.0)
    document = RoundDocument(KEYS, lambda _round: None)
    document.take(KeyValue(KEYS.round, encode_round(a_round(4)), 5, 5, 1))
    store.put(KEYS.round, b"nonsense")
    coroutine = document.read()
    request: Any = coroutine.send(None)
    request = coroutine.send(request.call(store))
    with caplog.at_level(logging.WARNING), pytest.raises(StopIteration):
        coroutine.send(request.call(store))
    assert "etcd has lost round 4: it is put back" in caplog.text
    assert document.round.restored


def test_what_is_no_round_says_nothing_where_none_is_known(caplog: pytest.LogCaptureFixture) -> None:
    store, told = MemoryStore(clock=lambda: 0.0), list[Round]()
    document = RoundDocument(KEYS, told.append)
    store.put(KEYS.round, b"nonsense")
    read(store, document)
    assert (document.round, told) == (NO_ROUND, [])
    assert "ignored" in caplog.text


# --- keys, leases and history -----------------------------------------------------------------------------------------


def test_a_tree_refuses_what_etcd_refuses() -> None:
    tree = Tree()
    with pytest.raises(StoreError, match="a key is empty"):
        check_txn((), (Put("", b""),))
    twice: list[tuple[Put | Delete, ...]] = [(Put("/a", b"1"), Put("/a", b"2")), (Put("/a", b"1"), Delete("/a"))]
    for writes in twice:
        with pytest.raises(StoreError, match="'/a' is written twice"):
            check_txn((), writes)
    check_txn((), (Put("/a", b"1"), Delete("/b"), Delete("/b")))
    with pytest.raises(LeaseLostError, match="lease 7 has expired"):
        tree.renew(7, 0.0)
    with pytest.raises(ValueError, match="the store is at 1"):
        tree.compact(2)


def test_a_history_that_is_forgotten_is_given_to_nobody_and_the_rest_is() -> None:
    tree = Tree()
    for number in range(4):
        tree.apply([Put("/a", b"%d" % number)])
    tree.compact(3)
    with pytest.raises(CompactedError):
        tree.changes_from(2)
    assert [events[0].kv.value for events in tree.changes_from(4)] == [b"2", b"3"]


def test_a_store_deletes_a_key_without_a_condition() -> None:
    store = MemoryStore(clock=lambda: 0.0)
    written = store.put("/a", b"1")
    assert store.delete("/a") == written + 1
    assert store.get("/a") is None


# --- values -----------------------------------------------------------------------------------------------------------


def test_a_request_says_in_a_trace_what_it_asks() -> None:
    assert repr(get("/a")) == "Ask(get)"


def test_a_member_of_the_round_waits_only_for_a_later_one() -> None:
    on_it = Member("m", "h", store_address="h:1", ready_for=3)
    assert [is_waiting(on_it, a_round(number)) for number in (2, 3, 4)] == [True, False, False]


def test_what_a_url_says_of_numbers_is_what_the_protocol_goes_by() -> None:
    url = parse_url(
        "etcd://h/run?min_workers=2&max_workers=5&multiple_of=4&last_call_timeout=7&ttl=9&orphan_timeout=11"
    )
    assert url.settings == Settings(2, 5, last_call_s=7.0, ttl_s=9.0, orphan_timeout_s=11.0, multiple_of=4)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"cert_cert": "c"}, "both cert_cert and cert_key"),
        ({"cert_key": "k", "ca_cert": "ca"}, "both cert_cert and cert_key"),
        ({"cert_cert": "c", "cert_key": "k"}, "need ca_cert"),
        ({"user": "u"}, "both user and password"),
    ],
)
def test_half_of_what_a_connection_needs_is_refused(given: dict[str, str], said: str) -> None:
    with pytest.raises(CredentialsError, match=said):
        Credentials(**given)


def test_nobody_is_released_from_a_run_that_goes_on_with_enough() -> None:
    """The rule by itself: the table asks it only after the rule that forms a round."""
    (release,) = [rule for rule in RULES[RoundState.BROKEN] if rule.when.startswith("without those who leave")]
    members = (
        Member("m", "h", store_address="h:1", ready_for=4, leaving=True),
        Member("n", "h", store_address="h:2", ready_for=4),
    )
    for minimum, are_released in ((1, False), (2, True)):
        view = absorb(View(Settings(minimum, 4)), MembersChanged(members), 0.0)
        broken = replace(a_round(3), roster=("m", "n"), state=RoundState.BROKEN)
        view = absorb(view, RoundPublished(broken), 0.0)
        assert bool(release.decide(view, 0.0)) is are_released


def test_a_worker_says_its_process_and_its_place_if_a_launcher_gave_it_one() -> None:
    assert who({"LOCAL_RANK": "3"}) == {"pid": os.getpid(), "local_rank": 3}
    assert who({}) == {"pid": os.getpid(), "local_rank": None}


def test_a_message_of_a_worker_survives_the_wire_and_everything_else_is_refused() -> None:
    message = {"op": "join", "step": 3, "name": "é"}
    assert decode(encode(message)) == message
    assert encode(message).count(b"\n") == 1
    for line, said in [
        (b"{", "does not hold JSON"),
        (b"[1]", "list where an object should be"),
        (b'{"op": 3}', "no object with an 'op'"),
        (b" " * (MAX_LINE_BYTES + 1), "at most"),
    ]:
        with pytest.raises(WireError, match=said):
            decode(line)


def test_a_request_to_leave_of_another_agent_s_member_stays_for_that_agent() -> None:
    keys = Keys("run")
    host = Host(
        keys, Settings(1, 2), name="h", agent_id="a", incarnation="i", clock=lambda: 0.0, jitter=lambda: 0.0,
        post=lambda _: None, on_round=lambda _: None, on_drain=lambda member: member == "mine",
    )  # fmt: skip
    host._take_drain_request(KeyValue("run/drain/h/other", b"", 1, 1, 1))
    assert host.is_written
    host._take_drain_request(KeyValue("run/drain/h/mine", b"", 1, 1, 1))
    host.declare(Member("mine", "h", leaving=True))
    assert list(host._records.unwritten(9)) == ["run/members/mine", "run/drain/h/mine"], "what it has led to goes first"
    assert host._records.write_of("run/drain/h/mine", host.round, 1) == Delete("run/drain/h/mine")
