from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import Dataset

import torchelastic
from tests.process.fork_server import fork_server
from tests.process.forked_ranks import run_ranks
from tests.waiting import is_gone, pause, wait_until
from torchelastic.data import ElasticBatchSampler, ElasticLoader, ElasticStream, EpochLoader
from torchelastic.data.shares import SecondDeal
from torchelastic.data.worker_processes import MAX_DEATHS
from torchelastic.error_text import in_one_line
from torchelastic.errors import UnfitError

# Since Python 3.14 worker processes are forked by a server, which has torch where the script imports it, as here.
fork_server()


class Numbers(Dataset[int]):
    """Sample i is i, so that batches show which indices were loaded."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


class ProcessIds(Numbers):
    """Each sample is the id of the process that loaded it."""

    def __getitem__(self, index: int) -> int:
        return os.getpid()


class FailsOnce(Numbers):
    def __init__(self, size: int, bad_index: int) -> None:
        super().__init__(size)
        self.bad_index = bad_index

    def __getitem__(self, index: int) -> int:
        if index == self.bad_index:
            self.bad_index = -1
            raise OSError("the disk hiccupped")
        return index


ENDS = {"hangs": signal.SIGSTOP, "ends": signal.SIGKILL, "crashes": signal.SIGSEGV}


class Bad(ProcessIds):
    """Sample 4 is one at which a process fails, ends or stops, at most so many times."""

    def __init__(self, size: int, what: str, folder: Path, times: int = 1) -> None:
        super().__init__(size)
        self.what, self.folder, self.times = what, folder, times

    def __getitem__(self, index: int) -> int:
        if index == 4 and len(list(self.folder.iterdir())) < self.times:
            (self.folder / str(os.getpid())).touch()
            if self.what == "fails":
                raise OSError("the disk hiccupped")
            if self.what == "leaves":
                raise SystemExit("the licence is over")
            os.kill(os.getpid(), ENDS[self.what])
        return super().__getitem__(index)


def make(size: int, batch: int, *, epochs: int = 1, shuffle: bool = False, **options: Any) -> ElasticLoader:
    return ElasticLoader(Numbers(size), ElasticBatchSampler(size, batch, epochs=epochs, shuffle=shuffle), **options)


@pytest.fixture(params=[0, 2], ids=["in this process", "two workers"])
def workers(request: pytest.FixtureRequest) -> int:
    count: int = request.param
    return count


def test_steps_go_over_the_ends_of_epochs_and_stop_after_the_last(workers: int) -> None:
    loader = make(5, 2, epochs=3, num_workers=workers)
    seen = []
    for batch in loader:
        assert batch.tolist() == list(loader.sampler.pending[0].indices)
        loader.sampler.commit()
        seen.append(batch.tolist())
    assert seen == [[0, 1], [2, 3], [4]] * 3
    assert next(loader, "end") == "end"


def test_a_rolled_back_step_gets_the_same_batches_again_without_a_reset(workers: int) -> None:
    loader = make(40, 2, num_workers=workers)
    next(loader)
    loader.sampler.commit()
    for _ in range(3):
        assert [next(loader).tolist() for _ in range(2)] == [[2, 3], [4, 5]]
        loader.sampler.rollback()
    assert next(loader).tolist() == [2, 3]


def test_a_loaded_position_and_a_new_world_are_noticed(workers: int) -> None:
    loader = make(40, 4, num_workers=workers)
    assert next(loader).tolist() == [0, 1, 2, 3]
    loader.sampler.commit()
    state = loader.sampler.state_dict()
    assert next(loader).tolist() == [4, 5, 6, 7]
    loader.sampler.commit()
    loader.sampler.load_state_dict(state)
    assert next(loader).tolist() == [4, 5, 6, 7]
    loader.sampler.set_world(1, 2)
    assert next(loader).tolist() == [6, 7]
    loader.sampler.commit()
    assert next(loader).tolist() == [10, 11]


def test_prefetched_batches_survive_whatever_leaves_the_position_where_it_is() -> None:
    loader = make(40, 4, collate_fn=list)
    next(loader)
    running = loader._running
    loader.sampler.commit()
    loader.sampler.rollback()
    loader.sampler.load_state_dict(loader.sampler.state_dict())
    loader.sampler.set_world(0, 1)
    assert next(loader) == [4, 5, 6, 7]
    assert loader._running is running


def test_an_accumulation_over_the_last_end_hands_out_what_there_is() -> None:
    loader = make(10, 2, epochs=2)
    steps = []
    while batches := list(itertools.islice(loader, 4)):
        steps.append(len(batches))
        assert len(loader.sampler.pending) == len(batches)
        loader.sampler.commit()
    assert steps == [4, 4, 2]
    assert loader.sampler.finished


def test_workers_outlive_epochs_rollbacks_and_resizes() -> None:
    sampler = ElasticBatchSampler(8, 4, epochs=6)
    loader = ElasticLoader(ProcessIds(8), sampler, num_workers=1)
    pids = set()
    for step in range(10):
        pids |= set(next(loader).tolist())
        if step % 3 == 0:
            sampler.rollback()
        else:
            sampler.commit()
        if step == 5:
            sampler.set_world(1, 2)
    assert len(pids) == 1
    assert pids != {os.getpid()}


@pytest.mark.parametrize("persist", [True, False])
def test_a_worker_that_is_killed_between_two_steps_disturbs_neither_and_is_replaced_at_once(
    caplog: pytest.LogCaptureFixture, persist: bool
) -> None:
    sampler = ElasticBatchSampler(64, 4, shuffle=False)
    loader = ElasticLoader(ProcessIds(64), sampler, num_workers=1, persistent_workers=persist)
    (victim,) = set(next(loader).tolist())
    sampler.commit()
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: is_gone(victim), 10, "it ends")  # torch alone raises here
    start_s = time.monotonic()
    with caplog.at_level(logging.WARNING):
        (replacement,) = set(next(loader).tolist())
    assert time.monotonic() - start_s < 4, "DataLoader alone takes five seconds to notice"
    assert replacement != victim
    assert sampler.pending[0].number == 1
    assert "died (killed by SIGKILL)" in caplog.text
    loader.close()


def test_data_workers_may_be_killed_at_any_moment() -> None:
    others = {process.pid for process in multiprocessing.active_children()}  # of tests before
    loader = make(64, 4, num_workers=2)
    for number in range(16):
        assert next(loader).tolist() == list(range(4 * number, 4 * number + 4))
        loader.sampler.commit()
        if number % 3 == 0:
            victims = [one for one in multiprocessing.active_children() if one.pid not in others]
            victims[number % len(victims)].kill()
    loader.close()


def test_a_data_worker_that_is_killed_with_the_lock_of_torchs_event_is_replaced() -> None:
    others = {process.pid for process in multiprocessing.active_children()}
    loader = make(64, 4, num_workers=2)
    assert next(loader).tolist() == [0, 1, 2, 3]
    loader.sampler.commit()
    mine = [one for one in multiprocessing.active_children() if one.pid not in others]
    event: Any = loader._running._workers_done_event  # type: ignore[union-attr]  # torch's
    event = getattr(event, "_event", event)

    def die_with_lock() -> None:
        event._cond.acquire()
        os.kill(os.getpid(), signal.SIGKILL)

    holder = multiprocessing.get_context("fork").Process(target=die_with_lock)
    holder.start()
    holder.join(10)
    assert holder.exitcode == -signal.SIGKILL
    assert not event._cond.acquire(block=False), "nobody gives it back any more"
    pids = [victim.pid or 0 for victim in mine]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)  # so that the trainer waits when they are killed
    killers = [threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)) for pid in pids]
    for killer in killers:
        killer.start()
    for number in range(1, 16):
        assert next(loader).tolist() == list(range(4 * number, 4 * number + 4))
        loader.sampler.commit()
    for killer in killers:
        killer.join()
    assert not any(victim.is_alive() for victim in mine)
    loader.close()


ORPHANS = """
import os, signal, sys, time
from pathlib import Path
import torchelastic
class Slow:
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if index >= 4:
            Path(sys.argv[1], str(os.getpid())).touch()
            time.sleep(600)
        return index
if __name__ == "__main__":
    sampler = torchelastic.ElasticBatchSampler(64, 4, shuffle=False)
    loader = torchelastic.ElasticLoader(Slow(), sampler, num_workers=2, multiprocessing_context=sys.argv[2])
    assert next(loader).tolist() == [0, 1, 2, 3]
    while len(os.listdir(sys.argv[1])) < 2:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.long
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_data_worker_at_work_on_a_sample_ends_with_its_killed_trainer(tmp_path: Path, method: str) -> None:
    (tmp_path / "train.py").write_text(ORPHANS)
    (tmp_path / "pids").mkdir()
    command = [sys.executable, str(tmp_path / "train.py"), str(tmp_path / "pids"), method]
    assert subprocess.run(command, timeout=120, check=False).returncode == -signal.SIGKILL
    pids = [int(path.name) for path in (tmp_path / "pids").iterdir()]
    assert len(pids) == 2
    wait_until(lambda: all(map(is_gone, pids)), 10, "they are killed, and do not sleep for ten minutes")


@pytest.mark.parametrize("persist", [True, False])
@pytest.mark.parametrize("what", ["fails", "ends", pytest.param("hangs", marks=pytest.mark.long)])
def test_training_waits_for_no_data_worker_that_is_replaced(tmp_path: Path, what: str, persist: bool) -> None:
    sampler = ElasticBatchSampler(64, 4, shuffle=False)
    options: dict[str, Any] = {"timeout": 1} if what == "hangs" else {}
    if what == "ends":  # torch notices the end of a process that another has forked within five seconds
        options["multiprocessing_context"] = "fork"
    loader = ElasticLoader(Bad(64, what, tmp_path), sampler, num_workers=2, persistent_workers=persist, **options)
    before = set(next(loader).tolist())
    sampler.commit()
    start_s = time.monotonic()
    if what != "ends":
        with pytest.raises(RuntimeError if what == "hangs" else OSError, match=r"timed out|hiccupped"):
            next(loader)
        sampler.rollback()
    after = set(next(loader).tolist())
    assert time.monotonic() - start_s < 4, "torch waits 5 s for each worker, and 5 s more for one that hangs"
    assert sampler.pending[0].number == 1
    before |= {int(path.name) for path in tmp_path.iterdir()}
    assert len(before) == 2
    assert not after & before
    loader.close()
    assert time.monotonic() - start_s < 4
    wait_until(lambda: not any(map(psutil.pid_exists, before | after)), 40, "all of them end")


@pytest.mark.long
def test_training_waits_for_no_data_worker_that_hangs_beside_a_killed_one() -> None:
    sampler = ElasticBatchSampler(64, 4, shuffle=False)
    loader = ElasticLoader(ProcessIds(64), sampler, num_workers=2)
    hanging, victim = (set(next(loader).tolist()).pop() for _ in range(2))
    pause([hanging])
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: is_gone(victim), 10, "it ends")
    sampler.rollback()
    start_s = time.monotonic()
    assert not {hanging, victim} & set(next(loader).tolist())
    assert time.monotonic() - start_s < 4, "torch waits ten seconds for the one that hangs"
    wait_until(lambda: not psutil.pid_exists(hanging), 40, "it ends")
    loader.close()


def test_a_sample_at_which_each_data_worker_dies_is_an_error(tmp_path: Path) -> None:
    sampler = ElasticBatchSampler(64, 8, shuffle=False)
    loader = ElasticLoader(Bad(64, "ends", tmp_path, times=100), sampler, num_workers=1)
    with pytest.raises(RuntimeError, match=r"killed by signal|has died|exited unexpectedly"):
        next(loader)
    assert len(list(tmp_path.iterdir())) == MAX_DEATHS
    loader.close()


@pytest.mark.parametrize(
    ("what", "how"), [("crashes", "killed by SIGSEGV"), ("leaves", "SystemExit: the licence is over")]
)
def test_a_sample_that_ends_each_process_that_reads_it_is_named_at_the_third(
    tmp_path: Path, what: str, how: str
) -> None:
    loader = ElasticLoader(Bad(64, what, tmp_path, times=100), ElasticBatchSampler(64, 8, shuffle=False), num_workers=1)
    with pytest.raises(UnfitError, match=rf"died at the same place \(.*\): sample 4 ends .* \({how}\)"):
        next(loader)
    assert len(list(tmp_path.iterdir())) == MAX_DEATHS + 1, "it is read once more, to find it"
    loader.close()


def test_of_a_stream_the_place_is_named(tmp_path: Path) -> None:
    def source(shard: int, num_shards: int, position: int) -> Iterator[int]:
        for number in range(position, 20):
            if shard == 1 and number == 5:
                (tmp_path / str(os.getpid())).touch()
                os.kill(os.getpid(), signal.SIGSEGV)
            yield number

    stream = ElasticStream(source, 2, global_batch_size=4, epochs=1, num_workers=1)
    with pytest.raises(UnfitError, match=r"killed by SIGSEGV.*logical shard 1 behind its sample [024]"):
        list(stream)  # the processes read ahead
    assert len(list(tmp_path.iterdir())) >= MAX_DEATHS
    stream.close()


class Raises(Numbers):
    """Sample 4 raises what cannot be made again in another process."""

    def __init__(self, size: int, what: str) -> None:
        super().__init__(size)
        self.what = what

    def __getitem__(self, index: int) -> int:
        class NoSuchKey(Exception):  # noqa: N818 - as botocore's, of a class that no module has
            pass

        if index == 4:
            raise NoSuchKey("no part 4") if self.what == "NoSuchKey" else Refusal({"text": "no part 4"})
        return index


class Refusal(Exception):  # noqa: N818 - as others name theirs
    message = "of the service"

    def __init__(self, answer: dict[str, str]) -> None:
        super().__init__(f"it said: {answer['text']}")


@pytest.mark.parametrize("what", ["NoSuchKey", "Refusal"])
def test_an_error_that_cannot_be_made_again_keeps_its_name_and_its_text(what: str) -> None:
    began: list[int] = []
    loader = ElasticLoader(
        Raises(10, what), ElasticBatchSampler(10, 8, shuffle=False), num_workers=1, worker_init_fn=began.append
    )
    with pytest.raises(RuntimeError, match=rf"Caught {what} in DataLoader worker process 0") as caught:
        next(loader)
    assert in_one_line(caught.value).endswith("no part 4")
    loader.close()


def test_a_sample_that_fails_to_load_is_tried_again_at_the_same_place() -> None:
    loader = ElasticLoader(FailsOnce(10, bad_index=5), ElasticBatchSampler(10, 4, shuffle=False))
    assert next(loader).tolist() == [0, 1, 2, 3]
    with pytest.raises(OSError, match="hiccupped"):
        next(loader)
    assert loader.sampler.position == (0, 1)
    assert [batch.tolist() for batch in loader] == [[4, 5, 6, 7], [8, 9]]


def test_starting_again_leaves_the_random_state_of_the_train_step_alone(workers: int) -> None:
    loader = make(20, 2, num_workers=workers)
    next(loader)
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    loader.sampler.rollback()
    next(loader)
    assert torch.equal(torch.rand(4), expected)


def test_a_pickled_loader_goes_on_where_it_was() -> None:
    loader = make(10, 4, num_workers=1)
    next(loader)
    loader.sampler.commit()
    twin = pickle.loads(pickle.dumps(loader))
    assert next(twin).tolist() == next(loader).tolist() == [4, 5, 6, 7]


def test_what_was_prefetched_is_dropped_when_the_batch_is_dealt_out_again() -> None:
    sampler = ElasticBatchSampler(8, 2, shuffle=False)
    loader = ElasticLoader(Numbers(8), sampler)
    next(loader)
    sampler.commit()
    sampler.set_world(0, 1)  # a group of the same size: the place is the same, and nothing was drawn in between
    sampler.deal_again(SecondDeal(compute=(1,), carried=(0,)))
    assert next(loader).tolist() == [3]
    sampler.commit()
    assert next(loader).tolist() == [4, 5]


# --- one iteration per epoch ------------------------------------------------------------------------------------------


def per_epoch(size: int, batch: int, *, epochs: int = 1, **options: Any) -> EpochLoader:
    return EpochLoader(Numbers(size), ElasticBatchSampler(size, batch, epochs=epochs, shuffle=False), **options)


def test_an_iteration_is_an_epoch_or_the_rest_of_one(workers: int) -> None:
    loader = per_epoch(10, 4, epochs=3, num_workers=workers)
    assert len(loader) == 3
    first = [batch.tolist() for batch in loader]
    assert first == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    running = iter(loader)
    assert next(running).tolist() == first[0]
    state = loader.state_dict()
    assert (state["epoch"], state["cursor"]) == (1, 4)
    assert [batch.tolist() for batch in loader] == first[1:], "what was handed out counts as trained"
    resumed = per_epoch(10, 4, epochs=3, num_workers=workers)
    resumed.load_state_dict(state)
    assert [batch.tolist() for batch in resumed] == first[1:]
    assert len(resumed) == 3, "of a whole epoch"
    resumed.close()
    loader.close()


def test_ranks_share_each_batch_and_another_number_of_them_goes_on() -> None:
    ranks = [per_epoch(8, 4, rank=rank, world_size=2) for rank in range(2)]
    assert [next(iter(one)).tolist() for one in ranks] == [[0, 1], [2, 3]]
    states = [one.state_dict() for one in ranks]
    assert states[0] == states[1], "Lightning saves that of rank 0 alone"
    alone = per_epoch(8, 4)
    alone.load_state_dict(states[0])
    assert [batch.tolist() for batch in alone] == [[4, 5, 6, 7]]


def test_more_epochs_than_the_sampler_has_are_named() -> None:
    loader = per_epoch(4, 4)
    assert len(list(loader)) == 1
    with pytest.raises(RuntimeError, match="all 1 epochs of the sampler are over"):
        next(iter(loader))
    with pytest.raises(ValueError, match="give both, or neither"):
        per_epoch(4, 4, rank=0)


def draws(samples: int) -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("torchelastic").addHandler(handler)
    for is_placed in (True, False):
        dataset = torch.utils.data.TensorDataset(torch.arange(samples))
        sampler = ElasticBatchSampler(dataset, 4, epochs=2)
        if is_placed:
            sampler.set_world(dist.get_rank(), dist.get_world_size())
        for _ in ElasticLoader(dataset, sampler):
            sampler.commit()
    return said


def test_a_sampler_that_is_in_no_state_is_said_once_where_there_are_several_ranks() -> None:
    for end in run_ranks(draws, 8, ranks=2):
        assert end.error is None
        (line,) = end.value
        assert line.startswith("each of the 2 ranks loads every sample, and a restart begins with the first: this Elas")


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_train_step_that_swallows_the_end_of_the_data_is_named_and_the_run_ends(is_stream: bool) -> None:
    """`for` takes all batches and the StopIteration behind them, so no step would ever end the run."""
    model = torch.nn.Linear(1, 1)
    stream = ElasticStream(lambda shard, _of, at: iter(range(5 * shard + at, 5 * shard + 5)), 2, global_batch_size=4)
    sampler = ElasticBatchSampler(10, 4)
    source: Any = stream if is_stream else ElasticLoader(Numbers(10), sampler)
    state = torchelastic.ModelState(
        model, torch.optim.SGD(model.parameters(), lr=0.1), sampler=stream if is_stream else sampler
    )
    drawn: list[list[int]] = []

    def train_step(_state: torchelastic.ModelState) -> None:
        drawn.append([number for batch in source for number in batch.tolist()])

    with pytest.raises(torchelastic.NonRetryableException, match=r"write `batch = next\(loader\)`"):
        torchelastic.train(torchelastic.CoordinatorP2P("gloo"), train_step, state)
    assert [len(numbers) for numbers in drawn] == [10, 0, 0]
