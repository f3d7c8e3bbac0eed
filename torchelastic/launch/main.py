"""The entry point of the command line."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from torchelastic.usage import CommandParser, usage_line
from torchelastic.version import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    from torchelastic.launch import checkpoint
    from torchelastic.launch.options import UsageError

    parser = command_parser()
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words[:1] == [checkpoint.NAME]:
        return checkpoint.execute(words[1:])
    options = parser.parse_args(words)
    try:
        return int(options.execute(options))
    except UsageError as error:
        parser.exit(2, f"{usage_line(f'torchelastic {options.command}', str(error))}\n")


def command_parser() -> argparse.ArgumentParser:
    """What understands the command line; the words after `checkpoint` have a parser of their own."""
    from torchelastic.launch import checkpoint, doctor, drain, events, report, run, simulate_esi, status, top

    parser: argparse.ArgumentParser = CommandParser(prog="torchelastic", description="Keeps PyTorch training alive.")
    parser.add_argument("--version", action="version", version=f"torchelastic {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run.add_parser(commands)
    drain.add_parser(commands)
    status.add_parser(commands)
    top.add_parser(commands)
    events.add_parser(commands)
    report.add_parser(commands)
    checkpoint.add_parser(commands)
    simulate_esi.add_parser(commands)
    doctor.add_parser(commands)
    return parser


def console() -> None:
    """What the `torchelastic` script calls. It imports the commands, so that Ctrl-C ends the process meanwhile, too.

    Python discards a KeyboardInterrupt that is raised in a weak reference's callback, and each import runs one: until
    the commands are imported, SIGINT has its default action. A shell's "ignore SIGINT" stays.
    """
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        command_parser()
        signal.signal(signal.SIGINT, handler)
    sys.exit(main())
