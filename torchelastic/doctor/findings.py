"""What a check says: one value per thing that was found, with its numbers and its remedy. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass


class Level(enum.IntEnum):
    """How bad a finding is."""

    OK = 0
    NOTE = 1
    WARNING = 2
    ERROR = 3


@dataclass(frozen=True)
class Finding:
    """One thing that was found.

    Attributes:
        check: what was checked, in one or two words.
        level: `OK`: as it should be. `NOTE`: good to know. `WARNING`: a run may be slow or fail later. `ERROR`: a run
            fails here.
        what: one sentence.
        because: what follows from it, or the numbers behind it.
        remedy: what to do about it; a warning and an error always have one.

    Raises:
        ValueError: a warning or an error without a remedy.
    """

    check: str
    level: Level
    what: str
    because: str = ""
    remedy: str = ""

    def __post_init__(self) -> None:
        if self.level >= Level.WARNING and not self.remedy:
            raise ValueError(f"{self.check}: {self.what!r} has no remedy: say what to do about it")


def exit_code(findings: Iterable[Finding], *, strict: bool = False) -> int:
    """1 if there is an error, with `strict` also if there is a warning; else 0."""
    least = Level.WARNING if strict else Level.ERROR
    return int(any(finding.level >= least for finding in findings))


def list_text(names: Iterable[str]) -> str:
    """Names with commas; `none` where there are none."""
    return ", ".join(names) or "none"
