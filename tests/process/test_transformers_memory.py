"""Real Trainers on the CPU, killed and resumed from memory."""

from __future__ import annotations

import datetime
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.trainer_callback import TrainerState

from tests.contracts.coded_momentum import CodedMomentum
from tests.process.forked_ranks import Ended, run_ranks, values
from tests.process.hugging_face_runs import STEPS, Outcome, Run, look, train
from torchelastic.adapters.hugging_face.rank_state import require_unsharded
from torchelastic.adapters.lightning.memory import MemorySaving
from torchelastic.adapters.memory_tier import StorageTier
from torchelastic.adapters.transformers import MemoryCheckpointCallback
from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.shards import ShardReader
from torchelastic.checkpoint.store.fence import Fence, OwnedError
from torchelastic.checkpoint.store.host_memory.dead_jobs import JOB_FILE
from torchelastic.errors import UnfitError

HOSTS = [{"TORCHELASTIC_FAILURE_DOMAIN": host, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"} for host in ("a", "b")]
DURABLE = {"save_strategy": "steps", "save_steps": 5}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 1}


def start(function: Callable[[Run], Any], run: Run, ranks: int = 1, hosts: Sequence[Any] = ()) -> list[Ended]:
    return run_ranks(function, run, ranks=ranks, environments=hosts)


def trained(run: Run, ranks: int = 1, hosts: Sequence[Any] = ()) -> list[Outcome]:
    return values(start(train, run, ranks, hosts))


def crash(run: Run, ranks: int = 1, hosts: Sequence[Any] = ()) -> None:
    ended = start(train, run, ranks, hosts)
    assert ended[0].exit_code == -signal.SIGKILL, ended[0].error


@pytest.fixture(scope="module")
def shared_memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        yield Path(folder)


@pytest.fixture
def run(tmp_path: Path, shared_memory: Path) -> Iterator[Run]:
    """A job of one test."""
    with tempfile.TemporaryDirectory(dir=shared_memory) as folder:
        yield Run(str(tmp_path / "durable"), f"{folder}/job7")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    run = Run(str(tmp_path_factory.mktemp("alone")), "/none", every=0)
    return trained(run)[0].digest


@pytest.fixture(scope="module")
def undisturbed_pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    run = Run(str(tmp_path_factory.mktemp("pair")), "/none", every=0, batch_norm=True)
    return [outcome.digest for outcome in trained(run, 2)]


@pytest.fixture(scope="module")
def crashed_alone(tmp_path_factory: pytest.TempPathFactory, shared_memory: Path) -> Run:
    """Killed in step 8: step 5 is durable, and step 6 in memory."""
    run = Run(str(tmp_path_factory.mktemp("crashed") / "durable"), f"{shared_memory}/alone/job7", kill_at=7)
    crash(replace(run, arguments=DURABLE))
    return run


@pytest.fixture(scope="module")
def crashed_pair(tmp_path_factory: pytest.TempPathFactory, shared_memory: Path) -> Run:
    """The same with two ranks, each on a host of its own."""
    run = Run(
        str(tmp_path_factory.mktemp("crashed") / "pair"), f"{shared_memory}/pair/job7", batch_norm=True, kill_at=7
    )
    crash(replace(run, arguments=DURABLE), 2, HOSTS)
    return run


def again(crashed: Run, fresh: Run) -> Run:
    """What a crashed run has left, once more, for a test that may change it."""
    shutil.copytree(crashed.folder, fresh.folder)
    shutil.copytree(Path(crashed.base).parent, Path(fresh.base).parent, dirs_exist_ok=True)
    return replace(crashed, folder=fresh.folder, base=fresh.base, kill_at=None)


# --- one process ------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_killed_run_goes_on_from_memory_and_ends_with_the_same_weights(
    crashed_alone: Run, run: Run, undisturbed: str
) -> None:
    run = again(crashed_alone, run)
    (outcome,) = trained(run)
    assert outcome.resumed_from == f"{run.base}/resume/checkpoint-6"
    assert (outcome.first_step, outcome.digest, outcome.warnings) == (6, undisturbed, ())
    assert outcome.was_tidy, "the folder is not needed after the first step"
    assert not Path(run.base).exists(), "the run is over"


def test_the_folder_is_in_the_trainers_own_layout_and_holds_plain_values(crashed_alone: Run, run: Run) -> None:
    run = again(crashed_alone, run)
    ((path, content),) = values(start(look, run))
    assert path == f"{run.base}/resume/checkpoint-6"
    names = {"model.safetensors", "optimizer.pt", "rng_state.pth", "scheduler.pt", "trainer_state.json"}
    assert {file.name for file in Path(path).iterdir()} == names
    by_trainer = {file.name for file in (Path(run.folder) / "checkpoint-5").iterdir()}
    assert by_trainer - names == {"config.json", "generation_config.json", "training_args.bin"}
    state = content["trainer_state.json"]
    assert (state["global_step"], [entry["step"] for entry in state["log_history"]]) == (6, [3, 6])
    assert content["scheduler.pt"]["last_epoch"] == 6
    assert content["optimizer.pt"]["state"][0]["step"] == 6
    assert isinstance(content["rng_state.pth"]["numpy"][1], list)


@pytest.mark.parametrize("kill_at", [5, 7], ids=["after_an_epoch", "in_an_epoch"])
def test_evaluation_that_draws_random_numbers_changes_nothing(run: Run, kill_at: int, evaluated: str) -> None:
    run = replace(run, every=1, arguments=EVALUATED)
    crash(replace(run, kill_at=kill_at))
    (outcome,) = trained(run)
    assert (outcome.first_step, outcome.digest) == (kill_at, evaluated)


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> str:
    run = Run(str(tmp_path_factory.mktemp("evaluated")), "/none", every=0, arguments=EVALUATED)
    return trained(run)[0].digest


@pytest.mark.long
def test_a_run_that_is_killed_after_its_last_step_trains_none_more(run: Run) -> None:
    run = replace(run, arguments={**DURABLE, "lr_scheduler_type": "constant"})
    digest = trained(replace(run, every=0, folder=f"{run.folder}-whole"))[0].digest
    crash(replace(run, kill_at=STEPS))
    assert (Path(run.folder) / f"checkpoint-{STEPS}").is_dir()
    (outcome,) = trained(run)
    assert (outcome.first_step, outcome.digest) == (10, digest)


def test_the_operations_since_the_last_log_are_counted(crashed_alone: Run, run: Run) -> None:
    crash(replace(run, kill_at=9))
    ((_, later),) = values(start(look, run))
    ((_, logged),) = values(start(look, crashed_alone))
    assert logged["trainer_state.json"]["total_flos"] * 8 == later["trainer_state.json"]["total_flos"] * 6 > 0


def test_a_newer_durable_checkpoint_wins(run: Run, undisturbed: str) -> None:
    run = replace(run, every=4, arguments=DURABLE)
    crash(replace(run, kill_at=7))
    (outcome,) = trained(run)
    assert outcome.resumed_from == f"{run.folder}/checkpoint-5"
    assert (outcome.first_step, outcome.digest) == (5, undisturbed)


def test_lost_memory_falls_back_to_the_durable_checkpoint_and_then_to_a_fresh_start(
    crashed_alone: Run, run: Run, undisturbed: str
) -> None:
    run = again(crashed_alone, run)
    shutil.rmtree(run.base)
    (outcome,) = trained(run)
    assert (outcome.resumed_from, outcome.digest) == (f"{run.folder}/checkpoint-5", undisturbed)
    shutil.rmtree(run.folder)
    assert values(start(look, run))[0][0] is None


def test_a_run_that_is_stopped_early_keeps_what_only_memory_has(run: Run, undisturbed: str) -> None:
    (outcome,) = trained(replace(run, stop_at=8))
    assert any("step 8 of 12" in text for text in outcome.warnings)
    (outcome,) = trained(run)
    assert (outcome.first_step, outcome.digest) == (8, undisturbed)
    trained(replace(run, stop_at=5, arguments=DURABLE))
    assert not Path(run.base).exists(), "the durable checkpoint is as new"


def test_states_of_callbacks_are_restored_if_the_trainer_is_known(run: Run) -> None:
    run = replace(run, arguments={"restore_callback_states_from_checkpoint": True})
    crash(replace(run, kill_at=7))
    (outcome,) = trained(run)
    assert outcome.counted == STEPS
    (ended,) = start(train, replace(run, knows_trainer=False))
    assert ended.error is not None
    assert "resume_from_checkpoint(trainer)" in ended.error


# --- two ranks --------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_two_killed_ranks_go_on_with_their_own_random_numbers(
    crashed_pair: Run, run: Run, undisturbed_pair: list[str]
) -> None:
    """Its buffers and dropout differ from rank to rank."""
    run = again(crashed_pair, run)
    outcomes = trained(run, 2, HOSTS)
    assert [outcome.resumed_from for outcome in outcomes] == [
        f"{Path(run.base).parent}/{host}/job7/resume/checkpoint-6" for host in "ab"
    ]
    assert [(outcome.first_step, outcome.digest) for outcome in outcomes] == [(6, one) for one in undisturbed_pair]
    assert not list(Path(run.base).parent.glob("*/job7"))


def test_what_ddp_replicates_is_written_once_and_each_rank_writes_half(crashed_pair: Run) -> None:
    written: list[dict[str, int]] = []
    for shard in sorted((Path(crashed_pair.base).parent / "a" / "job7").glob("step-000000006.*/shard-0000[01]-*")):
        with ShardReader(shard) as reader:
            written.append({entry.name: entry.size_bytes for entry in reader.header.entries})
    assert len(written) == 2, "its own, and the replica of the other host's"
    replicated = [{name: size for name, size in each.items() if "replicated/" in name} for each in written]
    assert not replicated[0].keys() & replicated[1].keys()
    assert len(replicated[0]) + len(replicated[1]) == 5 + 3 * 5, "of 5 parameters Adam has 3 tensors each"
    smaller, larger = sorted(sum(each.values()) for each in replicated)
    assert larger < 1.3 * smaller
    for rank, each in enumerate(written):
        assert any(f"rank-{rank}/" in name for name in each)
        assert not any(f"rank-{1 - rank}/" in name for name in each)
        assert any("running_mean" in name for name in each) == (rank == 0), "DDP takes buffers from rank 0"


LOGGED = {
    "f1": np.float32(0.5),
    "count": np.int64(3),
    "loss of a part": torch.tensor(2.0),
    7: [np.ones(2), {1}],
    "day": datetime.date(2026, 1, 2),
    "model": torch.nn.Linear(1, 1),
}


def test_whatever_was_logged_the_run_resumes_from_its_last_save(run: Run, undisturbed: str) -> None:
    crash(replace(run, logged=LOGGED, kill_at=7))
    (outcome,) = trained(replace(run, logged=LOGGED))
    assert (outcome.resumed_from, outcome.digest) == (f"{run.base}/resume/checkpoint-6", undisturbed)
    (entry,) = outcome.history
    expected = {"f1": 0.5, "count": 3, "loss of a part": 2.0, "7": [[1.0, 1.0], [1]], "day": "2026-01-02", "step": 3}
    assert dict(entry) == expected
    assert outcome.failures == ()


def test_a_save_that_one_rank_cannot_make_ends_no_run_and_is_known_on_all(run: Run) -> None:
    outcomes = trained(replace(run, fails_at=((4, 1), (6, 0), (8, 1))), 2)
    for rank, outcome in enumerate(outcomes):
        assert [failure.partition(":")[0] for failure in outcome.failures] == ["step 4", "step 6", "step 8"]
        assert all("no random numbers" in failure for failure in outcome.failures)
        said = [told for told in outcome.warnings if "not saved in memory" in told]
        assert len(said) == 2, (rank, said)  # once for each reason


def test_a_scheduler_that_no_trainer_could_load_again_is_refused_before_training(tmp_path: Path) -> None:
    callback, model = MemoryCheckpointCallback(tmp_path / "job7"), torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    args = SimpleNamespace(restore_callback_states_from_checkpoint=False)
    given = {"model": model, "optimizer": optimizer, "lr_scheduler": scheduler}
    # no path: torch reads one where Megatron-Core was imported, as by other tests of this process
    for value, told in ((iter([1]), "is a list_iterator"), (datetime.date(2026, 1, 2), "is no plain value")):
        setattr(scheduler, "odd", value)  # noqa: B010 - it has no such attribute
        with pytest.raises(UnfitError, match=rf"scheduler\['odd'\] {told}") as refused:
            callback.on_train_begin(args, TrainerState(), None, **given)  # type: ignore[arg-type]
        assert "allow_pickles" not in str(refused.value)
    del scheduler.__dict__["odd"]
    callback.on_train_begin(args, TrainerState(), None, **given)  # type: ignore[arg-type]
    callback.close()


def test_an_optimizer_whose_state_no_trainer_could_load_again_is_refused(tmp_path: Path) -> None:
    callback, model = MemoryCheckpointCallback(tmp_path / "job7"), torch.nn.Linear(2, 1)
    optimizer = CodedMomentum(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    args = SimpleNamespace(restore_callback_states_from_checkpoint=False)
    given = {"model": model, "optimizer": optimizer, "lr_scheduler": scheduler}
    callback.on_train_begin(args, TrainerState(), None, **given)  # type: ignore[arg-type]
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    with pytest.raises(UnfitError, match=r"optimizer's state holds tensors of the class .*\.Coded, .*add_safe_globals"):
        callback.on_train_begin(args, TrainerState(), None, **given)  # type: ignore[arg-type]
    callback.close()


# --- what cannot work -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED", "MEGATRON_LM"])
def test_strategies_that_shard_the_model_are_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=rf"{kind}.*MemoryStorageWriter"):
        require_unsharded("MemoryCheckpointCallback", kind)
    require_unsharded("MemoryCheckpointCallback", "MULTI_GPU")


@pytest.mark.parametrize("steps", [None, "5", 2.5])
def test_a_number_of_steps_that_is_none_is_named(run: Run, steps: Any) -> None:
    for callback in (MemoryCheckpointCallback, MemorySaving):
        with pytest.raises(TypeError, match=r"every_n_steps is .* no whole number"):
            callback(run.base, steps)


def test_a_save_that_fails_is_told_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    tier = StorageTier(tmp_path / "file" / "job7", async_save=False)
    tier.start()
    tier.save(tier.path_of(2), {"weight": torch.zeros(2)})
    tier.close()
    (told,) = [one.getMessage() for one in caplog.records if "was not saved" in one.getMessage()]
    assert "Not a directory" in told
    assert "\n" not in told


def test_a_container_that_another_run_uses_is_refused_before_training(
    shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchelastic.checkpoint.store.fence.ENTER_TIMEOUT_S", 0.1)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    theirs = Fence(shared_memory / "job9", owner_lock=JOB_FILE)
    theirs.enter("theirs")
    tier = StorageTier(shared_memory / "job9")
    with pytest.raises(OwnedError, match=rf"belongs to run 'theirs'.*process {os.getpid()} \(.*holds it"):
        tier.start()
    with pytest.raises(CheckpointError, match="are not open"):
        tier.newest()
    theirs.release()
    tier.start()
    assert tier.newest() is None
    tier.close()
