"""Whoever waits for other ranks names them: for a save, for a checkpoint's next point, for groups that gloo holds."""

from __future__ import annotations

import logging
from typing import cast

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from tests.pure.worlds_of_one import Counter, InMemory, World
from tests.waiting import wait_until
from torchelastic.checkpoint.loop_checkpoints import BOUND_FACTOR, MIN_BOUND_S, LoopCheckpoints
from torchelastic.group.peers import Alone
from torchelastic.p2p import abandoned, group_peers
from torchelastic.p2p.abandoned import AbortedGroups
from torchelastic.p2p.abortable import AbortableGroup
from torchelastic.p2p.group_peers import GroupPeers
from torchelastic.testing.clock import FakeClock


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


def nothing() -> None:
    """The round stands."""


def test_a_wait_says_whom_it_waits_for_and_ends_with_its_bound(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(group_peers, "CHECK_S", 0.1)
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(RuntimeError, match=r"waited .* s for rank 0 to save a checkpoint"),
    ):
        group_peers.wait_for_key(store, "saved/1", nothing, lambda: "rank 0 to save a checkpoint", bound_s=2.0)
    assert "waiting for rank 0 to save a checkpoint, for 0 s so far" in caplog.text
    assert caplog.text.count("waiting for rank 0") <= 5, "after twice as long each time"


class RoundIsOverError(RuntimeError):
    """What whoever waits is told in the end."""


def peers_at(store: TCPStore, rank: int, world_size: int, looks: int = 3) -> GroupPeers:
    """One rank of a round that breaks after so many looks at it."""
    left = [None] * looks

    def raise_if_broken() -> None:
        if not left:
            raise RoundIsOverError
        left.pop()

    return GroupPeers(cast("dist.ProcessGroup", None), store, rank, world_size, 1, raise_if_broken)


def test_a_meeting_names_the_ranks_that_are_missing(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(group_peers, "CHECK_S", 0.1)
    for rank in (1, 3):
        with pytest.raises(RoundIsOverError):
            peers_at(store, rank, 4).barrier()
    assert "waiting for ranks 0, 2, 3 to reach the same point of saving or restoring a checkpoint" in caplog.text
    assert "waiting for ranks 0, 2 to reach the same point of saving or restoring a checkpoint" in caplog.text


class Rank1(Alone):
    """Rank 1 of two, the other of which saves after each step, for 100 s; notes for how long it would be waited for."""

    rank, world_size = 1, 2

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self.clock, self.bounds = clock, list[float | None]()

    def rank_0_says(self, value: int) -> int:
        assert not value, "a rank that is not asked finds nothing due"
        return True

    def wait_for_rank_0(self, purpose: str, bound_s: float | None) -> None:
        self.bounds.append(bound_s)
        self.clock.advance(100.0)


def test_a_save_is_bounded_by_the_slowest_one_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, world, manager = FakeClock(), World(), InMemory()
    peers = Rank1(clock)
    monkeypatch.setattr(world, "peers", lambda: peers)
    checkpoints = LoopCheckpoints(world, manager, clock)
    checkpoints.enter_group(Counter(), 1)
    for _ in range(2):
        checkpoints.after_step(Counter())
    assert peers.bounds == [None, max(MIN_BOUND_S, BOUND_FACTOR * 100.0)]
    assert manager.saved == [], "rank 0 does it"


def test_who_waits_for_rank_0_says_so_and_goes_on_when_it_is_done(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(group_peers, "CHECK_S", 0.1)
    rank_0, rank_1 = peers_at(store, 0, 2), peers_at(store, 1, 2, looks=20)
    rank_0.wait_for_rank_0("to save a checkpoint", None)
    rank_1.wait_for_rank_0("to save a checkpoint", None)
    assert not caplog.text, "it is done"
    with pytest.raises(RuntimeError, match=r"waited .* s for rank 0 to save a checkpoint"):
        rank_1.wait_for_rank_0("to save a checkpoint", 0.5)  # the second time, which rank 0 has not come to
    assert "waiting for rank 0 to save a checkpoint" in caplog.text


class Held:
    """A group with an operation under way."""

    idle = False

    def is_idle(self) -> bool:
        return self.idle

    def held_bytes(self) -> int:
        return 2**20


def test_many_abandoned_groups_are_told_of_and_each_is_released_when_it_is_idle(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    published: dict[str, float] = {}
    monkeypatch.setattr(abandoned, "publish_metric", lambda _group, name, value: published.update({name: value}))
    groups = [Held() for _ in range(abandoned.MAX_GROUPS + 1)]
    kept = AbortedGroups()

    with caplog.at_level(logging.WARNING):
        kept.add(cast("list[AbortableGroup]", groups))
        wait_until(lambda: published.get("groups.abandoned") == len(groups))
        wait_until(lambda: f"{len(groups)} aborted process groups hold" in caplog.text)
    assert published["groups.abandoned.bytes"] == len(groups) * 2**20
    for group in groups[1:]:
        group.idle = True
    wait_until(lambda: kept.count == 1)
    groups[0].idle = True
    wait_until(lambda: kept.count == 0)
    wait_until(lambda: published["groups.abandoned"] == 0)
