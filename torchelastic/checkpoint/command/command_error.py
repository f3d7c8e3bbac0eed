"""What the command says when it cannot do what it was asked to."""

from __future__ import annotations


class CheckpointCommandError(Exception):
    """The command stops with exit code 2; the message names what is wrong, where, and what to do instead."""


def underlying(error: BaseException) -> BaseException:
    """What an error of a library covers: Ctrl-C, or what the operating system said; else the error itself.

    A writer that cannot finish its file complains of that, while the reason is already on its way.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) or not isinstance(seen, Exception):
            return seen
        seen = seen.__cause__ or seen.__context__
    return error
