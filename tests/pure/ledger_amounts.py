"""Amounts of the ledger by name."""

from __future__ import annotations

from torchelastic.observe.ledger.accounts import Account, Amounts


def amounts_of(**nanoseconds: int) -> Amounts:
    """Nanoseconds by label of the account; 0 where nothing is said."""
    assert set(nanoseconds) <= {account.label for account in Account}
    return tuple(nanoseconds.get(account.label, 0) for account in Account)
