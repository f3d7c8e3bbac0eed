"""Which CPUs each worker is bound to, near its GPU."""

from __future__ import annotations

import pytest

from torchelastic.launch.numa_binding import Cpu, Topology, bound
from torchelastic.launch.run_options import one_gpu
from torchelastic.usage import UsageError

# two sockets of two nodes; a node has three cores of two threads (n, n + 12), and two caches: of two cores and of one
NODES = {node: frozenset({3 * node + i + thread for i in range(3) for thread in (0, 12)}) for node in range(4)}
CPUS = {
    cpu: Cpu(socket=cpu % 12 // 6, core=cpu % 12, cache=cpu % 12 - (cpu % 3 == 1))
    for node in NODES.values()
    for cpu in node
}
HOST = Topology(gpus=(0, 3, 3, 0), nodes=NODES, cpus=CPUS)
ALL = frozenset(CPUS)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("node", [{0, 1, 2, 12, 13, 14}, {9, 10, 11, 21, 22, 23}, {9, 10, 11, 21, 22, 23}, {0, 1, 2, 12, 13, 14}]),
        ("socket", [{*range(6), *range(12, 18)}, *[{*range(6, 12), *range(18, 24)}] * 2, {*range(6), *range(12, 18)}]),
        ("exclusive", [{0, 12, 1, 13}, {9, 21, 10, 22}, {11, 23}, {2, 14}]),
        ("core-complex", [{0, 12, 1, 13}, {9, 21, 10, 22}, {11, 23}, {2, 14}]),
    ],
)
def test_each_worker_runs_near_its_gpu(mode: str, expected: list[set[int]]) -> None:
    assert bound(mode, 4, HOST, ALL) == expected
    assert bound(mode, 1, HOST, ALL) == expected[:1]


def test_cpus_that_the_launcher_may_not_use_are_not_given_and_not_counted() -> None:
    assert bound("node", 2, HOST, {0, 9, 21}) == [{0}, {9, 21}]
    assert bound("exclusive", 4, HOST, ALL - {0, 12}) == [{1, 13}, {9, 21, 10, 22}, {11, 23}, {2, 14}]
    assert bound("socket", 1, HOST, {0, 4}) == [{0, 4}]
    assert bound("core-complex", 1, HOST, {1, 2, 14}) == [{2, 14}]  # the larger part of a cache that is left


@pytest.mark.parametrize(
    ("mode", "nproc", "gpus", "allowed", "said"),
    [
        ("node", 1, (), ALL, "torch sees no GPU here; leave --numa-binding out"),
        ("node", 2, (0,), ALL, "worker 1 has no GPU, for torch sees 1 here: write --nproc-per-node 1"),
        (
            "node",
            1,
            (3,),
            {0, 1, 2, 5},
            "worker 0: its GPU is at NUMA node 3, and this process may run on the CPUs 0-2,5",
        ),
        ("exclusive", 2, (0, 0), {0, 12}, "there is no CPU for worker 1"),
        ("node", 1, (7,), ALL, "its GPU is at NUMA node 7"),
    ],
)
def test_where_there_is_nothing_for_a_worker_it_is_said(
    mode: str, nproc: int, gpus: tuple[int, ...], allowed: set[int], said: str
) -> None:
    with pytest.raises(UsageError) as caught:
        bound(mode, nproc, Topology(gpus, NODES, CPUS), allowed)
    assert said in str(caught.value)


def test_each_worker_sees_one_gpu_of_those_of_the_launcher() -> None:
    assert one_gpu(2, {}) == {"LOCAL_RANK": "0", "TORCHELASTIC_OWN_GPU": "1", "CUDA_VISIBLE_DEVICES": "2"}
    assert one_gpu(1, {"HIP_VISIBLE_DEVICES": "3, 5", "CUDA_VISIBLE_DEVICES": "0"}) == {
        "LOCAL_RANK": "0", "TORCHELASTIC_OWN_GPU": "1", "CUDA_VISIBLE_DEVICES": "5", "HIP_VISIBLE_DEVICES": "5",
    }  # fmt: skip
    with pytest.raises(
        UsageError, match="no GPU for worker 2: CUDA_VISIBLE_DEVICES is '0,1'; name more there, or write"
    ):
        one_gpu(2, {"CUDA_VISIBLE_DEVICES": "0,1"})
