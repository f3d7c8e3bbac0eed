"""A group whose peer never comes is given up while it is being formed, the user's own ones too."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, TCPStore

from tests.older_torch import needs_released_interpreter
from tests.process.foreign_connection import Foreign
from tests.process.forked_ranks import run_ranks
from tests.waiting import wait_until
from torchelastic.p2p.abortable import AbortableGroup, GroupAbortedError
from torchelastic.p2p.groups import ProcessGroups

#: Of gloo, which would wait so long for the peer.
TIMEOUT_S = 60.0
SOON_S = 10.0


@pytest.fixture
def groups() -> Iterator[ProcessGroups]:
    made = ProcessGroups("gloo", timedelta(seconds=TIMEOUT_S))
    yield made
    made.destroy()


def abort_soon(groups: ProcessGroups) -> threading.Event:
    """Abort from another thread when the formation waits for its peer; the event says that it was done."""
    done = threading.Event()

    def abort() -> None:
        wait_until(lambda: "torchelastic-formation" in [thread.name for thread in threading.enumerate()], SOON_S)
        time.sleep(0.1)
        groups.abort()
        done.set()

    threading.Thread(target=abort, daemon=True).start()
    return done


def test_the_formation_of_a_group_ends_with_its_abort_and_the_next_one_can_be_formed(groups: ProcessGroups) -> None:
    done = abort_soon(groups)
    began_s = time.monotonic()
    with pytest.raises(RuntimeError, match="aborted while it was being formed"):
        groups.form(HashStore(), 0, 2)  # rank 1 never comes
    assert done.wait(SOON_S)
    assert time.monotonic() - began_s < SOON_S
    groups.destroy()
    groups.form(HashStore(), 0, 1)
    dist.all_reduce(torch.ones(1))
    assert dist.get_backend() == "gloo"


def test_an_abort_before_the_formation_is_not_forgotten(groups: ProcessGroups) -> None:
    groups.abort()
    with pytest.raises(RuntimeError, match="aborted while it was being formed"):
        groups.form(HashStore(), 0, 2)


def test_a_group_of_the_users_own_is_an_abortable_one_and_is_not_made_after_the_abort(groups: ProcessGroups) -> None:
    groups.form(HashStore(), 0, 1)
    own = dist.new_group([0])
    assert isinstance(own, AbortableGroup)
    groups.abort()
    begun = dist.all_reduce(torch.ones(1), group=own, async_op=True)  # in a backward pass it must not raise here
    assert begun is not None
    assert begun.is_completed()
    with pytest.raises(GroupAbortedError):
        begun.wait()
    with pytest.raises(RuntimeError, match="aborted"):
        begun.get_future().wait()
    with pytest.raises(RuntimeError, match="aborted"):
        dist.new_group([0])


def test_a_world_that_the_user_makes_without_us_is_torchs_own(groups: ProcessGroups) -> None:
    groups.abort()  # of a run that has failed
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    assert not isinstance(dist.group.WORLD, AbortableGroup)
    dist.all_reduce(torch.ones(1))


def form_and_abort(port: int) -> dict[str, object]:
    """On two ranks: while the group is formed, another thread of rank 0 opens a connection; then the group is cut."""
    rank = dist.get_rank()
    store = TCPStore("127.0.0.1", port, 2, rank == 0)
    dist.destroy_process_group()
    groups = ProcessGroups("gloo", timedelta(seconds=TIMEOUT_S))
    opened: list[Foreign] = []

    def open_one() -> None:
        while not any(thread.name == "torchelastic-formation" for thread in threading.enumerate()):
            time.sleep(0.001)
        opened.append(Foreign())
        store.set("opened", "yes")

    other = threading.Thread(target=open_one)
    if rank == 0:
        other.start()
    else:
        store.wait(["opened"])  # rank 0 waits for this one in its formation
    groups.form(TCPStore("127.0.0.1", port, 2, False, wait_for_workers=False), rank, 2)
    if rank == 0:
        other.join()
    dist.all_reduce(torch.ones(1))
    cut = groups.abort() if rank == 0 else 0
    began_s = time.monotonic()
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError:
        freed_s = time.monotonic() - began_s
    else:
        freed_s = -1.0
    groups.destroy()
    return {"cut": cut, "freed_s": freed_s, "alive": [foreign.is_alive() for foreign in opened]}


def test_a_connection_that_another_thread_opens_during_the_formation_outlives_the_group() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    first, second = run_ranks(form_and_abort, port, ranks=2)
    assert first.error is None, first.error
    assert second.error is None, second.error
    assert first.value["alive"] == [True]
    assert first.value["cut"] == 1, "the one connection of gloo to the peer"
    for ended in (first, second):
        assert 0 <= ended.value["freed_s"] < SOON_S


def test_a_group_of_one_rank_cuts_nothing(groups: ProcessGroups, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Foreign] = []
    original = dist.ProcessGroupGloo.__init__

    def connect(self: dist.ProcessGroupGloo, *arguments: Any, **keywords: Any) -> None:
        opened.append(Foreign())
        original(self, *arguments, **keywords)

    monkeypatch.setattr(dist.ProcessGroupGloo, "__init__", connect)
    groups.form(HashStore(), 0, 1)
    assert opened
    assert groups.abort() == 0
    assert all(foreign.is_alive() for foreign in opened)


def test_a_world_of_the_users_own_after_ours_is_left_alone(groups: ProcessGroups) -> None:
    """After training a script may form groups as it likes; nobody would give those up."""
    groups.form(HashStore(), 0, 1)
    groups.destroy()
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers it

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        own = dist.new_group([0, 1])
        assert not isinstance(own, AbortableGroup)
    finally:
        dist.destroy_process_group()


@needs_released_interpreter
def test_the_checks_of_torchs_debug_level_detail_are_not_put_between(groups: ProcessGroups) -> None:
    """They wait for other ranks where nobody can give that up, and a DDP over them ended every worker with SIGSEGV."""
    debug: Any = dist  # these have no types
    level = debug.get_debug_level()
    debug.set_debug_level(debug.DebugLevel.DETAIL)
    try:
        groups.form(HashStore(), 0, 1)
        world = dist.group.WORLD
        assert isinstance(world, AbortableGroup)
        assert type(world._get_backend(torch.device("cpu"))) is dist.ProcessGroupGloo
        module = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        module(torch.ones(1, 2)).sum().backward()
    finally:
        debug.set_debug_level(level)
