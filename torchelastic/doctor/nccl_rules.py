"""Whether a worker survives that its peer is lost in NCCL: releases and settings that crash, hang or end it. Pure.

The communicator of a lost peer is given up (aborted) in processes that go on. Hardly anybody but frameworks like this
one does that, so releases of NCCL in which it crashes are in use, and by torch's default it ends the process. What is
said here of torch was read in its sources (2.6 to 2.15), of NCCL in the reports that are named beside each rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torchelastic.doctor.findings import Finding, Level

NAME = "NCCL"
ENGINE_SWITCH = "TORCH_DIST_USE_NCCL2"
SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"
_MODE = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_HEARTBEAT = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"
_MONITORING = "TORCH_NCCL_ENABLE_MONITORING"
_TEARDOWN = "TORCH_NCCL_TEARDOWN_ON_TIMEOUT"
_FAILOVER = "NCCL_IB_RESILIENCY_PORT_FAILOVER"
_NVLS = "NCCL_NVLS_ENABLE"
_BLOCKING_NAMES = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")
_RECORDER_NAMES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_NO_HANDLING, _CLEAN_UP_ONLY = 0, 2
#: What torch takes as yes, in any case of letters.
_YES = frozenset({"1", "y", "yes", "t", "true"})
#: torch gives its own watchdog eight minutes. It stands still while CUDA frees a communicator's memory.
LEAST_HEARTBEAT_S = 60

Release = tuple[int, ...]
#: Port failover came with 2.29.7; ranks may share a GPU since 2.30; what `_judge_shrinking` is about since 2.31.2.
_FAILOVER_SINCE, SHARING_SINCE, _BARRIER_SINCE = (2, 29, 7), (2, 30), (2, 31, 2)
#: First bad release, first good one after it, what happens, who says so.
_BAD: tuple[tuple[Release, Release, str, str], ...] = (
    # https://github.com/pytorch/pytorch/issues/149153
    ((2, 25), (2, 26, 2), "hangs", "ncclCommAbort of 2.25 never returns (pytorch issue 149153)"),
    # README and notes of release 0.5 of https://github.com/NVIDIA/nvidia-resiliency-ext
    ((2, 28, 3), (2, 28, 9), "crashes", "2.28.3 to 2.28.8 end with a segmentation fault then (NVRx's release notes)"),
)


@dataclass(frozen=True)
class NcclFacts:
    """What decides it.

    Attributes:
        release: of the library that torch loads, such as (2, 30, 7); empty: not known, or it is AMD's RCCL.
        cuda: the version that torch was built for, such as "13.2"; names the package that brings the library.
        is_nccl2: whether the backend "nccl" is NCCL2, as it is by default since torch 2.15.
        capabilities: compute capability of each GPU, such as "9.0".
        rdma_devices: of InfiniBand or RoCE, such as "mlx5_0".
        variables: the environment.
    """

    release: Release = ()
    cuda: str = ""
    is_nccl2: bool = False
    capabilities: tuple[str, ...] = ()
    rdma_devices: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        """The library in words."""
        return f"NCCL {'.'.join(map(str, self.release))}" if self.release else "NCCL of unknown version"


def judge_nccl(facts: NcclFacts) -> list[Finding]:
    """What makes the loss of a peer more than that; one line with release and engine if nothing does; then hints."""
    found = [*_judge_release(facts), *_judge_mode(facts), *_judge_watchdogs(facts), *_judge_switch(facts)]
    return [*(found or [Finding(NAME, Level.OK, f"{facts.name}; {_engine(facts)}")]), *_hints(facts)]


def release_of(text: str) -> Release:
    """The numbers of a version, for comparisons; of none: none.

    >>> release_of("2.30.7"), release_of("")
    ((2, 30, 7), ())
    """
    return tuple(int(number) for number in text.split(".") if number.isdigit())


def may_share(release: Release, variables: Mapping[str, str]) -> bool:
    """Whether NCCL lets several ranks use one GPU: only where that was asked for."""
    return release >= SHARING_SINCE and variables.get(SHARING) == "1"


def _engine(facts: NcclFacts) -> str:
    if facts.is_nccl2:
        return 'the backend "nccl" is NCCL2, torch\'s new engine'
    by = f", by {ENGINE_SWITCH}=0" if facts.variables.get(ENGINE_SWITCH) == "0" else ""
    return f'the backend "nccl" is ProcessGroupNCCL{by}'


def _judge_release(facts: NcclFacts) -> Iterator[Finding]:
    for first, good, happens, because in _BAD:
        if first <= facts.release < good:
            major = facts.cuda.partition(".")[0] or "12"
            wanted = ".".join(map(str, good))
            remedy = (
                f"install a torch that brings another one, or `pip install --no-deps 'nvidia-nccl-cu{major}>={wanted}'`"
            )
            what = f"{facts.name} {happens} when a communicator is aborted, as it is after the loss of a worker"
            yield Finding(NAME, Level.WARNING, what, because, remedy)


def _judge_mode(facts: NcclFacts) -> Iterator[Finding]:
    """What torch does about a failed collective. The older name of the variable counts only where this is not set."""
    value = facts.variables.get(_MODE)
    mode = _number(value)
    if value is None or mode == _CLEAN_UP_ONLY:
        return  # where it is not set, a worker sets it before its first group
    remedy = f"unset {_MODE}, or set it to {_CLEAN_UP_ONLY}, as torchelastic does where it is not set"
    if mode is None:
        yield Finding(NAME, Level.ERROR, f"{_MODE} is {value!r}, no number", "torch makes no NCCL group then", remedy)
    elif mode == _NO_HANDLING:
        because = "torch leaves a failed communicator as it is, and an error that only torch has seen goes unnoticed"
        yield Finding(NAME, Level.WARNING, f"{_MODE} is 0", because, remedy)
    else:
        because = "torch would end a process whose collective fails or times out: torchelastic's workers use 2 instead"
        yield Finding(NAME, Level.NOTE, f"{_MODE} is {mode}", because, remedy)


def _judge_watchdogs(facts: NcclFacts) -> Iterator[Finding]:
    """Further settings by which torch's own threads end the process, or see nothing."""
    blocking = next(
        (name for name in _BLOCKING_NAMES if name in facts.variables), ""
    )  # the first is the one that counts
    if _is_on(facts.variables.get(blocking)):
        because = "each collective holds the training thread, and torch has no thread that notices NCCL's errors"
        yield Finding(NAME, Level.WARNING, f"{blocking} is on", because, f"unset {blocking}")
    if facts.is_nccl2:  # it reads none of those that follow
        yield from _judge_recorder(facts)
        return
    # https://github.com/pytorch/pytorch/issues/155916: whatever the mode is
    value = facts.variables.get(_HEARTBEAT)
    heartbeat_s = _number(value)
    if value is not None and heartbeat_s is None:
        what, because = f"{_HEARTBEAT} is {value!r}, no number", "torch makes no NCCL group then"
        yield Finding(NAME, Level.ERROR, what, because, f"unset {_HEARTBEAT}, or give seconds")
    elif heartbeat_s is not None and heartbeat_s < LEAST_HEARTBEAT_S and _is_on(facts.variables.get(_MONITORING, "1")):
        because = "torch ends a process whose NCCL watchdog stands still for so long, as it may while one is aborted"
        remedy = f"unset {_HEARTBEAT} (torch's default is 480), or set {_MONITORING}=0"
        yield Finding(NAME, Level.WARNING, f"{_HEARTBEAT} is {heartbeat_s}", because, remedy)
    if _is_on(facts.variables.get(_TEARDOWN)):
        because = "torch ends the process of a worker whose collective times out"
        yield Finding(NAME, Level.WARNING, f"{_TEARDOWN} is on", because, f"unset {_TEARDOWN}")


def _judge_recorder(facts: NcclFacts) -> Iterator[Finding]:
    """The engine of torch 2.15 writes what its flight recorder has before anybody can abort the communicator."""
    name = next((name for name in _RECORDER_NAMES if facts.variables.get(name)), "")  # the first is the one that counts
    if _number(facts.variables.get(name)):
        what = f"{name} is {facts.variables[name]}: torch's flight recorder is on"
        because = "after the loss of a worker the others may wait up to 15 s until torch has written a file"
        yield Finding(NAME, Level.WARNING, what, because, f"unset {name}: here it is off by default")


def _judge_switch(facts: NcclFacts) -> Iterator[Finding]:
    """Whether somebody meant to have the older engine: only 0 says so to torch."""
    value = facts.variables.get(ENGINE_SWITCH, "")
    if facts.is_nccl2 and value.strip().lower() in {"0", "n", "no", "f", "false", "off"}:
        what, because = f"{ENGINE_SWITCH} is {value!r}, and {_engine(facts)}", "torch knows 0 alone as no"
        yield Finding(NAME, Level.WARNING, what, because, f"{ENGINE_SWITCH}=0, or unset it")


def _hints(facts: NcclFacts) -> Iterator[Finding]:
    if facts.release >= _BARRIER_SINCE:
        # https://github.com/pytorch/pytorch/issues/194679 and pull request 194775
        what = f"{facts.name}: shrink_group(..., shrink_flags=SHRINK_ABORT) of a script hangs"
        because = "survivors destroy the former communicator, and wait there for ranks that have aborted it"
        remedy = "leave the forming of groups to torchelastic, which aborts a group on all of its ranks"
        yield Finding(NAME, Level.NOTE, what, because, remedy)
    if len(facts.rdma_devices) > 1 and facts.release >= _FAILOVER_SINCE and _FAILOVER not in facts.variables:
        # https://github.com/NVIDIA/nccl/issues/2044 and 2192
        what = f"NCCL's port failover is off: a worker is lost with a port or cable of {', '.join(facts.rdma_devices)}"
        because = "it is off by default, and works where NCCL merges several ports into one network device"
        yield Finding(NAME, Level.NOTE, what, because, f"set {_FAILOVER}=1 on all hosts, and pull a cable to see")
    hoppers = [one for one in facts.capabilities if int(one.partition(".")[0]) >= 9]
    if len(hoppers) > 1 and facts.variables.get(_NVLS) != "0":
        # NVRx's usage guide, under known issues
        what = f"NCCL may use NVLink SHARP: {_NVLS} is not 0"
        because = "NVRx asks for that where communicators are aborted in processes that go on"
        yield Finding(NAME, Level.NOTE, what, because, f"if recoveries hang or crash, set {_NVLS}=0")


def _is_on(value: str | None) -> bool:
    return value is not None and value.lower() in _YES


def _number(value: str | None) -> int | None:
    try:
        return None if value is None else int(value)
    except ValueError:
        return None
