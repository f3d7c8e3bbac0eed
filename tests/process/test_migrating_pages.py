"""The pages about moving from elsewhere: the diffs are those of the scripts, and these run with what is there."""

from __future__ import annotations

import argparse
import ast
import pkgutil
import py_compile
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from examples.migrating.diffs import DOCS, PAGES, SCRIPTS, unified_diff, with_diff
from torchelastic.launch.command_line import command_parser
from torchelastic.launch.main import main
from torchelastic.launch.torchrun_options import COMPLETION, FLAGS, INSTEAD, MAPPED, USE_ENV, WITHOUT_EFFECT


@pytest.mark.parametrize("system", PAGES)
def test_the_diff_of_a_page_is_that_of_its_two_scripts(system: str) -> None:
    page = (DOCS / PAGES[system]).read_text()
    assert with_diff(page, unified_diff(system)) == page, "run `python -m examples.migrating.diffs`"


@pytest.mark.parametrize("folder", sorted({path.parent.name for path in SCRIPTS.glob("*/*.py")}))
def test_every_folder_of_scripts_has_a_page_that_shows_both(folder: str) -> None:
    pages = [page.read_text() for page in DOCS.glob("*.md")]
    for name in ("before", "after"):
        shown = f"+++ {folder}/after.py" if folder in PAGES else f"(../../examples/migrating/{folder}/{name}.py)"
        assert any(shown in page for page in pages), f"{folder}/{name}.py"


@pytest.mark.parametrize("blocks", ["", "```diff\n```\n```diff\n```\n"])
def test_a_page_without_one_place_for_its_diff_is_refused(blocks: str) -> None:
    with pytest.raises(ValueError, match="blocks of a diff"):
        with_diff(f"# Page\n{blocks}", "-a\n+b\n")


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*/*.py")), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_script_compiles(script: Path, tmp_path: Path) -> None:
    """All that can be said here of Horovod's; the others are run by tests/cluster/test_migrating_scripts.py."""
    assert py_compile.compile(str(script), str(tmp_path / "compiled"), doraise=True)


def test_scripts_import_of_ours_only_what_there_is() -> None:
    for script in SCRIPTS.glob("*/after.py"):
        for node in ast.walk(ast.parse(script.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("torchelastic"):
                for alias in node.names:
                    pkgutil.resolve_name(f"{node.module}.{alias.name}")  # raises an error that names it


def test_every_option_of_this_torchrun_is_understood_and_on_the_page() -> None:
    page = (DOCS / "torchrun.md").read_text()
    commands = next(action for action in command_parser()._actions if isinstance(action, argparse._SubParsersAction))
    ours = {word: action for action in commands.choices["run"]._actions for word in action.option_strings}
    theirs = [action for action in get_args_parser()._actions if action.option_strings and action.dest != "help"]
    assert len(theirs) > 20
    for action in theirs:
        for word in action.option_strings:
            assert word in ours, f"{word} is not understood"
            assert (action.nargs == 0) == (ours[word].nargs == 0), f"{word} takes a value in one of the two only"
        long = next(word for word in action.option_strings if word.startswith("--"))
        assert f"`{long}`" in page, f"{long} is not on the page"


def test_every_option_of_torchruns_that_is_understood_is_on_the_page() -> None:
    """Also those that the installed torch does not have yet, or has no more."""
    page = (DOCS / "torchrun.md").read_text()
    listed = (*FLAGS, *MAPPED, *WITHOUT_EFFECT, *INSTEAD, COMPLETION, USE_ENV)
    assert [name for name in listed if f"`--{name}`" not in page] == []


def test_the_same_words_behind_the_script_are_the_scripts_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main_code("run", "--standalone", str(tmp_path / "missing.py"), "--role", "trainer", "--tee", "3") == 2
    assert "missing.py" in capsys.readouterr().err


def main_code(*words: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(words)
    return int(str(stopped.value.code))
