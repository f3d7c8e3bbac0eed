"""Answers as bytes. Pure, but for reading the page's own files once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from importlib.resources import files

from torchelastic.observe.ledger.accounts import STYLES, Account
from torchelastic.observe.ledger.figures import TITLES
from torchelastic.observe.page.http_request import HttpError

#: With every answer. Nothing is loaded from elsewhere, nothing runs but the page's own script, nobody may frame it.
SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True)
class File:
    """One of the page's own files."""

    content_type: str
    content: bytes


def static_files() -> Mapping[str, File]:
    """The page's own files, by name. They are all that is ever served of them: no request names a path."""
    found = {name: File(_type_of(name), text.encode()) for name, text in _ledger_files().items()}
    for file in (files("torchelastic.observe.page") / "static").iterdir():
        content_type = _type_of(file.name)
        if content_type:
            found[file.name] = File(content_type, file.read_bytes())
    return found


def _ledger_files() -> Mapping[str, str]:
    """Made from the ledger, so that accounts and figures have the same names and colours as everywhere."""
    light = " ".join(f"--{account.label}: {style.light};" for account, style in STYLES.items())
    dark = " ".join(f"--{account.label}: {style.dark};" for account, style in STYLES.items())
    classes = "\n".join(f".a-{account.label} {{ background: var(--{account.label}); }}" for account in STYLES)
    sheet = (
        f":root {{ {light} }}\n"
        f'@media (prefers-color-scheme: dark) {{ :root:not([data-theme="light"]) {{ {dark} }} }}\n'
        f':root[data-theme="dark"] {{ {dark} }}\n'
        f"{classes}\n"
    )
    return {
        "accounts.css": sheet,
        "accounts.js": f"export const ACCOUNTS = {json.dumps([account.label for account in Account])};\n",
        "figures.js": f"export const FIGURES = {json.dumps(TITLES)};\n",
    }


def _type_of(name: str) -> str:
    """Empty: it is no file of the page."""
    return _TYPES.get("." + name.rpartition(".")[2], "")


def head(status: int, content_type: str, length: int | None, headers: Mapping[str, str] | None = None) -> bytes:
    """The head of an answer; the connection ends with it.

    Args:
        status: of HTTP.
        content_type: of the body.
        length: of the body in bytes; None: it goes on until the connection ends.
        headers: besides the usual ones.
    """
    fields = {"Content-Type": content_type, **SECURITY_HEADERS, **(headers or {}), "Connection": "close"}
    if length is not None:
        fields["Content-Length"] = str(length)
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode("ascii")


def whole(content: bytes, content_type: str) -> bytes:
    """An answer with a body."""
    return head(200, content_type, len(content)) + content


def error_response(error: HttpError) -> bytes:
    """The answer to a request that cannot be served."""
    body = f"{error.why}\n".encode()
    return head(error.status, "text/plain; charset=utf-8", len(body), error.headers) + body
