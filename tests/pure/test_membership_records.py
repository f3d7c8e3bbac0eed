"""Records go through JSON unchanged, and what is no record is refused by name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchelastic.rendezvous.records import (
    Member,
    RecordError,
    Round,
    RoundState,
    StateStatus,
    decode_member,
    decode_round,
    encode_member,
    encode_round,
)

names = st.text("abc-0123", min_size=1, max_size=12)


@given(
    names,
    names,
    st.integers(0, 9),
    st.integers(0, 10**9),
    st.sampled_from(StateStatus),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_a_member_survives_the_store(
    name: str,
    host: str,
    ready_for: int,
    step: int,
    state_status: StateStatus,
    failed: bool,
    departed: bool,
    leaving: bool,
) -> None:
    member = Member(name, host, "h:1", ready_for, step, state_status, failed, 0, 2.5, departed, leaving, arrival=17)
    assert decode_member(f"/x/members/{name}", encode_member(member), 17) == member


@given(st.integers(0, 99), st.sampled_from(RoundState), st.lists(names, unique=True, max_size=5))
def test_a_round_survives_the_store(number: int, state: RoundState, roster: list[str]) -> None:
    round_ = Round(
        number,
        state,
        tuple(roster),
        "h:1",
        7,
        StateStatus.COMPLETE,
        tuple(range(len(roster))),
        2,
        ("x",),
        "because",
        ("d",),
        3,
        True,
        tuple(roster[1:]),
    )
    assert decode_round("/x/round", encode_round(round_)) == round_


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\x80\x04pickle",
        b"[1]",
        b"{}",
        b'{"host":1}',
        encode_member(Member("a", "h")).replace(b'"step":0', b'"step":"0"'),
        encode_member(Member("a", "h")).replace(b'"state_status":1', b'"state_status":77'),
        encode_member(Member("a", "h")).replace(b'"failed":false', b'"failed":0'),
        encode_member(Member("a", "h")).replace(b'"step":0', b'"step":true'),
        encode_member(Member("a", "h")).replace(b'"step":0', b'"step":-1'),
        encode_member(Member("a", "h")).replace(b'"patience_s":15.0', b'"patience_s":NaN'),
        encode_member(Member("a", "h", leaving=True)).replace(b'"leaving":true', b'"leaving":1'),
        encode_member(Member("a", "h" * 2000)),
        encode_member(Member("a", "h\x1b[2J")),
        b" " * 2_000_000,
        b"[" * 100_000,
    ],
)
def test_garbage_in_the_store_is_refused_with_the_name_of_its_key(value: bytes) -> None:
    with pytest.raises(RecordError, match="/x/members/a"):
        decode_member("/x/members/a", value, 1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ('"roster":["a","b"]', '"roster":["a","a"]'),
        ('"stale":[1]', '"stale":[2]'),
        ('"stale":[1]', '"stale":[true]'),
        ('"number":1', '"number":-1'),
        ('"leaving":["b"]', '"leaving":["c"]'),
        ('"leaving":["b"]', '"leaving":[1]'),
        ('"leaving":["b"]', '"leaving":true'),
    ],
)
def test_a_round_that_cannot_be_is_refused_with_the_name_of_its_key(field: str, value: str) -> None:
    good = encode_round(Round(1, RoundState.RUNNING, ("a", "b"), "h:1", stale=(1,), leaving=("b",)))
    assert field.encode() in good
    with pytest.raises(RecordError, match="/x/round"):
        decode_round("/x/round", good.replace(field.encode(), value.encode()))


def test_what_a_terminal_would_obey_is_in_no_record_and_in_no_error() -> None:
    obeyed = "a\x1b[2J\nb"
    with pytest.raises(RecordError) as refused:
        decode_member(f"/x/members/{obeyed}", encode_member(Member("a", "h")), 0)
    assert str(refused.value).startswith(r"/x/members/a\x1b[2J\nb: ")
    for round_ in (Round(roster=(obeyed,)), Round(because=obeyed), Round(departed=(obeyed,))):
        with pytest.raises(RecordError, match="printable text"):
            decode_round("/x/round", encode_round(round_))
    with pytest.raises(RecordError) as long:
        decode_round("/x/round", encode_round(Round()).replace(b'"broken"', b'"%s"' % (b"x" * 1_000_000)))
    assert len(str(long.value)) < 3000
