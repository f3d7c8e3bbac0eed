"""How ranks are named for people."""

from __future__ import annotations

from torchelastic.group.peers import Alone
from torchelastic.text import describe_calls, listed


def test_who_calls_what_is_said_briefly() -> None:
    assert listed([1]) == "rank 1"
    assert listed(list(range(20))).endswith("7 and 12 more")
    assert describe_calls(["save(5)", "load()", "save(5)"]) == "rank 1 calls load(); ranks 0, 2 call save(5)"


def test_who_is_alone_agrees_with_itself() -> None:
    alone = Alone()
    assert [alone.rank_0_says(value) for value in (True, False)] == [True, False]
    assert alone.all_gather({"a": [1]}) == [{"a": [1]}]


def test_who_is_alone_waits_for_nobody_and_nobody_is_silent() -> None:
    peers = Alone()
    peers.wait_for_rank_0("a save", 1.0)
    assert peers.silent_s() == {}
