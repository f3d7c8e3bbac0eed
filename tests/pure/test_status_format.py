"""A host's status as JSON: it comes back as it was, is never too long, and nothing else is taken for one."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchelastic.observe.ledger.accounts import NOTHING, Account
from torchelastic.observe.ledger.figures import Seen
from torchelastic.observe.status.run_status import EventLine, HostStatus, WorkerStatus, combined
from torchelastic.observe.status.status_format import (
    LEAST_BYTES,
    decode_host,
    encode_host,
    host_from_plain,
    host_to_plain,
    run_to_plain,
)
from torchelastic.rendezvous.records import Member, RecordError, Round, RoundState

KEY = "/torchelastic/job/status/3f0a77c1"
HOST = "node-7"
names = st.text(st.characters(categories=("L", "N", "P", "S")), min_size=1, max_size=40)
counts = st.integers(0, 2**40)
times = st.floats(0, 4e9)
amounts = st.tuples(*[st.integers(0, 10**17)] * len(Account))
workers = st.builds(
    WorkerStatus,
    worker=names,
    host=st.just(HOST),
    pid=counts,
    rank=st.integers(-1, 9999),
    round=st.integers(-1, 9999),
    step=st.integers(-1, 2**40),
    steps_per_s=times,
    account=st.sampled_from([account.label for account in Account]),
    amounts=amounts,
    restarts=counts,
    began_s=times,
    values=st.dictionaries(names, st.floats(allow_nan=False, allow_infinity=False), max_size=8),
)
events = st.builds(
    EventLine, at_s=times, host=st.just(HOST), kind=names, text=names, worker=names, rank=st.integers(-1, 9),
    round=st.integers(-1, 9), step=st.integers(-1, 9),
)  # fmt: skip
seens = st.builds(
    lambda parts, **numbers: Seen(worker_ns=sum(parts), amounts=parts, **numbers),
    amounts, wall_ns=counts, configured_workers=counts, workers=counts, committed=counts, undone=counts,
    failures=counts, restores_from_checkpoint=counts, lost=counts, saves=counts,
)  # fmt: skip
hosts = st.builds(
    HostStatus,
    host=st.just(HOST),
    incarnation=names,
    at_s=times,
    began_s=times,
    every_s=times,
    round=st.integers(-1, 99),
    round_state=st.sampled_from(["", "running"]),
    round_since_s=times,
    version=names,
    workers=st.lists(workers, max_size=4).map(tuple),
    seen=seens,
    events=st.lists(events, max_size=5).map(tuple),
    journal=names,
    address=names,
    is_etcd_away=st.booleans(),
)


@given(hosts)
def test_what_was_written_comes_back_as_it_was(status: HostStatus) -> None:
    assert decode_host(KEY, encode_host(status, at_most_bytes=10**6)) == status


def full_host(workers: int = 64) -> HostStatus:
    """A host after a day, with everything in it."""
    day_ns = 86_400 * 10**9
    each = tuple(day_ns // 9 + place for place in range(9))
    here = [
        WorkerStatus(
            worker=f"gpu-node-0017-3f0a77c1/{place}.12", host="gpu-node-0017", pid=1234567, rank=1000 + place,
            round=117, step=1234567, steps_per_s=12.3456, account="data_wait", amounts=each, restarts=12,
            began_s=1700000000.123, values={"loss": 2.345678},
        )
        for place in range(workers)
    ]  # fmt: skip
    line = EventLine(
        at_s=1700000000.123, host="gpu-node-0017", kind="re_form", round=117, step=1234567,
        text="64 workers: trains again after 412 ms (detect 24 ms, abort 3 ms, rendezvous 200 ms, connect 185 ms): x",
    )  # fmt: skip
    total = tuple(workers * ns for ns in each)
    return HostStatus(
        host="gpu-node-0017", incarnation="3f0a77c1", at_s=1700086400.5, began_s=1700000000.1, every_s=1.0, round=117,
        round_state="running", round_since_s=1700000000.1, version="1.0", workers=tuple(here),
        seen=Seen(day_ns, sum(total), total, 0, workers, 10**8, 10**3, 12, 3, 11, 10**5), events=(line,) * 20,
        journal="/var/log/job7/ledger", address="http://10.0.0.17:9400",
    )  # fmt: skip


def test_a_host_of_64_workers_takes_less_than_30_kb_with_the_accounts_of_each() -> None:
    value = encode_host(full_host())
    assert len(value) < 30_000
    status = decode_host(KEY, value)
    assert len(status.workers) == 64
    assert all(worker.amounts != NOTHING for worker in status.workers)
    assert status.seen == full_host().seen


@pytest.mark.parametrize("limit", [30_000, 20_000, 12_000, 8_000, LEAST_BYTES])
@pytest.mark.parametrize("workers", [1, 8, 64, 256])
def test_what_is_too_long_is_cut_the_events_first_and_the_sums_never(limit: int, workers: int) -> None:
    whole = full_host(workers)
    value = encode_host(whole, limit)
    assert len(value) <= limit
    status = decode_host(KEY, value)
    assert status.seen == whole.seen
    assert (status.host, status.at_s, status.round_since_s) == (whole.host, whole.at_s, whole.round_since_s)
    assert whole.events[len(whole.events) - len(status.events) :] == status.events
    if status.events:
        assert status.workers == whole.workers
    if any(worker.values for worker in status.workers):
        assert [worker.amounts for worker in status.workers] == [worker.amounts for worker in whole.workers]
    if len(status.workers) < workers:
        assert all(worker.amounts == NOTHING for worker in status.workers)


def plain_with(**changes: Any) -> dict[str, Any]:
    return {**host_to_plain(full_host(1)), **changes}


def worker_with(**changes: Any) -> dict[str, Any]:
    plain = host_to_plain(full_host(1))
    plain["workers"][0].update(changes)
    return plain


def event_with(**changes: Any) -> dict[str, Any]:
    plain = host_to_plain(full_host(1))
    plain["events"][0].update(changes)
    return plain


def seen_with(**changes: Any) -> dict[str, Any]:
    plain = host_to_plain(full_host(1))
    plain["seen"].update(changes)
    return plain


NO_TIME = [0] * len(Account)
GARBAGE: list[tuple[Any, str]] = [
    ([], "Expected `object`, got `array`"),
    ({}, "`host`"),
    (plain_with(host=7), "$.host`"),
    (plain_with(host="x" * 401), "$.host`"),
    (plain_with(host="evil\x1b[2J"), "$.host`"),
    (plain_with(at_s="now"), "$.at_s`"),
    (plain_with(at_s=True), "$.at_s`"),
    (plain_with(at_s=float("nan")), "$.at_s`"),
    (plain_with(at_s=float("inf")), "$.at_s`"),
    (plain_with(at_s=10**400), "$.at_s`"),
    (plain_with(at_s=-1.0), "$.at_s`"),
    (plain_with(every_s=None), "$.every_s`"),
    (plain_with(round=-2), "$.round`"),
    (plain_with(is_etcd_away=1), "$.is_etcd_away`"),
    (plain_with(workers={}), "$.workers`"),
    (plain_with(workers=[1]), "$.workers[0]`"),
    (plain_with(workers=[{"worker": "a"}] * 4097), "$.workers`"),
    (plain_with(events=[{"at_s": 1.0, "kind": "a", "text": "b"}] * 21), "$.events`"),
    (plain_with(seen=[]), "$.seen`"),
    (seen_with(worker_ns=5, amounts=[0, 0, 4, *NO_TIME[3:]]), "accounts of 4 ns of 5 ns"),
    (seen_with(worker_ns=0, amounts=[-4, 4, *NO_TIME[2:]]), "$.seen.amounts[0]`"),
    (seen_with(worker_ns=0, amounts=[0, *NO_TIME]), "$.seen.amounts`"),
    (seen_with(lost=1.5), "$.seen.lost`"),
    (worker_with(worker=None), "$.workers[0].worker`"),
    (worker_with(rank="0"), "$.workers[0].rank`"),
    (worker_with(rank=True), "$.workers[0].rank`"),
    (worker_with(step=2**60), "$.workers[0].step`"),
    (worker_with(account="golf"), "no account 'golf'"),
    (worker_with(amounts=[0.5, *NO_TIME[1:]]), "$.workers[0].amounts[0]`"),
    (worker_with(values={"loss": None}), "$.workers[0].values[...]`"),
    (worker_with(values={"loss": float("nan")}), "$.workers[0].values[...]`"),
    (worker_with(values={f"v{number}": 1.0 for number in range(9)}), "$.workers[0].values`"),
    (worker_with(values={"a\nb": 1.0}), "$.workers[0].values`"),
    (event_with(text="a\nb"), "$.events[0].text`"),
    (event_with(kind=None), "$.events[0].kind`"),
]


@pytest.mark.parametrize(("document", "complaint"), GARBAGE, ids=[complaint for _, complaint in GARBAGE])
def test_what_is_no_status_is_refused_with_the_key_and_the_field(document: Any, complaint: str) -> None:
    with pytest.raises(RecordError) as caught:
        decode_host(KEY, json.dumps(document).encode())
    assert str(caught.value).startswith(KEY)
    assert complaint in str(caught.value)


def test_a_host_speaks_for_its_own_workers_only() -> None:
    status = host_from_plain(KEY, worker_with(host="other"))
    assert {worker.host for worker in status.workers} == {"gpu-node-0017"}


def test_a_run_as_json_names_members_by_rank_and_says_nothing_twice() -> None:
    round_ = Round(3, RoundState.RUNNING, ("b-0", "a-0"), because="all there")
    members = [
        Member("a-0", "a", leaving=True),
        Member("b-0", "b"),
        Member("c-0", "c"),
        Member("d-0", "d", departed=True),
    ]
    status = combined("job7", 1700086401.0, round_, members, [replace(full_host(2), round=3, round_state="running")])
    plain = json.loads(json.dumps(run_to_plain(status), allow_nan=False))
    assert [(one["member_id"], one["rank"], one["is_leaving"]) for one in plain["members"]] == [
        ("b-0", 0, False), ("a-0", 1, True), ("c-0", -1, False),
    ]  # fmt: skip
    assert plain["round"] == {
        "number": 3, "state": "running", "since_s": 1700000000.1, "because": "all there", "waiting": 0,
    }  # fmt: skip
    assert (plain["world_size"], plain["step"]) == (2, 1234567)
    assert len(plain["workers"]) == 2
    assert len(plain["events"]) == 20
    assert "workers" not in plain["hosts"][0]
    assert "events" not in plain["hosts"][0]
    assert sum(plain["seen"]["amounts_ns"].values()) == plain["seen"]["worker_ns"]
    assert set(plain["figures"]) == {"goodput", "ettr", "step_efficiency", "participation", "whole_job_s"}
