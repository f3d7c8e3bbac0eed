"""A book as JSON: what the head of a journal file brings forward from the files before it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torchelastic.ledger.accounts import by_label, from_labels
from torchelastic.ledger.book import Book, Counts, Earlier, Noticed
from torchelastic.ledger.events import Failure, LedgerFormatError, from_dict, tally_from_dict, tally_to_dict, to_dict
from torchelastic.ledger.life import Life
from torchelastic.ledger.marks import Marks


def book_to_dict(book: Book) -> dict[str, Any]:
    """For JSON."""
    return {
        "lives": [_life_to_dict(life) for life in book.lives.values()],
        "earlier": {**dataclasses.asdict(book.earlier), "amounts": by_label(book.earlier.amounts)},
        "counts": dataclasses.asdict(book.counts),
        "deaths": [list(death) for death in book.deaths],
        "noticed": [[to_dict(one.failure), one.level_ns, one.detect_ns] for one in book.noticed],
    }


def book_from_dict(fields: Mapping[str, Any]) -> Book:
    """What `book_to_dict` made.

    Raises:
        LedgerFormatError: it is something else, or its accounts do not sum up.
    """
    try:
        lives = [_life_from_dict(one) for one in fields["lives"]]
        earlier = Earlier(**{**fields["earlier"], "amounts": from_labels(fields["earlier"]["amounts"])})
        deaths = tuple((int(at_ns), str(worker)) for at_ns, worker in fields["deaths"])
        noticed = tuple(_noticed(*one) for one in fields["noticed"])
        book = Book({life.worker: life for life in lives}, earlier, Counts(**fields["counts"]), deaths, noticed)
        wrong = book.why_wrong(book.counts.last_ns)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise LedgerFormatError(f"no book: {error!r}"[:200]) from error
    if wrong:
        raise LedgerFormatError(f"a book that does not sum up: {wrong}")
    return book


def _life_to_dict(life: Life) -> dict[str, Any]:
    plain = {one.name: getattr(life, one.name) for one in dataclasses.fields(life)}
    return {**plain, "tally": tally_to_dict(life.tally), "marks": [list(point) for point in life.marks.points]}


def _life_from_dict(fields: Mapping[str, Any]) -> Life:
    marks = Marks(tuple((int(step), int(ns)) for step, ns in fields["marks"]))
    return Life(**{**fields, "tally": tally_from_dict(fields["tally"]), "marks": marks})


def _noticed(failure: Mapping[str, Any], level_ns: int, detect_ns: int) -> Noticed:
    event = from_dict(failure)
    if not isinstance(event, Failure):
        raise LedgerFormatError(f"no failure: {failure!r}"[:200])
    return Noticed(event, int(level_ns), int(detect_ns))
