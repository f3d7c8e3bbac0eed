"""Which of DDP's options are passed on, which are refused and why, and what its errors mean."""

from __future__ import annotations

from typing import Any

import pytest

from torchelastic.errors import UnfitError
from torchelastic.model.ddp_errors import static_without_sync, why_unfit
from torchelastic.model.ddp_options import PASSED, REFUSED, as_numbers, checked_options, from_numbers


def checked(ddp: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {"find_unused_parameters": False, "salvage": "discard", "logical_shards": None}
    return checked_options(ddp, **{**usual, **more})


def test_what_is_not_given_is_as_ddp_has_it() -> None:
    assert checked(None) == checked({}) == PASSED
    assert checked(None, find_unused_parameters=True) == {**PASSED, "find_unused_parameters": True}
    assert checked({"find_unused_parameters": True}, logical_shards=4)["find_unused_parameters"]
    assert checked({"gradient_as_bucket_view": False}, salvage="drop") == PASSED
    assert checked({"bucket_cap_mb": 2.5}) == {**PASSED, "bucket_cap_mb": 2.5}


def test_buffers_are_called_as_torch_2_13_calls_them_too() -> None:
    assert checked({"forward_sync_buffers": False}) == {**PASSED, "broadcast_buffers": False}
    with pytest.raises(ValueError, match=r"forward_sync_buffers.*give one of them"):
        checked({"forward_sync_buffers": True, "broadcast_buffers": True})


@pytest.mark.parametrize(
    ("ddp", "more", "reason"),
    [
        *[({name: None}, {}, why) for name, why in REFUSED.items()],
        ({"colour": 1}, {}, "no option that ModelState passes on: those are broadcast_buffers"),
        ({"static_graph": 1}, {}, "give True or False"),
        *[({"bucket_cap_mb": cap}, {}, "give MiB, above 0") for cap in (0, -1.0, True, "25")],
        ({"find_unused_parameters": False}, {"find_unused_parameters": True}, "give one of them"),
        ({"static_graph": True}, {"logical_shards": 2}, "there is no DDP"),
        ({"static_graph": True}, {"salvage": "drop"}, "static_graph': True}: the gradients kept"),
        ({"gradient_as_bucket_view": True}, {"salvage": "recompute"}, "lies in DDP's bucket"),
    ],
)
def test_what_would_break_a_promise_is_refused_by_name(ddp: dict[str, Any], more: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        checked(ddp, **more)
    assert next(iter(ddp)) in str(caught.value)


def test_ranks_compare_them_as_numbers() -> None:
    every = {"broadcast_buffers": False, "static_graph": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 2.5}
    assert from_numbers(*as_numbers({**PASSED, **every})) == every
    assert from_numbers(*as_numbers(PASSED)) == {}


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("Expected to mark a variable ready only once. This error is caused by ..", "use_reentrant=False"),
        ("expect_autograd_hooks_ INTERNAL ASSERT FAILED", "does not go with no_sync"),
    ],
)
def test_errors_that_come_again_until_the_script_is_changed_say_how(text: str, remedy: str) -> None:
    error = why_unfit(RuntimeError(text))
    assert isinstance(error, UnfitError)
    assert remedy in str(error)
    assert why_unfit(ValueError(text)) is None
    assert why_unfit(RuntimeError("shapes do not fit")) is None


def test_the_same_is_said_where_the_graph_is_static_from_the_start() -> None:
    assert str(static_without_sync()) == str(why_unfit(RuntimeError("expect_autograd_hooks_")))
