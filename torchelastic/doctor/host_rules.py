"""This host: its memory and what dead jobs have left there, the limits of the kernel, and its clock."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from torchelastic.checkpoint.compat.flashpoint.job import DEFAULT_ROOT, ROOT_VARIABLE
from torchelastic.checkpoint.store.host_memory.dead_jobs import find_dead
from torchelastic.checkpoint.store.host_memory.room import cgroup_available_bytes
from torchelastic.doctor.findings import Finding, Level
from torchelastic.file_systems import is_in_memory
from torchelastic.processes.control_groups import CGROUP_ROOT, SELF_CGROUP, control_groups, text_of
from torchelastic.text import bytes_text, shortlist

SHARED_MEMORY, MEMORY, LEFT_OVERS = "shared memory", "memory", "left-overs"
FILES, PROCESSES, LOCKED, CLOCK = "open files", "processes", "locked memory", "clock"
#: What docker gives a container that asks for nothing.
DOCKER_SHM_BYTES = 64 * 2**20
#: Two slots of each rank and two of each replica; a fifth with `async_save` under DDP (docs/checkpoint-interfaces.md).
MEMORY_COPIES, ASYNC_COPIES = 4, 5
#: What is left alone beside checkpoints; see `checkpoint.store.host_memory.room`.
MARGIN_BYTES = 256 * 2**20
#: Descriptors of a worker beside those of its connections: libraries, data loaders, checkpoints.
FILES_OF_ONE = 512
#: Connections to each other rank: those of two gloo groups, both ways.
FILES_PER_RANK = 4
#: Tensors from data loaders take a descriptor each (torch.multiprocessing's default strategy).
FILES_WISHED = 4096
#: Threads and processes of one worker with some data loaders.
TASKS_PER_WORKER = 128
#: Left-overs are in the way of the next job from this part of the file system on.
MUCH = 0.1
#: What adjtimex(2) returns for a clock that is not synchronized (TIME_ERROR of <sys/timex.h>).
_TIME_ERROR = 5
#: `struct timex` has 208 bytes on 64-bit Linux; `modes` is its first field, and 0 there only asks.
_TIMEX_BYTES = 512


@dataclass(frozen=True)
class MemoryFacts:
    """How much there is.

    Attributes:
        root: where checkpoints in memory are kept, and where data loaders put their tensors by default.
        is_tmpfs: whether it is memory; None: it is not there.
        size_bytes: of that file system; None: it has no limit of its own.
        free_bytes: of it.
        available_bytes: what can be allocated on this host without swapping.
        cgroup_bytes: what this process's control group still allows; None: it has no limit.
        needed_bytes: the state that the ranks of this host save together; None: not known.
    """

    root: str
    is_tmpfs: bool | None
    size_bytes: int | None
    free_bytes: int | None
    available_bytes: int
    cgroup_bytes: int | None = None
    needed_bytes: int | None = None


@dataclass(frozen=True)
class LimitFacts:
    """What a process may have; None: no limit.

    Attributes:
        files: soft limit on open files.
        files_hard: the hard one, up to which everybody may raise the soft one.
        processes: limit on processes and threads of this user.
        tasks: how many this user has.
        cgroup_processes: limit of the control group.
        cgroup_tasks: how many it has.
        locked_bytes: how much memory may be locked.
        has_infiniband: whether there is an RDMA device, whose driver locks memory.
        is_root: the limit per user does not hold for root.
    """

    files: int | None
    files_hard: int | None
    processes: int | None
    tasks: int
    cgroup_processes: int | None = None
    cgroup_tasks: int = 0
    locked_bytes: int | None = None
    has_infiniband: bool = False
    is_root: bool = False


def judge_shared_memory(facts: MemoryFacts) -> Finding:
    """Whether data loaders and checkpoints in memory have room. Pure."""
    larger = "docker run --shm-size=..., in Kubernetes an emptyDir with medium: Memory, else mount -o remount,size=..."
    if facts.is_tmpfs is None:
        what, because = f"there is no {facts.root}", "data loaders and checkpoints in memory keep their tensors there"
        return Finding(SHARED_MEMORY, Level.ERROR, what, because, f"mount a tmpfs at {facts.root}")
    if not facts.is_tmpfs:
        because = "checkpoints there are as slow as a disk"
        return Finding(SHARED_MEMORY, Level.WARNING, f"{facts.root} is on a disk", because, f"mount a tmpfs; {larger}")
    if facts.size_bytes is None or facts.free_bytes is None:
        return Finding(SHARED_MEMORY, Level.OK, f"{facts.root} has no limit of its own")
    size, free = bytes_text(facts.size_bytes), bytes_text(facts.free_bytes)
    what = f"{facts.root} has {size}, {free} of them free"
    if facts.size_bytes <= DOCKER_SHM_BYTES:
        because = f"{bytes_text(DOCKER_SHM_BYTES)} is what docker gives by default: data loaders end with a bus error"
        return Finding(SHARED_MEMORY, Level.ERROR, what, because, larger)
    if facts.needed_bytes is not None:
        return _judge_room(facts.needed_bytes, facts.free_bytes, what, larger)
    if facts.free_bytes < max(DOCKER_SHM_BYTES, facts.size_bytes // 10):
        remedy = f"see what is in {facts.root} (`torchelastic checkpoint prune --dead` for dead jobs), or {larger}"
        return Finding(SHARED_MEMORY, Level.WARNING, what, "less than a tenth is free", remedy)
    return Finding(SHARED_MEMORY, Level.OK, what)


def _judge_room(needed_bytes: int, free_bytes: int, what: str, larger: str) -> Finding:
    least_bytes, asynchronous_bytes = MEMORY_COPIES * needed_bytes, ASYNC_COPIES * needed_bytes
    because = f"checkpoints of {bytes_text(needed_bytes)} in memory, with replicas, take {bytes_text(least_bytes)}"
    if free_bytes < least_bytes:
        return Finding(SHARED_MEMORY, Level.ERROR, what, f"{because}: they would be skipped", larger)
    if free_bytes < asynchronous_bytes:
        because += f", and {bytes_text(asynchronous_bytes)} with dcp.async_save under DDP"
        return Finding(SHARED_MEMORY, Level.WARNING, what, because, larger)
    return Finding(SHARED_MEMORY, Level.OK, what, because)


def judge_memory(facts: MemoryFacts) -> Finding:
    """Whether there is memory, and who limits it. Pure."""
    limit = facts.cgroup_bytes
    is_limited = limit is not None and limit < facts.available_bytes
    available_bytes = min(facts.available_bytes, facts.available_bytes if limit is None else limit)
    what = f"{bytes_text(available_bytes)} can be allocated"
    because = "the control group of this container or job allows no more" if is_limited else ""
    remedy = (
        "raise the memory limit of the container or job (docker --memory, resources.limits.memory, sbatch --mem)"
        if is_limited
        else "end what else runs on this host, or take one with more memory"
    )
    if available_bytes < MARGIN_BYTES:
        return Finding(MEMORY, Level.ERROR, what, because or "the kernel is about to end processes", remedy)
    if facts.needed_bytes is not None and available_bytes < MEMORY_COPIES * facts.needed_bytes + MARGIN_BYTES:
        copies = bytes_text(MEMORY_COPIES * facts.needed_bytes)
        because = f"checkpoints in memory would take {copies} of it" + (f"; {because}" if because else "")
        return Finding(MEMORY, Level.ERROR, what, because, remedy)
    if is_limited and facts.is_tmpfs and (facts.free_bytes or 0) > available_bytes:
        because += f"; {facts.root} is larger than that, and filling it counts as memory"
        return Finding(MEMORY, Level.NOTE, what, because)
    return Finding(MEMORY, Level.NOTE if is_limited else Level.OK, what, because)


def judge_files(facts: LimitFacts, world_size: int) -> Finding:
    """Whether the limit on open files is enough for so many ranks. Pure."""
    needed = FILES_OF_ONE + FILES_PER_RANK * world_size
    if facts.files is None:
        return Finding(FILES, Level.OK, "no limit")
    what = f"ulimit -n is {facts.files}"
    because = f"a worker among {world_size} needs about {needed}"
    can_raise = facts.files_hard is None or facts.files_hard > facts.files
    wanted = max(needed, 65536) if facts.files_hard is None else min(max(needed, 65536), facts.files_hard)
    remedy = f"ulimit -n {wanted}" if can_raise else "docker run --ulimit nofile=65536, LimitNOFILE= of the service"
    if facts.files_hard is not None and facts.files_hard < needed:
        remedy = "raise the hard limit: /etc/security/limits.conf, docker run --ulimit nofile=65536, LimitNOFILE="
    if facts.files < FILES_OF_ONE // 2:
        return Finding(FILES, Level.ERROR, what, because, remedy)
    if facts.files < needed:
        return Finding(FILES, Level.WARNING, what, because, remedy)
    if facts.files < FILES_WISHED:
        because = "each tensor on its way from a data loader takes a descriptor: `received 0 items of ancdata` is this"
        return Finding(FILES, Level.NOTE, what, because, remedy)
    return Finding(FILES, Level.OK, what)


def judge_processes(facts: LimitFacts, workers: int) -> Finding:
    """Whether there is room for the threads and processes of so many workers on this host. Pure."""
    needed = TASKS_PER_WORKER * workers
    user = None if facts.processes is None or facts.is_root else facts.processes - facts.tasks
    group = None if facts.cgroup_processes is None else facts.cgroup_processes - facts.cgroup_tasks
    left = min((number for number in (user, group) if number is not None), default=None)
    if left is None:
        return Finding(PROCESSES, Level.OK, "no limit")
    what = f"{max(left, 0)} more processes and threads may be started"
    because = f"{workers} worker(s) with data loaders start about {needed}"
    by_group = "raise the limit of the container (docker run --pids-limit, podPidsLimit of the kubelet)"
    remedy = by_group if left == group else "raise ulimit -u"
    if left < needed // 4:
        return Finding(PROCESSES, Level.ERROR, what, because, remedy)
    if left < needed:
        return Finding(PROCESSES, Level.WARNING, what, because, remedy)
    return Finding(PROCESSES, Level.OK, what)


def judge_locked_memory(facts: LimitFacts) -> list[Finding]:
    """Whether NCCL over InfiniBand may lock its buffers; nothing where there is none. Pure."""
    if not facts.has_infiniband:
        return []
    if facts.locked_bytes is None:
        return [Finding(LOCKED, Level.OK, "no limit, as RDMA needs it")]
    what = f"ulimit -l is {bytes_text(facts.locked_bytes)}"
    because = "this host has an RDMA device: NCCL registers (locks) its buffers there, and fails if it may not"
    remedy = "ulimit -l unlimited (docker run --ulimit memlock=-1, LimitMEMLOCK=infinity)"
    return [Finding(LOCKED, Level.WARNING, what, because, remedy)]


def gather_memory(needed_bytes: int | None, root: Path | None = None) -> MemoryFacts:
    """Ask the file system, the host and the control group.

    Args:
        needed_bytes: see `MemoryFacts`.
        root: default: TORCHELASTIC_MEMORY_ROOT, else /dev/shm.
    """
    place = root or Path(os.environ.get(ROOT_VARIABLE) or DEFAULT_ROOT)
    available_bytes, cgroup_bytes = int(psutil.virtual_memory().available), cgroup_available_bytes()
    if not place.is_dir():
        return MemoryFacts(str(place), None, None, None, available_bytes, cgroup_bytes, needed_bytes)
    status = os.statvfs(place)
    size_bytes = status.f_blocks * status.f_frsize or None
    free_bytes = None if size_bytes is None else status.f_bavail * status.f_frsize
    is_tmpfs = is_in_memory(place)
    return MemoryFacts(str(place), is_tmpfs, size_bytes, free_bytes, available_bytes, cgroup_bytes, needed_bytes)


def gather_limits() -> LimitFacts:
    """Ask the kernel."""
    files, files_hard = (_limit(value) for value in resource.getrlimit(resource.RLIMIT_NOFILE))
    most, most_tasks = _most_processes(CGROUP_ROOT, SELF_CGROUP)
    return LimitFacts(
        files,
        files_hard,
        _limit(resource.getrlimit(resource.RLIMIT_NPROC)[0]),
        _tasks_of(os.getuid()),
        most,
        most_tasks,
        _limit(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        any(Path("/sys/class/infiniband").glob("*")),
        os.geteuid() == 0,
    )


def _limit(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value


def _tasks_of(uid: int) -> int:
    count = 0
    for process in psutil.process_iter(["uids", "num_threads"]):
        uids = process.info["uids"]
        if uids is not None and uids.real == uid:
            count += process.info["num_threads"] or 1
    return count


def _most_processes(root: Path, self_cgroup: Path) -> tuple[int | None, int]:
    """Limit and number of the strictest control group of this process that has a limit."""
    strictest: tuple[int | None, int] = (None, 0)
    for group in control_groups(root, self_cgroup):
        limit, number = text_of(group, "pids.max"), text_of(group, "pids.current")
        if limit.isdecimal() and number.isdecimal():
            left = int(limit) - int(number)
            if strictest[0] is None or left < strictest[0] - strictest[1]:
                strictest = int(limit), int(number)
    return strictest


def check_memory(needed_bytes: int | None) -> Sequence[Finding]:
    """Check shared memory and memory."""
    facts = gather_memory(needed_bytes)
    return [judge_shared_memory(facts), judge_memory(facts)]


def check_limits(workers: int, world_size: int) -> Sequence[Finding]:
    """Check the limits of this process, which those that it starts inherit."""
    facts = gather_limits()
    return [judge_files(facts, world_size), judge_processes(facts, workers), *judge_locked_memory(facts)]


# --- left-overs -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LeftOverFacts:
    """What dead jobs have left.

    Attributes:
        root: the folder that was searched.
        jobs: run id (None: it had none) and size in bytes of each dead job.
        size_bytes: of the file system; None: it has no limit, or is not there.
    """

    root: str
    jobs: tuple[tuple[str | None, int], ...]
    size_bytes: int | None


def judge_left_overs(facts: LeftOverFacts) -> Finding:
    """Whether dead jobs hold memory that the next one needs. Pure."""
    if not facts.jobs:
        return Finding(LEFT_OVERS, Level.OK, f"no dead job has left anything in {facts.root}")
    total_bytes = sum(size_bytes for _, size_bytes in facts.jobs)
    is_much = facts.size_bytes is not None and total_bytes > MUCH * facts.size_bytes
    run_ids = list(dict.fromkeys(run_id or "(no run id)" for run_id, _ in facts.jobs))
    what = f"{len(facts.jobs)} dead job(s) hold {bytes_text(total_bytes)} in {facts.root}"
    because = f"of {shortlist(run_ids, 5)}; a job that comes back (requeued, say) wants its memory"
    remedy = f"torchelastic checkpoint prune --dead {facts.root}"
    return Finding(LEFT_OVERS, Level.WARNING if is_much else Level.NOTE, what, because, remedy)


def gather_left_overs(root: Path | None = None) -> LeftOverFacts:
    """Search the memory root of this host, as `torchelastic checkpoint prune --dead` does; claims nothing."""
    place = root or Path(os.environ.get(ROOT_VARIABLE) or DEFAULT_ROOT)
    if not place.is_dir():
        return LeftOverFacts(str(place), (), None)
    status = os.statvfs(place)
    jobs = tuple((dead.run_id, dead.size_bytes) for dead in find_dead(place))
    return LeftOverFacts(str(place), jobs, status.f_blocks * status.f_frsize or None)


def check_left_overs() -> Sequence[Finding]:
    """Check the memory of this host for what dead jobs have left."""
    return [judge_left_overs(gather_left_overs())]


# --- clock ------------------------------------------------------------------------------------------------------------


def judge_clock(is_synchronized: bool | None, hosts: int = 1) -> Finding:
    """What follows from what the kernel says. Pure.

    Args:
        is_synchronized: whether chrony, ntpd or systemd-timesyncd synchronizes it; None: not known.
        hosts: of the run.
    """
    if is_synchronized is None:
        return Finding(CLOCK, Level.NOTE, "the kernel does not say whether the clock is synchronized")
    if is_synchronized:
        return Finding(CLOCK, Level.OK, "synchronized (NTP), says the kernel")
    because = "deadlines given as dates, certificates and the order of lines in logs depend on it"
    remedy = "start chrony or systemd-timesyncd; `chronyc tracking` or `timedatectl` shows its state"
    level = Level.NOTE if hosts == 1 else Level.WARNING
    return Finding(CLOCK, level, "not synchronized (NTP), says the kernel", because, remedy)


def gather_clock() -> bool | None:
    """Ask the kernel (adjtimex(2)); None where it cannot be asked."""
    try:
        state = int(ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES)))
    except (AttributeError, OSError):
        return None
    return None if state < 0 else state != _TIME_ERROR


def check_clock(hosts: int) -> Sequence[Finding]:
    """Check this host's clock: the kernel's state, which `timedatectl` and chrony show too."""
    return [judge_clock(gather_clock(), hosts)]
