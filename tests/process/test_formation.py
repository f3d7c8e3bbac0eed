"""A group whose peer never comes is given up while it is being formed, the user's own ones too."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

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
        deadline_s = time.monotonic() + SOON_S
        while not any(thread.name == "torchelastic-formation" for thread in threading.enumerate()):
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        time.sleep(0.1)
        groups.abort()
        done.set()

    threading.Thread(target=abort, daemon=True).start()
    return done


def test_the_formation_of_a_group_ends_with_its_abort_and_the_next_one_can_be_formed(groups: ProcessGroups) -> None:
    done = abort_soon(groups)
    began_s = time.monotonic()
    with pytest.raises(RuntimeError, match="given up while it was being formed"):
        groups.form(HashStore(), 0, 2)  # rank 1 never comes
    assert done.wait(SOON_S)
    assert time.monotonic() - began_s < SOON_S
    groups.destroy()
    groups.form(HashStore(), 0, 1)
    dist.all_reduce(torch.ones(1))
    assert dist.get_backend() == "gloo"


def test_an_abort_before_the_formation_is_not_forgotten(groups: ProcessGroups) -> None:
    groups.abort()
    with pytest.raises(RuntimeError, match="given up while it was being formed"):
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
    with pytest.raises(RuntimeError, match="given up"):
        begun.get_future().wait()
    with pytest.raises(RuntimeError, match="given up"):
        dist.new_group([0])


def test_a_world_that_the_user_makes_without_us_is_torchs_own(groups: ProcessGroups) -> None:
    groups.abort()  # of a run that has failed
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    assert not isinstance(dist.group.WORLD, AbortableGroup)
    dist.all_reduce(torch.ones(1))
