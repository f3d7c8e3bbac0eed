"""Pure: which saves do not count any more, because somebody has taken the run back to an older one.

In the place of the checkpoints lies a file whose name says all of it: what was saved before epoch 4 and has more than
8000 steps does not count. Whoever rewinds takes epoch 4 of the place; the job that goes on takes a later one, so all
that it saves counts, and whatever hosts still have in memory of the time before does not. Without the file everything
counts again that is still there.

    <root>/rewound-to-000008000.e4
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from torchelastic.checkpoint.store.save_id import STAGING_PREFIX, SaveId

_NAME = re.compile(r"rewound-to-(?P<step>\d{9,19})\.e(?P<epoch>\d{1,19})")


@dataclass(frozen=True, order=True)
class Rewind:
    """One decision that a run goes on from an older checkpoint.

    Attributes:
        epoch: only what was saved in earlier epochs is concerned; see `SaveId`.
        step: the most steps that a save may have of those that count.

    >>> Rewind(4, 8000).file_name
    'rewound-to-000008000.e4'
    """

    epoch: int
    step: int

    @property
    def file_name(self) -> str:
        """The name of its file; `all_in` is the inverse."""
        return f"rewound-to-{self.step:09d}.e{self.epoch}"

    @property
    def text(self) -> str:
        """What the file says to people."""
        return (
            f"Checkpoints of more than {self.step} steps that were saved before epoch {self.epoch} (e{self.epoch} in "
            "their names) do not count: somebody has called `torchelastic checkpoint rewind`. Remove this file to "
            "have those count again that are still there.\n"
        )

    def excludes(self, save: SaveId) -> bool:
        """Whether a save does not count any more."""
        return save.epoch < self.epoch and save.step > self.step

    @property
    def data(self) -> bytes:
        """The content of its file."""
        return self.text.encode()

    @classmethod
    def all_in(cls, names: Iterable[str]) -> list[Rewind]:
        """Those whose files are among these, the newest first."""
        found = (_NAME.fullmatch(name) for name in names)
        rewinds = (cls(int(match["epoch"]), int(match["step"])) for match in found if match is not None)
        return sorted(rewinds, reverse=True)


def highest_epoch(names: Iterable[str]) -> int:
    """The highest epoch that the names in a place tell of, of saves and of rewinds; 0: of none.

    A place that was copied without its hidden files has no other memory of the jobs that were there.

    >>> highest_epoch(["step-000008000.e1.r0.g2", "rewound-to-000008000.e4", ".fence.json"])
    4
    """
    there = list(names)
    saves = (SaveId.find(name.removeprefix(STAGING_PREFIX)) for name in there)
    epochs = [*(save.epoch for save in saves if save is not None), *(one.epoch for one in Rewind.all_in(there))]
    return max(epochs, default=0)


def counts(save: SaveId, rewinds: Iterable[Rewind]) -> bool:
    """Whether a save counts.

    >>> [counts(SaveId(epoch, 0, 0, step), [Rewind(4, 8000)]) for epoch, step in ((3, 8000), (3, 9000), (4, 9000))]
    [True, False, True]
    """
    return not any(rewind.excludes(save) for rewind in rewinds)


def how_to_undo(rewinds: Iterable[Rewind], saves: Collection[SaveId]) -> str:
    """What to do so that all saves count again, in words; "" where they do.

    >>> how_to_undo([Rewind(4, 8000), Rewind(2, 90000)], [SaveId(1, 0, 0, 9000)])
    'remove rewound-to-000008000.e4, wherever it lies, to have newer checkpoints count again'
    """
    files = [rewind.file_name for rewind in rewinds if any(map(rewind.excludes, saves))]
    where = "wherever it lies" if len(files) == 1 else "wherever they lie"
    return f"remove {' and '.join(files)}, {where}, to have newer checkpoints count again" if files else ""
