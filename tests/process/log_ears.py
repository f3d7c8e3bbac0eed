"""What is logged while something runs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def heard(name: str = "torchelastic") -> Iterator[list[str]]:
    """The warnings of a logger and those below it, which nobody else gets.

    Args:
        name: of the logger.
    """
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    vars(handler)["emit"] = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    propagate, logger.propagate = logger.propagate, False
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
