"""What the doctor makes of facts: each rule both ways, and what a person and a program get to see."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from torchelastic.checkpoint.format.abilities import ALL_ABILITIES
from torchelastic.doctor.findings import Finding, Level, exit_code
from torchelastic.doctor.findings_screen import document, lines_of, summary
from torchelastic.doctor.folder_rules import FolderFacts, judge_folder
from torchelastic.doctor.host_rules import (
    LimitFacts,
    MemoryFacts,
    judge_files,
    judge_memory,
    judge_processes,
    judge_shared_memory,
)
from torchelastic.doctor.versions import VersionFacts, judge_versions
from torchelastic.file_systems import Call
from torchelastic.version import NEWEST_TESTED_TORCH

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


@pytest.mark.parametrize(
    ("torch", "expected"),
    [
        (NEWEST_TESTED_TORCH, [OK]),
        (f"{NEWEST_TESTED_TORCH}+cu132", [OK]),
        ("2.13.0+cpu", [OK]),
        (f"{NEWEST_TESTED_TORCH}.post1", [OK, NOTE]),
        ("2.99.0.dev20261101+cu132", [OK, WARNING]),
        ("3.0", [OK, WARNING]),
    ],
)
def test_a_torch_that_is_newer_than_any_that_was_tested_is_said(torch: str, expected: list[Level]) -> None:
    found = judge_versions(replace(VERSIONS, installed={**VERSIONS.installed, "torch": torch}))
    assert levels(found) == expected
    assert (f"pip install 'torch<={NEWEST_TESTED_TORCH}'" in text_of(found)) is (len(expected) == 2)


def test_a_torch_of_ones_own_has_any_version() -> None:
    own = replace(VERSIONS, required=(), installed={**VERSIONS.installed, "torch": "of-my-own"})
    assert levels(judge_versions(own)) == [NOTE]


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
        (replace(FOLDER, abilities=ALL_ABILITIES.without(Call.FLOCK)), None, WARNING, "-o flock"),
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
