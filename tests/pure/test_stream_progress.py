"""The place in a stream: what a batch moves, and what a checkpoint holds of it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchelastic.data.stream_progress import ShardPlace, StreamProgress, position_text, samples_between

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=6,
)


@st.composite
def marks(draw: st.DrawFn) -> ShardPlace:
    at = draw(st.integers(0, 2**40))
    drawn = at + draw(st.integers(0, 2**20))
    digest = draw(st.integers(-1, 2**32 - 1))
    return ShardPlace(position_text(draw(plain)), at, drawn, digest, draw(st.booleans()))


@given(epoch=st.integers(0, 2**40), number=st.integers(0, 2**40), shards=st.lists(marks(), min_size=1, max_size=5))
def test_a_saved_place_comes_back_whatever_its_positions_are(epoch: int, number: int, shards: list[ShardPlace]) -> None:
    course = StreamProgress(epoch, number, tuple(shards))
    state = course.to_state()
    assert all(type(value) in (int, str) for value in state.values()), "plain: quick to copy before every step"
    again = json.loads(json.dumps(state))
    assert StreamProgress.from_state(again, len(shards)) == course


def test_an_epoch_ends_when_no_shard_has_anything_left() -> None:
    course = StreamProgress.start(3, 3)
    assert course.present == (0, 1, 2)
    some = (ShardPlace(drawn=2), ShardPlace(drawn=1, ended=True), ShardPlace(ended=True))
    later = course.advanced(some)
    assert (later.epoch, later.number, later.present) == (3, 1, (0,))
    assert samples_between(course.places, later.places) == (2, 1, 0)
    assert later.advanced([ShardPlace(drawn=3, ended=True), *some[1:]]) == StreamProgress.start(4, 3)


def damaged(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    state: dict[str, Any] = copy.deepcopy(StreamProgress(1, 2, (ShardPlace("7", 7, 9, 5), ShardPlace())).to_state())
    change(state)
    return state


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("shards"), "not the state of an ElasticStream: shards missing"),
        (lambda state: state.update(logical_shards=3), "logical_shards is 2 here but 3 in the saved state"),
        (lambda state: state.update(epoch=-1), "damaged"),
        (lambda state: state.update(number="2"), "damaged"),
        (lambda state: state.update(shards="["), "damaged"),
        (lambda state: state.update(shards="7"), "damaged"),
        (lambda state: state.update(shards="[[0,0,0,-1,0]]"), "damaged .1 shards"),
        (lambda state: state.update(shards="[1,2]"), "list of five"),
        (lambda state: state.update(shards='[[0,0,0,-1,0],[0,0,"1",-1,0]]'), "samples that are none"),
        (lambda state: state.update(shards="[[0,0,0,-1,0],[0,5,3,-1,0]]"), "samples that cannot be"),
        (lambda state: state.update(shards="[[0,0,0,-1,0],[0,0,0,-1,2]]"), "samples that cannot be"),
    ],
)
def test_a_state_that_is_none_of_this_stream_is_refused_with_its_reason(
    change: Callable[[dict[str, Any]], object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        StreamProgress.from_state(damaged(change), 2)


@pytest.mark.parametrize(
    ("position", "named"),
    [({"buffer": {1, 2}}, "a set"), ([{3: "x"}], "a dict key 3 that is no string"), (b"x", "a bytes")],
)
def test_a_position_of_anything_but_plain_values_is_refused(position: object, named: str) -> None:
    with pytest.raises(TypeError, match=named):
        position_text(position)
