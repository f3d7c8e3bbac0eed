"""How the accounts look, wherever they are shown: in a terminal, on the live page, in a report."""

from __future__ import annotations

from dataclasses import dataclass

from torchelastic.ledger.accounts import Account


@dataclass(frozen=True)
class Look:
    """Of one account.

    Attributes:
        letter: stands for it where there are no colours.
        terminal: its colour in a terminal, as rich names it.
        light, dark: its colour on a light and on a dark page, as CSS has it; the same hue.
    """

    letter: str
    terminal: str
    light: str
    dark: str


LOOKS: dict[Account, Look] = {
    Account.PRODUCTIVE: Look("P", "green", "#43a56d", "#2f9159"),
    Account.SAVE_STALL: Look("S", "blue", "#3f82c9", "#4a8fd6"),
    Account.REPLAYED: Look("X", "red", "#cf3f3a", "#e0514b"),
    Account.DETECT: Look("D", "bright_red", "#ef8b4e", "#e58442"),
    Account.RE_FORM: Look("F", "magenta", "#8b5cc0", "#9d72d3"),
    Account.RESTORE: Look("R", "bright_magenta", "#d583c4", "#c474b4"),
    Account.DATA_WAIT: Look("W", "yellow", "#e4bd45", "#c6a233"),
    Account.IDLE: Look("I", "bright_black", "#bcc4cc", "#4d565f"),
    Account.START_UP: Look("U", "cyan", "#64bccb", "#34899a"),
}
