"""How findings are shown: lines for people, in colour on a terminal, or one line of JSON for programs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from torchelastic.console import say, say_json
from torchelastic.doctor.findings import Finding, Level, exit_code
from torchelastic.text import counted, printable
from torchelastic.version import __version__

_STYLES = {Level.OK: "green", Level.NOTE: "cyan", Level.WARNING: "bold yellow", Level.ERROR: "bold red"}
_WIDTH = max(len(level.name) for level in Level)


def lines_of(findings: Sequence[Finding]) -> list[tuple[Level | None, str]]:
    """What is written, line by line, with the level whose colour the line begins in. Pure.

    Args:
        findings: in the order in which they are shown.
    """
    column = max((len(finding.check) for finding in findings), default=0)
    indent = " " * (_WIDTH + column + 4)
    lines: list[tuple[Level | None, str]] = []
    for finding in findings:
        check = finding.check.ljust(column)
        lines.append((finding.level, f"{finding.level.name.lower().ljust(_WIDTH)}  {check}  {_line(finding.what)}"))
        if finding.because:
            lines.append((None, f"{indent}why: {_line(finding.because)}"))
        if finding.remedy:
            lines.append((None, f"{indent}do:  {_line(finding.remedy)}"))
    return [*lines, (None, summary(findings))]


def summary(findings: Sequence[Finding]) -> str:
    """How many there are of each level.

    >>> summary([Finding("clock", Level.OK, "fine"), Finding("clock", Level.OK, "fine too")])
    '2 ok, 0 notes, 0 warnings, 0 errors'
    """
    counts = {level: sum(finding.level == level for finding in findings) for level in Level}
    named = [f"{counts[Level.OK]} ok"]
    for level in (Level.NOTE, Level.WARNING, Level.ERROR):
        named.append(counted(counts[level], level.name.lower()))
    return ", ".join(named)


def document(findings: Sequence[Finding], *, strict: bool) -> dict[str, Any]:
    """The findings for programs. Pure."""
    return {
        "version": __version__,
        "exit_code": exit_code(findings, strict=strict),
        "findings": [{**asdict(finding), "level": finding.level.name.lower()} for finding in findings],
    }


def show(findings: Sequence[Finding], *, as_json: bool, strict: bool) -> None:
    """Write them to stdout."""
    if as_json:
        say_json(document(findings, strict=strict))
    elif sys.stdout.isatty():
        _show_on_terminal(lines_of(findings))
    else:
        for _, line in lines_of(findings):
            say(line)


def _show_on_terminal(lines: Sequence[tuple[Level | None, str]]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(soft_wrap=True)
    for level, line in lines:
        text = Text(printable(line))
        if level is not None:
            text.stylize(_STYLES[level], 0, _WIDTH)
        console.print(text)


def _line(text: str) -> str:
    return " ".join(text.split())
