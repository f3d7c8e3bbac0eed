"""The options about the live page, and what comes of them."""

from __future__ import annotations

import argparse
import logging
import sys
from contextlib import ExitStack
from pathlib import Path

from torchelastic.launch.options import UsageError, add
from torchelastic.page.listening import PageOptions, listening

log = logging.getLogger(__name__)

OFF = "off"


def add_page(parser: argparse.ArgumentParser) -> None:
    """Add the options about the page."""
    page_help = "serve the run's live page there (default off; --standalone: any free port of this host alone)"
    add(parser, "page", metavar="[HOST:]PORT", help=page_help)
    file_help = "with the token that opens the page; made if there is none"
    add(parser, "page-token-file", type=Path, metavar="FILE", help=file_help)


def opened_page(options: argparse.Namespace, stack: ExitStack) -> PageOptions | None:
    """Take the page's address and say where it is, once; None: there is none.

    Args:
        options: of the command line.
        stack: frees the address.

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
    print(f"live page: {page.url_to_open}", file=sys.stderr, flush=True)  # noqa: T201 - no log: it may hold a token
    return page
