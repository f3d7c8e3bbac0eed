"""What options of `torchelastic run` mean here: the workers' command, their network, the end of their time."""

from __future__ import annotations

import argparse
import itertools
import math
import os
import resource
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from torchelastic.agent.health_check import HealthCheck
from torchelastic.agent.worker import Own
from torchelastic.agent.worker_environment import TAKING_PART
from torchelastic.launch import accelerators, numa_binding
from torchelastic.launch.torchrun_options import Translation, translated, workers_per_host
from torchelastic.lifetime.deadline import TERMINATION_TIME_VARIABLE
from torchelastic.metrics.pushing import checked_gateway
from torchelastic.network.interface_choice import IFACE_VARIABLE, InterfaceError, choose, library_variables
from torchelastic.network.interfaces import interfaces
from torchelastic.processes.cpus import usable_cpus
from torchelastic.processes.local_rank import OWN_GPU_VARIABLE
from torchelastic.usage import UsageError

#: Descriptors of etcd's connection, the page, the ledger and so on; and of each worker: two pipes, its log, its
#: connection, its end and the notice of its death.
FILES_OF_LAUNCHER, FILES_PER_WORKER = 64, 6
DEFAULT_HEALTH_CHECK_S = 600.0


def understood(options: argparse.Namespace) -> tuple[argparse.Namespace, Translation]:
    """The options with what torchrun's among them come to. Raises UsageError."""
    nproc = workers_per_host(options.nproc_per_node, usable_cpus, accelerators.count)
    _check_descriptors(nproc)
    theirs = translated(options, several_hosts=nodes(options.nnodes)[1] > 1, nproc=nproc)
    defaults = {"meeting_place": None, "nproc_per_node": nproc}
    ours = argparse.Namespace(**{**vars(options), **defaults, **theirs.options})
    if not 0.0 <= ours.term_grace < math.inf:
        raise UsageError(f"--term-grace is {ours.term_grace:g}: give seconds, 0 or more")
    _check_health_check(ours.health_check, ours.health_check_timeout)
    ours.own = _own_of_workers(ours, theirs, os.environ)
    if ours.log_dir is not None:
        _check_log_dir(ours.log_dir)
    if theirs.to_files and ours.log_dir is None:
        ours.log_dir = Path(tempfile.mkdtemp(prefix="torchelastic-logs-"))
        theirs = replace(theirs, notes=(*theirs.notes, f"the workers' output is written to files in {ours.log_dir}"))
    return ours, theirs


def _check_descriptors(nproc: int) -> None:
    """Raise UsageError if this process may not open the files of so many workers."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_OF_LAUNCHER + FILES_PER_WORKER * nproc
    if limit != resource.RLIM_INFINITY and wanted > limit:
        most = max(0, (limit - FILES_OF_LAUNCHER) // FILES_PER_WORKER)
        raise UsageError(
            f"--nproc-per-node {nproc}: this process may open {limit} files, enough for {most} workers; give fewer, or "
            f"`ulimit -n {wanted}` before"
        )


def _check_log_dir(folder: Path) -> None:
    """Raise UsageError if it can never be one; a full or missing disk is worth a warning, and the run goes on."""
    for path in (folder, *folder.parents):
        if path.exists():
            if not path.is_dir():
                raise UsageError(f"--log-dir {folder}: {path} is a file; give a folder")
            return


def _own_of_workers(options: argparse.Namespace, theirs: Translation, environment: Mapping[str, str]) -> list[Own]:
    """What each worker has for itself, by torchrun's options: one GPU that is visible, the CPUs near its GPU.

    Raises:
        UsageError: there is too little of them, or it cannot be known.
    """
    nproc, cpus, variables = options.nproc_per_node, [], []
    if theirs.numa_mode:
        topology = numa_binding.read(accelerators.pci_addresses())
        cpus = numa_binding.bound(theirs.numa_mode, nproc, topology, os.sched_getaffinity(0))
    if options.virtual_local_rank:
        variables = [one_gpu(local_rank, environment) for local_rank in range(nproc)]
    return [
        Own(of_it or {}, its or frozenset()) for of_it, its in itertools.zip_longest(variables, cpus, fillvalue=None)
    ]


def one_gpu(local_rank: int, environment: Mapping[str, str]) -> dict[str, str]:
    """What torchrun's --virtual-local-rank sets for a worker: the GPU with its number is the only one that it sees.

    Args:
        local_rank: its number on this host.
        environment: of the launcher.

    Raises:
        UsageError: the launcher sees fewer GPUs.

    >>> one_gpu(1, {"CUDA_VISIBLE_DEVICES": "4,6"})
    {'LOCAL_RANK': '0', 'TORCHELASTIC_OWN_GPU': '1', 'CUDA_VISIBLE_DEVICES': '6'}
    """
    rocm = "HIP_VISIBLE_DEVICES"
    source = rocm if environment.get(rocm) else "CUDA_VISIBLE_DEVICES"
    seen = environment.get(source)
    gpus = None if seen is None else [each.strip() for each in seen.split(",")]
    if gpus is not None and local_rank >= len(gpus):
        raise UsageError(
            f"--virtual-local-rank: there is no GPU for worker {local_rank}: {source} is {seen!r}; name more there, or "
            f"write --nproc-per-node {len(gpus)}"
        )
    gpu = str(local_rank) if gpus is None else gpus[local_rank]
    return {
        "LOCAL_RANK": "0",
        OWN_GPU_VARIABLE: "1",
        "CUDA_VISIBLE_DEVICES": gpu,
        **({rocm: gpu} if source == rocm else {}),
    }


def worker_command(options: argparse.Namespace) -> list[str]:
    """What each worker runs. Raises UsageError."""
    if options.no_python and not options.run_path:
        return _program(options)
    if options.module:
        return [sys.executable, "-m", options.script, *options.arguments]
    if Path(options.script).is_dir():
        raise UsageError(f"{options.script!r} is a folder: name the script in it; for a package write -m PACKAGE")
    if not Path(options.script).is_file():
        raise UsageError(f"there is no file {options.script!r}; for a module write -m {options.script}")
    return [sys.executable, options.script, *options.arguments]


def _program(options: argparse.Namespace) -> list[str]:
    if options.module:
        raise UsageError("--no-python and -m exclude each other: leave one out")
    found = shutil.which(options.script)
    if found is None:
        raise UsageError(f"--no-python: there is no program {options.script!r} that this user may start")
    return [found, *options.arguments]


def gateway_url(options: argparse.Namespace) -> str | None:
    """Of the push gateway; None: there is none. Raises UsageError."""
    try:
        return None if options.push_gateway is None else checked_gateway(options.push_gateway)
    except ValueError as error:
        raise UsageError(f"--push-gateway: {error}") from error


def health_check(options: argparse.Namespace, worker_variables: Mapping[str, str]) -> HealthCheck | None:
    """What decides whether this host may take part; None: nothing does.

    Args:
        options: of the command line, as `understood` has checked them.
        worker_variables: environment of the workers of this host.
    """
    if options.health_check is None:
        return None
    timeout_s = DEFAULT_HEALTH_CHECK_S if options.health_check_timeout is None else options.health_check_timeout
    kept = {name: value for name, value in worker_variables.items() if name not in TAKING_PART}
    return HealthCheck(options.health_check, timeout_s, kept)


def _check_health_check(command: str | None, timeout_s: float | None) -> None:
    """Raise UsageError if there is no command, or no time for it."""
    if command is None and timeout_s is not None:
        raise UsageError("--health-check-timeout is for a health check: give --health-check COMMAND too")
    if command is not None and not command.strip():
        raise UsageError("--health-check is empty: give the command that checks this host, or leave it out")
    if timeout_s is not None and not 0.0 < timeout_s < math.inf:
        raise UsageError(f"--health-check-timeout is {timeout_s:g}: give seconds, above 0")


def nodes(text: str) -> tuple[int, int]:
    """The least and the largest number of hosts. Raises UsageError."""
    low, _, high = text.partition(":")
    try:
        least, most = int(low), int(high or low)
    except ValueError:
        raise UsageError(f"--nnodes {text!r}: write a number, or MIN:MAX") from None
    if not 1 <= least <= most:
        raise UsageError(f"--nnodes {text!r}: 1 <= MIN <= MAX")
    return least, most


@dataclass(frozen=True)
class Network:
    """Over which of its networks this host meets the others.

    Attributes:
        address: at which the others reach this host; empty: on the network that leads to etcd.
        variables: for the workers: gloo, NCCL and whatever else announces an address go by them.
    """

    address: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)


def chosen_network(text: str | None, environment: Mapping[str, str]) -> Network:
    """What `--iface` names, among the interfaces of this host.

    Args:
        text: its value; None: TORCHELASTIC_IFACE counts.
        environment: of this process.

    Raises:
        UsageError: there is none like that (the message lists those that there are), or GLOO_SOCKET_IFNAME differs.
    """
    asked_by = "--iface" if text is not None else IFACE_VARIABLE
    text = environment.get(IFACE_VARIABLE, "") if text is None else text
    if not text and asked_by == IFACE_VARIABLE:
        return Network()
    try:
        choice = choose(text, interfaces(), asked_by=asked_by)
        return Network(choice.address, {IFACE_VARIABLE: text, **library_variables(choice, environment)})
    except InterfaceError as error:
        raise UsageError(str(error)) from error


def limited(environment: Mapping[str, str], limit_s: float | None, now_s: float) -> dict[str, str]:
    """What tells the workers the end of their time; of two ends the nearer one. Empty: nothing but what they have.

    Args:
        environment: variables that they have anyway.
        limit_s: seconds from now; None: there is no limit.
        now_s: Unix seconds.

    Raises:
        UsageError: the limit is no time, or the variable holds no number.

    >>> limited({}, 60.0, now_s=1000.0)
    {'TORCHELASTIC_TERMINATION_TIME': '1060.000'}
    >>> limited({"TORCHELASTIC_TERMINATION_TIME": "1010"}, 60.0, now_s=1000.0)
    {}
    """
    if limit_s is None:
        return {}
    if not 0.0 < limit_s < math.inf:
        raise UsageError(f"--time-limit is {limit_s:g}: give seconds, above 0")
    end_s = now_s + limit_s
    text = environment.get(TERMINATION_TIME_VARIABLE, "").strip()
    try:
        known_s = float(text or "nan")
    except ValueError:
        raise UsageError(f"{TERMINATION_TIME_VARIABLE} is {text!r}: give Unix seconds, or unset it") from None
    is_known_nearer = now_s < known_s < end_s  # one in the past is left from an earlier life
    return {} if is_known_nearer else {TERMINATION_TIME_VARIABLE: f"{end_s:.3f}"}
