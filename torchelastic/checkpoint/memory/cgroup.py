"""How much memory the control group of this process still allows; versions 1 and 2.

Docker, Kubernetes and SLURM limit a job by one. Files on tmpfs are charged to the group that writes them. The kernel
reclaims page cache before it ends a process of a group that has reached its limit, so that counts as free; shared
memory does not. (Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst of the kernel.) Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
SELF_CGROUP = Path("/proc/self/cgroup")
#: Version 1 says "no limit" by the largest number of pages that it knows.
_NO_LIMIT_BYTES = 2**60


def cgroup_available_bytes(root: Path = CGROUP_ROOT, self_cgroup: Path = SELF_CGROUP) -> int | None:
    """What the strictest of the groups of this process still allows; None: no group has a limit.

    Args:
        root: where they are mounted.
        self_cgroup: names them, one hierarchy per line.
    """
    try:
        lines = self_cgroup.read_text().splitlines()
    except OSError:
        return None
    found: list[int] = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            found += [left for group in _groups(root, path) if (left := _left_v2(group)) is not None]
        elif "memory" in controllers.split(","):
            found += [left for group in _groups(root / "memory", path) if (left := _left_v1(group)) is not None]
    return min(found, default=None)


def _groups(mount: Path, path: str) -> Iterator[Path]:
    """A group and all above it. In a container the path may be that of the host: then the mount itself is the group."""
    group = mount / path.strip("/")
    while group != mount:
        if group.is_dir():
            yield group
        group = group.parent
    yield mount


def _left_v2(group: Path) -> int | None:
    limits = [limit for name in ("memory.max", "memory.high") if (limit := _number(group / name)) is not None]
    used = _number(group / "memory.current")
    if not limits or used is None:
        return None
    cache = _of_stat(group, "inactive_file") + _of_stat(group, "active_file")
    return max(0, min(limits) - used + cache)


def _left_v1(group: Path) -> int | None:
    limit, used = _number(group / "memory.limit_in_bytes"), _number(group / "memory.usage_in_bytes")
    if limit is None or used is None or limit >= _NO_LIMIT_BYTES:
        return None
    cache = _of_stat(group, "total_inactive_file") + _of_stat(group, "total_active_file")
    return max(0, limit - used + cache)


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
