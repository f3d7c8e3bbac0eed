"""How many CPUs a process may use in a container: by affinity, and by the quota of both versions of control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from torchelastic.launch import accelerators, run_options
from torchelastic.launch.command_line import command_parser
from torchelastic.processes.cpus import usable_cpus


def written(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text + "\n")
    return folder


def version_1(group: str, quota: str, period: str) -> dict[str, str]:
    return {f"{group}/cpu.cfs_quota_us": quota, f"{group}/cpu.cfs_period_us": period}


@pytest.fixture(autouse=True)
def sixteen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(16)))


@pytest.mark.parametrize(
    ("of_process", "files", "cpus"),
    [
        ("0::/", {}, 16),
        ("0::/", {"cpu.max": "max 100000"}, 16),
        ("0::/", {"cpu.max": "350000 100000"}, 3),
        ("0::/", {"cpu.max": "9900000 100000"}, 16),
        ("0::/", {"cpu.max": "20000 100000"}, 1),
        ("0::/pod/box", {"pod/cpu.max": "400000 100000", "pod/box/cpu.max": "max 100000"}, 4),
        ("0::/host/docker/1a2b", {"cpu.max": "200000 100000"}, 2),
        ("4:cpu,cpuacct:/docker/1a2b\n0::/", version_1("cpu,cpuacct", "150000", "50000"), 3),
        ("1:cpu:/job\n2:cpuset:/job", version_1("cpu/job", "-1", "100000"), 16),
        ("1:cpu:/job\n0::/", version_1("cpu/job", "500000", "100000"), 5),
        ("nonsense", {"cpu.max": "nonsense"}, 16),
    ],
)
def test_the_smallest_quota_counts(tmp_path: Path, of_process: str, files: dict[str, str], cpus: int) -> None:
    root = written(tmp_path / "fs", files)
    assert usable_cpus(root, written(tmp_path, {"self": of_process}) / "self") == cpus


def test_no_control_groups_are_no_limit(tmp_path: Path) -> None:
    assert usable_cpus(tmp_path / "none", tmp_path / "nor this") == 16


@pytest.mark.parametrize("text", ["cpu", "auto"])
def test_as_many_workers_are_started_as_the_quota_fills(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_options, "usable_cpus", lambda: 3)
    monkeypatch.setattr(accelerators, "count", lambda _kind: 0)
    options, _ = run_options.understood(
        command_parser().parse_args(["run", "--standalone", f"--nproc-per-node={text}", "train.py"])
    )
    assert options.nproc_per_node == 3
