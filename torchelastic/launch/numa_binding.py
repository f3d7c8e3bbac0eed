"""Which CPUs each worker runs on: those near its GPU, in torchrun's four ways (`--numa-binding`). Pure but `read`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from torchelastic.usage import UsageError

MODES = ("node", "socket", "exclusive", "core-complex")
SYSFS = Path("/sys")

_LEAVE_IT_OUT = "leave --numa-binding out, or bind each worker with --no-python and numactl"


@dataclass(frozen=True)
class Cpu:
    """A logical CPU.

    Attributes:
        socket: the number of its package.
        core: the first logical CPU of its physical core.
        cache: the first logical CPU that shares its largest cache.
    """

    socket: int
    core: int
    cache: int


@dataclass(frozen=True)
class Topology:
    """What a host is made of.

    Attributes:
        gpus: the NUMA node of each GPU, in torch's order.
        nodes: the logical CPUs of each NUMA node.
        cpus: the logical CPUs of these nodes, by number.
    """

    gpus: tuple[int, ...]
    nodes: Mapping[int, frozenset[int]]
    cpus: Mapping[int, Cpu]


def bound(mode: str, nproc: int, topology: Topology, allowed: Set[int]) -> list[frozenset[int]]:
    """The CPUs of each worker, which uses the GPU with its own number.

    Args:
        mode: one of `MODES`.
        nproc: how many workers.
        topology: of the host.
        allowed: the CPUs that this process may run on; workers get no others.

    Raises:
        UsageError: a worker has no GPU, or there is no CPU for it.
    """
    gpus = topology.gpus
    if not gpus:
        raise UsageError(f"--numa-binding {mode}: torch sees no GPU here; {_LEAVE_IT_OUT}")
    if nproc > len(gpus):
        raise UsageError(
            f"--numa-binding {mode}: worker {len(gpus)} has no GPU, for torch sees {len(gpus)} here: write "
            f"--nproc-per-node {len(gpus)}, or {_LEAVE_IT_OUT}"
        )
    found = [_near(mode, gpu, topology, allowed) for gpu in range(nproc)]
    for worker, cpus in enumerate(found):
        if not cpus:
            raise UsageError(
                f"--numa-binding {mode}: there is no CPU for worker {worker}: its GPU is at NUMA node {gpus[worker]}, "
                f"and this process may run on the CPUs {_ranges(allowed)} only: ask your scheduler for CPUs near each "
                f"GPU, or {_LEAVE_IT_OUT}"
            )
    return found


def _near(mode: str, gpu: int, topology: Topology, allowed: Set[int]) -> frozenset[int]:
    node = topology.gpus[gpu]
    here = topology.nodes.get(node, frozenset()) & allowed
    if mode == "node" or not here:
        return here
    if mode == "socket":
        socket = topology.cpus[min(here)].socket
        on_it = (cpus & allowed for cpus in topology.nodes.values())
        return frozenset().union(*(cpus for cpus in on_it if cpus and topology.cpus[min(cpus)].socket == socket))
    at_node = [other for other, its_node in enumerate(topology.gpus) if its_node == node]
    place = at_node.index(gpu)
    if mode == "exclusive":
        cores = _grouped(here, lambda cpu: topology.cpus[cpu].core)
        return frozenset().union(*_part([cores[core] for core in sorted(cores)], place, len(at_node)))
    caches = _grouped(here, lambda cpu: topology.cpus[cpu].cache)
    largest_first = sorted(caches, key=lambda cache: (-len(caches[cache]), cache))
    return caches[largest_first[place % len(largest_first)]]


def _grouped(cpus: Iterable[int], key: Callable[[int], int]) -> dict[int, frozenset[int]]:
    groups: dict[int, set[int]] = defaultdict(set)
    for cpu in cpus:
        groups[key(cpu)].add(cpu)
    return {name: frozenset(group) for name, group in groups.items()}


def _part(cores: Sequence[frozenset[int]], place: int, parts: int) -> Sequence[frozenset[int]]:
    """One of so many parts, of which the first are larger by one if they cannot be equal."""
    least, larger = divmod(len(cores), parts)
    begin = place * least + min(place, larger)
    return cores[begin : begin + least + (place < larger)]


def read(addresses: Sequence[str], sysfs: Path = SYSFS) -> Topology:
    """What the kernel says of this host.

    Args:
        addresses: of its GPUs, on the PCI bus.
        sysfs: where it says so.

    Raises:
        UsageError: it does not.
    """
    from torchelastic.processes.cpus import listed_cpus  # here: --help does not need it

    system = sysfs / "devices/system"
    try:
        # -1: there is one node only, and the firmware does not say so
        gpus = [max(0, int((sysfs / "bus/pci/devices" / each / "numa_node").read_text())) for each in addresses]
        possible = listed_cpus((system / "node/possible").read_text())
        files = {node: system / f"node/node{node}/cpulist" for node in possible}
        nodes = {node: frozenset(listed_cpus(file.read_text())) for node, file in files.items() if file.exists()}
        cpus = {cpu: _cpu(system / f"cpu/cpu{cpu}") for node in nodes.values() for cpu in node}
    except (OSError, ValueError) as error:
        raise UsageError(f"--numa-binding: {error}, so it is not known which CPUs are near; {_LEAVE_IT_OUT}") from error
    return Topology(tuple(gpus), nodes, cpus)


def _cpu(folder: Path) -> Cpu:
    from torchelastic.processes.cpus import listed_cpus  # as above

    shared, largest = {int(folder.name[3:])}, -1
    for cache in folder.glob("cache/index[0-9]*"):
        level = int((cache / "level").read_text())
        if level > largest and (cache / "type").read_text().strip() in ("Unified", "Data"):
            shared, largest = listed_cpus((cache / "shared_cpu_list").read_text()), level
    core = listed_cpus((folder / "topology/thread_siblings_list").read_text())
    return Cpu(int((folder / "topology/physical_package_id").read_text()), min(core), min(shared))


def _ranges(numbers: Iterable[int]) -> str:
    """The reverse of `listed_cpus`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
