"""Finds the journals of a run on disk. What cannot be read is said; it never hides what can."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from torchelastic.observe.ledger.host_ledger import HostLedger
from torchelastic.observe.ledger.journal import Journal, journal_files, read_journal
from torchelastic.observe.ledger.ledger_events import LedgerFormatError
from torchelastic.text import counted


@dataclass(frozen=True)
class Found:
    """What was found on disk.

    Attributes:
        journals: those that could be read, by name.
        lacks: (of which journal, what is missing of it or why it could not be read, as a sentence).
    """

    journals: Mapping[str, Journal] = field(default_factory=dict)
    lacks: tuple[tuple[str, str], ...] = ()

    def lacks_of(self, journals: Container[str]) -> tuple[str, ...]:
        """What is missing of these journals; and which could not be read, as nobody knows of which run they are."""
        return tuple(lack for name, lack in self.lacks if name in journals or name not in self.journals)


def find_journals(paths: Sequence[Path]) -> Found:
    """All journals of these folders, or those that these files belong to. Files may be written to meanwhile.

    Args:
        paths: a `--log-dir` of `torchelastic run`, or files of journals; a file means its whole journal.

    Raises:
        OSError: a path is not there, or a folder cannot be read.
    """
    journals: dict[str, Journal] = {}
    lacks: list[tuple[str, str]] = []
    read: set[tuple[Path, ...]] = set()
    for path in paths:
        for name, files in _files_at(path).items():
            if files in read:
                continue
            read.add(files)
            try:
                journal = read_journal(files)
            except (LedgerFormatError, OSError) as error:
                lacks.append((name, f"The journal {name} is skipped: {error}."))
                continue
            known = journals.get(name)
            if known is not None and known.head == journal.head:
                lacks.append((name, f"{name} was given twice, as copies: the longer one is used."))
                if len(journal.events) <= len(known.events):
                    continue
            elif known is not None:
                name = str(files[0].parent / name)
            journals[name] = journal
            lacks += [(name, lack) for lack in _lacks(name, files, journal)]
    return Found(journals, tuple(lacks))


def _files_at(path: Path) -> dict[str, tuple[Path, ...]]:
    path = path.absolute()
    if path.is_dir():
        return journal_files(path)
    path.stat()  # an error that names it, if it is not there
    named = {name: files for name, files in journal_files(path.parent).items() if path in files}
    return named or {path.name: (path,)}


def _lacks(name: str, files: Sequence[Path], journal: Journal) -> list[str]:
    found = []
    if journal.before != HostLedger():
        found.append(
            f"The oldest events of {name} are gone, since only so many of its files are kept: what was before is in "
            f"the sums, and not among the failures and events."
        )
    numbers = [int(path.name.split(".")[-2]) for path in files if path.name.endswith(".jsonl") and "." in path.stem]
    gaps = [number for number, following in pairwise(numbers) if following != number + 1]
    if gaps:
        found.append(f"A file of {name} is missing after number {gaps[0]}: its events are lost.")
    if journal.damaged:
        found.append(f"Skipped in {name}: {counted(journal.damaged, 'damaged line')}.")
    if journal.unknown:
        lines = counted(journal.unknown, "line")
        found.append(f"Skipped in {name}: {lines} of a kind that a later torchelastic has added.")
    torn = sum(_is_torn(path) for path in files)
    if torn:
        found.append(f"The last line of {name} is torn: its agent was ended while it wrote, or writes at this moment.")
    return found


def _is_torn(path: Path) -> bool:
    with path.open("rb") as file:
        size_bytes = file.seek(0, 2)
        if not size_bytes:
            return False
        file.seek(size_bytes - 1)
        return file.read(1) != b"\n"
