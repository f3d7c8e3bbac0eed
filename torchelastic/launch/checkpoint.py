"""`torchelastic checkpoint`: hands its words to `torchelastic.checkpoint.command`, which is loaded only then."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

NAME = "checkpoint"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `checkpoint` to the list of commands; its words have a parser of their own."""
    commands.add_parser(NAME, help="list, show, verify, prune and convert checkpoints", add_help=False)


def execute(words: Sequence[str]) -> int:
    """Run it with the words that follow `checkpoint`; returns the exit code."""
    from torchelastic.checkpoint.command.main import main

    return main(words)
