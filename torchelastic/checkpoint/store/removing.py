"""Removing checkpoints where that may be refused: for now (somebody has a file open), or in one way and not another.

A checkpoint loses its manifest first, so nobody takes the rest for one; the rest is found again by that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import Any

from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.store.manifest import MANIFEST_NAME
from torchelastic.checkpoint.store.save_id import SaveId

#: After so many refusals the rest is left for another time: each may cost seconds.
MOST_REFUSED = 3


class Removals:
    """What one tier removes. What is refused keeps nothing else from being removed, and is tried again."""

    def __init__(self) -> None:
        self._refused: dict[SaveId, int] = {}

    def run(self, names: Iterable[SaveId], remove: Callable[[SaveId], None]) -> list[SaveId]:
        """Removes checkpoints, those first that were refused least often.

        Args:
            names: which; what is not among them any more is forgotten.
            remove: one of them.

        Returns:
            Those that are gone.

        Raises:
            CheckpointError: the first that was refused; the others were tried all the same, up to `MOST_REFUSED`.
        """
        wanted = set(names)
        self._refused = {name: times for name, times in self._refused.items() if name in wanted}
        removed: list[SaveId] = []
        failures: list[CheckpointError] = []
        for name in sorted(wanted, key=lambda name: (self._refused.get(name, 0), name)):
            if len(failures) == MOST_REFUSED:
                break
            try:
                remove(name)
            except CheckpointError as error:
                failures.append(error)
                self._refused[name] = self._refused.get(name, 0) + 1
            else:
                removed.append(name)
        if failures:
            raise failures[0]
        return removed


def left_overs(names: Iterable[SaveId], committed: Collection[SaveId]) -> list[SaveId]:
    """Of what has no manifest that which never will: saves in one place end in order, a newer one is complete. Pure.

    >>> one, two, three = (SaveId(1, 1, number, number) for number in (1, 2, 3))
    >>> left_overs([one, two, three], [two]) == [one], left_overs([one], [])
    (True, [])
    """
    newest = max(committed, default=None)
    return [] if newest is None else [name for name in names if name < newest and name not in committed]


def remove_objects(files: Any, folder: str, names_in: Callable[[], Collection[str]]) -> None:
    """Removes the objects of a checkpoint: by one request where the store takes that, else one by one.

    Some stores refuse requests for many objects (gateways to S3), some packages do not notice what was refused in such
    a request: so it is looked at what is left.

    Args:
        files: the file system of fsspec.
        folder: of the checkpoint.
        names_in: what is in it now.

    Raises:
        Exception: what the package raises: something was refused.
    """
    names = names_in()
    if MANIFEST_NAME in names:
        _remove_one(files, f"{folder}/{MANIFEST_NAME}")
    refusal: Exception | None = None
    try:
        files.rm(folder, recursive=True)
    except FileNotFoundError:
        pass  # there was nothing else, or somebody else was faster
    except Exception as error:  # noqa: BLE001 - each protocol's package has its own errors
        refusal = error
    for name in sorted(names_in()):
        _remove_one(files, f"{folder}/{name}")
    with suppress(Exception):  # of a file system that has folders; it was refused with the rest
        if refusal is not None:
            files.rmdir(folder)
    if left := sorted(names_in()):
        raise refusal or PermissionError(f"{folder}/{left[0]} is still there")


def _remove_one(files: Any, path: str) -> None:
    try:
        files.rm_file(path)
    except FileNotFoundError:
        pass  # somebody else was faster
    except NotImplementedError:
        files.rm(path)
