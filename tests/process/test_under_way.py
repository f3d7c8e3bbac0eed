"""An operation that nobody waits for any more is held until it has ended: torch 2.6 would hang with its group."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import cast

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from tests.process.forked_ranks import run_ranks, values
from torchelastic.group import under_way
from torchelastic.group.messages import LaggedMax
from torchelastic.group.watched_group import RanksMissingError, WatchedGroup


class Begun:
    """An operation, of which a test says when it has ended."""

    def __init__(self) -> None:
        self.has_ended = False

    def is_completed(self) -> bool:
        return self.has_ended

    def wait(self) -> bool:
        return True


@pytest.fixture
def group() -> Iterator[WatchedGroup]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield WatchedGroup(dist.group.WORLD, 0.05, "test")
    dist.destroy_process_group()


def ends(held: weakref.ref[Begun]) -> bool:
    """Whether it is let go of when it has ended."""
    begun = held()
    assert begun is not None, "nobody holds it"
    begun.has_ended = True
    del begun
    under_way.release_ended()
    gc.collect()
    return held() is None


def test_one_whose_wait_was_given_up_is_held_until_it_has_ended(group: WatchedGroup) -> None:
    begun = Begun()
    with pytest.raises(RanksMissingError):
        group.wait(cast("dist.Work", begun), "call-1")
    held = weakref.ref(begun)
    del begun
    gc.collect()
    assert ends(held)


def test_a_maximum_that_is_never_read_is_held_until_it_has_ended(
    group: WatchedGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[Begun]] = []

    def all_reduce(*_: object, async_op: bool) -> Begun:
        begun = Begun()
        made.append(weakref.ref(begun))
        return begun

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    LaggedMax(group, 1, [1.0])
    gc.collect()
    assert ends(made[0])
    finished = LaggedMax(group, 2, [2.0])
    begun = made[1]()
    assert begun is not None
    begun.has_ended = True
    del begun
    assert finished.finish() == [2.0]
    del finished
    gc.collect()
    assert made[1]() is None


def leave_a_maximum_under_way() -> float:
    """Rank 0 begins one, does not read it and destroys the group; rank 1 ends without having begun it."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["begun"], timedelta(seconds=30))
        return 0.0
    assert dist.group.WORLD is not None
    LaggedMax(WatchedGroup(dist.group.WORLD, 5.0, "test"), 1, [1.0])
    store.set("begun", "1")
    dist.destroy_process_group()
    return 1.0


def test_a_group_is_destroyed_while_a_maximum_is_under_way() -> None:
    assert values(run_ranks(leave_a_maximum_under_way, ranks=2)) == [1.0, 0.0]
