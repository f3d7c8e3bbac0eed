"""Worker processes that work, fail, die, hang, and lose their trainer: each with the real thing."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.pool import RemoteTraceback  # type: ignore[attr-defined]  # typeshed does not know it
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.process import async_work
from tests.process.async_work import PATIENCE_S, wait_for
from tests.waiting import is_gone, wait_until
from torchelastic.checkpoint.async_ckpt import AsyncCallsQueue, AsyncCheckpointError, AsyncRequest, abort_checkpoints

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def persistent() -> Iterator[AsyncCallsQueue]:
    with AsyncCallsQueue(cpu_shm_mode=True, io_priority=3, sigterm_timeout=10.0, timeout_s=PATIENCE_S) as queue:
        yield queue


def never() -> None:
    raise AssertionError("finalised although the work had failed")


def run(queue: AsyncCallsQueue, function: Callable[..., object], *args: Any) -> None:
    """Have the work done and finalised."""
    finalized: list[int] = []
    index = queue.schedule_async_request(AsyncRequest(function, args, [lambda: finalized.append(1)]))
    assert queue.maybe_finalize_async_calls(blocking=True) == [index]
    assert finalized == [1]


def failure(queue: AsyncCallsQueue, function: Callable[..., object], *args: Any) -> AsyncCheckpointError:
    """The error of a call, which must not be finalised, and after which the queue must be empty."""
    queue.schedule_async_request(AsyncRequest(function, args, [never]))
    with pytest.raises(AsyncCheckpointError) as caught:
        queue.maybe_finalize_async_calls(blocking=True)
    assert queue.get_num_unfinalized_calls() == 0
    return caught.value


@pytest.mark.long
def test_one_process_does_all_calls_gives_way_and_leaves_ctrl_c_to_the_trainer(
    persistent: AsyncCallsQueue, tmp_path: Path
) -> None:
    nice = max(10, os.getpriority(os.PRIO_PROCESS, 0))
    for name in ("first", "second"):
        run(persistent, async_work.note_whereabouts, tmp_path / name)
    pid, *rest = wait_for(tmp_path / "first").split()
    assert rest == [str(nice), "SIG_IGN"]
    assert int(pid) != os.getpid()
    assert psutil.Process(int(pid)).ionice().ioclass == psutil.IOPRIO_CLASS_IDLE
    assert wait_for(tmp_path / "second").split()[0] == pid


#: A worker that says with which nice value it begins to import torch, and imports no more.
IMPORTS = """
import multiprocessing, os, sys

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(os.getpriority(os.PRIO_PROCESS, 0), flush=True)
            os._exit(0)

sys.meta_path.insert(0, Watch())
from torchelastic.checkpoint.compat.nvrx.async_ckpt.worker_main import work
ours, theirs = multiprocessing.Pipe()
work(theirs, os.getppid(), 10, None)
"""


def test_a_worker_gives_way_once_it_is_ready_and_not_while_it_starts() -> None:
    """With a nice value, the import would take minutes on a host whose processors are all taken."""
    began = subprocess.run(
        [sys.executable, "-c", IMPORTS], capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE_S
    )
    assert (began.stdout.split(), began.stderr) == ([str(os.getpriority(os.PRIO_PROCESS, 0))], "")


def test_the_tensors_are_those_of_the_moment_of_scheduling(persistent: AsyncCallsQueue, tmp_path: Path) -> None:
    live = torch.zeros(1000)
    for number in (1, 2):  # both are scheduled before either has run; the second must not get the memory of the first
        live += 1
        args = (live, tmp_path / f"{number}", tmp_path / "go")
        persistent.schedule_async_request(AsyncRequest(async_work.note_sum, args, []))
    live += 1
    assert persistent.maybe_finalize_async_calls() == []
    async_work.write(tmp_path / "go", "")
    assert len(persistent.maybe_finalize_async_calls(blocking=True)) == 2
    assert [wait_for(tmp_path / name) for name in ("1", "2")] == ["1000.0", "2000.0"]
    run(persistent, async_work.note_sum, live, tmp_path / "3")  # in memory that was used before
    assert wait_for(tmp_path / "3") == "3000.0"
    assert not live.is_shared()  # type: ignore[no-untyped-call]


def test_a_process_stages_itself_before_schedule_returns(persistent: AsyncCallsQueue, tmp_path: Path) -> None:
    request = AsyncRequest(
        async_work.note_staged,
        ("label", None, tmp_path / "seen"),
        [],
        preload_fn=partial(async_work.stage, tmp_path / "staged"),
    )
    persistent.schedule_async_request(request)
    assert (tmp_path / "staged").read_text() == "staged\n"
    persistent.maybe_finalize_async_calls(blocking=True)
    label, staged_by, done_by = wait_for(tmp_path / "seen").split()
    assert (label, staged_by) == ("label", done_by)


def test_staging_that_fails_fails_in_schedule(persistent: AsyncCallsQueue) -> None:
    request = AsyncRequest(async_work.note_staged, (1, 2, 3), [never], preload_fn=partial(async_work.fail, "no room"))
    with pytest.raises(AsyncCheckpointError, match="ValueError: no room"):
        persistent.schedule_async_request(request)
    assert persistent.get_num_unfinalized_calls() == 0


def test_the_error_of_the_worker_is_the_cause_with_its_traceback(persistent: AsyncCallsQueue) -> None:
    error = failure(persistent, async_work.fail, "disk on fire")
    assert "rank 0: ValueError: disk on fire" in str(error)
    assert isinstance(error.__cause__, ValueError)
    assert isinstance(error.__cause__.__cause__, RemoteTraceback)
    assert "in fail" in str(error.__cause__.__cause__)


def test_what_cannot_be_pickled_is_refused_by_schedule(persistent: AsyncCallsQueue, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="cannot be sent to a worker process"):
        persistent.schedule_async_request(AsyncRequest(lambda: None, (), [never]))
    assert persistent.get_num_unfinalized_calls() == 0
    run(persistent, async_work.note_sum, torch.ones(2), tmp_path / "after")


@pytest.mark.long
def test_a_killed_worker_is_reported_with_all_that_it_had_to_do(persistent: AsyncCallsQueue, tmp_path: Path) -> None:
    persistent.schedule_async_request(AsyncRequest(async_work.hang, (tmp_path / "pid",), [never]))
    persistent.schedule_async_request(AsyncRequest(async_work.note_sum, (torch.ones(1), tmp_path / "no"), [never]))
    pid = int(wait_for(tmp_path / "pid"))
    assert persistent.maybe_finalize_async_calls() == []
    os.kill(pid, signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(AsyncCheckpointError, match=f"worker process {pid} was ended by SIGKILL"):
            persistent.maybe_finalize_async_calls(blocking=True)
    assert persistent.maybe_finalize_async_calls(blocking=True) == []
    run(persistent, async_work.note_sum, torch.ones(2), tmp_path / "after")  # by a new worker
    assert wait_for(tmp_path / "after") == "2.0"


def test_a_worker_that_hangs_is_given_up(
    persistent: AsyncCallsQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    persistent.schedule_async_request(AsyncRequest(async_work.hang, (tmp_path / "pid",), [never]))
    pid = int(wait_for(tmp_path / "pid"))
    monkeypatch.setattr(persistent, "_timeout_s", 0.1)
    with pytest.raises(AsyncCheckpointError, match=r"not done within 0.1 s"):
        persistent.maybe_finalize_async_calls(blocking=True)
    wait_until(lambda: is_gone(pid), PATIENCE_S, "the worker ends")


@pytest.mark.long
def test_a_process_for_each_call_has_to_end_well(tmp_path: Path) -> None:
    with AsyncCallsQueue(persistent=False, timeout_s=PATIENCE_S) as queue:
        requests = [
            AsyncRequest(async_work.note_sum, (torch.ones(3), tmp_path / "sum"), []),
            AsyncRequest(async_work.leave_later, (7,), [never]),
        ]
        for request in requests:  # they run beside each other
            queue.schedule_async_request(request)
        with pytest.raises(AsyncCheckpointError, match="ended with exit code 7") as caught:
            queue.maybe_finalize_async_calls(blocking=True)
    assert caught.value.finalized_calls == (1,)
    assert wait_for(tmp_path / "sum") == "3.0"


@pytest.mark.long
def test_abort_kills_a_worker_that_ignores_sigterm(tmp_path: Path) -> None:
    queue = AsyncCallsQueue(sigterm_timeout=0.2, timeout_s=PATIENCE_S)
    queue.schedule_async_request(AsyncRequest(async_work.hang, (tmp_path / "pid", True), [never]))
    pid = int(wait_for(tmp_path / "pid"))
    abort_checkpoints()
    assert is_gone(pid)
    assert queue.get_num_unfinalized_calls() == 0


@pytest.mark.long
def test_a_warm_worker_is_taken_and_ends_with_its_queue(tmp_path: Path) -> None:
    before = psutil.Process().children()
    AsyncCallsQueue.warmup_persistent_caller(0)
    warm = {child.pid for child in psutil.Process().children() if child not in before}
    queue = AsyncCallsQueue(timeout_s=PATIENCE_S)
    run(queue, async_work.note_whereabouts, tmp_path / "first")
    pid = int(wait_for(tmp_path / "first").split()[0])
    assert pid in warm
    del queue  # forgotten, and not closed
    gc.collect()
    assert is_gone(pid)


TRAINER = """
import sys, time
from pathlib import Path
from tests.process import async_work
from torchelastic.checkpoint.async_ckpt import AsyncCallsQueue, AsyncRequest

if __name__ == "__main__":
    queue = AsyncCallsQueue(is_daemon=False)
    queue.schedule_async_request(AsyncRequest(async_work.hang, (Path(sys.argv[1]),), []))
    async_work.wait_for(Path(sys.argv[1]))
    if sys.argv[2] == "stay":
        time.sleep(600)
"""


@pytest.mark.parametrize("then", ["stay", pytest.param("leave", marks=pytest.mark.long)])
def test_the_worker_does_not_outlive_its_trainer(tmp_path: Path, then: str) -> None:
    (tmp_path / "trainer.py").write_text(TRAINER)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(tmp_path / "trainer.py"), str(tmp_path / "pid"), then]
    trainer = subprocess.Popen(command, env=environment)
    worker = int(wait_for(tmp_path / "pid"))
    if then == "stay":
        trainer.kill()
    assert trainer.wait(PATIENCE_S) == (-signal.SIGKILL if then == "stay" else 0)
    wait_until(lambda: is_gone(worker), PATIENCE_S, "the worker ends")


GONE_AT_ONCE = """
import multiprocessing, os
from torchelastic.checkpoint.async_ckpt import AsyncCallsQueue

AsyncCallsQueue.warmup_persistent_caller(0)
print(multiprocessing.active_children()[0].pid, flush=True)
os._exit(0)
"""


@pytest.mark.long
def test_a_worker_whose_trainer_is_gone_before_it_is_ready_ends_without_a_word(tmp_path: Path) -> None:
    with (tmp_path / "said").open("w+") as said:  # not a pipe, which the worker would hold open
        subprocess.run([sys.executable, "-c", GONE_AT_ONCE], cwd=ROOT, stdout=said, stderr=said, check=True)
        worker = int((tmp_path / "said").read_text())
        wait_until(lambda: is_gone(worker), PATIENCE_S, "the worker ends")
        assert (tmp_path / "said").read_text() == f"{worker}\n"


FORGETFUL = """
from torchelastic.checkpoint.async_ckpt import AsyncCallsQueue, AsyncRequest

queue = AsyncCallsQueue(worker="thread")
queue.schedule_async_request(AsyncRequest(print, ("saved",), []))
queue.maybe_finalize_async_calls(blocking=True)
"""


@pytest.mark.long
def test_a_script_that_forgets_to_close_its_queue_ends_without_a_word() -> None:
    done = subprocess.run([sys.executable, "-c", FORGETFUL], cwd=ROOT, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("saved\n", "")


@pytest.mark.long
def test_a_script_that_lacks_its_guard_is_told_so(tmp_path: Path) -> None:
    script = TRAINER.replace('if __name__ == "__main__":', "if True:").replace(
        "    async_work.wait_for", "    queue.close() #"
    )
    (tmp_path / "trainer.py").write_text(script)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(tmp_path / "trainer.py"), str(tmp_path / "pid"), "leave"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 1
    assert "ended with exit code 1 before the call was done, before it was ready" in done.stderr


@pytest.mark.long
def test_a_worker_that_hangs_before_it_is_ready_is_named_with_the_likely_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # as in a script without that guard, whose copy in the worker waits for the other ranks at its top
    monkeypatch.setattr("torchelastic.checkpoint.compat.nvrx.async_ckpt.worker_process._READY_S", 0.0)
    others = set(multiprocessing.active_children())
    with AsyncCallsQueue() as queue:
        queue.schedule_async_request(AsyncRequest(os.getpid, (), []))
        (pid,) = (child.pid for child in multiprocessing.active_children() if child not in others)
        worker = psutil.Process(pid)
        worker.suspend()
        try:
            wait_until(lambda: bool(caplog.messages), PATIENCE_S, "a warning")
        finally:
            worker.resume()
    assert caplog.messages == [
        f"the checkpoint worker {worker.pid} is not ready after 0 s: see what it has printed (scripts need an "
        '`if __name__ == "__main__":`)'
    ]


def starting_worker(queue: AsyncCallsQueue, *requests: AsyncRequest) -> psutil.Process:
    """The new worker that has these to do, stopped before it is ready."""
    others = set(multiprocessing.active_children())
    for request in requests:
        queue.schedule_async_request(request)
    (child,) = (child for child in multiprocessing.active_children() if child not in others)
    worker = psutil.Process(child.pid)
    worker.suspend()
    return worker


@pytest.mark.long
@pytest.mark.parametrize("persistent", [True, False])
def test_the_start_of_a_worker_is_no_part_of_the_limit_of_its_call(tmp_path: Path, persistent: bool) -> None:
    with AsyncCallsQueue(persistent, timeout_s=8.0) as queue:
        worker = starting_worker(queue, AsyncRequest(async_work.note_sum, (torch.ones(3), tmp_path / "sum"), []))
        late = threading.Timer(10.0, worker.resume)
        late.start()
        assert queue.maybe_finalize_async_calls(blocking=True) == [1]
        assert not late.is_alive(), "it was ready before it was let go"


@pytest.mark.long
def test_the_start_of_a_worker_is_no_part_of_the_limit_of_staging(tmp_path: Path) -> None:
    args = ("label", None, tmp_path / "seen")
    staging = partial(async_work.stage, tmp_path / "staged")
    with AsyncCallsQueue(timeout_s=8.0) as queue:
        done = threading.Thread(target=stop_for, args=(set(multiprocessing.active_children()), 10.0))
        done.start()
        queue.schedule_async_request(AsyncRequest(async_work.note_staged, args, [], preload_fn=staging))
        assert not done.is_alive(), "it was ready before it was let go"
        assert queue.maybe_finalize_async_calls(blocking=True) == [1]


def stop_for(others: set[Any], duration_s: float) -> None:
    wait_until(lambda: bool({*multiprocessing.active_children()} - others), PATIENCE_S, "a worker is started")
    (child,) = {*multiprocessing.active_children()} - others
    worker = psutil.Process(child.pid)
    worker.suspend()
    time.sleep(duration_s)
    worker.resume()


@pytest.mark.parametrize("persistent", [True, False])
def test_a_worker_that_is_not_ready_in_time_is_ended_and_named(persistent: bool) -> None:
    with AsyncCallsQueue(persistent, timeout_s=PATIENCE_S, start_timeout_s=0.2) as queue:
        worker = starting_worker(queue, AsyncRequest(os.getpid, (), [never]))
        with pytest.raises(
            AsyncCheckpointError,
            match=rf"the worker process {worker.pid} was not ready within 0.2 s \(start_timeout_s\) and was ended: see",
        ):
            queue.maybe_finalize_async_calls(blocking=True)
        assert is_gone(worker.pid)
    with pytest.raises(ValueError, match="start_timeout_s is 0: give seconds, more than 0"):
        AsyncCallsQueue(start_timeout_s=0)


@pytest.mark.long
def test_staging_that_waits_for_too_long_behind_a_call_leaves_that_call_alone(tmp_path: Path) -> None:
    with AsyncCallsQueue(timeout_s=PATIENCE_S) as queue:
        args = (torch.ones(2), tmp_path / "sum", tmp_path / "go")
        queue.schedule_async_request(AsyncRequest(async_work.note_sum, args, []))
        run_first = AsyncRequest(async_work.note_staged, (1, 2, 3), [never], preload_fn=os.getpid)
        queue._timeout_s = 0.2
        with pytest.raises(AsyncCheckpointError, match=r"call 2 .* its preload_fn was not through within 0.2 s"):
            queue.schedule_async_request(run_first)
        queue._timeout_s = PATIENCE_S
        async_work.write(tmp_path / "go", "")
        assert queue.maybe_finalize_async_calls(blocking=True) == [1]
