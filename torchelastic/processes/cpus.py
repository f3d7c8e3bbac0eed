"""How many CPUs this process may use: fewer than the host has, where a container or a scheduler limits it.

A limit comes in two ways: certain CPUs alone (the affinity: SLURM, `taskset`, Kubernetes' static policy), or so much
time of all of them (a quota: `docker run --cpus`, the CPU limit of a pod). A process that runs more threads than its
quota allows is stopped for the rest of each tenth of a second, all of them at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from torchelastic.processes.control_groups import CGROUP_ROOT, SELF_CGROUP, control_groups, text_of


def usable_cpus(root: Path = CGROUP_ROOT, self_cgroup: Path = SELF_CGROUP) -> int:
    """How many there are for this process, by its affinity and by the quotas of its control groups.

    Args:
        root: where control groups are mounted.
        self_cgroup: names those of this process.
    """
    groups = control_groups(root, self_cgroup, "cpu")
    return within(len(os.sched_getaffinity(0)), map(_quota, groups))


def within(cpus: int, quotas: Iterable[float | None]) -> int:
    """How many CPUs are to be used: as many as the smallest quota fills, and at least one. Pure.

    Args:
        cpus: on which a process may run.
        quotas: CPUs' worth of time, such as 2.5; None: no limit.

    >>> within(64, [None, 7.65, 16.0]), within(4, [8.0]), within(4, [0.5]), within(4, [])
    (7, 4, 1, 4)
    """
    return max(1, int(min([cpus, *(quota for quota in quotas if quota is not None)])))


def quota_of(max_text: str, quota_text: str, period_text: str) -> float | None:
    """The quota of a control group, in CPUs; None: it has no limit. Pure.

    Args:
        max_text: what `cpu.max` says, of version 2: microseconds in each period, and the period's length.
        quota_text: `cpu.cfs_quota_us`, of version 1; negative for none.
        period_text: `cpu.cfs_period_us`.

    >>> quota_of("250000 100000", "", ""), quota_of("max 100000", "", ""), quota_of("", "50000", "100000")
    (2.5, None, 0.5)
    >>> quota_of("", "-1", "100000"), quota_of("", "", "")
    (None, None)
    """
    quota, _, period = max_text.partition(" ") if max_text else (quota_text, "", period_text)
    if not quota.isdecimal() or not period.isdecimal() or 0 in (int(quota), int(period)):
        return None
    return int(quota) / int(period)


def listed_cpus(text: str) -> set[int]:
    r"""What the kernel means by a list of CPUs, or of nodes. Raises ValueError. Pure.

    >>> listed_cpus("0-2,4\n"), listed_cpus("")
    ({0, 1, 2, 4}, set())
    """
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def _quota(group: Path) -> float | None:
    return quota_of(*(text_of(group, name) for name in ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")))
