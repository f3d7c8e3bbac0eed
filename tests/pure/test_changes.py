"""Which tests wait for CI: none that is about something that has changed, and none where nobody knows what has."""

from __future__ import annotations

import doctest
import os
import subprocess
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from tests import changes
from tests.changes import BELONGS, changed_paths, waits

ROOT = Path(__file__).parents[2]
FILES = [path.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/*/test_*.py")]
WAITING = [file for file in FILES if waits(file, [])]


def git(folder: Path, *words: str) -> None:
    who = {"GIT_AUTHOR_NAME": "a", "GIT_COMMITTER_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_EMAIL": "a@b"}
    subprocess.run(["git", "-C", str(folder), *words], check=True, capture_output=True, env={**os.environ, **who})


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with two commits."""
    git(tmp_path, "init", "--quiet")
    for name in ("first", "second"):
        (tmp_path / name).write_text(name)
        git(tmp_path, "add", ".")
        git(tmp_path, "commit", "--quiet", "-m", name)
    return tmp_path


def test_the_examples_are_true() -> None:
    done = doctest.testmod(changes)
    assert done.attempted
    assert not done.failed


def test_each_pattern_means_something_that_is_there() -> None:
    paths = [path.relative_to(ROOT).as_posix() for room in _ROOMS for path in ROOT.glob(room) if path.is_file()]
    for tests, about in BELONGS.items():
        assert [file for file in FILES if fnmatchcase(file, tests)], tests
        for pattern in about:
            assert [path for path in paths if fnmatchcase(path, pattern)], f"{tests}: {pattern}"


_ROOMS = ("*", "torchelastic/**/*", "tests/*/*", "docs/**/*", "examples/**/*", "deploy/**/*", "benchmarks/**/*")


def test_a_changed_file_of_tests_does_not_wait() -> None:
    assert WAITING
    for file in WAITING:
        assert not waits(file, ["README.txt", file])


def test_where_nobody_knows_what_has_changed_nothing_waits() -> None:
    assert not [file for file in FILES if waits(file, None)]


def test_what_an_adapter_or_an_example_is_made_of_makes_its_tests_run() -> None:
    assert waits("tests/process/test_lightning_memory.py", ["examples/nanogpt/train.py"])
    assert not waits("tests/process/test_lightning_memory.py", ["torchelastic/adapters/lightning/strategy.py"])
    assert not waits("tests/process/test_nanogpt.py", ["examples/nanogpt/train.py"])


def test_the_last_commit_and_what_came_after_it_has_changed(checkout: Path) -> None:
    assert changed_paths(checkout) == ["second"]
    (checkout / "first").write_text("edited")
    (checkout / "new").touch()
    assert changed_paths(checkout) == ["first", "new", "second"]
    (checkout / ".gitignore").write_text("new\n")
    (checkout / "first").unlink()
    assert changed_paths(checkout) == [".gitignore", "first", "second"]


def test_all_commits_that_the_upstream_does_not_have_have_changed(checkout: Path, tmp_path: Path) -> None:
    git(checkout, "branch", "upstream")
    git(checkout, "branch", "--set-upstream-to=upstream")
    assert changed_paths(checkout) == ["second"], "all is there: the last commit"
    for name in ("third", "fourth"):
        (checkout / name).touch()
        git(checkout, "add", ".")
        git(checkout, "commit", "--quiet", "-m", name)
    assert changed_paths(checkout) == ["fourth", "third"]


def test_without_a_repository_or_with_one_commit_nobody_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    assert changed_paths(outside) is None
    git(outside, "init", "--quiet")
    (outside / "first").touch()
    git(outside, "add", ".")
    git(outside, "commit", "--quiet", "-m", "first")
    assert changed_paths(outside) is None
    monkeypatch.setenv("PATH", "")
    assert changed_paths(outside) is None
