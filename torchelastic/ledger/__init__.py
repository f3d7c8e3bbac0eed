"""Where every second of every worker went; see docs/ledger.md.

Names are loaded on first use (PEP 562); importing this package imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchelastic.lazy_names import lazily

if TYPE_CHECKING:
    from torchelastic.ledger.accounts import Account, Amounts
    from torchelastic.ledger.book import Book
    from torchelastic.ledger.events import Event, LedgerFormatError
    from torchelastic.ledger.figures import Figure, Figures, Seen, figures_of, seen
    from torchelastic.ledger.journal import Head, Journal, JournalWriter, read_journals
    from torchelastic.ledger.meter import this_worker
    from torchelastic.ledger.tally import Tally
    from torchelastic.ledger.together import books_together

__all__ = [
    "Account",
    "Amounts",
    "Book",
    "Event",
    "Figure",
    "Figures",
    "Head",
    "Journal",
    "JournalWriter",
    "LedgerFormatError",
    "Seen",
    "Tally",
    "books_together",
    "figures_of",
    "read_journals",
    "seen",
    "this_worker",
]

_MODULES = {
    "accounts": ("Account", "Amounts"),
    "book": ("Book",),
    "events": ("Event", "LedgerFormatError"),
    "figures": ("Figure", "Figures", "Seen", "figures_of", "seen"),
    "journal": ("Head", "Journal", "JournalWriter", "read_journals"),
    "meter": ("this_worker",),
    "tally": ("Tally",),
    "together": ("books_together",),
}

__getattr__, __dir__ = lazily(__name__, {name: module for module, names in _MODULES.items() for name in names})
