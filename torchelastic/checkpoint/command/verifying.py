"""`verify`: reads everything, and names what is damaged."""

from __future__ import annotations

from pathlib import Path

from torchelastic.checkpoint.command.listing import find
from torchelastic.checkpoint.command.screen import progress, say, say_json
from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.text import bytes_text


def verify(path: Path, *, as_json: bool) -> int:
    """`torchelastic checkpoint verify`, for all checkpoints at a path.

    Returns:
        The exit code: 0 if all are intact, 1 if one is damaged, 2 if one cannot be read.

    Raises:
        CheckpointCommandError: there is nothing at the path.
    """
    found = find(path)
    code = 0
    for one in found:
        unreadable = False
        try:
            with progress(one.size_bytes, one.name) as advance:
                lines = one.format.verify(one, advance)
        except CheckpointError as error:
            lines, unreadable = [str(error)], True
        state = "unreadable" if unreadable else "damaged" if lines else "intact"
        if lines and not one.path.exists():
            state, lines = "removed meanwhile", []  # by the run that writes here
        code = max(code, {"unreadable": 2, "damaged": 1}.get(state, 0))
        if as_json:
            about = {"path": str(one.path), "name": one.name, "kind": one.format.kind, "partial": one.partial}
            say_json({**about, "state": state, "damage": lines})
        else:
            say(f"{one.name}: {state} ({bytes_text(one.size_bytes)}{'; ' if one.partial else ''}{one.partial or ''})")
            for line in lines:
                say(f"  {line}")
    return code
