"""What the command needs to know of each kind of checkpoint that this package writes."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchelastic.checkpoint.command.command_error import CheckpointCommandError
from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.store.manifest import Manifest

#: Called with how many bytes have been read since it was called last.
Advance = Callable[[int], None]


@dataclass(frozen=True, kw_only=True)
class FoundCheckpoint:
    """One checkpoint that is there, whether complete or damaged.

    Attributes:
        format: how to read it.
        path: the file or folder.
        name: how it is called among those beside it.
        step: committed steps of the run; None: it does not say.
        world_size: how many ranks wrote it; None: it does not say.
        saved_s: when it was saved, in seconds of wall time.
        size_bytes: how large it is.
        damage: why it is not complete, as far as names and sizes tell; None if it is.
        partial: which part of it is here, where the rest may be intact elsewhere; None: all of it.
        is_unfinished: whether it lacks the manifest that comes last, so that it does not count: see `partial`.
        is_rewound: whether it does not count, since the run was taken back to an older one.
        shards: its files that are here.
        manifest: which shards belong to it; None where none says so, or it cannot be read.
        facts: what else it says about itself, for `show`.
        metrics: what was measured of it, by name.
    """

    format: Format
    path: Path
    name: str
    step: int | None
    world_size: int | None
    saved_s: float
    size_bytes: int
    damage: str | None
    partial: str | None = None
    is_unfinished: bool = False
    is_rewound: bool = False
    shards: tuple[Path, ...] = ()
    manifest: Manifest | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether all of it is here, as far as names and sizes tell."""
        return self.damage is None and self.partial is None

    @property
    def is_usable(self) -> bool:
        """Whether what is here of it counts."""
        return self.damage is None and not self.is_unfinished


class MovedOnError(Exception):
    """A run at work has removed all that was there: look again at what it has saved instead."""


def still_there(paths: Iterable[Path], look: Callable[[Path], FoundCheckpoint | None]) -> list[FoundCheckpoint]:
    """Looks at one checkpoint after the other, and passes over what a run at work removes meanwhile.

    Args:
        paths: one for each checkpoint, which goes when it goes.
        look: at the checkpoint of such a path; None: it is of another kind.

    Raises:
        MovedOnError: nothing else was there.
    """
    found, have_gone = [], False
    for path in paths:
        one = None
        try:
            one = look(path)
        except CheckpointError:
            if os.path.lexists(path):
                raise
        if not os.path.lexists(path):
            have_gone = True
        elif one is not None:
            found.append(one)
    if have_gone and not found:
        raise MovedOnError
    return found


@dataclass(frozen=True)
class TensorRow:
    """One tensor of a checkpoint.

    Attributes:
        name: its path in the state.
        dtype: as torch spells it, without `torch.`.
        shape: of the whole tensor.
        size_bytes: of the whole tensor.
        shards: the names of the files that hold it, or parts of it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    shards: tuple[str, ...]


@dataclass(frozen=True)
class Contents:
    """What a checkpoint holds.

    Attributes:
        structure: the state without its tensors, as `flatten` makes it; None where no shard has it.
        tensors: in the order in which they are stored.
    """

    structure: Any
    tensors: Sequence[TensorRow]


class Format(ABC):
    """One kind of checkpoint.

    Attributes:
        kind: its name on the screen.
        step_title: what `FoundCheckpoint.step` is called in this kind.
    """

    kind: str
    step_title = "step"

    @abstractmethod
    def find(self, path: Path) -> list[FoundCheckpoint]:
        """The checkpoints at a path, newest first; none if it holds nothing of this kind. Reads no tensor.

        Raises:
            CheckpointError: the path cannot be looked at.
            MovedOnError: see `still_there`.
        """

    @abstractmethod
    def contents(self, found: FoundCheckpoint) -> Contents:
        """What a checkpoint holds, without reading tensors or running anything.

        Raises:
            CheckpointError: it cannot be read; CorruptCheckpointError if it is damaged.
            CheckpointCommandError: it cannot be read in this way; says what to do.
        """

    @abstractmethod
    def verify(self, found: FoundCheckpoint, advance: Advance) -> list[str]:
        """Reads everything, compares all checksums, and says what is damaged: one line each, none if it is intact.

        Raises:
            CheckpointError: it cannot be read.
        """

    @abstractmethod
    def load(self, found: FoundCheckpoint, *, allow_pickles: bool) -> Any:
        """The whole state, on the CPU; errors as `contents`."""

    def remove(self, found: FoundCheckpoint) -> None:
        """Removes a checkpoint, so that nobody ever sees a part of it.

        Raises:
            CheckpointError: it cannot be removed.
        """
        raise CheckpointCommandError(
            f"{found.path} is a {self.kind}: remove it yourself; prune removes checkpoints of a folder"
        )
