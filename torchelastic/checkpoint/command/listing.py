"""`ls`, and `verify`, which reads everything and names what is damaged."""

from __future__ import annotations

from torchelastic.checkpoint.command.format import FoundCheckpoint
from torchelastic.checkpoint.command.screen import progress
from torchelastic.checkpoint.command.stored_saves import StoredSaves, is_removed
from torchelastic.console import complain, say, say_json, table
from torchelastic.text import age_text, bytes_text, measured_text


def ls(saves: StoredSaves, *, as_json: bool, now_s: float) -> int:
    """`torchelastic checkpoint ls`; returns the exit code.

    Raises:
        CheckpointCommandError: there is nothing.
    """
    found = saves.find()
    if as_json:
        for one in found:
            say_json(record_of(one))
    else:
        titles = ("NAME", found[0].format.step_title.upper(), "RANKS", "SIZE", "AGE", "KIND", "STATE", "METRICS")
        columns = len(titles) if any(one.metrics for one in found) else len(titles) - 1
        table(titles[:columns], [_row(one, now_s)[:columns] for one in found])
    if not any(one.is_usable for one in found):
        complain(f"torchelastic checkpoint ls: {saves.none_usable(found)}")
        return 2
    return 0


def verify(saves: StoredSaves, *, as_json: bool) -> int:
    """`torchelastic checkpoint verify`, for all of them.

    Returns:
        The exit code: 0 if all that are finished are intact, 1 if one is damaged or none is finished, 2 if one cannot
        be read.

    Raises:
        CheckpointCommandError: there is nothing.
    """
    found = saves.find()
    code = int(all(one.is_unfinished for one in found))
    for one in found:
        unreadable = False
        try:
            with progress(one.size_bytes, one.name) as advance:
                lines = one.format.verify(one, advance)
        except OSError as error:  # a CheckpointError is one
            lines, unreadable = [str(error)], True
        state = "unreadable" if unreadable else "damaged" if lines else "intact"
        if one.is_unfinished and not lines:
            state = "not finished"
        if lines and is_removed(one):
            state, lines = "removed meanwhile", []
        code = max(code, {"unreadable": 2, "damaged": 1}.get(state, 0))
        if as_json:
            about = {"path": str(one.path), "name": one.name, "kind": one.format.kind, "partial": one.partial}
            say_json({**about, "state": state, "damage": lines})
        else:
            said, part = (one.partial, None) if one.is_unfinished else (state, one.partial)
            say(f"{one.name}: {said} ({bytes_text(one.size_bytes)}{f'; {part}' if part else ''})")
            for line in lines:
                say(f"  {line}")
    return code


def record_of(found: FoundCheckpoint) -> dict[str, object]:
    """What `--json` says of a checkpoint."""
    return {
        "kind": found.format.kind,
        "name": found.name,
        "path": str(found.path),
        found.format.step_title: found.step,
        "world_size": found.world_size,
        "size_bytes": found.size_bytes,
        "saved_s": found.saved_s,
        "complete": found.is_complete,
        "damage": found.damage,
        "partial": found.partial,
        "rewound": found.is_rewound,
        "files": [str(path) for path in found.shards],
        "metrics": {name: value if value - value == 0 else str(value) for name, value in found.metrics.items()},
    }


def _row(found: FoundCheckpoint, now_s: float) -> tuple[str, ...]:
    state = f"damaged: {found.damage}" if found.damage is not None else found.partial or "complete"
    return (
        found.name,
        "-" if found.step is None else str(found.step),
        "-" if found.world_size is None else str(found.world_size),
        bytes_text(found.size_bytes),
        age_text(now_s - found.saved_s),
        found.format.kind,
        f"rewound, does not count; {state}" if found.is_rewound else state,
        measured_text(found.metrics),
    )
