"""Names of checkpoints in memory: paths that were checked once. Pure; names and rules are ML Flashpoint's.

/dev/shm/jobs/145                          the container of a job
/dev/shm/jobs/145/step-20_ckpt             the container of one checkpoint
/dev/shm/jobs/145/step-20_ckpt/common.pt   an object
"""

from __future__ import annotations

import os
import re
from collections import UserString

_STEP = re.compile(r"step-(0|[1-9][0-9]*)_ckpt")


class CheckpointId(UserString):
    """A path below the root; slashes at its end are dropped.

    Args:
        path: begins with a slash; no part of it is empty or ends with a dot.

    Raises:
        ValueError: it is not such a path, or the root itself.
    """

    def __init__(self, path: str | os.PathLike[str] | UserString) -> None:
        text = str(path) if isinstance(path, UserString) else os.fspath(path)
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
    def format_version_container(cls, step: int) -> str:
        """The name of the container of one step.

        Raises:
            ValueError: the step is negative, or no whole number.

        >>> CheckpointContainerId.format_version_container(20)
        'step-20_ckpt'
        """
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise ValueError(f"{step!r} is no step: give a whole number, 0 or more")
        return f"step-{step}_ckpt"

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
    def create_child(parent: CheckpointContainerId, child: str) -> CheckpointContainerId:
        """The container of this name inside another one; the other one itself for an empty name.

        Raises:
            TypeError: the parent is no `CheckpointContainerId`.
            ValueError: the name cannot be part of an id.
        """
        if not isinstance(parent, CheckpointContainerId):
            raise TypeError(f"the parent is a {type(parent).__name__}: give a CheckpointContainerId")
        child = child.strip("/")
        return CheckpointContainerId(f"{parent}/{child}") if child else parent


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
    def from_container(parent: CheckpointContainerId, name: str) -> CheckpointObjectId:
        """The object of this name in a container.

        Raises:
            TypeError: the parent is no `CheckpointContainerId`.
            ValueError: the name is empty, or cannot be part of an id.
        """
        if not isinstance(parent, CheckpointContainerId):
            raise TypeError(f"the parent is a {type(parent).__name__}: give a CheckpointContainerId")
        name = name.strip().strip("/")
        if not name:
            raise ValueError(f"an object in {parent} needs a name")
        return CheckpointObjectId(f"{parent}/{name}")
