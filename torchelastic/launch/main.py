"""The entry point of the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from torchelastic.launch import drain, run
from torchelastic.launch.options import UsageError
from torchelastic.version import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="torchelastic", description="Keeps PyTorch training alive.")
    parser.add_argument("--version", action="version", version=f"torchelastic {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run.add_parser(commands)
    drain.add_parser(commands)
    options = parser.parse_args(arguments)
    try:
        return int(options.execute(options))
    except UsageError as error:
        parser.exit(2, f"torchelastic {options.command}: {error}\n")


def console() -> None:
    """What the `torchelastic` script calls."""
    sys.exit(main())
