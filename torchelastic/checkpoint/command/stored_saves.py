"""The saves in one place, of whatever format: what is there, which one is meant, and removing one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeVar

from torchelastic.checkpoint.command.command_error import CheckpointCommandError
from torchelastic.checkpoint.command.foreign import dcp, safetensors_file, torch_file
from torchelastic.checkpoint.command.format import Format, FoundCheckpoint, MovedOnError
from torchelastic.checkpoint.command.memory_steps import MemorySteps
from torchelastic.checkpoint.command.shard_checkpoints import FolderOfShards, ShardFile
from torchelastic.checkpoint.command.stream_checkpoints import StreamFolder
from torchelastic.checkpoint.store.disk_tier import DiskTier

Read = TypeVar("Read")

#: In the order in which they are looked for and listed.
FORMATS: tuple[Format, ...] = (ShardFile(), FolderOfShards(), MemorySteps(), StreamFolder())

#: What it is, how to tell it, how to read it. The first bytes of safetensors can look like a pickle's, not the reverse.
FOREIGN = (
    ("a folder of torch.distributed.checkpoint", dcp.is_one, dcp.read),
    ("of safetensors", safetensors_file.is_one, safetensors_file.read),
    ("a file of torch.save", torch_file.is_one, torch_file.read),
)

#: Of a checkpoint that is complete, and does not count.
_REWOUND = "rewound: remove the files rewound-to-... beside it to have it count again"


@dataclass(frozen=True)
class StoredSaves:
    """See the module's docstring.

    Attributes:
        path: of the folder that holds them, or of the one that is meant.
        has_all_hosts: whether what is not there is on no other host either.
    """

    path: Path
    has_all_hosts: ClassVar[bool] = False

    def find(self) -> list[FoundCheckpoint]:
        """The checkpoints there, of every kind, each kind newest first; at least one.

        Raises:
            CheckpointCommandError: there are none; says what is there instead.
            CheckpointError: the path cannot be looked at.
        """
        before: list[Path] = []
        while True:
            with suppress(MovedOnError):
                found = self._find_now()
                paths = [one.path for one in found]
                if paths == before or any(one.is_usable for one in found):
                    return found
                before = paths  # a run may just have finished one, and have removed the one before

    def foreign_kind(self) -> str | None:
        """Which format of others is there, in words; None for none of them."""
        return next((what for what, is_one, _ in FOREIGN if is_one(self.path)), None)

    def newest_complete(self) -> FoundCheckpoint:
        """The one that `show` and `convert` mean where there are several; of several kinds, the one saved last.

        Raises:
            CheckpointCommandError: none can be used, or there are none.
        """
        found = self.find()
        counting = [one for one in found if not one.is_rewound]
        usable = [one for one in counting if one.is_complete] or [one for one in counting if one.is_usable]
        if not usable:
            raise self.none_usable(found)
        first_of_kind = {one.format.kind: one for one in reversed(usable)}
        return max(first_of_kind.values(), key=lambda one: one.saved_s)

    def read_newest(self, read: Callable[[FoundCheckpoint], Read]) -> tuple[FoundCheckpoint, Read]:
        """`newest_complete`, and what is read of it; where a run at work removes it meanwhile, of the newest one then.

        Errors as `newest_complete` and `read`.
        """
        while True:
            found = self.newest_complete()
            try:
                return found, read(found)
            except (CheckpointCommandError, OSError):  # a CheckpointError is one
                if not is_removed(found):
                    raise

    def remove(self, one: FoundCheckpoint) -> None:
        """Removes one of those that were found, where it is stored.

        Raises:
            CheckpointCommandError: it is refused, or the storage does not answer.
            CheckpointError: it cannot be removed.
        """
        one.format.remove(one)

    def rewind(self, step: int, owner: str) -> str:
        """What is saved there and has more steps does not count any more; see `Tier.rewind`, also for errors.

        Returns:
            The file that says so.
        """
        return str(self.path / DiskTier(self.path).rewind(step, owner).file_name)

    def none_usable(self, found: Sequence[FoundCheckpoint]) -> CheckpointCommandError:
        """The error for a place without a usable checkpoint."""
        why = f"damaged: {found[0].damage}" if found[0].damage is not None else found[0].partial or _REWOUND
        if len(found) == 1:
            return CheckpointCommandError(f"{self.path} is {why}; use another copy of it, or an older checkpoint")
        many = f"all {len(found)} checkpoints in {self.path} are of no use"
        return CheckpointCommandError(f"{many} (the newest is {why})")

    def _find_now(self) -> list[FoundCheckpoint]:
        """Raises MovedOnError where a run has replaced all of them meanwhile."""
        path = self.path
        if not path.exists():
            raise CheckpointCommandError(
                f"{path} does not exist: give the folder or file of a checkpoint, or a folder of them"
            )
        foreign = self.foreign_kind()
        if foreign is not None:
            raise CheckpointCommandError(f"{path} is {foreign}, which only `torchelastic checkpoint convert` reads")
        found = [one for known in FORMATS for one in known.find(path)]
        if found:
            return found
        if path.is_dir() and not any(path.iterdir()):
            raise CheckpointCommandError(f"{path} is empty: give the folder that checkpoints were written to")
        raise CheckpointCommandError(
            f"{path} holds no checkpoint that torchelastic knows: give a folder of checkpoints, one of them, or a shard"
        )


def is_removed(found: FoundCheckpoint) -> bool:
    """Whether a run at work has removed what was found finished, or has begun to."""
    try:
        now = found.format.find(found.path)
    except MovedOnError:
        return True
    return not any(one.path == found.path and not one.is_unfinished for one in now)
