"""The queue on one rank, with a thread: what is finalised when, and what happens to a call that fails; `torch.save`."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.process.async_work import PATIENCE_S
from tests.waiting import wait_until
from torchelastic.checkpoint.async_ckpt import (
    AsyncCallsQueue,
    AsyncCheckpointError,
    AsyncRequest,
    TorchAsyncCheckpoint,
    abort_checkpoints,
)
from torchelastic.checkpoint.compat.elastic01.staging import new_staging_path
from torchelastic.checkpoint.compat.nvrx.async_ckpt.request import CollectiveFinalize
from torchelastic.checkpoint.compat.nvrx.async_ckpt.torch_checkpoint import save_and_rename


@pytest.fixture
def queue() -> Iterator[AsyncCallsQueue]:
    with AsyncCallsQueue(worker="thread", timeout_s=PATIENCE_S) as one:
        yield one


class Work:
    """Work that ends when the test says so."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.has_begun, self.may_end, self.error = threading.Event(), threading.Event(), error
        self.finalized = 0
        self.thread = threading.current_thread()

    def __call__(self) -> None:
        self.thread = threading.current_thread()
        self.has_begun.set()
        assert self.may_end.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error

    def finalize(self) -> None:
        self.finalized += 1

    @property
    def request(self) -> AsyncRequest:
        return AsyncRequest(self, (), [self.finalize])


def done_work(error: BaseException | None = None) -> Work:
    work = Work(error)
    work.may_end.set()
    return work


def test_a_call_is_finalised_on_the_trainer_and_only_when_it_is_done(queue: AsyncCallsQueue) -> None:
    work, threads = Work(), []
    request = work.request
    request.add_finalize_fn(lambda: threads.append(threading.current_thread()))
    assert queue.schedule_async_request(request) == 1
    assert queue.maybe_finalize_async_calls() == []
    assert (queue.get_num_unfinalized_calls(), work.finalized) == (1, 0)
    work.may_end.set()
    assert queue.maybe_finalize_async_calls(blocking=True) == [1]
    assert (queue.get_num_unfinalized_calls(), work.finalized) == (0, 1)
    assert threads == [threading.main_thread()]


def test_a_failure_is_told_once_and_is_not_finalised(queue: AsyncCallsQueue) -> None:
    good, bad = done_work(), done_work(ValueError("disk on fire"))
    for work in (good, bad, good):
        queue.schedule_async_request(work.request)
    with pytest.raises(AsyncCheckpointError, match="call 2 failed on rank 0: ValueError: disk on fire") as caught:
        queue.maybe_finalize_async_calls(blocking=True)
    assert caught.value.__cause__ is bad.error
    assert caught.value.finalized_calls == (1,)
    assert queue.maybe_finalize_async_calls(blocking=True) == [3]
    assert (good.finalized, bad.finalized) == (2, 0)


def test_what_a_failed_call_was_given_is_let_go(queue: AsyncCallsQueue) -> None:
    class State(list[int]):
        """A list that can be referred to weakly."""

    def fail(_: State) -> None:
        raise ValueError("disk on fire")

    state = State()
    is_held = weakref.ref(state)
    queue.schedule_async_request(AsyncRequest(fail, (state,), []))
    del state
    with pytest.raises(AsyncCheckpointError):
        queue.maybe_finalize_async_calls(blocking=True)
    gc.collect()
    assert is_held() is None


def test_a_failing_finalize_function_is_the_callers_own_error(queue: AsyncCallsQueue) -> None:
    def fail() -> None:
        raise LookupError("mine")

    queue.schedule_async_request(AsyncRequest(None, (), [fail]))
    with pytest.raises(LookupError, match="mine"):
        queue.maybe_finalize_async_calls()
    assert queue.get_num_unfinalized_calls() == 0


def test_a_preload_that_fails_fails_in_schedule_and_leaves_nothing_behind(queue: AsyncCallsQueue) -> None:
    work = done_work()
    with pytest.raises(ZeroDivisionError):
        queue.schedule_async_request(work.request._replace(async_fn_args=(1, 2), preload_fn=lambda: 1 // 0))
    assert queue.get_num_unfinalized_calls() == 0
    with pytest.raises(ValueError, match="takes the place"):
        queue.schedule_async_request(work.request._replace(preload_fn=lambda: 1))
    assert queue.maybe_finalize_async_calls(blocking=True) == []
    assert queue.get_num_unfinalized_calls() == 0


def test_work_that_takes_too_long_has_failed_and_the_queue_goes_on() -> None:
    hung, behind, after = Work(), done_work(), done_work()
    queue = AsyncCallsQueue(worker="thread", timeout_s=0.2)
    queue.schedule_async_request(hung.request)
    queue.schedule_async_request(behind.request)
    with pytest.raises(AsyncCheckpointError, match=r"call 1 .* not done within 0.2 s"):
        queue.maybe_finalize_async_calls(blocking=True)
    index = queue.schedule_async_request(after.request)
    assert queue.maybe_finalize_async_calls(blocking=True) == [2, index]
    assert behind.thread is not hung.thread
    hung.may_end.set()
    assert (hung.finalized, behind.finalized, after.finalized) == (0, 1, 1)


def test_polls_that_do_not_block_name_a_call_that_takes_too_long_once(caplog: pytest.LogCaptureFixture) -> None:
    slow = Work()
    with AsyncCallsQueue(worker="thread", timeout_s=0.01) as queue:
        queue.schedule_async_request(slow.request)
        assert slow.has_begun.wait(PATIENCE_S)
        time.sleep(0.02)
        assert [queue.maybe_finalize_async_calls() for _ in range(3)] == [[], [], []]
        assert [text.split(" (")[0] for text in caplog.messages] == [
            "asynchronous checkpoint call 1 is not done 0.01 s"
        ]
        slow.may_end.set()
        wait_until(lambda: queue.maybe_finalize_async_calls() == [1], PATIENCE_S, "the slow call")


def test_what_a_failed_call_has_begun_is_taken_back_once(queue: AsyncCallsQueue) -> None:
    done: list[str] = []
    for work in (done_work(ValueError("disk on fire")), done_work()):
        names = ("together", "alone", "given up")
        hook = CollectiveFinalize(*(partial(done.append, name) for name in names))
        queue.schedule_async_request(work.request._replace(finalize_fns=[hook]))
    with pytest.raises(AsyncCheckpointError):
        queue.maybe_finalize_async_calls(blocking=True)
    assert done == ["given up"]
    assert queue.maybe_finalize_async_calls(blocking=True) == [2]
    assert done == ["given up", "together"]


def test_abort_drops_everything_at_once(caplog: pytest.LogCaptureFixture) -> None:
    work = Work()
    queue = AsyncCallsQueue(worker="thread", timeout_s=PATIENCE_S)
    queue.schedule_async_request(work.request)
    assert work.has_begun.wait(PATIENCE_S)
    queue.close(abort=True)
    assert "still at work" in caplog.text
    assert queue.get_num_unfinalized_calls() == 0
    work.may_end.set()
    assert queue.maybe_finalize_async_calls(blocking=True) == []
    assert work.finalized == 0


def test_abort_from_another_thread_ends_a_wait() -> None:
    work = Work()
    queue = AsyncCallsQueue(worker="thread", timeout_s=PATIENCE_S)
    queue.schedule_async_request(work.request)

    def abort() -> None:
        assert work.has_begun.wait(PATIENCE_S)
        abort_checkpoints()

    aborting = threading.Thread(target=abort)
    aborting.start()
    try:
        assert queue.maybe_finalize_async_calls(blocking=True) == []  # it was aborted before the wait began
    except AsyncCheckpointError as error:
        assert "aborted" in str(error) or "closed" in str(error)  # noqa: PT017 - which of the two is up to the threads
    aborting.join()
    work.may_end.set()
    assert (work.finalized, queue.get_num_unfinalized_calls()) == (0, 0)


def test_a_forgotten_queue_is_reported_and_its_thread_ends(caplog: pytest.LogCaptureFixture) -> None:
    work = Work()
    queue = AsyncCallsQueue(worker="thread", timeout_s=PATIENCE_S)
    queue.schedule_async_request(work.request)
    assert work.has_begun.wait(PATIENCE_S)
    with caplog.at_level(logging.WARNING):
        del queue
        gc.collect()
    assert "1 unfinalised checkpoint calls was forgotten" in caplog.text
    work.may_end.set()
    work.thread.join(PATIENCE_S)
    assert not work.thread.is_alive()
    assert work.finalized == 0


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="nice values per thread are Linux's")
def test_the_thread_gives_way_and_the_trainer_does_not() -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    seen: list[int] = []
    with AsyncCallsQueue(worker="thread", cpu_priority=before + 2, timeout_s=PATIENCE_S) as queue:
        queue.schedule_async_request(AsyncRequest(lambda: seen.append(os.getpriority(os.PRIO_PROCESS, 0)), (), []))
    assert seen == [before + 2]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


# --- torch.save in the background: what is in the file, when it appears, and what is left when it does not ------------


@pytest.fixture(scope="module")
def checkpoint() -> Iterator[TorchAsyncCheckpoint]:
    one = TorchAsyncCheckpoint()
    yield one
    one.close()


@pytest.mark.long
def test_the_file_holds_the_state_of_the_moment_of_the_call(checkpoint: TorchAsyncCheckpoint, tmp_path: Path) -> None:
    weight = torch.zeros(1000)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(weight.clone())])
    step = [1]
    state = {"weight": weight, "row": weight[:10], "optimizer": optimizer.state_dict(), "step": step}
    checkpoint.async_save(state, tmp_path / "a.pt")
    weight += 1
    step[0] = 2
    checkpoint.async_save(state, f=str(tmp_path / "b.pt"), pickle_protocol=2)
    checkpoint.finalize_async_save(blocking=True)
    for name, value, number in (("a.pt", 0, 1), ("b.pt", 1, 2)):
        saved = torch.load(tmp_path / name, weights_only=True)
        assert torch.equal(saved["weight"], torch.full((1000,), float(value)))
        assert saved["step"] == [number]
        assert saved["row"].untyped_storage().data_ptr() == saved["weight"].untyped_storage().data_ptr()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt", "b.pt"]


@pytest.mark.long
def test_a_failed_save_is_told_and_the_next_one_works(checkpoint: TorchAsyncCheckpoint, tmp_path: Path) -> None:
    checkpoint.async_save({"x": torch.ones(1)}, tmp_path / "missing" / "a.pt")
    with pytest.raises(AsyncCheckpointError, match=r"CheckpointError: .*could not save a checkpoint: No such file"):
        checkpoint.finalize_async_save(blocking=True)
    checkpoint.async_save({"x": torch.ones(1)}, tmp_path / "a.pt")
    checkpoint.finalize_async_save(blocking=True, terminate=True)
    assert torch.load(tmp_path / "a.pt", weights_only=True) == {"x": torch.ones(1)}


class Unsavable:
    def __reduce__(self) -> str:
        raise ValueError("cannot be saved")


def test_a_save_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    save_and_rename({"x": 1}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match="cannot be saved"):
        save_and_rename({"x": Unsavable()}, tmp_path / "a.pt")
    assert torch.load(tmp_path / "a.pt", weights_only=True) == {"x": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


def test_what_a_killed_writer_has_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    mine = new_staging_path(tmp_path)
    pid, _, scope, _ = mine.name.removeprefix(".tmp-").split("-", 3)
    dead = tmp_path / mine.name.replace(pid, "4000000", 1)  # above any pid_max in use here: there is no such process
    elsewhere = tmp_path / dead.name.replace(scope, "0" * 12)
    for path in (mine, dead, elsewhere):
        path.touch()
    save_and_rename({"x": 1}, tmp_path / "a.pt")
    assert not dead.exists()
    assert mine.exists(), "a living process of this host may be writing it"
    assert elsewhere.exists(), "who can tell whether it lives on another host"


def test_files_appear_with_the_users_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        save_and_rename({"x": 1}, tmp_path / "a.pt")
    finally:
        os.umask(before)
    assert (tmp_path / "a.pt").stat().st_mode & 0o777 == 0o640
