"""What commands write: answers as lines, tables or one line of JSON, and a last word on the screen beside them."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torchelastic.text import printable

#: What is called by another name on the screen.
_names: dict[str, str] = {}


@contextlib.contextmanager
def renamed(text: str, shown: str) -> Iterator[None]:
    """Meanwhile a text is shown as another one, wherever it stands in what is written."""
    _names[text] = shown
    try:
        yield
    finally:
        del _names[text]


def as_shown(text: str) -> str:
    """A text with the names that are meant for people, see `renamed`."""
    for name, shown in _names.items():
        text = text.replace(name, shown)
    return text


def say(text: str) -> None:
    """One or more lines of the answer."""
    print(printable(as_shown(text)))  # noqa: T201 - what commands are for


def complain(text: str) -> None:
    """One line beside the answer."""
    print(printable(as_shown(text)), file=sys.stderr)  # noqa: T201 - the last word on the screen


def say_json(document: Any) -> None:
    """One line for programs."""
    line = json.dumps(document, sort_keys=True, allow_nan=False, default=str)
    print(as_shown(line))  # noqa: T201 - what commands are for


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Columns; with rich on a terminal, else aligned by blanks, uncut, so that other programs can read them."""
    shown = [[printable(as_shown(cell)).replace("\n", " ") for cell in row] for row in rows]
    if sys.stdout.isatty():
        _rich_table(titles, shown)
        return
    widths = [max(len(row[column]) for row in (titles, *shown)) for column in range(len(titles))]
    for row in (titles, *shown):
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print(line.rstrip())  # noqa: T201 - what commands are for


def _rich_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        drawn.add_column(title, overflow="fold")
    for row in rows:
        drawn.add_row(*map(Text, row))
    Console().print(drawn)
