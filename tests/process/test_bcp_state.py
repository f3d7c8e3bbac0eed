"""BCPState: real files, real gloo ranks, real SIGKILL."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.older_torch import needs_fsdp2_on_cpus
from tests.process import training_state_jobs as jobs
from tests.process.local_ranks import Crew, succeeded
from tests.process.training_state_jobs import Job
from tests.waiting import wait_until
from torchelastic.checkpoint import (
    BCPState,
    CheckpointError,
    CorruptCheckpointError,
    DiskTier,
    DurableTier,
    EverySteps,
    KeepLast,
    MemoryTier,
)
from torchelastic.checkpoint.errors import FencedError
from torchelastic.checkpoint.store import SealedShard, ShardRecord, Tier, list_checkpoints, open_checkpoint
from torchelastic.checkpoint.store.fence import OwnedError

ROOT = Path(__file__).parents[2]
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=MEMORY) as made:
        yield Path(made) / "checkpoints"


CREW_SIZE = 2


def saved_twice(folder: Path) -> Job:
    """A job with checkpoints of its iterations 1 and 2."""
    job = Job(folder)
    for _ in range(2):
        job.train(1)
        job.state.save()
    return job


def everything(job: Job) -> list[Any]:
    return [job.digest(), torch.get_rng_state().tolist()]


# --- one process ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", [True, False])
def test_a_resumed_run_has_the_losses_of_the_undisturbed_one_bit_for_bit(folder: Path, sync: bool) -> None:
    undisturbed, resumed, extra = jobs.in_one_folder(str(folder), sync=sync, kind="plain")
    assert resumed == undisturbed
    assert extra == [3, 0, [1.0, 1.0, 1.0]]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)


def test_if_all_are_damaged_nothing_is_touched_and_they_are_named(folder: Path) -> None:
    saved_twice(folder)
    names = [info.folder.name for info in list_checkpoints(folder)]
    for info in list_checkpoints(folder):
        flip(next(info.folder.glob("*.shard")))
    again = Job(folder, seed=3)
    before = everything(again)
    with pytest.warns(RuntimeWarning), pytest.raises(CorruptCheckpointError, match="nothing was changed") as raised:
        again.resume()
    assert all(name in str(raised.value) for name in names)
    assert everything(again) == before
    assert not again.optimizer.state


def other_groups(folder: Path) -> BCPState:
    model: Any = jobs.net(1)
    groups = [{"params": model[0].parameters()}, {"params": [*model[1].parameters(), *model[3].parameters()]}]
    return BCPState(model, torch.optim.AdamW(groups), "ddp", None, folder)


def test_the_newest_place_that_is_left_is_resumed_from_and_named(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    def tiers() -> list[Tier]:
        durable = DurableTier((folder / "bucket").as_uri(), KeepLast(2), every=EverySteps(2))
        return [MemoryTier(folder / "memory"), DiskTier(folder / "disk", every=EverySteps(3)), durable]

    job = Job(folder, tiers=tiers())
    for _ in range(5):
        job.train(1)
        job.state.save()
    job.state.close()
    bucket = (folder / "bucket").as_uri()
    for lost, iteration, place in (("", 5, folder / "memory"), ("memory", 4, bucket), ("bucket", 3, folder / "disk")):
        shutil.rmtree(folder / lost) if lost else None
        caplog.clear()
        again = Job(folder, seed=2, tiers=tiers())
        extra = again.resume()
        assert extra is not None
        assert (extra["iteration"], extra["digest"]) == (iteration, again.digest())
        (said,) = [text for text in caplog.messages if text.startswith("resumed from")]
        assert said.endswith(f" in {place}")
        again.state.close()


OTHERS: dict[str, tuple[Callable[[Path], BCPState], str]] = {
    "names": (lambda f: BCPState(m := torch.nn.ModuleDict({"a": jobs.net(1)}), adam(m), "ddp", None, f), "lacks 'a.0."),
    "shapes": (lambda f: Job(f, wide=13).state, r"'0.weight' was a float32 of shape \(12, 6\) and is a float32 of"),
    "dtype": (lambda f: BCPState(m := jobs.net(1).double(), adam(m), "ddp", None, f), "float32 of .* a float64 of"),
    "groups": (other_groups, "optimizer 0: the groups of this AdamW hold other parameters than they did"),
    "optimizers": (lambda f: BCPState(jobs.net(1), None, "ddp", None, f), r"1 optimizer\(s\) were saved, and there"),
    "optimizer": (
        lambda f: BCPState(model := jobs.net(1), torch.optim.SGD(model.parameters()), "ddp", None, f),
        "optimizer 0: that state's parameter groups lack 'dampening', 'momentum', .* another kind of optimizer",
    ),
}


def adam(model: torch.nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters())


@pytest.mark.parametrize(("make", "why"), OTHERS.values(), ids=OTHERS.keys())
def test_another_model_or_optimizer_is_refused_by_name_and_stays_as_it_is(
    folder: Path, make: Callable[[Path], BCPState], why: str
) -> None:
    saved_twice(folder)
    state = make(folder)
    before = {name: value.clone() for name, value in state.state_dict()["model"].items()}
    random_before = torch.get_rng_state()
    with pytest.raises(CheckpointError, match=f"does not fit: .*{why}.*Nothing was loaded"):
        state.maybe_resume_from_ckpt()
    assert all(torch.equal(before[name], value) for name, value in state.state_dict()["model"].items())
    assert torch.equal(random_before, torch.get_rng_state())


def test_no_extra_state_and_no_folder_are_the_defaults(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (str(folder), ""):
        state = BCPState(torch.nn.Linear(1, 1), None, "ddp", lambda: None, path)
        state.save()
        assert state.maybe_resume_from_ckpt() == {}
        state.close()
    assert sorted(found.name for found in tmp_path.iterdir()) == [".velastic"]


def test_what_a_user_has_beside_the_checkpoints_is_not_removed(folder: Path) -> None:
    job = Job(folder, keep=1)
    (folder / "tensorboard_logs").mkdir(parents=True)
    for _ in range(3):
        job.train(1)
        job.state.save()
    assert [info.name.step for info in list_checkpoints(folder)] == [3]
    assert (folder / "tensorboard_logs").exists()


class BrokenOnce(DiskTier):
    """Its second shard meets an error of a library, which is no `CheckpointError`."""

    puts = 0

    def put(self, shard: SealedShard) -> ShardRecord:
        self.puts += 1
        if self.puts == 2:
            raise ConnectionError("the place is gone")
        return super().put(shard)


@pytest.mark.parametrize("told_by", ["wait", "save"])
def test_whatever_a_place_raises_in_the_background_is_told_once_and_the_next_save_counts(
    folder: Path, told_by: str
) -> None:
    job = Job(folder, tiers=[BrokenOnce(folder)])
    for _ in range(2):
        job.train(1)
        job.state.save(sync=False)
    if told_by == "wait":
        with pytest.raises(ConnectionError, match="the place is gone"):
            job.state.wait()
        job.state.wait()
    job.train(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        job.state.save()
    told = [one for one in caught if "the save before failed on this rank: the place is gone" in str(one.message)]
    assert len(told) == (told_by == "save")
    assert [info.name.step for info in list_checkpoints(folder)] == [3, 1]


class Silent(DurableTier):
    """It does not answer until the test says so."""

    def __init__(self, url: str) -> None:
        super().__init__(url, every=EverySteps(2))
        self.asked, self.answers = threading.Event(), threading.Event()

    def put(self, shard: SealedShard) -> ShardRecord:
        self.asked.set()
        assert self.answers.wait(60)
        return super().put(shard)


def test_storage_that_is_silent_holds_up_no_save_in_memory(tmp_path: Path) -> None:
    memory, store = tmp_path / "memory", Silent(f"file://{tmp_path}/store")
    job = Job(tmp_path, tiers=[MemoryTier(memory, KeepLast(9)), store], timeout_s=5.0)
    for step in range(1, 5):
        job.train(1)
        job.state.save(sync=False)
        assert step != 2 or store.asked.wait(30)
    wait_until(lambda: [info.name.step for info in list_checkpoints(memory)] == [4, 3, 2, 1], 30, "all are in memory")
    with pytest.raises(CheckpointError, match="the disk does not answer"):
        job.state.save()  # it says that it is everywhere
    store.answers.set()
    job.state.wait()
    assert [info.name.step for info in list_checkpoints(tmp_path / "store")] == [4, 2]


def test_a_place_that_times_out_is_told_apart_from_one_that_does_not_answer(tmp_path: Path) -> None:
    class TimesOut(DiskTier):
        def put(self, shard: SealedShard) -> ShardRecord:
            raise TimeoutError(f"{shard.name} took too long")

    job = Job(tmp_path, tiers=[TimesOut(tmp_path / "disk")], timeout_s=5.0)
    with pytest.raises(TimeoutError, match="took too long"):
        job.state.save()


def test_names_do_not_depend_on_wrappers(folder: Path) -> None:
    model: Any = jobs.net(0)
    model[3] = torch.compile(model[3])
    compiled: Any = torch.compile(model)
    BCPState(compiled, adam(model), "ddp", None, folder).save()
    plain: Any = jobs.net(1)
    assert BCPState(plain, adam(plain), "ddp", None, folder).maybe_resume_from_ckpt() == {}
    assert torch.equal(plain[0].weight, model[0].weight)
    assert torch.equal(plain[3].weight, model[3].weight)


def test_several_optimizers_tied_weights_and_a_finer_dtype_come_back(folder: Path) -> None:
    def make(seed: int) -> tuple[Any, list[torch.optim.Optimizer]]:
        torch.manual_seed(seed)
        model: Any = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).bfloat16()
        model[1].weight = model[0].weight
        first = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
        return model, [first, torch.optim.Adam([*model[2].parameters(), model[1].bias], lr=torch.tensor(0.25))]

    model, optimizers = make(0)
    for _ in range(2):
        model(torch.ones(2, 4).bfloat16()).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    finer = {"momentum_buffer": torch.full((4, 4), 1 / 3), "history": [{"sum": torch.full((3,), 1 / 3)}]}
    optimizers[0].state[model[0].weight].update(finer)  # float32 beside bfloat16
    BCPState(model, optimizers, "ddp", None, folder).save()
    again, their = make(1)
    BCPState(again, their, "ddp", None, folder).load()
    assert again[1].weight is again[0].weight
    assert torch.equal(again[0].weight, model[0].weight)
    assert torch.equal(their[0].state[again[0].weight]["momentum_buffer"], torch.full((4, 4), 1 / 3))
    assert torch.equal(their[0].state[again[0].weight]["history"][0]["sum"], torch.full((3,), 1 / 3))
    assert their[1].param_groups[0]["lr"] == torch.tensor(0.25)
    kept, loaded = optimizers[1].state[model[2].weight], their[1].state[again[2].weight]
    assert kept.keys() == loaded.keys()
    assert all(torch.equal(kept[key], loaded[key]) for key in kept)


def test_a_job_that_saves_into_the_folder_replaces_the_one_before(folder: Path) -> None:
    first = saved_twice(folder)
    second = Job(folder, seed=2)
    second.resume()
    second.state.save()
    with pytest.raises(FencedError, match="was replaced by"):
        first.state.save()
    assert [info.name.step for info in list_checkpoints(folder)] == [3, 2]
    assert not list(folder.glob(".tmp*"))
    another = Job(folder, run_id="another run")
    for call in (another.resume, another.state.save):  # at the start, and not only when it has trained
        with pytest.raises(OwnedError, match=rf"is alive: process {os.getpid()} \("):
            call()
    assert another.state.load() is not None, "what another run saves may be read"
    second.state.close()
    first.state.close()
    assert another.resume() is not None


def test_an_extra_state_that_cannot_be_saved_is_named_and_nothing_is_written(folder: Path) -> None:
    model = jobs.net(0)
    values: dict[str, Any] = {"fine": 1, "loader": iter([1])}
    state = BCPState(model, adam(model), "ddp", lambda: values, folder)
    with pytest.raises(TypeError, match=r"own\['rank0'\]\['extra'\]\['loader'\] is a list_iterator"):
        state.save()
    assert list_checkpoints(folder) == []
    del values["loader"]
    state.save()
    wrong = BCPState(model, adam(model), "ddp", lambda: [1], folder)  # type: ignore[arg-type,return-value]
    with pytest.raises(TypeError, match="return a dict"):
        wrong.save()
    wrong.close()  # its background may still be making the folder


LAST_SAVE = """
import concurrent.futures.thread as executors
import time
import torch
from torchelastic.checkpoint import BCPState
from torchelastic.checkpoint.format.stage import Stage

seal = Stage.seal


def late(self, *how):
    while not executors._shutdown:  # the interpreter ends, and no executor takes any work from now on
        time.sleep(0.001)
    return seal(self, *how)


Stage.seal = late
model = torch.nn.ParameterList([torch.full((3_000_000,), 1.0) for _ in range(4)])  # more than one thread would hash
state = BCPState(model, None, get_extra_fn=lambda: {"iter_num": 7})
print(state.maybe_resume_from_ckpt())
state.save(sync=False)
"""


@pytest.mark.long
def test_the_interpreter_does_not_end_before_the_save_in_the_background_is_published(folder: Path) -> None:
    folder.mkdir()
    command = [sys.executable, "-c", LAST_SAVE]
    for expected in ("None", "{'iter_num': 7}"):
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=100, env={"PYTHONPATH": str(ROOT)}
        )
        assert (done.returncode, done.stdout.strip()) == (0, expected), done.stderr
    assert len(list_checkpoints(folder / ".velastic/checkpoint")) == 2


# --- several ranks ----------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp2", marks=needs_fsdp2_on_cpus)])
@pytest.mark.parametrize("sync", [True, False])
def test_each_of_two_ranks_goes_on_bit_for_bit(crew: Crew, folder: Path, kind: str, sync: bool) -> None:
    answers = succeeded(crew.run(_in_one_folder, str(folder), sync, kind, ranks=2))
    assert [resumed for _, resumed, _ in answers] == [undisturbed for undisturbed, _, _ in answers]
    assert [extra[:2] for _, _, extra in answers] == [[3, 0], [3, 1]]
    assert answers[0][0] != answers[1][0]  # they do not see the same data
    with open_checkpoint(list_checkpoints(folder)[0].folder) as checkpoint:
        shared = [
            sum(entry.size_bytes for entry in shard.header.entries if not entry.name.startswith("own/"))
            for shard in checkpoint.shards
        ]
    assert max(shared) < 1.5 * min(shared)  # each writes about one half of what they hold together


def _in_one_folder(folder: str, sync: bool, kind: str) -> Any:
    return jobs.in_one_folder(folder, sync=sync, kind=kind)


@needs_fsdp2_on_cpus
def test_two_sharded_ranks_are_resumed_by_one_and_one_by_two(crew: Crew, folder: Path) -> None:
    by_two, _ = succeeded(crew.run(jobs.saved_by, str(folder), "fsdp2", ranks=2))
    ((one, extra, kept, words),) = succeeded(crew.run(_resumed_plain, str(folder), ranks=1))
    assert one == by_two
    assert extra == [2, 0]
    assert not kept
    assert any("saved by 2 rank(s), and there are 1" in text and "is not used" in text for text in words)

    other = folder.parent / "other"
    (by_one,) = succeeded(crew.run(jobs.saved_by, str(other), "ddp", ranks=1))
    found = succeeded(crew.run(jobs.resumed_by, str(other), "ddp", ranks=2))
    assert [values for values, *_ in found] == [by_one, by_one]
    assert [extra for _, extra, *_ in found] == [[2, 0], [2, 0]]
    assert [kept for _, _, kept, _ in found] == [False, False]  # rank 1 did not exist: it draws from what rank 0 had
    assert any("new ranks draw from the random numbers of that one" in text for text in found[0][3])


def _resumed_plain(folder: str) -> Any:
    """A model without batch norm, as the sharded one is."""
    jobs_net, jobs.net = jobs.net, lambda seed, **more: jobs_net(seed, **{**more, "buffers": False})
    try:
        return jobs.resumed_by(folder, "plain")
    finally:
        jobs.net = jobs_net


def test_buffers_that_ddp_does_not_keep_equal_are_each_ranks_own(crew: Crew, folder: Path) -> None:
    (same, first), (too, second) = succeeded(crew.run(jobs.own_buffers, str(folder), ranks=2))
    assert same
    assert too
    assert first != second


def test_models_that_differ_are_not_mixed(crew: Crew, folder: Path) -> None:
    answers = succeeded(crew.run(jobs.different_ranks, str(folder), ranks=2))
    for kind, text in answers:
        assert kind == "ValueError"
        assert "of rank 1 differ from those of rank 0" in text
    assert list_checkpoints(folder) == []


@pytest.mark.parametrize("sync", [True, False])
def test_a_full_disk_on_one_rank_is_told_on_all_and_leaves_what_was_before(
    crew: Crew, folder: Path, sync: bool
) -> None:
    answers = succeeded(crew.run(_full_on_rank_1, str(folder), sync, ranks=2))
    for at_save, at_wait, iteration in answers:
        told, other = (at_save, at_wait) if sync else (at_wait, at_save)
        assert told[0] in ("CheckpointError", "NotPublishedError")
        assert other == ("", "")
        assert iteration == 1
    assert "rank 1 could not store its shard" in answers[0][0 if sync else 1][1]  # and not: its time was up
    told_on_1 = answers[1][0 if sync else 1][1]
    assert "full" in told_on_1
    assert not list(folder.glob(".tmp*"))


def _full_on_rank_1(folder: str, sync: bool) -> Any:
    return jobs.full_on_rank_1(folder, sync=sync)


def test_damage_that_one_rank_sees_sends_all_to_the_older_one(crew: Crew, folder: Path) -> None:
    answers = succeeded(crew.run(jobs.damaged_for_rank_1, str(folder), ranks=2))
    assert [answer[:3] for answer in answers] == [(1, 0, True), (1, 1, True)]
    assert any("shard 1 in the disk tier of rank 1" in text and "step-000000002" in text for text in answers[0][3])


def test_what_is_sharded_otherwise_is_refused_with_the_remedy(crew: Crew, folder: Path) -> None:
    expected = [
        ("ValueError", "use torch.distributed.fsdp.fully_shard (FSDP2)"),
        ("ValueError", "say framework='fsdp2'"),
        ("ValueError", "some parameters are DTensors, and '1.weight' is not"),
        ("ValueError", "ZeroRedundancyOptimizer cannot be saved by all ranks together"),
        ("TypeError", "extra/w' is a part of a tensor (a DTensor): save its full_tensor()"),
    ]
    for answers in succeeded(crew.run(jobs.refused, str(folder), ranks=2)):
        for (kind, text), (expected_kind, words) in zip(answers, expected, strict=True):
            assert kind == expected_kind
            assert words in text


def test_a_model_that_fits_on_one_rank_only_is_refused_on_both(crew: Crew, folder: Path) -> None:
    (first, first_kept), (second, second_kept) = succeeded(crew.run(jobs.another_model_on_rank_1, str(folder), ranks=2))
    assert first_kept
    assert second_kept
    assert "rank 1: the checkpoint does not fit" in first[1]
    assert "does not fit" in second[1]


@needs_fsdp2_on_cpus
def test_what_a_lost_host_had_of_a_sharded_model_comes_from_its_copy_on_another(crew: Crew, folder: Path) -> None:
    answers = succeeded(crew.run(jobs.after_a_host_is_lost, str(folder), ranks=2))
    assert answers == [(2, 0, True), (2, 1, True)]


@needs_fsdp2_on_cpus
def test_of_a_shard_on_another_host_a_rank_receives_only_what_it_reads(crew: Crew, folder: Path) -> None:
    for is_same, received_bytes, part_bytes in succeeded(crew.run(jobs.received_by_each_rank, str(folder), ranks=2)):
        assert is_same
        assert 0 < received_bytes < part_bytes / 5  # the header, and what only the other one has saved


def test_an_unfinished_save_is_named_in_a_warning(folder: Path) -> None:
    saved_twice(folder)
    (folder / ".tmp-step-000000003.e1.r0.g3").mkdir()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        extra = Job(folder, seed=2).resume()
    assert extra is not None
    assert extra["iteration"] == 2
    assert any("step-000000003.e1.r0.g3" in str(one.message) and "never finished" in str(one.message) for one in caught)


def test_an_older_one_is_loaded_by_its_folder(folder: Path) -> None:
    saved_twice(folder)
    oldest = list_checkpoints(folder)[-1].folder
    assert Job(folder, seed=2).state.load(oldest)["iteration"] == 1
