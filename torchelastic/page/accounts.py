"""The accounts for the page's script and style sheet: the same names and colours as everywhere else. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping

from torchelastic.ledger.accounts import LOOKS, Account


def account_files() -> Mapping[str, str]:
    """The files that are made from the ledger, by name: `accounts.css` and `accounts.js`."""
    light = " ".join(f"--{account.label}: {look.light};" for account, look in LOOKS.items())
    dark = " ".join(f"--{account.label}: {look.dark};" for account, look in LOOKS.items())
    classes = "\n".join(f".a-{account.label} {{ background: var(--{account.label}); }}" for account in LOOKS)
    sheet = (
        f":root {{ {light} }}\n"
        f'@media (prefers-color-scheme: dark) {{ :root:not([data-theme="light"]) {{ {dark} }} }}\n'
        f':root[data-theme="dark"] {{ {dark} }}\n'
        f"{classes}\n"
    )
    return {
        "accounts.css": sheet,
        "accounts.js": f"export const ACCOUNTS = {json.dumps([account.label for account in Account])};\n",
    }
