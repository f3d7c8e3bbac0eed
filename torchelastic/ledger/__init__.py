"""Where every second of every worker went; see docs/ledger.md.

`Book`, `Tally` and `books_together` are earlier names of `HostLedger`, `Counters` and `merged_ledgers`.

Names are loaded on first use (PEP 562); importing this package imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchelastic.lazy_names import lazily

if TYPE_CHECKING:
    from torchelastic.ledger.accounts import Account, Amounts
    from torchelastic.ledger.counters import Counters, Tally
    from torchelastic.ledger.events import LedgerEvent, LedgerFormatError
    from torchelastic.ledger.figures import Figure, Figures, Seen, figures_of, seen
    from torchelastic.ledger.host_ledger import Book, HostLedger
    from torchelastic.ledger.journal import Head, Journal, JournalWriter, read_journals
    from torchelastic.ledger.merge import books_together, merged_ledgers
    from torchelastic.ledger.meter import this_worker

__all__ = [
    "Account",
    "Amounts",
    "Book",
    "Counters",
    "Figure",
    "Figures",
    "Head",
    "HostLedger",
    "Journal",
    "JournalWriter",
    "LedgerEvent",
    "LedgerFormatError",
    "Seen",
    "Tally",
    "books_together",
    "figures_of",
    "merged_ledgers",
    "read_journals",
    "seen",
    "this_worker",
]

_MODULES = {
    "accounts": ("Account", "Amounts"),
    "counters": ("Counters", "Tally"),
    "events": ("LedgerEvent", "LedgerFormatError"),
    "figures": ("Figure", "Figures", "Seen", "figures_of", "seen"),
    "host_ledger": ("Book", "HostLedger"),
    "journal": ("Head", "Journal", "JournalWriter", "read_journals"),
    "merge": ("books_together", "merged_ledgers"),
    "meter": ("this_worker",),
}

__getattr__, __dir__ = lazily(__name__, {name: module for module, names in _MODULES.items() for name in names})
