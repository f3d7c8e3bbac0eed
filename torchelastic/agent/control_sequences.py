r"""Lines that a program writes anew in their place: `\r` and the control sequences (ECMA-48) of progress bars. Pure."""

from __future__ import annotations

import re

_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_SEQUENCE_BYTES = re.compile(_SEQUENCE.pattern.encode())
#: Of those, what only changes colours.
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
#: Up, and erase: how rich and tqdm get back to a line that they have written.
_MOVE = re.compile(r"\x1b\[\d*[AKJ]")
_UP = re.compile(r"\x1b\[\d*A")
_PROMPT = re.compile(r"[^\r]*[\s:?>]")


def last_state(line: str) -> str | None:
    r"""What a terminal would show of a line in the end; None: only what was erased again.

    >>> last_state("\r 50%|##  |\r100%|####|"), last_state("as it is\r"), last_state("\r 50%\r     \r")
    ('100%|####|', 'as it is', None)
    """
    state = _state(line)
    return None if state != line and not plain_text(state).strip() else state


def shown_of(line: str) -> tuple[str, str | None]:
    r"""How to show a line on a terminal, where other lines may have come in between.

    Args:
        line: without its end.

    Returns:
        The sequences that bring the cursor up to lines written before; the text in its colours, without any other
        sequence, None: there is nothing to show.

    >>> shown_of("\r\x1b[2K\x1b[1A\x1b[2K\x1b[32mrow\x1b[0m")
    ('\x1b[2K\x1b[1A\x1b[2K', '\x1b[32mrow\x1b[0m')
    """
    state = _state(line)
    moves = "".join(_MOVE.findall(state)) if _UP.search(state) else ""
    text = _SEQUENCE.sub(lambda found: found[0] if _COLOUR.fullmatch(found[0]) else "", state)
    return moves, None if text != line and not plain_text(text).strip() else text


def plain_text(line: str) -> str:
    r"""The last state of a line without any sequence.

    >>> plain_text("\r 1 of 2\r\x1b[31m2 of 2\x1b[0m")
    '2 of 2'
    """
    state = _state(line)
    return _SEQUENCE.sub("", state)


def without_sequences(text: bytes) -> bytes:
    r"""Bytes without the sequences in them; `\r` stays."""
    return _SEQUENCE_BYTES.sub(b"", text)


def is_prompt(begun: str) -> bool:
    r"""Whether the beginning of a line seems to wait for an answer, and is no progress bar.

    >>> is_prompt("(Pdb) "), is_prompt("name:"), is_prompt("...."), is_prompt("\r 5% ")
    (True, True, False, False)
    """
    return _PROMPT.fullmatch(begun) is not None


def _state(line: str) -> str:
    """What was written last, from the beginning of the line on."""
    return next((part for part in reversed(line.split("\r")) if part), "")
