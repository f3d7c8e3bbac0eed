"""`prune --dead`: lists what dead jobs have left in memory, asks, and removes it. Imports no torch."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from torchelastic.checkpoint.command.command_error import CheckpointCommandError
from torchelastic.checkpoint.compat.flashpoint.job import memory_root
from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.store.host_memory.dead_jobs import DeadJob, find_dead, remove_dead
from torchelastic.console import complain, say, say_json, table
from torchelastic.text import age_text, bytes_text


def prune_dead(
    root: Path | None,
    *,
    older_than_s: float | None = None,
    dry_run: bool,
    yes: bool,
    as_json: bool,
    now_s: float,
    ask: Callable[[str], bool] | None = None,
) -> int:
    """`torchelastic checkpoint prune --dead`; returns the exit code.

    Args:
        root: a folder of containers, or one; None: where this host keeps them.
        older_than_s: leave those alone that were changed less than so long ago; None: none (the clock may be set back).
        dry_run: only list them.
        yes: remove them without asking.
        as_json: one line per container for programs.
        now_s: the wall time.
        ask: puts a question that is answered by yes or no; not given: on the terminal, if there is one.

    Returns:
        0: done, or there are none, or the answer was no; 2: one could not be removed.

    Raises:
        CheckpointCommandError: there is nobody to ask, or the root is no folder.
    """
    place = memory_root() if root is None else root
    if not place.is_dir():
        raise CheckpointCommandError(
            f"{place} is no folder: give the container of a job, or a folder of them such as /dev/shm"
        )
    found = find_dead(place)
    least_s = -math.inf if older_than_s is None else older_than_s
    chosen = [dead for dead in found if dead.is_half_removed or now_s - dead.changed_s >= least_s]
    if not as_json:
        _list(place, found, now_s)
    if chosen and not dry_run and not yes and not _agreed(chosen, as_json, ask or _ask_terminal()):
        say("nothing is removed")
        return 0
    return _remove(found, chosen, dry_run=dry_run, as_json=as_json, now_s=now_s)


def _list(place: Path, found: Sequence[DeadJob], now_s: float) -> None:
    if not found:
        say(f"no job that is dead has left anything in {place}")
        return
    rows = [
        (str(dead.base), dead.run_id or "-", bytes_text(dead.size_bytes), age_text(now_s - dead.changed_s))
        for dead in found
    ]
    table(("CONTAINER", "JOB", "SIZE", "UNCHANGED FOR"), rows)


def _agreed(chosen: Sequence[DeadJob], as_json: bool, ask: Callable[[str], bool] | None) -> bool:
    if ask is None or as_json:
        raise CheckpointCommandError(
            "nothing is removed, for there is nobody to ask: use --yes, or --dry-run; a job that is to start again "
            "(a requeued one, say) wants its memory back, so consider --older-than SECONDS"
        )
    size = bytes_text(sum(dead.size_bytes for dead in chosen))
    return ask(f"remove {len(chosen)} of them ({size})? A job that starts again would find nothing in memory. [y/N] ")


def _ask_terminal() -> Callable[[str], bool] | None:
    if not sys.stdin.isatty():
        return None

    def ask(question: str) -> bool:
        try:
            return input(question).strip().lower() in ("y", "yes")
        except EOFError:
            return False

    return ask


def _remove(found: Sequence[DeadJob], chosen: Sequence[DeadJob], *, dry_run: bool, as_json: bool, now_s: float) -> int:
    freed_bytes, code = 0, 0
    for dead in found:
        state = "kept" if dead not in chosen else "would be removed" if dry_run else "removed"
        if state == "removed":
            try:
                state = state if remove_dead(dead) else "in use again"
            except CheckpointError as error:
                complain(f"torchelastic checkpoint prune: {error}")
                state, code = "not removed", 2
        freed_bytes += dead.size_bytes if state in ("removed", "would be removed") else 0
        if as_json:
            about = {"path": str(dead.base), "run_id": dead.run_id, "size_bytes": dead.size_bytes}
            say_json({**about, "created_s": dead.created_s, "age_s": now_s - dead.changed_s, "state": state})
        else:
            say(f"{dead.base}: {state}")
    if found and not as_json:
        say(f"{bytes_text(freed_bytes)} {'would be freed' if dry_run else 'freed'}")
    return code
