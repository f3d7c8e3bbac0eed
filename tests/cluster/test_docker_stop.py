"""As `docker stop` ends a container: SIGTERM to the first process of it, SIGKILL to all of them 10 s later.

Nobody has told the script how long that is, so it saves at once: after the kill every step that was trained when
SIGTERM came is in the checkpoint. The script has an IterManager; `train(lifetime=)` is in `test_lifetime_train`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import wait_until
from torchelastic.processes import dies_with_parent
from torchelastic.rendezvous.server import EtcdServer

GRACE_S = 10.0
RUN = (sys.executable, "-m", "torchelastic.launch", "run", "--nproc-per-node=2")
#: What somebody may have set here, and nobody sets there.
NOT_SET = ("TORCHELASTIC_TERM_GRACE_S", "TORCHELASTIC_DEADLINE_SIGNALS", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
#: Its saves take 0.3 s, and its batches come from a process that knows nothing of deadlines.
SCRIPT = """
import os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from torchelastic.lifetime import IterManager

def note(name, step):
    if rank == 0:
        Path(f".{name}").write_text(str(step))
        Path(f".{name}").rename(name)

if __name__ == "__main__":
    if "alone" in sys.argv:
        rank = 0
    else:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
    torch.set_num_threads(1)
    data = iter(torch.utils.data.DataLoader(range(1_000_000), num_workers=1))
    manager, step = IterManager(), 0
    while True:
        manager.iter()
        if manager.should_save_ckpt():
            with manager.saving():
                time.sleep(0.3)
                note("saved", step)
        if manager.should_stop:
            break
        next(data)
        time.sleep(0.02)
        step += 1
        note("trained", step)
    sys.exit(manager.exit_code)
"""


def number(path: Path) -> int:
    return int(path.read_text()) if path.exists() else 0


def trained_and_saved(folder: Path, *words: str) -> tuple[int, int, str]:
    """The step at which SIGTERM came, the one that is saved when all processes are gone, and what they said."""
    (folder / "train.py").write_text(SCRIPT)
    log, trained, saved = folder / "log", folder / "trained", folder / "saved"
    environment = {name: value for name, value in os.environ.items() if name not in NOT_SET}
    with log.open("wb") as file, subprocess.Popen(
        dies_with_parent(words),
        cwd=folder, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
    ) as first:  # fmt: skip
        try:
            wait_until(lambda: number(trained) >= 20, 90, f"it trains: {log.read_text()}")
            assert not saved.exists(), "no deadline is known, so nothing was saved"
            came_at = number(trained)
            first.send_signal(signal.SIGTERM)
            try:
                first.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                pass
        finally:
            if first.poll() is None:
                os.killpg(first.pid, signal.SIGKILL)  # workers of a launcher that is gone are killed by the kernel
    return came_at, number(saved), log.read_text()


@pytest.fixture
def url(etcd: EtcdServer, run_id: str) -> tuple[str, ...]:
    return f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={run_id}"


@pytest.mark.long
def test_a_script_of_the_launcher_has_saved(tmp_path: Path) -> None:
    came_at, saved, log = trained_and_saved(tmp_path, *RUN, "--standalone", "train.py")
    assert saved >= came_at, log
    assert "SIGTERM, 30 s of grace are a guess" in log, "what the launcher gives is not what the launcher is given"


@pytest.mark.long
def test_what_the_launcher_gives_its_workers_is_the_guess(tmp_path: Path) -> None:
    """So the last save is made before the launcher ends the workers, too."""
    came_at, saved, log = trained_and_saved(tmp_path, *RUN, "--standalone", "--term-grace=8", "train.py")
    assert "SIGTERM, 8 s of grace are a guess" in log
    assert saved > came_at + 20, log
    assert "the workers did not leave within" not in log


@pytest.mark.long
def test_a_script_that_is_started_again_whenever_the_group_changes_has_saved(
    tmp_path: Path, url: tuple[str, ...]
) -> None:
    """With more than one host a member of the run stands in for the script, and ends it."""
    came_at, saved, log = trained_and_saved(tmp_path, *RUN, *url, "--nnodes=1:2", "--last-call=1", "train.py")
    assert saved >= came_at, log


@pytest.mark.long
def test_a_script_by_itself_has_saved(tmp_path: Path) -> None:
    came_at, saved, log = trained_and_saved(tmp_path, sys.executable, "train.py", "alone")
    assert saved >= came_at, log
