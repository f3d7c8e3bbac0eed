"""The command lines that pages tell people to type."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted(ROOT.glob("examples/**/README.md")),
    *sorted(ROOT.glob("deploy/**/README.md")),
    ROOT / "benchmarks" / "README.md",
]

_SHELLS = ("sh", "bash", "shell", "console")
_OPERATORS = {";", "&", "&&", "|", "||", "(", ")", ">", ">>", "<", ">&", ";;"}
#: What may stand before a command and leaves it one.
_BEFORE = {"srun", "exec", "time", "sudo", "nohup", "env", "if", "then", "do", "!", "--"}
#: What stands in a line that is no command yet: something is left out, or to be chosen.
_LEFT_OUT = re.compile(r"\.\.(?![/\w])|[\[\]{}…]")


@dataclass(frozen=True)
class Command:
    """One command.

    Attributes:
        page: from the root of the repository.
        words: of the command, its name first.
        is_whole: it is to be typed as it stands: it is no part of a sentence, and nothing is left out.
    """

    page: str
    words: tuple[str, ...]
    is_whole: bool

    def __str__(self) -> str:
        return f"{self.page}: {' '.join(self.words)}"


def commands_in(text: str, page: str) -> Iterator[Command]:
    """Every command of a page: of its shell blocks, its indented blocks, and in its sentences."""
    fence: str | None = None
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        mark = re.match(r"\s*```+(\w*)", line)
        if mark:
            fence = mark[1] if fence is None else None
        elif fence in _SHELLS or (fence is None and line.startswith("    ")):
            yield from _commands(line, page, is_whole=True)
        elif fence is None:
            for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", line):
                yield from _commands(code, page, is_whole=False)


def _commands(line: str, page: str, *, is_whole: bool) -> Iterator[Command]:
    """The commands of one line of a shell. One in quotes (`--cmd "torchelastic run .."`) counts too."""
    line = line.strip().removeprefix("$ ")
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.wordchars += "$%@[]{},:+#…^"
    lexer.commenters = "" if not re.search(r"(^|\s)#", line) else "#"
    try:
        words = list(lexer)
    except ValueError:  # an apostrophe: this is a sentence
        return
    is_whole = is_whole and not _LEFT_OUT.search(line)
    start = 0
    for at in range(len(words) + 1):
        if at == len(words) or words[at] in _OPERATORS:
            own = _without_what_stands_before(words[start:at])
            if own:
                yield Command(page, tuple(own), is_whole)
            start = at + 1
    for word in words:
        if " " in word and word.startswith(("torchelastic ", "python ")):
            yield from _commands(word, page, is_whole=is_whole)


def _without_what_stands_before(words: list[str]) -> list[str]:
    """The command's own words: no variables that are set for it, no `srun --ntasks=2`."""
    at = 0
    while at < len(words) and (re.match(r"[A-Z_a-z]\w*=", words[at]) or words[at] in _BEFORE):
        is_srun = words[at] == "srun"
        at += 1
        while is_srun and at < len(words) and words[at].startswith("-"):
            at += 1
    return words[at:]
