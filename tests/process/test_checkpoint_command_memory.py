"""`torchelastic checkpoint ls | show | verify | prune | convert` of checkpoints in memory."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.process.command_checkpoints import Capture, flip, lines_of, run
from tests.process.memory_jobs import tmpfs_folder
from tests.process.memory_left_overs import left_by_a_killed_job, state_of


@pytest.fixture
def base() -> Iterator[Path]:
    with tmpfs_folder() as root:
        yield root / "7"


def save_of(folder: Path) -> Path:
    """Where the save of the container of a step lies."""
    (save,) = folder.parent.glob("step-000000020.*")
    return save


def shard_of(folder: Path) -> Path:
    return save_of(folder) / "shard-00000-of-00002.shard"


def test_a_container_and_a_step_of_it_are_listed(base: Path, capsys: Capture) -> None:
    folder = left_by_a_killed_job(base, 20)
    for path in (base, folder, save_of(folder)):
        (one,) = lines_of(capsys, "ls", path)
        assert (one["kind"], one["step"], one["world_size"]) == ("memory", 20, 1)
        assert (one["complete"], one["damage"], one["partial"]) == (True, None, None)
        assert one["files"] == [str(shard_of(folder))]
    assert run(capsys, "ls", base)[1].splitlines()[1].split()[-2:] == ["memory", "complete"]


def test_show_lists_tensors_values_and_whose_it_is(base: Path, capsys: Capture) -> None:
    folder = left_by_a_killed_job(base, 20)
    (document,) = lines_of(capsys, "show", folder, "--tensors", "--values")
    assert document["facts"]["run"] == "job7"
    assert document["facts"]["save"].startswith("step-000000020.e1.r0.g0.")
    rows = {row["name"]: row for row in document["tensors"]}
    assert rows["w"]["shape"] == [4, 3]
    assert (rows["opt.m"]["dtype"], rows["opt.m"]["size_bytes"]) == ("int64", 24)
    assert rows["w"]["shards"] == [shard_of(folder).name]
    assert "not opened" in document["values"]["opt.lr"]


@pytest.mark.parametrize("how", ["copy", "link"])
def test_a_save_under_another_name_is_what_it_was(how: str, base: Path, tmp_path: Path, capsys: Capture) -> None:
    save, other = save_of(left_by_a_killed_job(base, 20)), tmp_path / "best"
    if how == "copy":
        shutil.copytree(save, other)
    else:
        other.symlink_to(save)
    (one,) = lines_of(capsys, "ls", other)
    assert (one["kind"], one["step"], one["world_size"], one["complete"]) == ("memory", 20, 1, True)
    (shown,) = lines_of(capsys, "show", other)
    assert shown["facts"]["save"] == save.name
    code, out, _ = run(capsys, "verify", other)
    assert (code, "intact" in out) == (0, True), out
    code, _, err = run(capsys, "convert", other, tmp_path / "state.pt", "--to", "torch", "--allow-pickles")
    assert code == 0, err
    loaded, saved = torch.load(tmp_path / "state.pt", weights_only=False)["w"], state_of(20)["w"]
    assert isinstance(saved, torch.Tensor)
    assert torch.equal(loaded, saved)


def test_a_shard_that_is_on_another_host_makes_it_partial_and_not_damaged(base: Path, capsys: Capture) -> None:
    folder = left_by_a_killed_job(base, 20)
    shard_of(folder).unlink()
    (one,) = lines_of(capsys, "ls", base)
    assert (one["complete"], one["damage"]) == (False, None)
    assert one["partial"] == "only the shards of rank(s) none of 1 are here"
    assert run(capsys, "verify", base)[0] == 0
    (document,) = lines_of(capsys, "show", base, "--tensors", "--values")
    assert {row["name"] for row in document["tensors"]} == {"w", "opt.m"}
    code, _, err = run(capsys, "convert", base, base / "out", "--to", "torch")
    assert code == 2
    assert "where all of its shards are" in err


def test_convert_of_one_of_its_shards_names_the_folder(base: Path, tmp_path: Path, capsys: Capture) -> None:
    shard = shard_of(left_by_a_killed_job(base, 20))
    code, _, err = run(capsys, "convert", shard, tmp_path / "out", "--to", "torch")
    assert code == 2
    assert str(shard.parent) in err
    assert not (tmp_path / "out").exists(), "an empty state"


def test_convert_takes_a_path_from_where_it_is_called(
    base: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_by_a_killed_job(base, 20)
    monkeypatch.chdir(base.parent)
    assert run(capsys, "convert", base.name, tmp_path / "out", "--to", "torch")[0] == 0
    expected: Any = state_of(20)
    assert torch.equal(torch.load(tmp_path / "out", weights_only=True)["w"], expected["w"])


@pytest.mark.parametrize("to", ["torch", "shard"])
def test_convert_gives_the_state_that_was_saved(base: Path, tmp_path: Path, capsys: Capture, to: str) -> None:
    left_by_a_killed_job(base, 20)
    target = tmp_path / "out"
    assert run(capsys, "convert", base, target, "--to", to)[0] == 0
    if to == "shard":
        assert run(capsys, "convert", target, tmp_path / "again", "--to", "torch")[0] == 0
        target = tmp_path / "again"
    state = torch.load(target, weights_only=True)
    expected: Any = state_of(20)
    assert torch.equal(state["w"], expected["w"])
    assert state["opt"]["lr"] == 0.5
    assert torch.equal(state["opt"]["m"], expected["opt"]["m"])


def test_verify_names_a_damaged_commit(base: Path, capsys: Capture) -> None:
    commit = save_of(left_by_a_killed_job(base, 20)) / "shard-00001-of-00002.shard"
    flip(commit, 100)
    code, out, _ = run(capsys, "verify", base)
    assert (code, str(commit) in out) == (1, True)


def test_verify_names_an_attached_file_that_was_changed_or_is_missing(base: Path, capsys: Capture) -> None:
    attached = left_by_a_killed_job(base, 20) / "common.pt"
    assert run(capsys, "verify", base)[0] == 0
    flip(attached, 3)
    for _ in range(2):
        code, out, _ = run(capsys, "verify", base)
        assert (code, str(attached) in out) == (1, True)
        attached.unlink(missing_ok=True)


def test_the_container_itself_may_be_given_to_be_pruned(base: Path, capsys: Capture) -> None:
    left_by_a_killed_job(base, 20)
    code, out, _ = run(capsys, "prune", "--dead", base, "--yes")
    assert (code, f"{base}: removed" in out, base.exists()) == (0, True, False)
