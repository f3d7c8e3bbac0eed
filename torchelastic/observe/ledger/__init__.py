"""Where every second of every worker went; see docs/ledger.md.

The training thread counts into memory that it shares with its agent (`meter.py`, `shared_counts.py`); the agent keeps
the ledger and writes the journal (`keeper.py`, `journal.py`), so a worker's death loses nothing. The rest is pure.
Names are loaded on first use (PEP 562); importing this package imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchelastic.lazy_names import lazily

if TYPE_CHECKING:
    from torchelastic.observe.ledger.accounts import Account as Account
    from torchelastic.observe.ledger.meter import this_worker as this_worker

__getattr__, __dir__ = lazily(__name__)
