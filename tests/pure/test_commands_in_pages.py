"""What pages and scripts tell people to type is what the command line, the Makefile and the repository have."""

from __future__ import annotations

import argparse
import contextlib
import io
import re
from pathlib import Path

import pytest

from tests.pure.commands_in_pages import PAGES, ROOT, Command, commands_in
from tests.pure.public_api import parsers

PARSERS = parsers()
COMMANDS = [
    command for page in PAGES for command in commands_in(page.read_text(encoding="utf-8"), str(page.relative_to(ROOT)))
]
OURS = [
    command
    for command in COMMANDS
    if command.words[0] == "torchelastic"
    and len(command.words) > 1
    and not command.words[1].endswith(":")  # its output
]
MODULES = [
    command for command in COMMANDS if re.match(r"(.*/)?python3?$", command.words[0]) and command.words[1:2] == ("-m",)
]
MAKES = [command for command in COMMANDS if command.words[0] == "make" and len(command.words) > 1]
#: Modules of other packages that pages name.
FOREIGN = {"build", "pip", "venv", "pytest", "http", "horovod", "torch", "pybind11"}


def parser_of(command: Command) -> tuple[argparse.ArgumentParser, list[str]]:
    """The parser of a command and the words for it."""
    depth = 3 if command.words[1] == "checkpoint" and len(command.words) > 2 else 2
    for taken in (depth, depth - 1):
        words = " ".join(command.words[:taken])
        if words in PARSERS and (taken > 1 or command.words[1].startswith("-")):
            return PARSERS[words], list(command.words[taken:])
    pytest.fail(f"{command}\nthere is no such command of torchelastic", pytrace=False)


def own_part(parser: argparse.ArgumentParser, words: list[str]) -> list[str]:
    """Without the script's own arguments, which are not ours to judge."""
    if not any(action.nargs == argparse.REMAINDER for action in parser._actions):
        return words
    takes_value = {o for a in parser._actions if a.nargs != 0 for o in a.option_strings}
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] not in ("-m", "--module"):
        at += 2 if words[at] in takes_value else 1
    return words[: at + 1]


@pytest.mark.parametrize("command", OURS, ids=str)
def test_a_command_of_ours_has_the_options_that_a_page_gives_it(command: Command) -> None:
    parser, words = parser_of(command)
    known = {option for action in parser._actions for option in action.option_strings}
    given = [
        word.partition("=")[0].strip("[]") for word in own_part(parser, words) if re.match(r"\[?-{1,2}[a-z]", word)
    ]
    assert [option for option in given if option not in known] == []


@pytest.mark.parametrize("command", [one for one in OURS if one.is_whole], ids=str)
def test_a_command_that_stands_whole_on_a_page_is_understood(command: Command) -> None:
    parser, words = parser_of(command)
    typed = [re.sub(r"\$\{?\w+\}?|\$\w+", "1", word) for word in words]
    said, code = io.StringIO(), 0
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            parser.parse_args(typed)
        except SystemExit as end:
            code = int(end.code or 0)
    assert code == 0, said.getvalue()


@pytest.mark.parametrize("command", MODULES, ids=str)
def test_a_module_that_a_page_runs_exists_and_knows_the_options(command: Command) -> None:
    module = command.words[2]
    if module.partition(".")[0] in FOREIGN:
        return
    folder = ROOT.joinpath(*module.split("."))
    is_package = (folder / "__main__.py").is_file()
    assert is_package or folder.with_suffix(".py").is_file(), f"{command}\nthere is no module {module} to run"
    sources = folder.rglob("*.py") if is_package else [folder.with_suffix(".py"), *folder.parent.glob("*.py")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    options = [word.partition("=")[0] for word in command.words[3:] if word.startswith("--")]
    names = [option for option in options if f'"{option}"' not in text and f'"{option[2:]}"' not in text]
    assert names == [] or module == "torchelastic.launch"


@pytest.mark.parametrize("command", MAKES, ids=str)
def test_a_target_of_make_that_a_page_names_exists(command: Command) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert set(command.words[1:2]) <= set(targets)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_of_the_repository_that_a_page_types_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    is_of_others = page.parent.name == "migrating"  # such a page also names files of where one comes from
    commands = [command for command in commands_in(text, "") if command.is_whole or not is_of_others]
    typed = {word for command in commands for word in command.words}
    paths = [word for word in typed if re.fullmatch(r"(?:examples|deploy|benchmarks)/[\w./-]*\w", word)]
    assert [path for path in paths if not (ROOT / path).exists() and not (page.parent / path).exists()] == []


def test_the_pages_have_commands_at_all() -> None:
    assert len(OURS) > 60
    assert sum(one.is_whole for one in OURS) > 20
    assert len(MODULES) > 20
    assert len(MAKES) > 5


@pytest.mark.parametrize("words", PARSERS)
def test_every_command_explains_itself_and_each_of_its_options(words: str) -> None:
    parser = PARSERS[words]
    assert words in parser.format_help()
    explained = {"command", "verb"}  # the list of commands explains itself
    assert [one.dest for one in parser._actions if not one.help and one.dest not in explained] == []
