"""Groups that are not of gloo: the abort reaches every one, and what it raises reaches nobody; each worker has its GPU.

On any machine with backends of Python's that stand for NCCL, of no class of torch's that would tell what they can do;
the last test needs a GPU, and NCCL itself. torch's own engines without a GPU: `test_nccl_engines.py`.
"""

from __future__ import annotations

import enum
import os
import threading
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from tests.waiting import wait_until
from torchelastic.errors import RetryableException, UnfitError
from torchelastic.group import communicators
from torchelastic.group.communicators import wait_for_collectives
from torchelastic.p2p.groups import ProcessGroups
from torchelastic.p2p.options import choose_gpu

TIMEOUT = timedelta(seconds=60)
NAME = "standin"
UNKNOWN = "unknown"


class ErrorType(enum.Enum):
    """As torch's, which its builds for CPUs lack."""

    SUCCESS = 0
    TIMEOUT = 1
    COMM_ERROR = 2


class Unknown(dist.ProcessGroup):
    """A backend that is no gloo, whose kernels do not raise, and which tells nothing: notes that it was aborted."""

    made: list[Unknown] = []  # noqa: RUF012 - of the class
    failing = False

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch's stub knows one of two
        self.aborted = 0
        Unknown.made.append(self)

    def abort(self) -> None:
        self.aborted += 1
        if Unknown.failing:
            raise RuntimeError("a communicator that cannot be aborted")

    def shutdown(self) -> None:
        pass

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return NAME

    @property
    def pg_name(self) -> str:
        return NAME


class Silent(Unknown):
    """The same, but it can be asked for errors and connected ahead, as both engines of NCCL."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.error = ErrorType.SUCCESS
        self.options = SimpleNamespace(lazy_init=True)
        self.connected: list[tuple[str, bool]] = []

    def get_error(self) -> ErrorType:
        return self.error

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.connected.append((threading.current_thread().name, self.options.lazy_init))


def make(store: Any, rank: int, size: int, _timeout: timedelta) -> Silent:
    return Silent(rank, size)


def make_unknown(store: Any, rank: int, size: int, _timeout: timedelta) -> Unknown:
    return Unknown(rank, size)


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessGroups]:
    for name, maker in ((NAME, make), (UNKNOWN, make_unknown)):
        if not dist.is_backend_available(name):
            dist.Backend.register_backend(name, maker, devices=["cuda"])
    monkeypatch.setattr(Unknown, "made", [])
    monkeypatch.setattr(Unknown, "failing", False)
    made = ProcessGroups(NAME, TIMEOUT)
    made.form(HashStore(), 0, 1)
    yield made
    monkeypatch.setattr(Unknown, "failing", False)
    made.destroy()
    assert not dist.is_initialized()


def test_the_abort_reaches_the_default_group_and_those_that_the_user_made(groups: ProcessGroups) -> None:
    dist.new_group(backend=NAME)
    assert len(Unknown.made) == 2
    assert groups.control is not None, "there is a gloo group beside them"
    groups.abort()
    wait_until(lambda: [one.aborted for one in Unknown.made] == [1, 1], what="both are aborted")
    assert dist.is_initialized(), "a step that is under way must not be told that there never was a group"


def test_after_an_abort_a_new_generation_can_be_formed(groups: ProcessGroups) -> None:
    groups.abort()
    groups.destroy()
    groups.form(HashStore(), 0, 1)
    assert dist.is_initialized()
    assert len(Unknown.made) == 2


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
    with pytest.raises(RuntimeError, match="aborted while it was being formed"):
        dist.new_group(backend=NAME)
    assert connects.is_set()
    ends.set()


@pytest.mark.parametrize("error", [ErrorType.TIMEOUT, ErrorType.COMM_ERROR])
def test_a_communicator_that_torch_has_given_up_by_itself_does_not_count(
    groups: ProcessGroups, error: ErrorType
) -> None:
    """A kernel of NCCL that was aborted ends without an error, also where nobody here has aborted it."""
    wait_for_collectives()
    silent = Unknown.made[0]
    assert isinstance(silent, Silent)
    silent.error = error
    with pytest.raises(RetryableException, match="a collective of NCCL was aborted"):
        wait_for_collectives()


def test_a_group_of_the_users_that_has_failed_is_asked_too(groups: ProcessGroups) -> None:
    own = dist.new_group(backend=NAME)
    assert isinstance(own, Silent)
    own.error = ErrorType.COMM_ERROR
    with pytest.raises(RetryableException, match="a collective of NCCL was aborted"):
        wait_for_collectives()


def test_the_ranks_are_connected_on_a_thread_that_can_be_left_behind(
    groups: ProcessGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `lazy_init`, which keeps the constructor from it, the call has no effect."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(Silent, "size", lambda _self: 2)
    own = dist.new_group(backend=NAME)
    assert isinstance(own, Silent)
    assert own.connected == [("torchelastic-formation", False)]


def test_a_backend_that_cannot_be_asked_is_refused_when_the_default_group_is_formed() -> None:
    if not dist.is_backend_available(UNKNOWN):
        dist.Backend.register_backend(UNKNOWN, make_unknown, devices=["cuda"])
    made = ProcessGroups(UNKNOWN, TIMEOUT)
    with pytest.raises(UnfitError, match=r"the backend 'unknown' of a process group cannot be asked .* use 'nccl'"):
        made.form(HashStore(), 0, 1)
    made.destroy()
    assert not dist.is_initialized()


def test_a_group_of_the_users_whose_backend_cannot_be_asked_is_refused(groups: ProcessGroups) -> None:
    with pytest.raises(UnfitError, match="the backend 'unknown' of a process group cannot be asked"):
        dist.new_group(backend=UNKNOWN)


def test_a_mixed_group_whose_half_for_gpus_cannot_be_asked_is_refused(
    groups: ProcessGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnfitError, match="the backend 'unknown' of a process group cannot be asked"):
        dist.new_group(backend=f"cpu:gloo,cuda:{UNKNOWN}")


def test_gloo_raises_and_needs_not_be_asked(groups: ProcessGroups) -> None:
    own = dist.new_group(backend="gloo")
    dist.all_reduce(torch.ones(1), group=own)
    wait_for_collectives()


@pytest.mark.parametrize(
    ("given", "used", "words"),
    [
        ({}, "2", None),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, "0", None),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"}, "2", None),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, "2", "TORCH_NCCL_ASYNC_ERROR_HANDLING=1 would have torch end"),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}, "2", "TORCH_NCCL_ASYNC_ERROR_HANDLING=3 would have torch end"),
        ({"NCCL_ASYNC_ERROR_HANDLING": "1"}, "2", "NCCL_ASYNC_ERROR_HANDLING=1 would have torch end"),
    ],
    ids=["not set", "nothing", "clean up", "tear down", "skip", "old name"],
)
def test_torch_ends_no_process_for_a_collective_that_has_failed(
    groups: ProcessGroups,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    given: dict[str, str],
    used: str,
    words: str | None,
) -> None:
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    groups.destroy()
    groups.form(HashStore(), 0, 1)
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == used
    assert (words in caplog.text) if words else "would have torch end" not in caplog.text


@pytest.mark.parametrize(
    ("given", "used"),
    [({}, "0"), ({"TORCH_FR_BUFFER_SIZE": "100"}, "100"), ({"TORCH_NCCL_TRACE_BUFFER_SIZE": "7"}, None)],
    ids=["off", "chosen", "chosen by the other name"],
)
def test_the_flight_recorder_of_torch_is_off_unless_it_was_asked_for(
    groups: ProcessGroups, monkeypatch: pytest.MonkeyPatch, given: dict[str, str], used: str | None
) -> None:
    """Where it is on, nobody can abort a communicator for up to 15 seconds."""
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    groups.destroy()
    groups.form(HashStore(), 0, 1)
    assert os.environ.get("TORCH_FR_BUFFER_SIZE") == used


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
