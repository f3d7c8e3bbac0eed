"""The entry point of the command line. A command's module is imported when it runs, and not for `--help`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pkgutil import resolve_name

from torchelastic.launch.command_line import CHECKPOINT, command_parser
from torchelastic.usage import CommandError, UsageError, usage_line


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    return _command(sys.argv[1:] if arguments is None else arguments)()


def console() -> None:
    """What the `torchelastic` script calls. Ctrl-C ends the process also while it imports the command.

    Python discards a KeyboardInterrupt that is raised in a weak reference's callback, and each import runs one: until
    the command is imported, SIGINT has its default action. A shell's "ignore SIGINT" stays.
    """
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    command = _command(sys.argv[1:])
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, handler)
    sys.exit(command())


def _command(words: Sequence[str]) -> Callable[[], int]:
    """The imported command with its options. Raises SystemExit: --help, or invalid arguments."""
    if list(words[:1]) == [CHECKPOINT]:
        return partial(resolve_name("torchelastic.checkpoint.command.main:main"), words[1:])
    options = command_parser().parse_args(words)
    return partial(_run, f"torchelastic {options.command}", partial(resolve_name(options.function), options))


def _run(name: str, function: Callable[[], int]) -> int:
    try:
        return function()
    except UsageError as error:
        print(usage_line(name, str(error)), file=sys.stderr)  # noqa: T201 - the last word on the screen
        raise SystemExit(2) from error
    except CommandError as error:
        print(f"{name}: {error}", file=sys.stderr)  # noqa: T201 - the last word on the screen
        return 1
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains when it ends
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
