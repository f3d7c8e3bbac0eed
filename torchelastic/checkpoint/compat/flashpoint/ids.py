"""Names of checkpoints in memory: paths that were checked once, shards, and objects on the wire. Pure.

    /dev/shm/jobs/145                     the container of a job
      step-20_ckpt                        what users and frameworks call one checkpoint; see `container`
        common.pt                         an attached file
      step-000000020.e1.r0.g12.5f0c1a2b   what lies there of the save: see `store`
        shard-00003-of-00009.shard        what one of eight ranks has saved
        shard-00008-of-00009.shard        one more: DCP's metadata, and the attached files
        manifest.json                     last of all: the checkpoint is complete

Names and rules of the containers are ML Flashpoint's; saves and shards are the store's. Between hosts a shard is named
by the last part of the container's path and its `ShardId`; where the container lies is each host's own business.
"""

from __future__ import annotations

import operator
import os
import re
from collections import UserString
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, SupportsIndex

from torchelastic.checkpoint.store.kinds import MEMORY_STATE
from torchelastic.checkpoint.store.save_id import SaveId, ShardId

_PART = re.compile(r"[\w.=@+,-]{1,128}", re.ASCII)
_EXAMPLE = "step-000000020.e1.r0.g12.5f0c1a2b/shard-00003-of-00009.shard"
_STEP = re.compile(r"step-(0|[1-9][0-9]*)_ckpt")


class CheckpointId(UserString):
    """A path below the root; slashes at its end are dropped.

    Args:
        string: begins with a slash; no part of it is empty or ends with a dot.

    Raises:
        ValueError: it is not such a path, or the root itself.
    """

    def __init__(self, string: str | os.PathLike[str] | UserString) -> None:
        text = str(string) if isinstance(string, UserString) else os.fspath(string)
        if not text.startswith("/"):
            raise ValueError(f"{text!r} is no id of a checkpoint: give an absolute path, such as /dev/shm/jobs/145")
        stripped = text.rstrip("/")
        if not stripped:
            raise ValueError("the root itself is no id of a checkpoint: give a folder of this job alone")
        for part in stripped.split("/")[1:]:
            if not part or part.endswith("."):
                raise ValueError(f"{text!r} is no id of a checkpoint: a part of it is empty or ends with a dot")
        super().__init__(stripped)

    def __fspath__(self) -> str:
        return self.data

    @property
    def name(self) -> str:
        """Its last part."""
        return self.data.rsplit("/", 1)[1]

    def get_parent(self, levels_up: int = 1) -> CheckpointContainerId | None:
        """What it lies in; None where that is the root.

        Raises:
            ValueError: `levels_up` is not above 0.
        """
        if levels_up < 1:
            raise ValueError(f"levels_up is {levels_up}: give 1 or more")
        parts = self.data.split("/")
        return CheckpointContainerId("/".join(parts[:-levels_up])) if levels_up < len(parts) - 1 else None


class CheckpointContainerId(CheckpointId):
    """What holds checkpoints, or the objects of one; a folder."""

    @classmethod
    def format_version_container(cls, step: SupportsIndex) -> str:
        """The name of the container of one step.

        Raises:
            ValueError: the step is negative, or no whole number.

        >>> CheckpointContainerId.format_version_container(20)
        'step-20_ckpt'
        """
        try:
            number = -1 if isinstance(step, bool) else operator.index(step)  # of numpy too
        except TypeError:
            number = -1
        if number < 0:
            raise ValueError(f"{step!r} is no step: give a whole number, 0 or more")
        return f"step-{number}_ckpt"

    @classmethod
    def parse_version_container_step(cls, name: str) -> int | None:
        """The step in the name of a container; None if it is another one.

        >>> CheckpointContainerId.parse_version_container_step("step-20_ckpt")
        20
        """
        match = _STEP.fullmatch(name)
        return int(match.group(1)) if match else None

    @classmethod
    def get_version_container_pattern(cls) -> re.Pattern[str]:
        """What the names of steps' containers match as a whole; group 1 is the step."""
        return _STEP

    @staticmethod
    def create_child(parent_container_id: CheckpointContainerId, child_id: str) -> CheckpointContainerId:
        """The container of this name inside another one; the other one itself for an empty name.

        Raises:
            TypeError: the parent is no `CheckpointContainerId`.
            ValueError: the name cannot be part of an id.
        """
        if not isinstance(parent_container_id, CheckpointContainerId):
            raise TypeError(f"the parent is a {type(parent_container_id).__name__}: give a CheckpointContainerId")
        child = child_id.strip("/")
        return CheckpointContainerId(f"{parent_container_id}/{child}") if child else parent_container_id


def parts_of(checkpoint_id: str | os.PathLike[str] | CheckpointId) -> tuple[CheckpointContainerId, int]:
    """The container of the job in which a checkpoint lies, and its step.

    Raises:
        ValueError: it is no container of a step.
    """
    wanted = CheckpointContainerId(checkpoint_id)
    base, step = wanted.get_parent(), CheckpointContainerId.parse_version_container_step(wanted.name)
    if base is None or step is None:
        raise ValueError(
            f"{wanted} is no container of a checkpoint: put it into the job's, and name it with "
            "CheckpointContainerId.format_version_container(step), such as /dev/shm/jobs/145/step-20_ckpt"
        )
    return base, step


class CheckpointObjectId(CheckpointId):
    """What lies in a container; a file."""

    @staticmethod
    def from_container(parent_container_id: CheckpointContainerId, object_name: str) -> CheckpointObjectId:
        """The object of this name in a container.

        Raises:
            TypeError: the parent is no `CheckpointContainerId`.
            ValueError: the name is empty, or cannot be part of an id.
        """
        if not isinstance(parent_container_id, CheckpointContainerId):
            raise TypeError(f"the parent is a {type(parent_container_id).__name__}: give a CheckpointContainerId")
        name = object_name.strip().strip("/")
        if not name:
            raise ValueError(f"an object in {parent_container_id} needs a name")
        return CheckpointObjectId(f"{parent_container_id}/{name}")


# --- shards and objects -----------------------------------------------------------------------------------------------


def shard_of(save: SaveId, rank: int, ranks: int) -> ShardId:
    """The shard of one of so many ranks; that behind the last rank's holds the metadata of all of them.

    >>> str(shard_of(SaveId(1, 0, 12, 20, "5f0c1a2b"), 3, 8))
    'step-000000020.e1.r0.g12.5f0c1a2b/shard-00003-of-00009.shard'
    """
    return ShardId(save, rank, ranks + 1)


def is_commit(shard: ShardId) -> bool:
    """Whether this is the shard that holds the metadata of a save."""
    return shard.rank == shard.world_size - 1


def meta_of_shard(shard: ShardId) -> dict[str, Any]:
    """What the header of a shard says of its name, which its checksums cover."""
    return {"kind": MEMORY_STATE, **shard.stated, "world_size": shard.world_size - 1}


def object_of(container: str, shard: ShardId) -> str:
    """What the hosts call a shard in the container of this name; `parse_object` is the inverse."""
    return f"{container}/{shard}"


def parse_object(text: str) -> tuple[str, ShardId]:
    """The name of the container, and the shard.

    Raises:
        ValueError: it is no name of a shard.
    """
    container, _, rest = text.partition("/")
    with suppress(ValueError):
        shard = ShardId.parse(rest)
        if shard.world_size > 1 and is_part(container):  # that of a rank, or the metadata behind it
            return container, shard
    raise ValueError(f"{text[:200]!r} is no object of a checkpoint, such as '145/{_EXAMPLE}'")


def newest_of_step(objects: Iterable[str], container: str, step: int) -> list[str]:
    """Of the objects that a host has, those of the newest save of a step whose metadata it has; these come last."""
    shards = []
    for one in objects:
        with suppress(ValueError):  # what others have saved there
            name, shard = parse_object(one)
            shards += [shard] * (name == container and shard.name.step == step)
    newest = max((shard.name for shard in shards if is_commit(shard)), default=None)
    return [object_of(container, shard) for shard in sorted(shards) if shard.name == newest]


def is_part(text: str) -> bool:
    """Whether a text may be part of the name of an object, or the name of an attached file."""
    return _PART.fullmatch(text) is not None and not text.startswith(".") and not text.endswith(".")
