"""`torchelastic checkpoint ls | show`, and how the launcher starts it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.process.command_checkpoints import (
    Capture,
    Harmful,
    add_checkpoint,
    add_local,
    add_streams,
    flip,
    lines_of,
    run,
)
from torchelastic.checkpoint import FileSystemCheckpointManager
from torchelastic.checkpoint.format.shard_writing import write_shard
from torchelastic.checkpoint.format.tree import Flat
from torchelastic.checkpoint.local import LocalCheckpointManager
from torchelastic.checkpoint.shards import save_tree
from torchelastic.checkpoint.store import list_checkpoints

# --- ls ---------------------------------------------------------------------------------------------------------------


def test_a_folder_of_checkpoints_is_listed_newest_first(tmp_path: Path, capsys: Capture) -> None:
    for step in (9, 100):
        add_checkpoint(tmp_path, step, {"loss": 0.5})
    (tmp_path / ".tmp-step-000000200.e1.r2.g200").mkdir()
    code, out, err = run(capsys, "ls", tmp_path)
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines()]
    assert rows[0] == ["NAME", "STEP", "RANKS", "SIZE", "AGE", "KIND", "STATE", "METRICS"]
    assert [row[:3] for row in rows[1:]] == [
        ["step-000000100.e1.r2.g100", "100", "2"],
        ["step-000000009.e1.r2.g9", "9", "2"],
    ]
    assert all(row[-4:] == ["shards", "complete", "loss", "0.5"] for row in rows[1:])
    newest = lines_of(capsys, "ls", tmp_path)[0]
    assert (newest["step"], newest["world_size"], newest["saved_s"], newest["complete"]) == (100, 2, 1100.0, True)
    assert newest["metrics"] == {"loss": 0.5}
    assert newest["size_bytes"] == sum(Path(file).stat().st_size for file in newest["files"])


def test_a_damaged_one_is_listed_with_the_reason(tmp_path: Path, capsys: Capture) -> None:
    add_checkpoint(tmp_path, 1)
    broken = add_checkpoint(tmp_path, 2)
    shard = broken / "shard-00001-of-00002.shard"
    shard.write_bytes(shard.read_bytes()[:-1])
    listed = lines_of(capsys, "ls", tmp_path)
    assert [one["complete"] for one in listed] == [False, True]
    assert "shard-00001-of-00002.shard" in listed[0]["damage"]
    assert "damaged: " in run(capsys, "ls", tmp_path)[1]


def test_one_checkpoint_is_told_apart_by_what_is_in_it(tmp_path: Path, capsys: Capture) -> None:
    folder = add_checkpoint(tmp_path / "root", 3)
    renamed = folder.rename(tmp_path / "best")
    save_tree(tmp_path / "noname", {"a": torch.ones(2)}, meta={"iteration": 5})
    add_streams(tmp_path / "streams", 1)
    local = add_local(tmp_path / "local", 4)
    kinds = {
        renamed: ("shards", "step", 3),
        tmp_path / "noname": ("shard", "step", 5),
        tmp_path / "streams": ("streams", "id", 0),
        tmp_path / "streams" / "0": ("streams", "id", 0),
        tmp_path / "local": ("shards", "step", 40),
        tmp_path / "local" / "session": ("shards", "step", 40),
        local[0]: ("shard", "step", 40),
    }
    for path, (kind, title, number) in kinds.items():
        (one,) = lines_of(capsys, "ls", path)
        assert (one["kind"], one[title], one["complete"]) == (kind, number, True), path


def test_looking_changes_nothing(tmp_path: Path, capsys: Capture) -> None:
    add_streams(tmp_path, 1)
    add_checkpoint(tmp_path, 5)
    (tmp_path / ".tmp-1-0123456789abcdef-0123456789ab-host").mkdir()
    before = sorted(tmp_path.rglob("*"))
    for verb in ("ls", "show", "verify"):
        assert run(capsys, verb, tmp_path)[0] == 0
    assert sorted(tmp_path.rglob("*")) == before


def test_a_missing_shard_may_be_on_another_host_but_verify_asks_for_it(tmp_path: Path, capsys: Capture) -> None:
    add_checkpoint(tmp_path, 1)
    (add_checkpoint(tmp_path, 2) / "shard-00000-of-00002.shard").unlink()
    newest, older = lines_of(capsys, "ls", tmp_path)
    assert (newest["complete"], newest["damage"], older["complete"]) == (False, None, True)
    assert newest["partial"] == "only the shards of rank(s) 1 of 2 are here"
    assert lines_of(capsys, "show", tmp_path)[0]["step"] == 1
    (alone,) = lines_of(capsys, "show", newest["path"], "--tensors")
    assert alone["tensors"][0]["shards"] == ["shard-00001-of-00002.shard[2:4, 0:3]"]
    code, out, _ = run(capsys, "verify", tmp_path)
    assert code == 1
    assert "the shard of rank 0, is missing" in out
    assert run(capsys, "prune", tmp_path, "--keep-last", 1)[0] == 0
    assert len(list_checkpoints(tmp_path)) == 2
    assert run(capsys, "convert", newest["path"], tmp_path / "t", "--to", "shard")[0] == 2


def test_a_save_of_which_some_ranks_are_elsewhere_is_partial_and_not_damaged(tmp_path: Path, capsys: Capture) -> None:
    add_local(tmp_path, 1, ranks=4, holders=2)
    (one,) = lines_of(capsys, "ls", tmp_path)
    assert (one["complete"], one["damage"]) == (False, None)
    assert one["partial"] == "only the shards of rank(s) 0, 1 of 4 are here"
    code, _, err = run(capsys, "prune", tmp_path, "--keep-last", 1)
    assert code == 2
    assert "nothing is removed" in err
    code, out, _ = run(capsys, "verify", tmp_path)
    assert (code, out.count("intact"), one["partial"] in out) == (0, 1, True), "each host has a folder of its own"
    file = Path(one["files"][1])
    flip(file, file.stat().st_size - 1)
    code, out, _ = run(capsys, "verify", tmp_path)
    assert code == 1
    assert str(file) in out


def test_a_local_save_that_was_killed_before_all_ranks_had_written_it_is_not_finished(
    tmp_path: Path, capsys: Capture
) -> None:
    (shard,) = add_local(tmp_path, 1, ranks=2, holders=1)
    shard.with_name("manifest.json").unlink()
    for verb, code in (("ls", 2), ("verify", 1)):
        ended, out, _ = run(capsys, verb, tmp_path)
        assert ended == code
        assert "not finished: it has no manifest" in out
        assert "damaged" not in out, "the others may still be writing"
    assert run(capsys, "convert", shard.parent, tmp_path / "t", "--to", "torch")[0] == 2
    assert LocalCheckpointManager(tmp_path, "session").find_latest() == -1


# --- show -------------------------------------------------------------------------------------------------------------


def test_show_tells_run_token_shards_and_tensors(tmp_path: Path, capsys: Capture) -> None:
    add_checkpoint(tmp_path, 1)
    add_checkpoint(tmp_path, 2)
    _, out, _ = run(capsys, "show", tmp_path, "--tensors", "--values")
    said = {line.split("  ")[0].strip(): line.split("  ")[-1].strip() for line in out.splitlines()}
    assert said["run"] == "job7"
    assert said["step"] == "2"
    assert said["world size"] == "2"
    assert said["fencing token"] == "epoch 1, round 2"
    assert said["tensors"] == "1, 48 B (1 float32)"
    assert "shard-00001-of-00002.shard" in said
    (row,) = [line for line in out.splitlines() if line.startswith("w ")]
    assert row.split(None, 4)[:4] == ["w", "float32", "[4,", "3]"]
    assert "shard-00000-of-00002.shard[0:2, 0:3] shard-00001-of-00002.shard[2:4, 0:3]" in row
    assert "lr: 0.1\nrng: 100 values\n" in out


def test_show_runs_nothing_and_sends_no_commands_to_the_terminal(tmp_path: Path, capsys: Capture) -> None:
    state = {"bad": Harmful(str(tmp_path / "ran")), "text": "\x1b]0;owned\x07", "\x1b[2J": torch.ones(1), (1, "k"): 1}
    save_tree(tmp_path / "s", state, allow_pickles=True)
    code, out, _ = run(capsys, "show", tmp_path / "s", "--values", "--tensors")
    assert code == 0
    assert "\x1b" not in out
    assert "not opened" in out
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("structure", [{}, {"leaf": 1}, {"dict": [[1]]}, {"bytes": 7}, {"numpy": {}}, [{"leaf": {}}]])
def test_show_of_a_structure_that_makes_no_sense_is_one_line(
    tmp_path: Path, capsys: Capture, structure: object
) -> None:
    write_shard(tmp_path / "s", Flat(structure, ()), {})
    code, out, err = run(capsys, "show", tmp_path / "s", "--values")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert str(tmp_path / "s") in err


def test_show_of_a_stream_lists_its_tensors(tmp_path: Path, capsys: Capture) -> None:
    add_streams(tmp_path, 2)
    (document,) = lines_of(capsys, "show", tmp_path, "--tensors", "--values")
    assert document["id"] == 1
    assert [row["name"] for row in document["tensors"]] == ["w"]
    assert document["values"]["n"] == 1


def test_a_stream_of_the_users_own_making_is_listed_and_not_opened(tmp_path: Path, capsys: Capture) -> None:
    checkpoint = FileSystemCheckpointManager(tmp_path).create_checkpoint()
    with checkpoint.open_output_stream("default") as stream:
        stream.write(b"text of mine")
    checkpoint.commit()
    assert lines_of(capsys, "ls", tmp_path)[0]["complete"]
    assert run(capsys, "verify", tmp_path)[0] == 0
    code, _, err = run(capsys, "show", tmp_path)
    assert code == 2
    assert "State.save of your own" in err


# --- the launcher's command line --------------------------------------------------------------------------------------


def test_the_launcher_knows_the_command_and_loads_nothing_for_it() -> None:
    def launched(*words: str) -> subprocess.CompletedProcess[str]:
        code = (
            "import sys\nfrom torchelastic.launch.main import main\n"
            "try: main(sys.argv[1:])\nfinally: print('torch' in sys.modules, file=sys.stderr)"
        )
        return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60)

    assert "checkpoint" in launched("--help").stdout
    helped = launched("checkpoint", "--help")
    assert "torchelastic checkpoint prune" in helped.stdout
    assert helped.stderr.splitlines()[-1] == "False"


# --- words ------------------------------------------------------------------------------------------------------------
