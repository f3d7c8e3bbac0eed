"""The options about the live page, and what comes of them."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from torchelastic.launch.options import UsageError, add
from torchelastic.page.listening import PageOptions, listening

log = logging.getLogger(__name__)

OFF = "off"


def to_stderr(text: str) -> None:
    """Write a line to standard error."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - the screen


def add_page(parser: argparse.ArgumentParser) -> None:
    """Add the options about the page."""
    page_help = "serve the run's live page there (default off; --standalone: any free port of this host alone)"
    add(parser, "page", metavar="[HOST:]PORT", help=page_help)
    file_help = "with the token that opens the page; made if there is none"
    add(parser, "page-token-file", type=Path, metavar="FILE", help=file_help)


def opened_page(
    options: argparse.Namespace, stack: ExitStack, address: str = "", say: Callable[[str], None] = to_stderr
) -> PageOptions | None:
    """Take the page's address and say where it is, once; None: there is none.

    Args:
        options: of the command line.
        stack: frees the address.
        address: where the other hosts reach this one, if one was chosen; told instead of its name.
        say: shows a line; no log, for the line may hold a token.

    Raises:
        UsageError: the words make no sense, or the address cannot be had.
    """
    where = options.page or ("0" if options.standalone else OFF)
    if where == OFF:
        if options.page_token_file is not None:
            raise UsageError("--page-token-file is for a page: give --page [HOST:]PORT too")
        return None
    try:
        page = listening(where, options.page_token_file, is_seen=sys.stderr.isatty())
    except (ValueError, OSError) as error:
        if options.page is None and options.page_token_file is None:  # nobody has asked for it
            log.warning("the live page is not served: %s", error)
            return None
        raise UsageError(str(error)) from error
    stack.callback(page.socket.close)
    page = replace(page, address=address)
    say(f"live page: {page.url_to_open}")
    return page
