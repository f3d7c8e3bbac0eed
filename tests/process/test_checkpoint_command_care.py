"""`torchelastic checkpoint verify | prune`, and what each command says of bad input."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.process.command_checkpoints import (
    Capture,
    add_checkpoint,
    add_local,
    add_streams,
    flip,
    lines_of,
    names,
    run,
)
from tests.process.tier_saves import staging_folder
from torchelastic.checkpoint.command.main import main
from torchelastic.checkpoint.shards import save_tree
from torchelastic.checkpoint.store import SaveId

# --- verify -----------------------------------------------------------------------------------------------------------


def test_verify_names_the_shard_and_the_tensor(tmp_path: Path, capsys: Capture) -> None:
    add_checkpoint(tmp_path, 1)
    folder = add_checkpoint(tmp_path, 2)
    shards = [folder / f"shard-0000{rank}-of-00002.shard" for rank in range(2)]
    flip(shards[0], 100)  # in its header
    flip(shards[1], shards[1].stat().st_size - 1)
    code, out, _ = run(capsys, "verify", tmp_path)
    assert code == 1
    assert f"the shard {shards[0]} cannot be used: its header is damaged" in out
    assert f"{shards[1]}: tensor 'w' is damaged" in out
    assert "step-000000001.e1.r2.g1: intact" in out
    assert run(capsys, "ls", tmp_path)[0] == 0, "names and sizes alone do not tell"


@pytest.mark.parametrize("what", ["a byte of a stream", "a missing stream", "a byte of the manifest"])
def test_verify_of_streams_reads_all_of_them(tmp_path: Path, capsys: Capture, what: str) -> None:
    add_streams(tmp_path, 1)
    if what == "a missing stream":
        (tmp_path / "0" / "metrics").unlink()
    else:
        flip(tmp_path / "0" / ("metrics" if "of a stream" in what else "manifest.json"), 50)
    (tmp_path / "0" / "note").write_text("of somebody else")
    code, out, _ = run(capsys, "verify", tmp_path)
    assert code == 1
    assert ("metrics" in out) or ("manifest" in out)


# --- prune ------------------------------------------------------------------------------------------------------------


def test_prune_keeps_by_rules_and_says_why(tmp_path: Path, capsys: Capture) -> None:
    for step, loss in ((100, 0.1), (150, 0.9), (200, 0.8), (250, 0.7), (300, 0.6)):
        add_checkpoint(tmp_path, step, {"loss": loss})
    rules = ("--keep-last", 1, "--keep-every", 200, "--keep-best", "loss")
    before = names(tmp_path)
    code, dry, _ = run(capsys, "prune", tmp_path, *rules, "--dry-run")
    assert code == 0
    assert names(tmp_path) == before
    assert dry.count("would be removed") == 2
    _, out, _ = run(capsys, "prune", tmp_path, *rules)
    assert names(tmp_path) == [f"step-000000{step}.e1.r2.g{step}" for step in (100, 200, 300)]
    assert "step-000000100.e1.r2.g100: kept (number 1 by min loss (0.1))" in out
    assert "step-000000250.e1.r2.g250: removed (" in out
    assert not list(tmp_path.glob(".tmp-*"))
    assert [one["state"] for one in lines_of(capsys, "prune", tmp_path, *rules)] == ["kept"] * 3


def test_prune_leaves_the_newest_complete_damaged_ones_and_writers_alone(tmp_path: Path, capsys: Capture) -> None:
    for step in (1, 2, 3):
        folder = add_checkpoint(tmp_path, step)
    (folder / "manifest.json").unlink()
    staging = staging_folder(tmp_path, SaveId(1, 2, 9, 9))
    code, out, _ = run(capsys, "prune", tmp_path, "--keep-last", 1)
    assert code == 0
    assert names(tmp_path) == ["step-000000002.e1.r2.g2", "step-000000003.e1.r2.g3"]
    assert "left alone: " in out
    assert staging.is_dir()


def test_prune_removes_what_is_left_of_older_saves(tmp_path: Path, capsys: Capture) -> None:
    for step in (1, 2, 3):
        folder = add_checkpoint(tmp_path, step)
        if step < 3:
            (folder / "manifest.json").unlink()
    code, out, _ = run(capsys, "prune", tmp_path, "--keep-last", 5)
    assert code == 0
    assert names(tmp_path) == ["step-000000003.e1.r2.g3"]
    assert out.count("removed (left over: it has no manifest, and a newer one is complete)") == 2


def test_prune_of_streams_and_local_saves(tmp_path: Path, capsys: Capture) -> None:
    add_streams(tmp_path / "streams", 3)
    for generation in (1, 2, 3):
        add_local(tmp_path / "local", generation)
    for root in (tmp_path / "streams", tmp_path / "local"):
        assert run(capsys, "prune", root, "--keep-last", 2)[0] == 0
        assert len(lines_of(capsys, "ls", root)) == 2
    assert names(tmp_path / "streams") == ["1", "2"]
    assert len(list((tmp_path / "local").rglob("*.shard"))) == 4


def test_prune_that_makes_no_sense_removes_nothing(tmp_path: Path, capsys: Capture) -> None:
    for step in (1, 2):
        folder = add_checkpoint(tmp_path, step, {"loss": 1.0})
    before = names(tmp_path)
    cases: list[tuple[list[object], str]] = [
        ([tmp_path], "--keep-last"),
        ([tmp_path, "--keep-best", "los"], "(they have loss)"),
        ([folder, "--keep-last", 1], "itself"),
    ]
    for words, expected in cases:
        code, out, err = run(capsys, "prune", *words)
        assert (code, out) == (2, "")
        assert expected in err
    assert names(tmp_path) == before


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--keep-last", "0"], "--keep-last: '0' is no whole number of 1 or more"),
        (["--keep-every", "-1"], "--keep-every: '-1' is"),
        (["--keep-best", "loss", "--best-count", "1.5"], "--best-count: '1.5' is"),
        (["--keep-best", ""], "--keep-best: name a metric"),
    ],
)
def test_prune_names_the_option_whose_value_makes_no_sense(
    tmp_path: Path, capsys: Capture, words: list[str], expected: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["prune", str(tmp_path), *words])
    assert expected in capsys.readouterr().err


# --- bad input --------------------------------------------------------------------------------------------------------


def make_empty(path: Path) -> None:
    path.mkdir()


def make_foreign(path: Path) -> None:
    path.mkdir()
    (path / "readme.txt").write_text("hello")


def make_damaged(path: Path) -> None:
    for step in (1, 2):
        (add_checkpoint(path, step) / "manifest.json").unlink()


def make_torn_shard(path: Path) -> None:
    save_tree(path, {"a": torch.ones(100)})
    path.write_bytes(path.read_bytes()[:-10])


def make_torch_file(path: Path) -> None:
    torch.save({"a": 1}, path)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (None, "does not exist"),
        (make_empty, "is empty"),
        (make_foreign, "holds no checkpoint"),
        (make_damaged, "all 2 checkpoints in"),
        (make_torn_shard, "is damaged"),
        (make_torch_file, "convert"),
    ],
)
def test_bad_input_is_one_line_that_names_it(
    tmp_path: Path, capsys: Capture, make: Callable[[Path], None] | None, expected: str
) -> None:
    path = tmp_path / "given.shard"
    if make is not None:
        make(path)
    for words in (["ls"], ["show"], ["prune", "--keep-last", "1"], ["verify"]):
        code, _, err = run(capsys, words[0], path, *words[1:])
        if words == ["verify"] and make in (make_damaged, make_torn_shard):
            assert code == 1
            continue
        assert code == 2, words
        assert err.count("\n") == 1
        assert str(path) in err
        if words[0] != "prune" or make is not make_torn_shard:
            assert expected in err


@pytest.mark.parametrize(
    "words", [[], ["ls"], ["mv", "x"], ["convert", "a", "b", "--to", "zip"], ["ls", "x", "--force"]]
)
def test_wrong_words_end_with_code_2(words: list[str], capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    command = (
        " ".join(["torchelastic checkpoint", *words[:1]])
        if words[:1] in (["ls"], ["convert"])
        else "torchelastic checkpoint"
    )
    assert line.startswith(f"{command}: ")
    assert line.endswith(f"; see {command} --help")


@pytest.mark.long
def test_a_broken_pipe_is_no_traceback(tmp_path: Path) -> None:
    for step in range(1, 4):
        add_checkpoint(tmp_path, step)
    command = [sys.executable, "-m", "torchelastic.launch", "checkpoint", "show", str(tmp_path), "--values"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 128 + signal.SIGPIPE
