"""Contract: a writer that was paused before it published, and replaced meanwhile, publishes nothing."""

from __future__ import annotations

from collections.abc import Callable

import psutil
import pytest

from tests.cluster.conftest import jobs as jobs
from tests.cluster.harness import Job, pause, process_tree, resume, wait_until
from torchelastic.checkpoint import FileSystemCheckpointManager
from torchelastic.rendezvous import EtcdServer
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
    (paused,) = {event["pid"] for event in job.of("started")} & {
        process.pid for process in psutil.process_iter() if process.status() == psutil.STATUS_STOPPED
    }
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
    assert "was replaced while it saved" in job.output()
    job.open_gate(OTHERS_AT + 1)
    job.wait()
