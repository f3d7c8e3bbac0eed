"""How our command lines are read, and what they say of invalid arguments: one line, which names where to read more."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn


class UsageError(Exception):
    """The arguments contradict each other; the message says what to change. Exit code 2."""


class CommandError(Exception):
    """The command cannot do what it was asked to; the message says why. Exit code 1."""


class CommandParser(argparse.ArgumentParser):
    """As argparse's, which prints the whole usage before the line that matters; its sub-parsers are such, too."""

    def error(self, message: str) -> NoReturn:
        """End the process with exit code 2 and one line on standard error."""
        self.exit(2, f"{usage_line(self.prog, message)}\n")

    def parse_known_args(  # type: ignore[override]  # argparse's has overloads for each kind of namespace
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Refuse unknown arguments here, where the command is known, and not in the name of the whole program."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._meant(unknown)}")
        return found, unknown

    def _meant(self, unknown: Sequence[str]) -> str:
        """Which options look like those that there are not, in brackets; empty: none does."""
        import difflib  # here: --help does not need it

        known = [name for action in self._actions for name in action.option_strings]
        words = [word.partition("=")[0].replace("_", "-") for word in unknown if word.startswith("--")]
        alike = [match for word in words for match in difflib.get_close_matches(word, known, n=1, cutoff=0.7)]
        return f" (did you mean {', '.join(dict.fromkeys(alike))}?)" if alike else ""


def usage_line(command: str, message: str) -> str:
    """What to say of invalid arguments.

    Args:
        command: its words.
        message: what is wrong, and what to write instead; after a first line there may be a list.

    >>> usage_line("torchelastic run", "--nnodes 'x': write a number, or MIN:MAX")
    "torchelastic run: --nnodes 'x': write a number, or MIN:MAX; see torchelastic run --help"
    """
    return f"{command}: {message}" + ("" if "\n" in message else f"; see {command} --help")


def add_option(
    parser: argparse._ActionsContainer, name: str, what: str, *, short: str | None = None, **settings: Any
) -> None:
    """Add an option; dashes and underscores in its name are the same, as for torchrun's users.

    Args:
        parser: or a group of options of it.
        name: without the leading dashes.
        what: its help.
        short: such as `-t`.
        settings: of `add_argument`.
    """
    spellings = {f"--{name}", f"--{name.replace('-', '_')}"}
    names = [*sorted(spellings), *filter(None, [short])]
    parser.add_argument(*names, dest=name.replace("-", "_"), help=what, **settings)
