"""`torchelastic checkpoint prune --dead`: what dead jobs have left in memory is listed, asked for, and removed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.process.command_checkpoints import Capture, run
from tests.process.memory_jobs import dead_job, living_job, tmpfs_folder
from torchelastic.checkpoint.command.prune_dead import prune_dead
from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.store.host_memory.dead_jobs import DeadJob, find_dead, remove_dead


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    with tmpfs_folder() as folder:
        yield folder


def prune(root: Path, **settings: Any) -> int:
    given: dict[str, Any] = {"dry_run": False, "yes": False, "as_json": False, "now_s": 0.0, **settings}
    return prune_dead(root, **given)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_the_dead_are_listed_and_removed_and_the_living_are_not(root: Path, capsys: Capture) -> None:
    dead_job(root / "7", "job7", size_bytes=2**20)
    dead_job(root / "8")
    with living_job(root / "9", "job9"):
        code, out, _ = run(capsys, "prune", "--dead", root, "--yes")
        assert names(root) == ["9"]
        assert list((root / "9").iterdir()) != []
    assert code == 0
    rows = [line.split() for line in out.splitlines()]
    assert rows[0] == ["CONTAINER", "JOB", "SIZE", "UNCHANGED", "FOR"]
    assert rows[1][:4] == [str(root / "7"), "job7", "2.01", "MiB"]
    assert rows[2][:2] == [str(root / "8"), "-"]
    assert [row[-1] for row in rows[3:5]] == ["removed", "removed"]
    assert rows[5][0].startswith("2.0")
    assert rows[5][1:] == ["MiB", "freed"]


def test_without_a_terminal_and_without_yes_nothing_is_removed(root: Path, capsys: Capture) -> None:
    dead_job(root / "7")
    code, out, err = run(capsys, "prune", "--dead", root)
    assert (code, names(root)) == (2, ["7"])
    assert str(root / "7") in out
    assert "--yes" in err
    assert "--older-than" in err
    assert run(capsys, "prune", "--dead", root, "--json")[:2] == (2, "")


@pytest.mark.parametrize(("answer", "left"), [("y", []), ("YES", []), ("n", ["7"]), ("", ["7"]), (None, ["7"])])
def test_on_a_terminal_it_asks(
    root: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, answer: str | None, left: list[str]
) -> None:
    dead_job(root / "7", size_bytes=2**20)
    questions: list[str] = []

    def reply(question: str) -> str:
        questions.append(question)
        if answer is None:
            raise EOFError
        return answer

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", reply)
    code, out, _ = run(capsys, "prune", "--dead", root)
    assert (code, names(root)) == (0, left)
    assert ("nothing is removed" in out) == bool(left)
    assert len(questions) == 1
    assert "remove 1 of them (2.01 MiB)?" in questions[0]


def test_what_was_changed_lately_stays_for_a_job_that_comes_back(root: Path, capsys: Capture) -> None:
    dead_job(root / "7")
    (dead,) = find_dead(root)
    assert prune(root, yes=True, older_than_s=60.0, now_s=dead.changed_s + 59.0) == 0
    assert f"{root / '7'}: kept" in capsys.readouterr().out
    assert names(root) == ["7"]
    assert prune(root, yes=True, older_than_s=60.0, now_s=dead.changed_s + 60.0) == 0
    assert names(root) == []


def test_programs_get_a_line_per_container(root: Path, capsys: Capture) -> None:
    dead_job(root / "7", "job7", size_bytes=2**20)
    dead_job(root / "8")
    (_, young) = find_dead(root)
    prune(root, dry_run=True, as_json=True, now_s=young.changed_s + 5.0)
    first, second = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (first["path"], first["run_id"], first["state"]) == (str(root / "7"), "job7", "would be removed")
    assert first["size_bytes"] >= 2**20
    assert second["run_id"] is None
    assert second["age_s"] == pytest.approx(5.0)
    prune(root, yes=True, as_json=True, older_than_s=1e9, now_s=young.changed_s)
    assert [json.loads(line)["state"] for line in capsys.readouterr().out.splitlines()] == ["kept", "kept"]


@pytest.mark.long
def test_a_job_that_comes_back_before_the_answer_keeps_its_container(root: Path, capsys: Capture) -> None:
    dead_job(root / "7", "job7")
    with living_job(root / "8", "job8") as process:
        process.kill()
        process.wait()

    back: list[Any] = []

    def ask(_: str) -> bool:
        back.append(living_job(root / "7", "job7"))
        back[0].__enter__()
        return True

    try:
        assert prune(root, ask=ask) == 0
    finally:
        back[0].__exit__(None, None, None)
    out = capsys.readouterr().out
    assert f"{root / '7'}: in use again" in out
    assert f"{root / '8'}: removed" in out
    assert names(root) == ["7"]


def test_what_cannot_be_removed_is_named_and_the_others_go(
    root: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead_job(root / "7")
    dead_job(root / "8")

    def refuse(dead: DeadJob) -> bool:
        if dead.base.name == "7":
            raise CheckpointError(f"could not remove {dead.base}")
        return remove_dead(dead)

    monkeypatch.setattr("torchelastic.checkpoint.command.prune_dead.remove_dead", refuse)
    code, out, err = run(capsys, "prune", "--dead", root, "--yes")
    assert (code, names(root)) == (2, ["7"])
    assert f"{root / '7'}: not removed" in out
    assert f"could not remove {root / '7'}" in err


def test_the_root_is_where_this_host_keeps_checkpoints_in_memory(
    root: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_MEMORY_ROOT", str(root))
    dead_job(root / "torchelastic-4711" / "7")
    code, out, _ = run(capsys, "prune", "--dead", "--yes")
    assert code == 0
    assert str(root / "torchelastic-4711" / "7") in out
    assert names(root / "torchelastic-4711") == []


def test_words_that_make_no_sense_together_remove_nothing(root: Path, capsys: Capture) -> None:
    dead_job(root / "7")
    cases: list[tuple[list[object], str]] = [
        (["--dead", root, "--keep-last", 1], "without --keep"),
        (["--dead", root, "--yes", "--older-than", -1], "0 or more"),
        (["--dead", root, "--yes", "--older-than", "nan"], "0 or more"),
        (["--dead", root / "missing", "--yes"], "is no folder"),
        (["--dead", root, "--best-count", 2, "--yes"], "without --keep"),
        ([root, "--keep-last", 1, "--best-count", 3], "go with --keep-best"),
        ([root, "--keep-last", 1, "--best-mode", "max"], "go with --keep-best"),
        ([root, "--keep-last", 1, "--yes"], "go with --dead"),
        ([root, "--keep-last", 1, "--older-than", 5], "go with --dead"),
        ([], "say which folder"),
    ]
    for words, expected in cases:
        code, out, err = run(capsys, "prune", *words)
        assert (code, out) == (2, "")
        assert expected in err
        assert err.count("\n") == 1
    assert names(root) == ["7"]


def test_it_needs_no_torch(root: Path) -> None:
    dead_job(root / "7")
    code = (
        "import sys\nfrom torchelastic.launch.main import main\n"
        "try: main(sys.argv[1:])\nfinally: print('torch' in sys.modules, file=sys.stderr)"
    )
    words = ["checkpoint", "prune", "--dead", str(root), "--yes"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60)
    assert done.stderr == "False\n"
    assert f"{root / '7'}: removed" in done.stdout
    assert names(root) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a container away")
def test_the_containers_of_other_users_are_left_alone_even_by_root(root: Path, capsys: Capture) -> None:
    base = dead_job(root / "7")
    os.chown(base / ".job", 4711, 4711)
    code, out, _ = run(capsys, "prune", "--dead", root, "--yes")
    assert (code, names(root)) == (0, ["7"])
    assert "has left anything" in out
