"""Contract: a writer that was paused before it published, and replaced meanwhile, publishes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from tests.cluster.conftest import jobs as jobs
from tests.cluster.harness import Job, process_tree, resume
from tests.contracts import local_ranks, memory_ranks
from tests.process.forked_ranks import run_ranks, values
from tests.waiting import pause, stands_still, wait_until
from torchelastic.checkpoint import CheckpointError, FileSystemCheckpointManager
from torchelastic.checkpoint.local import BasicTensorAwareStateDict, LocalCheckpointManager
from torchelastic.rendezvous import EtcdServer
from torchelastic.testing.disk_faults import FaultyDisk
from torchelastic.testing.faults import Fault

#: The step that is being saved when its writer is paused, and the one that the others have come to when it goes on.
PAUSED_AT, OTHERS_AT = 10, 25


@pytest.mark.long
def test_a_host_that_was_paused_in_its_save_does_not_publish_the_newest_checkpoint(
    jobs: Callable[..., Job], etcd: EtcdServer, run_id: str
) -> None:
    job = jobs(
        [Fault("hang", "save", step=PAUSED_AT)],
        epochs=4, checkpoint_every=5, checkpoint_dir=jobs().folder, timeout_ms=3000, gates=[5, OTHERS_AT + 1],
    )  # fmt: skip
    rendezvous = (f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={run_id}", "--nnodes=1:2", "--ttl=2")
    for _ in range(2):
        job.start(*rendezvous, nproc=1)
    job.wait_for("held", step=5, count=2)
    job.open_gate(5)
    wait_until(job.plan.struck, 60, "the writer stops in its save")
    workers = {event["pid"] for event in job.of("started")}
    paused = wait_until(lambda: next(filter(stands_still, workers), None), 20, "it stands still")
    agent = psutil.Process(paused).ppid()
    others = [pid for pid in process_tree(agent) if pid != paused]
    pause(others)  # the host stands still, not only the worker

    job.wait_for("saved", step=OTHERS_AT)
    job.wait_for("held", step=OTHERS_AT + 1)
    manager = FileSystemCheckpointManager(job.job_options["checkpoint_dir"])
    before = [one.sequence_id for one in manager.list_checkpoints()]
    resume([*others, paused])
    wait_until(lambda: [one for one in job.of("saved", step=PAUSED_AT) if one["pid"] == paused], 30, "it goes on")
    wait_until(lambda: job.of("asking", pid=paused)[1:] or not psutil.pid_exists(paused), 60, "its save has ended")
    after = [one.sequence_id for one in manager.list_checkpoints()]
    assert after == before, "a checkpoint of step 10 counts as newer than that of step 25"
    wait_until(lambda: "was replaced while it saved" in job.output(), 20, "its agent says so")
    job.open_gate(OTHERS_AT + 1)
    job.wait()


def others_in_memory(root: Path) -> None:
    assert memory_ranks.recover(root) == (5, True)
    memory_ranks.save(root, 10)


def others_locally(root: Path) -> None:
    assert local_ranks.resume(root) == {"found": 5, "loaded": 5}
    local_ranks.save(root, 10)


class StoppedBeforeItPublishes(FaultyDisk):
    """The process does nothing from the moment before a file is renamed until others have saved a checkpoint."""

    def __init__(self, root: Path, others: Callable[[Path], None], file: str) -> None:
        super().__init__()
        self._root, self._others, self._file = root, others, file
        self.is_replaced = False

    def rename(self, source: Path, target: Path) -> None:
        self.stop_before(target)
        super().rename(source, target)

    def stop_before(self, target: Path) -> None:
        if target.name == self._file and not self.is_replaced:
            self.is_replaced = True
            values(run_ranks(self._others, self._root))


class StoppedBeforeItsShard(StoppedBeforeItPublishes):
    """The same where the file is published."""

    def publish(self, source: Path, target: Path) -> None:
        self.stop_before(target)
        super().publish(source, target)


def test_a_writer_into_memory_that_was_replaced_in_the_moment_before_it_publishes_leaves_no_checkpoint(
    tmp_path: Path,
) -> None:
    memory_ranks.save(tmp_path, 5)
    disk = StoppedBeforeItPublishes(tmp_path, others_in_memory, "manifest.json")
    with pytest.raises(CheckpointException, match="was replaced"):
        memory_ranks.save(tmp_path, 20, disk)
    assert disk.is_replaced
    assert memory_ranks.candidates(tmp_path) == ["step-10_ckpt"]


def test_a_writer_of_local_checkpoints_that_was_replaced_before_it_publishes_leaves_none(tmp_path: Path) -> None:
    local_ranks.save(tmp_path, 5)
    disk = StoppedBeforeItsShard(tmp_path, others_locally, "shard-00000-of-00001.shard")
    with pytest.raises(CheckpointError, match="was replaced"):
        local_ranks.save(tmp_path, 20, disk=disk)
    assert disk.is_replaced
    assert local_ranks.resume(tmp_path) == {"found": 10, "loaded": 10}, "as one of epoch 0, that of 20 would be newer"
    assert len(list(tmp_path.glob("host-0/step-*"))) == 1


def test_a_writer_of_local_checkpoints_that_was_replaced_before_its_manifest_writes_none(tmp_path: Path) -> None:
    local_ranks.save(tmp_path, 5)
    manager = LocalCheckpointManager(tmp_path / "host-0")
    request = manager.save(BasicTensorAwareStateDict({"weights": torch.zeros(3)}), 20, is_async=True)
    assert request is not None
    assert request.async_fn is not None
    request.async_fn(*request.async_fn_args)
    values(run_ranks(others_locally, tmp_path))
    (finalize,) = request.finalize_fns
    with pytest.raises(CheckpointError, match="was replaced"):
        finalize()
    assert local_ranks.resume(tmp_path) == {"found": 10, "loaded": 10}
    assert [path.parent.name[:14] for path in tmp_path.glob("host-0/**/manifest.json")] == ["step-000000010"]


def test_who_only_loads_local_checkpoints_replaces_nobody(tmp_path: Path) -> None:
    manager = LocalCheckpointManager(tmp_path)
    for step in (1, 2):
        manager.save(BasicTensorAwareStateDict({"weights": torch.zeros(3)}), step)
        assert LocalCheckpointManager(tmp_path).load()[1].iteration == step
