"""How much memory the control group (version 2) of this process still allows.

Docker, Kubernetes and SLURM limit a job by one. Files on tmpfs are charged to the group that writes them. The kernel
reclaims page cache before it ends a process of a group that has reached its limit, so that counts as free; shared
memory does not. (Documentation/admin-guide/cgroup-v2.rst of the kernel.) Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
SELF_CGROUP = Path("/proc/self/cgroup")


def cgroup_available_bytes(root: Path = CGROUP_ROOT, self_cgroup: Path = SELF_CGROUP) -> int | None:
    """What the strictest of the groups of this process still allows; None: no group has a limit.

    Args:
        root: where they are mounted.
        self_cgroup: names the lowest one.
    """
    try:
        lines = self_cgroup.read_text().splitlines()
    except OSError:
        return None
    found: list[int] = []
    for line in lines:
        if line.startswith("0::"):  # other numbers are hierarchies of version 1
            found += [left for group in _groups(root, line[3:]) if (left := _left(group)) is not None]
    return min(found, default=None)


def _groups(mount: Path, path: str) -> Iterator[Path]:
    """A group and all above it. In a container the path may be that of the host: then the mount itself is the group."""
    group = mount / path.strip("/")
    while group != mount:
        if group.is_dir():
            yield group
        group = group.parent
    yield mount


def _left(group: Path) -> int | None:
    limits = [limit for name in ("memory.max", "memory.high") if (limit := _number(group / name)) is not None]
    used = _number(group / "memory.current")
    if not limits or used is None:
        return None
    cache = _of_stat(group, "inactive_file") + _of_stat(group, "active_file")
    return max(0, min(limits) - used + cache)


def _number(path: Path) -> int | None:
    """None for a file that is not there, or says `max`."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _of_stat(group: Path, name: str) -> int:
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(value) for key, _, value in (line.partition(" ") for line in lines) if key == name), 0)
