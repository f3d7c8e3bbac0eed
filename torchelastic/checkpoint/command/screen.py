"""What the command writes: tables, sizes, ages and a progress bar on a terminal; plain lines elsewhere."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torchelastic.checkpoint.command.errors import CheckpointCommandError
from torchelastic.checkpoint.command.format import Advance
from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.text import printable

#: What a folder with a copy is called instead.
_names: dict[str, str] = {}


@contextlib.contextmanager
def shown_as(folder: str, name: str) -> Iterator[None]:
    """Meanwhile a folder with a copy is called by the name of the place that it is a copy of, also in errors."""
    _names[folder] = name
    try:
        yield
    except (CheckpointError, CheckpointCommandError) as error:
        raise CheckpointCommandError(_renamed(str(error))) from error
    finally:
        del _names[folder]


def _renamed(text: str) -> str:
    for folder, name in _names.items():
        text = text.replace(folder, name)
    return text


def say(text: str) -> None:
    """One or more lines of the answer."""
    print(printable(_renamed(text)))  # noqa: T201 - what the command is for


def complain(text: str) -> None:
    """One line beside the answer."""
    print(printable(_renamed(text)), file=sys.stderr)  # noqa: T201 - the last word on the screen


def say_json(document: Any) -> None:
    """One line for programs."""
    line = json.dumps(document, sort_keys=True, allow_nan=False, default=str)
    print(_renamed(line))  # noqa: T201 - what the command is for


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Columns; with rich on a terminal, else aligned by blanks, uncut, so that other programs can read them."""
    shown = [[printable(_renamed(cell)).replace("\n", " ") for cell in row] for row in rows]
    if sys.stdout.isatty():
        _rich_table(titles, shown)
        return
    widths = [max(len(row[column]) for row in (titles, *shown)) for column in range(len(titles))]
    for row in (titles, *shown):
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print(line.rstrip())  # noqa: T201 - what the command is for


@contextlib.contextmanager
def progress(total_bytes: int, what: str) -> Iterator[Advance]:
    """A progress bar on stderr, where that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _size_bytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(printable(what), total=total_bytes)
        yield lambda size_bytes: bar.advance(task, size_bytes)


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
