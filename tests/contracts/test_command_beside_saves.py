"""Contract: `torchelastic checkpoint` beside a run that saves a checkpoint and removes the one before, at any moment.

The run moves on at the n-th look of the command at the disk, for every n, and it keeps one checkpoint alone; or its
first save is under way, and all of its files appear then, the manifest last. Or the command looks when the run is at
its n-th change.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.contracts.facades import FACADES, KINDS
from tests.contracts.faults import CHANGES, in_child, numbers, under_profile, warm_up
from torchelastic.checkpoint.command.main import main
from torchelastic.checkpoint.store.manifest import MANIFEST_NAME

LOOKS = {"stat", "lstat", "open", "listdir", "scandir"}
COMMANDS = {"show": ["show", "--tensors", "--values"], "prune": ["prune", "--keep-last", "1"]}
#: Every command meets several kinds, and every kind several commands: one way of looking at a folder serves them all.
PAIRS = [
    *(("streams", "ls"), ("streams", "verify"), ("tiered", "show"), ("tiered", "prune"), ("training", "convert")),
    *(("local", "verify"), ("local", "convert"), ("memory", "show"), ("memory", "verify"), ("memory tier", "ls")),
    *(("memory tier", "prune"), ("durable", "ls"), ("durable", "prune")),
]


def at_call(number: int, of: set[str], happens: Callable[[], Any], action: Callable[[], Any]) -> list[Any]:
    """What the action returns, and what has happened at its call of that number; None: it has not so many."""
    counted, happened = itertools.count(1), []

    def profile(_: FrameType, event: str, function: Any) -> None:
        if event == "c_call" and function.__name__ in of and next(counted) == number:
            sys.setprofile(None)
            happened.append(happens())

    return [under_profile(profile, action), happened or None]


def said(words: list[str], folder: Path) -> list[Any]:
    """The exit code of a command, and all that it prints."""
    out, words = io.StringIO(), [words[0], str(folder), *words[1:]]
    if words[0] == "convert":
        words += [str(folder.with_name("converted")), "--to", "shard"]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            code = main(words)
        except Exception:
            return [None, traceback.format_exc()]
    return [code, out.getvalue()]


def sweep(words: list[str], base: Path, happens: Callable[[Path], None]) -> Iterator[tuple[int | None, str]]:
    """What a command says beside a run that does something at one of its looks, for each of them."""
    folder = base.with_name("copy")
    for number in numbers():
        shutil.rmtree(folder, ignore_errors=True)
        folder.with_name("converted").unlink(missing_ok=True)
        shutil.copytree(base, folder, symlinks=True)
        ended = in_child(
            lambda number=number: at_call(number, LOOKS, lambda: happens(folder), lambda: said(words, folder))  # type: ignore[misc]
        )
        (code, text), happened = ended.value
        yield code, text
        if happened is None:
            return


def appear(files: Path, folder: Path) -> None:
    """One after the other, in the order in which they are published."""
    for file in sorted(files.iterdir(), key=lambda file: file.name == MANIFEST_NAME):
        file.rename(folder / file.name)


@pytest.mark.long
@pytest.mark.parametrize(("name", "verb"), PAIRS)
def test_a_run_that_moves_on_at_any_moment_is_never_called_damaged(name: str, verb: str, tmp_path: Path) -> None:
    facade, base, words = FACADES[name], tmp_path / "base", COMMANDS.get(verb, [verb])
    warm_up([lambda: facade.save(tmp_path / "trial", 1), lambda: said(words, tmp_path / "trial")])
    in_child(lambda: facade.save(base, 1))
    told = list(sweep(words, base, lambda folder: facade.save(folder, 2)))
    assert len(told) > 5
    assert not [one for one in told if one[0] != 0 or "damaged" in one[1] or "not finished" in one[1]]


@pytest.mark.long
@pytest.mark.parametrize(("name", "verb"), [pytest.param("local", "verify", marks=pytest.mark.long), ("memory", "ls")])
def test_a_save_whose_files_appear_at_any_moment_is_never_called_damaged(name: str, verb: str, tmp_path: Path) -> None:
    facade, base = KINDS[name], tmp_path / "base"
    warm_up([lambda: facade.save(tmp_path / "trial", 1), lambda: said([verb], tmp_path / "trial")])
    in_child(lambda: facade.save(base, 1))
    (manifest,) = base.rglob(MANIFEST_NAME)
    whole, place = tmp_path / "whole", manifest.parent.relative_to(base)
    manifest.parent.rename(whole)
    (base / place).mkdir()

    def finish(folder: Path) -> None:
        appear(Path(shutil.copytree(whole, folder.with_name("files"))), folder / place)
        folder.with_name("files").rmdir()

    told = list(sweep([verb], base, finish))
    assert {code != 0 for code, _ in told} == {False, True}, "it is there, or not yet"
    assert not [text for _, text in told if "damaged" in text or "Traceback" in text]


@pytest.mark.long
@pytest.mark.parametrize("name", ["local", "memory tier", "private disk", "durable"])
def test_at_any_moment_of_a_save_there_is_one_that_is_whole_and_none_is_damaged(name: str, tmp_path: Path) -> None:
    """Also while the one before is removed."""
    facade, base = FACADES[name], tmp_path / "base"
    warm_up([lambda: facade.save(tmp_path / "trial", 1), lambda: said(["verify"], tmp_path / "trial")])
    in_child(lambda: facade.save(base, 1))
    told, folder = [], tmp_path / "copy"
    for number in numbers():
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(base, folder, symlinks=True)
        ended = in_child(
            lambda number=number: at_call(  # type: ignore[misc]
                number,
                CHANGES,
                lambda: [said([verb], folder) for verb in ("ls", "verify")],
                lambda: facade.save(folder, 2),
            )
        )
        _, happened = ended.value
        if happened is None:
            break
        told += happened[0]
    assert len(told) > 8
    assert not [one for one in told if one[0] != 0 or "damaged" in one[1]]
