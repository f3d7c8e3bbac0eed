"""What docstrings, comments and pages say of files and modules of ours is there: a rename is followed everywhere."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import PurePosixPath

import pytest

from tests.pure.public_names import exported
from tests.pure.test_rooms import PACKAGE
from torchelastic.moved_modules import FRONT_DOORS, MOVED

ROOT = PACKAGE.parent
#: Where files of ours are named; CHANGELOG.md tells of what was.
FOLDERS = ("torchelastic", "tests", "benchmarks", "examples", "deploy", "docs")

_FILE = re.compile(r"`((?:[\w.-]*/)*[\w-]+\.py)`")
_MODULE = re.compile(r"`(?:torchelastic\.)?([a-z_][a-z_0-9]*(?:\.[a-z_0-9]+)+)(?:\.[A-Z]\w*)?`")

#: Files that are named and are not ours, or not in this tree: (file, who names it), each with its reason.
ELSEWHERE = {
    ("/srv/job/train.py", "docs/kubernetes.md"): "in the image that the page builds",
    ("/srv/job/train.py", "tests/cluster/pods.py"): "in that image",
    ("train.py", "tests/cluster/conftest.py"): "written by the test",
    ("check.py", "docs/silent-corruption.md"): "written by the reader",
    ("tests/check_weights_equality.py", "docs/migrating/pyrecover.md"): "of the other system",
    ("aws/petctl.py", "docs/migrating/torchelastic-0.1.md"): "of the other system",
}


def texts() -> Iterator[tuple[PurePosixPath, str]]:
    """Every file that may name others, and its text."""
    paths = [path for folder in FOLDERS for kind in ("*.py", "*.md") for path in ROOT.joinpath(folder).rglob(kind)]
    for path in sorted([*paths, *ROOT.glob("*.md")]):
        if path.name != "CHANGELOG.md":
            yield PurePosixPath(path.relative_to(ROOT).as_posix()), path.read_text()


def files() -> frozenset[str]:
    return frozenset(str(path) for path, _ in texts() if path.suffix == ".py")


def is_there(named: str, by: PurePosixPath, known: frozenset[str]) -> bool:
    """Whether a file of that name is meant: in the package, beside the one that names it, or from a room around both.

    A file of the same name in another room is no answer. Elsewhere, any file whose path ends so is.
    """
    if by.parts[0] != "torchelastic":
        return any(one == named or one.endswith(f"/{named}") for one in known)
    return any(str(folder / named) in known for folder in by.parents)


def test_a_file_that_is_named_in_backticks_is_there() -> None:
    known = files()
    assert is_there("store/restore_plan.py", PurePosixPath("torchelastic/checkpoint/engine/restorer.py"), known)
    assert not is_there("restore_plan.py", PurePosixPath("torchelastic/checkpoint/engine/restorer.py"), known)
    missing = {
        (match[1], str(by))
        for by, text in texts()
        for match in _FILE.finditer(text)
        if not is_there(match[1], by, known)
    }
    assert missing - ELSEWHERE.keys() == set()
    stale = {one for one in ELSEWHERE if f"`{one[0]}`" not in ROOT.joinpath(one[1]).read_text()}
    assert stale == set(), "named no more"


@functools.cache
def modules_of(known: frozenset[str]) -> tuple[frozenset[str], frozenset[str]]:
    """The package's modules by their names without `torchelastic.`: all, and those that hold more than modules."""
    paths = [PurePosixPath(one).relative_to("torchelastic") for one in known if one.startswith("torchelastic/")]
    names = {".".join(path.with_suffix("").parts) for path in paths}
    plain = {name for name in names if not name.endswith("__init__") and name not in FRONT_DOORS}
    return frozenset(name.removesuffix(".__init__") for name in names), frozenset(plain)


def moved_and_named(text: str, known: frozenset[str]) -> Iterator[str]:
    """The modules that a text names by where they were; one may be named from the room that both are in."""
    modules, plain = modules_of(known)
    for match in _MODULE.finditer(text):
        name, parent = match[1], match[1].rpartition(".")[0]
        is_old = any(name == one or name.startswith(f"{one}.") for one in MOVED)
        is_module = any(f".{one}".endswith(f".{name}") for one in modules)
        is_door = parent in FRONT_DOORS and name.removeprefix(f"{parent}.") in exported(f"torchelastic.{parent}")
        if is_old and not (is_module or is_door or any(f".{one}".endswith(f".{parent}") for one in plain)):
            yield name


@pytest.mark.parametrize("folder", ["torchelastic", "benchmarks", "examples"])
def test_a_module_that_is_named_in_backticks_is_named_by_where_it_is(folder: str) -> None:
    known = files()
    stale = ["p2p.peers", "checkpoint.memory.room", "checkpoint.memory.buffer_io", "ledger.page.Page"]
    right = ["p2p.group_peers", "ledger.meter", "observe.ledger.meter.this_worker", "checkpoint.shards.read_into"]
    assert list(moved_and_named(" ".join(f"`{name}`" for name in [*stale, *right]), known)) == [
        *("p2p.peers", "checkpoint.memory.room", "checkpoint.memory.buffer_io", "ledger.page"),
    ]
    found = {
        (name, str(by))
        for by, text in texts()
        if by.parts[0] == folder and by.name != "moved_modules.py"
        for name in moved_and_named(text, known)
    }
    assert found == set()
