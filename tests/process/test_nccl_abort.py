"""Groups that are not of gloo: the abort reaches every one, and what it raises reaches nobody; each worker has its GPU.

On any machine with a backend of Python's that stands for NCCL; the last test needs a GPU, and NCCL itself.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from tests.waiting import wait_until
from torchelastic.errors import RetryableException
from torchelastic.group import communicators
from torchelastic.group.communicators import wait_for_collectives
from torchelastic.p2p.groups import ProcessGroups
from torchelastic.p2p.options import choose_gpu

TIMEOUT = timedelta(seconds=60)
NAME = "standin"


class StandIn(dist.ProcessGroup):
    """A backend for CPU tensors that is no gloo: notes that it was aborted, or fails at it."""

    made: list[StandIn] = []  # noqa: RUF012 - of the class
    failing = False

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch's stub knows one of two
        self.aborted = 0
        StandIn.made.append(self)

    def abort(self) -> None:
        self.aborted += 1
        if StandIn.failing:
            raise RuntimeError("a communicator that cannot be aborted")

    def shutdown(self) -> None:
        pass

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return NAME

    @property
    def pg_name(self) -> str:
        return NAME


def make(store: Any, rank: int, size: int, _timeout: timedelta) -> StandIn:
    return StandIn(rank, size)


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessGroups]:
    if not dist.is_backend_available(NAME):
        dist.Backend.register_backend(NAME, make, devices=["cuda"])
    monkeypatch.setattr(StandIn, "made", [])
    monkeypatch.setattr(StandIn, "failing", False)
    made = ProcessGroups(NAME, TIMEOUT)
    made.form(HashStore(), 0, 1)
    yield made
    monkeypatch.setattr(StandIn, "failing", False)
    made.destroy()
    assert not dist.is_initialized()


def test_the_abort_reaches_the_default_group_and_those_that_the_user_made(groups: ProcessGroups) -> None:
    dist.new_group(backend=NAME)
    assert len(StandIn.made) == 2
    assert groups.control is not None, "there is a gloo group beside them"
    groups.abort()
    wait_until(lambda: [one.aborted for one in StandIn.made] == [1, 1], what="both are aborted")
    assert dist.is_initialized(), "a step that is under way must not be told that there never was a group"


def test_after_an_abort_a_new_generation_can_be_formed(groups: ProcessGroups) -> None:
    groups.abort()
    groups.destroy()
    groups.form(HashStore(), 0, 1)
    assert dist.is_initialized()
    assert len(StandIn.made) == 2


def test_what_was_computed_counts_until_the_group_is_given_up(groups: ProcessGroups) -> None:
    """A kernel of NCCL that was aborted ends without an error: who uses its result has to ask."""
    wait_for_collectives()
    groups.abort()
    with pytest.raises(RetryableException, match="a collective of NCCL was aborted"):
        wait_for_collectives()
    groups.destroy()
    groups.form(HashStore(), 0, 1)
    wait_for_collectives()


def test_a_communicator_that_never_connects_is_left_behind_when_the_group_is_given_up(
    groups: ProcessGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL waits for a lost peer for ever, whatever becomes of the group."""
    connects, ends = threading.Event(), threading.Event()

    def connect() -> None:
        connects.set()
        ends.wait()

    monkeypatch.setattr(communicators, "connecting", lambda _group: connect)
    threading.Thread(target=lambda: connects.wait() and groups.abort(), daemon=True).start()
    with pytest.raises(RuntimeError, match="given up while it was being formed"):
        dist.new_group(backend=NAME)
    assert connects.is_set()
    ends.set()


@pytest.mark.parametrize(
    ("local_rank", "gpus", "chosen", "device"),
    [("3", 8, 0, 3), ("0", 8, 0, 0), ("3", 8, 5, 5), ("3", 1, 0, 0), (None, 8, 0, 0)],
    ids=["none chosen", "the first worker", "one chosen", "each sees its own", "no launcher"],
)
def test_each_worker_of_a_host_has_a_gpu_of_its_own(
    monkeypatch: pytest.MonkeyPatch, local_rank: str | None, gpus: int, chosen: int, device: int
) -> None:
    """Else every worker's is the first, of which NCCL takes no two ranks."""
    present = [chosen]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: present[-1])
    monkeypatch.setattr(torch.cuda, "set_device", present.append)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    choose_gpu()
    assert present[-1] == device


@pytest.mark.skipif(
    not (torch.cuda.is_available() and dist.is_nccl_available()),
    reason="no GPU with NCCL: on a machine with one, `make test-gpu`",
)
def test_what_nccl_has_computed_counts_until_its_group_is_given_up_and_the_next_group_works() -> None:
    torch.cuda.set_device(0)
    groups = ProcessGroups("nccl", TIMEOUT)
    for _ in range(2):
        groups.form(HashStore(), 0, 1)
        value = torch.ones(1000, device="cuda")
        dist.all_reduce(value)
        wait_for_collectives()
        assert value.sum().item() == 1000
        groups.abort()
        with pytest.raises(RetryableException, match="a collective of NCCL was aborted"):
            wait_for_collectives()
        groups.destroy()
