"""Workers are bound to the CPUs near their GPUs: from a tree of sysfs to what the kernel lets a process use."""

from __future__ import annotations

import asyncio
import builtins
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.process.supervised import supervise
from torchelastic.agent.supervisor import Supervisor
from torchelastic.agent.worker import Own
from torchelastic.launch.accelerators import pci_addresses
from torchelastic.launch.numa_binding import MODES, Topology, bound, read
from torchelastic.usage import UsageError


def write_tree(root: Path, gpus: Iterable[int], cpus: dict[int, tuple[int, int, int, int]]) -> list[str]:
    """A tree as the kernel's; cpus: number to (node, socket, core, cache). Returns the addresses of the GPUs."""

    def put(name: str, text: object) -> None:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")

    def alike(place: int, value: int) -> str:
        return ",".join(str(cpu) for cpu in sorted(cpus) if cpus[cpu][place] == value)

    nodes = {node for node, *_ in cpus.values()}
    put("devices/system/node/possible", f"0-{max(nodes)}")
    for node in nodes:
        put(f"devices/system/node/node{node}/cpulist", alike(0, node))
    for cpu, (_node, socket, core, cache) in cpus.items():
        at = f"devices/system/cpu/cpu{cpu}"
        put(f"{at}/topology/physical_package_id", socket)
        put(f"{at}/topology/thread_siblings_list", alike(2, core))
        for index, (level, kind, shared) in enumerate(
            [(1, "Data", cpu), (1, "Instruction", cpu), (3, "Unified", alike(3, cache)), (9, "Instruction", cpu)]
        ):
            put(f"{at}/cache/index{index}/level", level)
            put(f"{at}/cache/index{index}/type", kind)
            put(f"{at}/cache/index{index}/shared_cpu_list", shared)
    addresses = [f"0000:{0xA0 + number:02x}:00.0" for number, _ in enumerate(gpus)]
    for address, node in zip(addresses, gpus, strict=True):
        put(f"bus/pci/devices/{address}/numa_node", node)
    return addresses


def random_host(dice: random.Random) -> tuple[list[int], dict[int, tuple[int, int, int, int]]]:
    """Nodes of some cores; sockets of some nodes; caches and cores that end with their node."""
    cpus: dict[int, tuple[int, int, int, int]] = {}
    per_socket, per_cache, threads = dice.randint(1, 2), dice.randint(1, 3), dice.randint(1, 2)
    nodes = dice.randint(1, 4)
    cores = [(node, node * 8 + i) for node in range(nodes) for i in range(dice.randint(2, 8))]
    for thread in range(threads):
        for node, core in cores:
            cpus[core + 64 * thread] = (node, node // per_socket, core, node * 100 + core % 8 // per_cache)
    return [dice.randrange(nodes) for _ in range(dice.randint(1, 4))], cpus


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_the_cpus_are_those_that_torchrun_would_choose(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    binding = pytest.importorskip("torch.numa.binding", reason="torch binds workers since 2.9")
    for seed in range(20):
        dice, root = random.Random(seed), tmp_path / str(seed)
        gpus, cpus = random_host(dice)
        addresses = write_tree(root, gpus, cpus)
        # torch forgets that a node of a socket may have no CPU that is allowed
        firsts = {min(cpu for cpu in cpus if cpus[cpu][0] == node) for node, *_ in cpus.values()}
        allowed = firsts | {cpu for cpu in cpus if dice.random() < 0.8}
        ours = read(addresses, root)
        expected = _of_torch(binding, mode, ours, root, allowed, monkeypatch)
        if expected is None:
            with pytest.raises(UsageError, match="there is no CPU for worker"):
                bound(mode, len(gpus), ours, allowed)
        else:
            assert bound(mode, len(gpus), ours, allowed) == expected, f"seed {seed}"


def _of_torch(
    binding: Any, mode: str, host: Topology, root: Path, allowed: set[int], monkeypatch: pytest.MonkeyPatch
) -> list[set[int]] | None:
    """What torch chooses on such a host; None: it refuses, or binds a worker to no CPU."""

    def below(plain: Callable[..., Any]) -> Callable[..., Any]:
        return lambda path, *rest: plain(str(root / path[5:]) if str(path).startswith("/sys/") else path, *rest)

    word = "device" if hasattr(binding, "_get_numa_node_index_for_device_index") else "gpu"  # until torch 2.13
    with monkeypatch.context() as patched:
        patched.setattr(builtins, "open", below(open))
        patched.setattr(os, "listdir", below(os.listdir))
        patched.setattr(os, "sched_getaffinity", lambda _pid: allowed)
        patched.setattr(
            binding, f"_get_numa_node_index_for_{word}_index", lambda **index: host.gpus[index[f"{word}_index"]]
        )
        patched.setattr(binding.torch.accelerator, "device_count", lambda: len(host.gpus))
        patched.setattr(binding.torch.cuda, "device_count", lambda: len(host.gpus))
        options = binding.NumaOptions(affinity_mode=binding.AffinityMode(mode))
        try:
            return [
                binding._get_logical_cpus_to_bind_to(**{f"{word}_index": gpu}, numa_options=options)
                for gpu in range(len(host.gpus))
            ]
        except RuntimeError:
            return None


def test_workers_run_where_they_are_bound_and_so_does_what_they_start(tmp_path: Path) -> None:
    first, second, *_ = sorted(os.sched_getaffinity(0))
    addresses = write_tree(tmp_path / "sys", (1, 0), {first: (0, 0, first, first), second: (1, 0, second, second)})
    cpus = bound("exclusive", 2, read(addresses, tmp_path / "sys"), os.sched_getaffinity(0))
    script = (
        "import os, subprocess, sys\n"
        "child = 'import os; print(sorted(os.sched_getaffinity(0)))'\n"
        f"with open({str(tmp_path)!r} + '/' + os.environ['LOCAL_RANK'], 'w') as file:\n"
        "    subprocess.run([sys.executable, '-c', child], stdout=file, check=True)\n"
    )

    async def until_over(supervisor: Supervisor) -> None:
        await asyncio.wait_for(supervisor.all_over.wait(), 60.0)

    supervise(2, until_over, script, own=[Own(cpus=each) for each in cpus])
    assert [(tmp_path / name).read_text() for name in "01"] == [f"[{second}]\n", f"[{first}]\n"]


def test_a_host_that_does_not_say_where_its_gpus_are_is_named(tmp_path: Path) -> None:
    addresses = write_tree(tmp_path, (0,), {0: (0, 0, 0, 0)})
    with pytest.raises(UsageError, match=r"0000:dc:00\.0/numa_node.*leave --numa-binding out"):
        read([*addresses, "0000:dc:00.0"], tmp_path)
    (tmp_path / "bus/pci/devices" / addresses[0] / "numa_node").write_text("-1\n")
    assert read(addresses, tmp_path).gpus == (0,)


FAKE = """
class accelerator:
    is_available = staticmethod(lambda: True)
    current_accelerator = staticmethod(lambda: "cuda")
def get_device_module(kind):
    return cuda
class cuda:
    device_count = staticmethod(lambda: 2)
    get_device_properties = staticmethod(lambda index: PROPERTIES)
"""
PROPERTIES = "type('P', (), {'pci_domain_id': 1, 'pci_bus_id': 0xdc, 'pci_device_id': 2 + index})"


def test_torch_is_asked_for_the_addresses_and_an_old_one_does_not_know_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "torch.py").write_text("print('a banner')\n" + FAKE.replace("PROPERTIES", PROPERTIES))
    assert pci_addresses() == ["0001:dc:02.0", "0001:dc:03.0"]
    (tmp_path / "torch.py").write_text(FAKE.replace("PROPERTIES", "object()"))
    with pytest.raises(UsageError, match=r"pci_domain_id.*install torch 2\.9 or later"):
        pci_addresses()


@pytest.mark.long
def test_a_command_line_of_a_host_without_gpus_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    command = [sys.executable, "-m", "torchelastic", "run", "--numa-binding=exclusive", "train.py"]
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=tmp_path, env=hidden, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--numa-binding exclusive: torch sees no GPU here; leave --numa-binding out" in done.stderr
