"""Pure: how checkpoints of an experiment are called, which is the newest, and which may go. By number, not as text."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_NAME = re.compile(r"ckpt_(?P<step>0|[1-9]\d{0,17})(?P<final>_final)?(?P<file>\.shard)?")


@dataclass(frozen=True, order=True)
class SavedName:
    """Which checkpoint it is; later ones are greater.

    Attributes:
        step: how many steps are done.
        is_final: whether it was saved because the time was nearly over.
        is_file: whether rank 0 wrote it as one file; else each rank wrote its part into a folder.

    >>> SavedName(129, is_final=True, is_file=True).text
    'ckpt_129_final.shard'
    """

    step: int
    is_final: bool
    is_file: bool

    @property
    def text(self) -> str:
        """The name of the file or folder; `find` is the inverse."""
        return f"ckpt_{self.step}{'_final' if self.is_final else ''}{'.shard' if self.is_file else ''}"

    @classmethod
    def find(cls, text: str) -> SavedName | None:
        """Reads a name; None if it is no checkpoint's."""
        match = _NAME.fullmatch(text)
        if match is None:
            return None
        return cls(int(match["step"]), match["final"] is not None, match["file"] is not None)


def newest_first(texts: Iterable[str]) -> list[SavedName]:
    """The checkpoints among the names in a folder.

    >>> [name.text for name in newest_first(["ckpt_70", "ckpt_100", "tensorboard_logs", "ckpt_9_final"])]
    ['ckpt_100', 'ckpt_70', 'ckpt_9_final']
    """
    return sorted((name for name in map(SavedName.find, texts) if name is not None), reverse=True)


def superfluous(names: Iterable[SavedName], keep: int) -> list[SavedName]:
    """What may be deleted: all but the newest `keep`, by step.

    Final ones are counted for themselves, so none of them ever goes for a periodic one that came later.

    Args:
        names: all that are complete.
        keep: how many of each sort stay, 1 or more; less: all.
    """
    if keep < 1:
        return []
    ordered = sorted(names, reverse=True)
    periodic = [name for name in ordered if not name.is_final]
    final = [name for name in ordered if name.is_final]
    return [*periodic[keep:], *final[keep:]]
