"""Pure: which saves do not count any more, because somebody has taken the run back to an older one.

In the place of the checkpoints lies a file whose name says all of it: what was saved before epoch 4 and has more than
8000 steps does not count. Whoever rewinds takes epoch 4 of the place; the job that goes on takes a later one, so all
that it saves counts, and whatever hosts still have in memory of the time before does not. Without the file everything
counts again that is still there.

    <root>/rewound-to-000008000.e4
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from torchelastic.checkpoint.store.save_id import SaveId

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

    @classmethod
    def all_in(cls, names: Iterable[str]) -> list[Rewind]:
        """Those whose files are among these, the newest first."""
        found = (_NAME.fullmatch(name) for name in names)
        rewinds = (cls(int(match["epoch"]), int(match["step"])) for match in found if match is not None)
        return sorted(rewinds, reverse=True)


def counts(save: SaveId, rewinds: Iterable[Rewind]) -> bool:
    """Whether a save counts.

    >>> [counts(SaveId(epoch, 0, 0, step), [Rewind(4, 8000)]) for epoch, step in ((3, 8000), (3, 9000), (4, 9000))]
    [True, False, True]
    """
    return not any(rewind.excludes(save) for rewind in rewinds)
