"""The control groups of this process, by which Docker, Kubernetes and SLURM limit a job.

(Documentation/admin-guide/cgroup-v1 and cgroup-v2.rst of the kernel.)
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
SELF_CGROUP = Path("/proc/self/cgroup")


def control_groups(root: Path = CGROUP_ROOT, self_cgroup: Path = SELF_CGROUP, controller: str = "") -> Iterator[Path]:
    """The folders of the groups of this process that are limited by one controller, each below those above it.

    Args:
        root: where they are mounted.
        self_cgroup: names the lowest ones.
        controller: such as "cpu": also that of version 1; empty: of version 2 alone, which has one group for all.
    """
    try:
        lines = self_cgroup.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            yield from _with_those_above(root, path)
        elif controller and controller in controllers.split(","):
            yield from _with_those_above(root / controllers, path)


def _with_those_above(mount: Path, path: str) -> Iterator[Path]:
    """A group and all above it. In a container the path may be that of the host: then the mount itself is the group."""
    group = mount / path.strip("/")
    while group != mount:
        if group.is_dir():
            yield group
        group = group.parent
    yield mount


def text_of(group: Path, name: str) -> str:
    """What a file of a group says; empty where there is none."""
    try:
        return (group / name).read_text().strip()
    except OSError:
        return ""
