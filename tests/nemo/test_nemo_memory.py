"""The real NeMo, made to run on a CPU: runs that are killed, and go on from memory. See docs/nemo.md.

NeMo is imported once, in the process of pytest; each rank of a run is a fork of it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.nemo import on_cpu
from tests.nemo.runs import DURABLE_EVERY, STEPS, Run, in_forks

if importlib.util.find_spec("nemo.lightning") is None:
    pytest.skip("NeMo is not installed here: `make test-nemo` builds an environment with it", allow_module_level=True)

pytestmark = pytest.mark.timeout(300)  # importing NeMo, and two runs for the fixtures

KILLED_AT = 7  # the newest in memory is of step 6, the newest durable one of step 4


@pytest.fixture(scope="module", autouse=True)
def nemo() -> None:
    os.environ.update(CUDA_VISIBLE_DEVICES="", TORCHDYNAMO_DISABLE="1", WANDB_MODE="disabled")
    torch.set_num_threads(1)
    # what logs keeps the stream that it finds now: the descriptor, which each rank leads to a file of its own
    stream = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115 - it stays open
    with contextlib.redirect_stderr(stream):
        on_cpu.install()
        importlib.import_module("tests.nemo.small_run")


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="nemo-", dir=shared if shared.is_dir() else None) as path:
        yield Path(path)


def train(run: Run) -> Run:
    """Runs it to where it ends."""
    run.folder.mkdir(parents=True, exist_ok=True)
    log = run.folder.with_suffix(".txt")
    codes = in_forks(run.hosts, "train", run, log=log)
    expected = 0 if run.killed_at is None else -signal.SIGKILL
    assert codes == [expected] * run.hosts, f"{codes}\n{log.read_text(errors='replace')[-6000:]}"
    return run


def as_new(run: Run, name: str, **changes: Any) -> Run:
    """A copy of all that a killed run has left, as the start of another one."""
    folder = run.folder.parent / name
    shutil.copytree(run.folder, folder)
    return replace(run, folder=folder, killed_at=None, **changes)


def steps_in(container: Path) -> list[str]:
    return sorted(path.name for path in container.glob("step-*_ckpt"))


def assert_same_weights(run: Run, other: Run) -> None:
    for rank in range(run.hosts):
        expected = other.weights(rank)
        assert expected
        assert all(torch.equal(value, expected[name]) for name, value in run.weights(rank).items())


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> Run:
    return train(Run(folder / "undisturbed", hosts=2, has_memory=False))


@pytest.fixture(scope="module")
def killed(folder: Path) -> Run:
    return train(Run(folder / "killed", hosts=2, killed_at=KILLED_AT, durable_async=True))


def test_a_step_of_the_durable_save_is_skipped(killed: Run) -> None:
    assert [steps_in(killed.container(host)) for host in (0, 1)] == [["step-6_ckpt"], ["step-6_ckpt"]]
    seen = [json.loads(line) for line in (killed.folder / "seen-0.jsonl").read_text().splitlines()]
    assert seen[DURABLE_EVERY + 1] == ["step-2_ckpt"]
    assert len(seen) == KILLED_AT + 1
    assert not any("step-4_ckpt" in one for one in seen)


def test_a_killed_run_goes_on_from_memory_though_a_host_was_replaced(killed: Run, undisturbed: Run) -> None:
    run = as_new(killed, "replaced")
    shutil.rmtree(run.container(1))
    train(run)
    for rank in (0, 1):
        assert run.result(rank)["steps"] == [6, 7]
        assert run.result(rank)["ckpt_path"] == str(run.container(rank) / "step-6_ckpt")
    assert_same_weights(run, undisturbed)


def test_with_nothing_in_memory_it_goes_on_from_the_durable_checkpoint(killed: Run, undisturbed: Run) -> None:
    run = as_new(killed, "empty")
    for host in (0, 1):
        shutil.rmtree(run.container(host))
    train(run)
    assert run.result()["steps"] == [4, 5, 6, 7]
    assert Path(run.result()["ckpt_path"]).is_relative_to(run.folder / "durable")
    assert_same_weights(run, undisturbed)


@pytest.mark.parametrize("what", ["read_data", "load_common"])
def test_what_cannot_be_loaded_on_one_rank_is_passed_over_on_all(killed: Run, undisturbed: Run, what: str) -> None:
    run = train(as_new(killed, f"broken-{what}", breaks=what))
    assert [run.result(rank)["steps"] for rank in (0, 1)] == [[4, 5, 6, 7]] * 2
    assert Path(run.result()["ckpt_path"]).is_relative_to(run.folder / "durable")
    assert "a test has broken it" in run.folder.with_suffix(".txt").read_text(errors="replace")
    assert_same_weights(run, undisturbed)


def test_saved_at_once_with_its_context_and_removed_when_the_run_is_over(folder: Path) -> None:
    options = {"always_save_context": True, "use_fully_parallel_wrapper": False, "use_cached_ckpt_structure": True}
    run = train(Run(folder / "at-once", async_save=False, killed_at=3, keep=False, options=options))
    assert steps_in(run.container()) == ["step-2_ckpt"]
    common = torch.load(run.container() / "step-2_ckpt" / "common.pt", weights_only=False)
    assert common["content_metadata"]["chained_optim_avoid_prefix"] is True
    run = train(replace(run, killed_at=None))
    assert run.result()["steps"] == [2, 3, 4, 5, 6, 7]
    assert {"io.json", "model.yaml"} <= set(run.result()["context"])
    assert "torchelastic-context" in run.result()["context_path"], "and not that of the durable checkpoint"
    assert not run.container().exists()


def test_a_newer_durable_checkpoint_is_taken(folder: Path) -> None:
    run = train(Run(folder / "newer", killed_at=DURABLE_EVERY + 1))
    assert steps_in(run.container()) == ["step-2_ckpt"]
    run = train(replace(run, killed_at=None))
    assert run.result()["steps"] == list(range(DURABLE_EVERY, STEPS))


@pytest.mark.parametrize("checks", ["wrap", "as_the_guide_says", "choose", "train_plainly"])
def test_in_one_process(folder: Path, checks: str) -> None:
    """Functions of `small_run`, each with its assertions: what is wrapped, what is resumed from, other strategies."""
    log = folder / f"{checks}.txt"
    codes = in_forks(1, checks, folder / checks, log=log)
    assert codes == [0], log.read_text(errors="replace")[-6000:]
