"""What the doctor makes of facts: each rule both ways, and what a person and a program get to see."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from torchelastic.doctor.accelerators import AcceleratorFacts, is_compiled_for, judge_accelerators
from torchelastic.doctor.findings import Finding, Level, exit_code
from torchelastic.doctor.folder import FolderFacts, judge_folder
from torchelastic.doctor.host import (
    LeftOverFacts,
    LimitFacts,
    MemoryFacts,
    judge_clock,
    judge_files,
    judge_left_overs,
    judge_locked_memory,
    judge_memory,
    judge_processes,
    judge_shared_memory,
)
from torchelastic.doctor.lifetime import DeadlineSource, LifetimeFacts, judge_lifetime
from torchelastic.doctor.screen import document, lines_of, summary
from torchelastic.doctor.versions import VersionFacts, judge_versions
from torchelastic.launch.doctor import parse_size
from torchelastic.text import bytes_text
from torchelastic.usage import UsageError

OK, NOTE, WARNING, ERROR = Level.OK, Level.NOTE, Level.WARNING, Level.ERROR
MIB, GIB = 2**20, 2**30


def levels(findings: Sequence[Finding]) -> list[Level]:
    return [finding.level for finding in findings]


def text_of(findings: Sequence[Finding]) -> str:
    return "\n".join(f"{one.what} | {one.because} | {one.remedy}" for one in findings)


# Findings -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "code", "strict_code"),
    [([], 0, 0), ([OK, NOTE], 0, 0), ([NOTE, WARNING], 0, 1), ([WARNING, ERROR, OK], 1, 1)],
)
def test_the_exit_code_is_that_of_the_worst(found: list[Level], code: int, strict_code: int) -> None:
    findings = [Finding("a", level, "b", remedy="c") for level in found]
    assert (exit_code(findings), exit_code(findings, strict=True)) == (code, strict_code)


@pytest.mark.parametrize("level", [WARNING, ERROR])
def test_what_is_wrong_has_a_remedy(level: Level) -> None:
    with pytest.raises(ValueError, match="has no remedy"):
        Finding("clock", level, "it is late")


def test_a_person_sees_why_and_what_to_do_below_each_other() -> None:
    findings = [Finding("a", OK, "fine"), Finding("bcd", ERROR, "broken\nin two", "7 > 5", "mend it")]
    assert [line for _, line in lines_of(findings)] == [
        "ok       a    fine",
        "error    bcd  broken in two",
        "              why: 7 > 5",
        "              do:  mend it",
        "1 ok, 0 notes, 0 warnings, 1 error",
    ]
    assert [level for level, _ in lines_of(findings)] == [OK, ERROR, None, None, None]
    assert summary([]) == "0 ok, 0 notes, 0 warnings, 0 errors"


def test_a_program_gets_every_finding_and_the_exit_code() -> None:
    told = json.loads(json.dumps(document([Finding("a", WARNING, "b", "c", "d")], strict=True)))
    assert told["exit_code"] == 1
    assert told["findings"] == [{"check": "a", "level": "warning", "what": "b", "because": "c", "remedy": "d"}]
    assert document([Finding("a", WARNING, "b", "c", "d")], strict=False)["exit_code"] == 0


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (23.5 * GIB, "23.5 GiB"), (300 * 2**40, "300 TiB")],
)
def test_sizes_have_three_digits(size: float, text: str) -> None:
    assert bytes_text(size) == text


@pytest.mark.parametrize(
    ("text", "size"), [("10", 10), ("30GiB", 30 * GIB), ("30g", 30 * GIB), ("1.5 TB", 3 * 2**39), ("7B", 7)]
)
def test_a_size_is_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1G", "1e9", "3 XiB", "1..5G"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--state-size"):
        parse_size(text)


# Versions -------------------------------------------------------------------------------------------------------------

VERSIONS = VersionFacts("3.11.4", "1.0.0", ("torch>=2.6", "etcd3==0.12.0"), {"torch": "2.13.0+cpu", "etcd3": "0.12.0"})


def test_versions_that_fit_are_one_line() -> None:
    (finding,) = judge_versions(VERSIONS)
    assert finding == Finding("versions", OK, "torchelastic 1.0.0, Python 3.11.4, torch 2.13.0+cpu, etcd3 0.12.0")


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (replace(VERSIONS, installed={**VERSIONS.installed, "torch": "2.5.1"}), "pip install 'torch>=2.6'"),
        (replace(VERSIONS, installed={**VERSIONS.installed, "etcd3": "0.13.0"}), "etcd3 is 0.13.0"),
        (replace(VERSIONS, installed={**VERSIONS.installed, "torch": None}), "torch is not installed"),
    ],
)
def test_a_version_that_does_not_fit_is_an_error(facts: VersionFacts, said: str) -> None:
    found = judge_versions(facts)
    assert levels(found) == [ERROR]
    assert said in text_of(found)


def test_a_folder_that_was_never_installed_is_noted() -> None:
    assert levels(judge_versions(replace(VERSIONS, required=()))) == [NOTE]


# GPUs -----------------------------------------------------------------------------------------------------------------

CPU = AcceleratorFacts(torch="2.13.0")
GPUS = AcceleratorFacts(
    ("nvidia0", "nvidia1"),
    torch="2.13.0",
    cuda_build="12.8",
    nccl=True,
    nccl_version="2.27.3",
    devices=(("H200", "9.0"), ("H200", "9.0")),
    compiled_for=("sm_80", "sm_90"),
)


def test_a_host_without_gpus_is_noted() -> None:
    assert levels(judge_accelerators(CPU, None)) == [NOTE]


def test_gpus_that_can_be_used_are_counted() -> None:
    (finding,) = judge_accelerators(GPUS, 2)
    assert finding.level == OK
    assert finding.what == "2 x H200; torch 2.13.0 for 12.8, NCCL 2.27.3"


@pytest.mark.parametrize(
    ("facts", "workers", "level", "said"),
    [
        (replace(CPU, failure="No module named 'torch'"), None, ERROR, "No module named 'torch'"),
        (replace(CPU, failure="not within 11 s", is_late=True), None, WARNING, "takes long"),
        (replace(CPU, nodes=("nvidia0",)), None, ERROR, "built for CPUs alone"),
        (replace(CPU, nodes=("nvidia0",), cuda_build="12.8"), None, ERROR, "nvidia-smi"),
        (replace(CPU, nodes=("nvidia0",), cuda_build="12.8", visible=""), None, ERROR, "hides all"),
        (replace(CPU, nodes=("nvidia0",), cuda_build="12.8", visible="-1"), None, ERROR, "hides all"),
        (replace(CPU, nodes=("nvidia0",), cuda_build="12.8", visible="0"), None, ERROR, "nvidia-smi"),
        (replace(GPUS, nccl=False), None, ERROR, "no NCCL"),
        (replace(GPUS, compiled_for=("sm_80",)), None, ERROR, "no kernels for H200 (sm_90)"),
        (GPUS, 3, WARNING, "--nproc-per-node 2"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_told(
    facts: AcceleratorFacts, workers: int | None, level: Level, said: str
) -> None:
    found = judge_accelerators(facts, workers)
    assert levels(found) == [level]
    assert said in text_of(found)


def test_a_torch_without_gloo_is_an_error_even_without_gpus() -> None:
    assert levels(judge_accelerators(replace(CPU, gloo=False), None)) == [ERROR, NOTE]


@pytest.mark.parametrize(
    ("capability", "compiled", "can"),
    [
        ("8.6", ["sm_80"], True),
        ("8.0", ["sm_86"], False),
        ("9.0", ["sm_90a"], True),
        ("12.0", ["sm_90"], False),
        ("12.0", ["sm_90", "compute_90"], True),
        ("10.0", ["sm_100"], True),
    ],
)
def test_kernels_run_on_the_same_major_capability(capability: str, compiled: list[str], can: bool) -> None:
    assert is_compiled_for(capability, compiled) is can


# Memory and limits ----------------------------------------------------------------------------------------------------

ROOMY = MemoryFacts("/dev/shm", True, 24 * GIB, 20 * GIB, 30 * GIB)


@pytest.mark.parametrize(
    ("facts", "level", "said"),
    [
        (ROOMY, OK, "24.0 GiB"),
        (replace(ROOMY, size_bytes=64 * MIB, free_bytes=64 * MIB), ERROR, "--shm-size"),
        (replace(ROOMY, size_bytes=65 * MIB, free_bytes=65 * MIB), OK, ""),
        (replace(ROOMY, is_tmpfs=None, size_bytes=None, free_bytes=None), ERROR, "there is no /dev/shm"),
        (replace(ROOMY, is_tmpfs=False), WARNING, "on a disk"),
        (replace(ROOMY, size_bytes=None, free_bytes=None), OK, "no limit"),
        (replace(ROOMY, free_bytes=2 * GIB), WARNING, "prune --dead"),
        (replace(ROOMY, needed_bytes=4 * GIB), OK, "16.0 GiB"),
        (replace(ROOMY, needed_bytes=4 * GIB + 1), WARNING, "async_save"),
        (replace(ROOMY, needed_bytes=5 * GIB + 1), ERROR, "skipped"),
    ],
)
def test_shared_memory_is_compared_with_what_is_needed(facts: MemoryFacts, level: Level, said: str) -> None:
    finding = judge_shared_memory(facts)
    assert finding.level == level
    assert said in text_of([finding])


@pytest.mark.parametrize(
    ("facts", "level", "said"),
    [
        (ROOMY, OK, "30.0 GiB"),
        (replace(ROOMY, cgroup_bytes=40 * GIB), OK, "30.0 GiB"),
        (replace(ROOMY, cgroup_bytes=25 * GIB), NOTE, "control group"),
        (replace(ROOMY, cgroup_bytes=8 * GIB), NOTE, "larger than that"),
        (replace(ROOMY, cgroup_bytes=100 * MIB), ERROR, "--memory"),
        (replace(ROOMY, available_bytes=100 * MIB), ERROR, "end what else runs"),
        (replace(ROOMY, cgroup_bytes=17 * GIB, needed_bytes=4 * GIB), NOTE, ""),
        (replace(ROOMY, cgroup_bytes=16 * GIB, needed_bytes=4 * GIB), ERROR, "checkpoints in memory"),
    ],
)
def test_memory_is_what_the_stricter_of_host_and_container_leaves(facts: MemoryFacts, level: Level, said: str) -> None:
    finding = judge_memory(facts)
    assert finding.level == level
    assert said in text_of([finding])


PLENTY = LimitFacts(2**20, 2**20, 100_000, 500)


@pytest.mark.parametrize(
    ("files", "hard", "world", "level", "said"),
    [
        (2**20, 2**20, 1, OK, "1048576"),
        (None, None, 1000, OK, "no limit"),
        (1024, 2**20, 1, NOTE, "ulimit -n 65536"),
        (1024, 4096, 1, NOTE, "ulimit -n 4096"),
        (1024, 2**20, 128, NOTE, "received 0 items"),
        (1024, 2**20, 129, WARNING, "about 1028"),
        (1024, 1024, 129, WARNING, "limits.conf"),
        (64, 2**20, 1, ERROR, "ulimit -n 65536"),
    ],
)
def test_open_files_are_compared_with_the_number_of_ranks(
    files: int | None, hard: int | None, world: int, level: Level, said: str
) -> None:
    finding = judge_files(replace(PLENTY, files=files, files_hard=hard), world)
    assert finding.level == level
    assert said in text_of([finding])


@pytest.mark.parametrize(
    ("facts", "level", "said"),
    [
        (PLENTY, OK, "99500"),
        (replace(PLENTY, processes=None), OK, "no limit"),
        (replace(PLENTY, processes=600), ERROR, "ulimit -u"),
        (replace(PLENTY, processes=1000), WARNING, "about 1024"),
        (replace(PLENTY, processes=600, is_root=True), OK, "no limit"),
        (replace(PLENTY, processes=600, is_root=True, cgroup_processes=512, cgroup_tasks=12), WARNING, "--pids-limit"),
        (replace(PLENTY, cgroup_processes=100, cgroup_tasks=120), ERROR, "0 more"),
    ],
)
def test_processes_are_compared_with_the_number_of_workers(facts: LimitFacts, level: Level, said: str) -> None:
    finding = judge_processes(facts, workers=8)
    assert finding.level == level
    assert said in text_of([finding])


def test_locked_memory_counts_where_there_is_infiniband() -> None:
    assert judge_locked_memory(replace(PLENTY, locked_bytes=8 * MIB)) == []
    assert levels(judge_locked_memory(replace(PLENTY, locked_bytes=8 * MIB, has_infiniband=True))) == [WARNING]
    assert levels(judge_locked_memory(replace(PLENTY, has_infiniband=True))) == [OK]


# The checkpoint folder ------------------------------------------------------------------------------------------------

FOLDER = FolderFacts("/mnt/c", file_system="ext4", free_bytes=90 * GIB, size_bytes=100 * GIB, bytes_per_s=200 * MIB)


@pytest.mark.parametrize(
    ("facts", "needed", "level", "said"),
    [
        (FOLDER, None, OK, "/mnt/c (ext4): 90.0 GiB of 100 GiB free, 200 MiB/s"),
        (FOLDER, 20 * GIB, OK, "about 102 s"),
        (FOLDER, 46 * GIB, WARNING, "before the last one goes"),
        (FOLDER, 91 * GIB, ERROR, "before the last one goes"),
        (replace(FOLDER, in_the_way=True, is_there=False), None, ERROR, "no folder"),
        (replace(FOLDER, is_there=False, may_be_made=True), None, WARNING, "mkdir -p /mnt/c"),
        (replace(FOLDER, is_there=False), None, ERROR, "may not make it"),
        (replace(FOLDER, failed="Read-only file system"), None, ERROR, "Read-only file system"),
        (replace(FOLDER, file_system="tmpfs"), None, WARNING, "memory"),
        (replace(FOLDER, file_system="overlay"), None, WARNING, "container"),
        (replace(FOLDER, has_locks=False), None, WARNING, "-o flock"),
        (replace(FOLDER, free_bytes=GIB - 1), None, WARNING, "less than 1.00 GiB"),
        (replace(FOLDER, free_bytes=100), None, ERROR, "less than 1.00 GiB"),
        (replace(FOLDER, free_files=3), None, WARNING, "3 files"),
    ],
)
def test_a_checkpoint_folder_has_to_be_durable_roomy_and_writable(
    facts: FolderFacts, needed: int | None, level: Level, said: str
) -> None:
    found = judge_folder(facts, needed)
    assert levels(found) == [level]
    assert said in text_of(found)


# Left-overs, deadlines, clock -----------------------------------------------------------------------------------------


def test_left_overs_are_a_warning_where_they_are_large() -> None:
    assert judge_left_overs(LeftOverFacts("/dev/shm", (), GIB)).level == OK
    little = judge_left_overs(LeftOverFacts("/dev/shm", (("job7", 100 * MIB), (None, MIB)), GIB))
    assert little.level == NOTE
    assert "2 dead job(s) hold 101 MiB in /dev/shm" in little.what
    assert "job7, (no run id)" in little.because
    assert little.remedy == "torchelastic checkpoint prune --dead /dev/shm"
    many = tuple((f"job{number}", 30 * MIB) for number in range(7))
    assert judge_left_overs(LeftOverFacts("/dev/shm", many, GIB)).level == WARNING
    assert "job4 and 2 more" in judge_left_overs(LeftOverFacts("/dev/shm", many, GIB)).because


@pytest.mark.parametrize(
    ("facts", "found", "said"),
    [
        (LifetimeFacts(grace_s=30.0), [NOTE], "30 s of grace"),
        (LifetimeFacts(failure="X is 'y'"), [ERROR], "X is 'y'"),
        (LifetimeFacts((DeadlineSource("SLURM", "squeue", 3600.0),), 30.0), [OK], "60 min are left"),
        (LifetimeFacts((DeadlineSource("SLURM", "squeue", 250.0),), 30.0), [WARNING], "ends in 250 s"),
        (LifetimeFacts((DeadlineSource("SLURM", "squeue", -5.0),), 30.0), [WARNING], "ends in 0 s"),
        (LifetimeFacts((DeadlineSource("AWS spot", "metadata", None),), 30.0), [OK], "no end is known"),
        (LifetimeFacts((), 30.0, ("A=1 is in the past",)), [WARNING, NOTE], "A=1 is in the past"),
    ],
)
def test_deadlines_are_told_with_the_time_that_is_left(facts: LifetimeFacts, found: list[Level], said: str) -> None:
    judged = judge_lifetime(facts)
    assert levels(judged) == found
    assert said in text_of(judged)


def test_a_clock_that_nobody_keeps_right_is_noted() -> None:
    assert [judge_clock(state).level for state in (True, False, None)] == [OK, NOTE, NOTE]
    assert [judge_clock(state, hosts=2).level for state in (True, False, None)] == [OK, WARNING, NOTE]
