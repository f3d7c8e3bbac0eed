"""What planners pickle: read as `torch.load(weights_only=True)` reads it, with nothing of it run."""

from __future__ import annotations

import collections
import io
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from torchelastic.checkpoint.compat.flashpoint.pickles import load_safely

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=8,
)


def archive_of(value: Any) -> io.BytesIO:
    content = io.BytesIO()
    torch.save(value, content)
    content.seek(0)
    return content


@given(PLAIN)
def test_plain_values_are_read_as_they_were(value: Any) -> None:
    loaded = load_safely(archive_of(value))
    assert loaded == value
    assert type(loaded) is type(value)


def test_what_is_more_than_plain_is_left_to_torch() -> None:
    ordered = load_safely(archive_of(collections.OrderedDict(lr=0.1)))
    assert (type(ordered), dict(ordered)) == (collections.OrderedDict, {"lr": 0.1})
    assert load_safely(archive_of({1, 2})) == {1, 2}
    older = io.BytesIO()
    torch.save({"lr": 0.1}, older, _use_new_zipfile_serialization=False)
    older.seek(0)
    assert load_safely(older) == {"lr": 0.1}
    weights = load_safely(archive_of({"w": torch.arange(3), "n": 1}))
    assert torch.equal(weights["w"], torch.arange(3))


@given(st.binary(max_size=200) | st.integers(0, 400).map(lambda end: archive_of({"a": [1, "b"]}).getvalue()[:end]))
def test_what_is_no_archive_is_refused_with_the_errors_of_torch(content: bytes) -> None:
    def ended(load: Any) -> Any:
        try:
            return load()
        except Exception as error:
            return type(error)

    whole = archive_of({"a": [1, "b"]}).getvalue()
    expected = ended(lambda: torch.load(io.BytesIO(content), map_location="cpu", weights_only=True))
    found = ended(lambda: load_safely(io.BytesIO(content)))
    assert found == expected or (whole.startswith(content) and found == {"a": [1, "b"]}), "its pickle is whole"
