"""Whoever waits for other ranks names them: for a save, for a checkpoint's next point, for groups that gloo holds."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from tests.pure.worlds_of_one import Counter, InMemory, World
from torchelastic.checkpoint.in_loop import BOUND_FACTOR, MIN_BOUND_S, LoopCheckpoints
from torchelastic.group.peers import Alone
from torchelastic.p2p import abandoned, keys
from torchelastic.p2p.abandoned import AbandonedGroups
from torchelastic.p2p.abortable import AbortableGroup
from torchelastic.p2p.peers import GroupPeers
from torchelastic.testing.clock import FakeClock


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


def nothing() -> None:
    """The round stands."""


def test_a_wait_says_whom_it_waits_for_and_ends_with_its_bound(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(keys, "LOOK_S", 0.1)
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(RuntimeError, match=r"waited .* s for rank 0 to save a checkpoint"),
    ):
        keys.wait_for_key(store, "saved/1", nothing, lambda: "rank 0 to save a checkpoint", bound_s=0.5)
    assert "waiting for rank 0 to save a checkpoint, for 0 s so far" in caplog.text


def test_a_meeting_names_the_ranks_that_are_missing(store: TCPStore) -> None:
    named: list[str] = []

    def wait_for_key(key: str, waited_for: Callable[[], str], bound_s: float | None = None) -> None:
        named.append(waited_for())

    group = cast("dist.ProcessGroup", None)
    for rank in (1, 3):
        GroupPeers(group, store, rank, 4, 1, wait_for_key).barrier()
    assert named == [
        "ranks 0, 2, 3 to reach the same point of saving or restoring a checkpoint",
        "ranks 0, 2 to reach the same point of saving or restoring a checkpoint",
    ]


class Rank1(Alone):
    """Rank 1 of two, the other of which saves after each step, for 100 s; notes for how long it would be waited for."""

    rank, world_size = 1, 2

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self.clock, self.bounds = clock, list[float | None]()

    def rank_0_says(self, value: bool) -> bool:
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
    checkpoints.enter_group(Counter(), 1, synced_before=False)
    for _ in range(2):
        checkpoints.after_step(Counter())
    assert peers.bounds == [None, max(MIN_BOUND_S, BOUND_FACTOR * 100.0)]
    assert manager.saved == [], "rank 0 does it"


def test_who_waits_for_rank_0_says_so_and_goes_on_when_it_is_done(store: TCPStore) -> None:
    waits: list[tuple[str, float | None]] = []

    def wait_for_key(key: str, waited_for: Callable[[], str], bound_s: float | None = None) -> None:
        waits.append((waited_for(), bound_s))
        store.wait([key], timedelta(seconds=0.5))

    group = cast("dist.ProcessGroup", None)
    rank_0, rank_1 = (GroupPeers(group, store, rank, 2, 1, wait_for_key) for rank in range(2))
    rank_0.wait_for_rank_0("to save a checkpoint", 7.0)
    assert waits == [], "it is the one that is waited for"
    rank_1.wait_for_rank_0("to save a checkpoint", 7.0)
    assert waits == [("rank 0 to save a checkpoint", 7.0)]
    with pytest.raises(dist.DistStoreError):
        rank_1.wait_for_rank_0("to save a checkpoint", 7.0)  # the second time, which rank 0 has not come to


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
    kept = AbandonedGroups()

    def until(condition: Callable[[], Any]) -> None:
        deadline_s = time.monotonic() + 20.0
        while not condition():
            assert time.monotonic() < deadline_s
            time.sleep(0.02)

    with caplog.at_level(logging.WARNING):
        kept.add(cast("list[AbortableGroup]", groups))
        until(lambda: published.get("groups.abandoned") == len(groups))
        until(lambda: f"{len(groups)} process groups that were given up hold" in caplog.text)
    assert published["groups.abandoned.bytes"] == len(groups) * 2**20
    for group in groups[1:]:
        group.idle = True
    until(lambda: kept.count == 1)
    groups[0].idle = True
    until(lambda: kept.count == 0)
    until(lambda: published["groups.abandoned"] == 0)
