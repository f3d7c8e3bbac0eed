"""`torchelastic doctor` on this host: facts of real files, limits, interfaces and children; it never hangs."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from tests.waiting import wait_until
from torchelastic.checkpoint.format.abilities import ALL_ABILITIES
from torchelastic.doctor.accelerators import gather_accelerators, judge_accelerators, nccl_facts
from torchelastic.doctor.examination import Check, Question, checks, run_checks
from torchelastic.doctor.findings import Finding, Level
from torchelastic.doctor.folder_rules import gather_folder, judge_folder
from torchelastic.doctor.host_rules import (
    _most_processes,
    gather_limits,
    gather_memory,
    judge_files,
    judge_shared_memory,
)
from torchelastic.doctor.lifetime import LifetimeFacts, gather_lifetime, judge_lifetime
from torchelastic.doctor.nccl_rules import judge_nccl
from torchelastic.launch.main import main
from torchelastic.processes.background import side_by_side
from torchelastic.rendezvous.credentials import PASSWORD_VARIABLE
from torchelastic.rendezvous.url import parse_url
from torchelastic.testing.disk_faults import FaultyDisk, full_at
from torchelastic.testing.file_system_faults import (
    FileSystemFault,
    file_system_without,
    no_folder_fsync,
    no_folder_rename,
    no_free_space,
    no_fsync,
    no_links,
    no_locks,
    no_rename_over,
)

T = TypeVar("T")

#: Long after this, a test whose subject hangs would fail.
LONG_S = 60.0
MIB = 2**20
PASSWORD = "horse-battery-9f3c"


def on_a_thread(act: Callable[[], T]) -> T:
    return side_by_side({"it": act}, {"it": LONG_S})["it"].result()


# Never a hang ---------------------------------------------------------------------------------------------------------


def test_a_check_that_hangs_holds_nobody_up() -> None:
    never = threading.Event()

    def hang() -> list[Finding]:
        never.wait()
        return []

    checked = [
        Check("folder", hang, 0.2, why_late="its server is away", remedy="see the server"),
        Check("clock", lambda: [Finding("clock", Level.OK, "fine")], LONG_S),
        Check("other", hang, 0.1, Level.WARNING),
    ]
    found = run_checks(checked)
    never.set()
    assert [(one.check, one.level) for one in found] == [
        ("folder", Level.ERROR),
        ("clock", Level.OK),
        ("other", Level.WARNING),
    ]
    assert found[0].what == "no answer within 0.2 s: aborted"
    assert (found[0].because, found[0].remedy) == ("its server is away", "see the server")


def test_a_check_that_fails_is_told_and_the_others_go_on() -> None:
    def fail() -> list[Finding]:
        raise KeyError("x")

    found = run_checks([Check("a", fail), Check("b", lambda: [Finding("b", Level.OK, "fine")])])
    assert [(one.check, one.level) for one in found] == [("a", Level.WARNING), ("b", Level.OK)]
    assert "KeyError" in found[0].because


def test_a_password_file_that_never_ends_is_given_up(tmp_path: Path) -> None:
    fifo = tmp_path / "password"
    os.mkfifo(fifo)
    url = parse_url(f"etcd://127.0.0.1:1/doctor?min_workers=1&user=trainer&password_file={fifo}")
    about_etcd = [replace(check, timeout_s=0.3) for check in checks(Question(url)) if check.name == "etcd"]
    (finding,) = run_checks(about_etcd)
    assert (finding.check, finding.level) == ("etcd", Level.ERROR)
    assert "aborted" in finding.what
    with os.fdopen(os.open(fifo, os.O_WRONLY), "wb"):
        pass  # lets the thread go that reads it


# Folders --------------------------------------------------------------------------------------------------------------


def test_a_folder_is_tried_and_nothing_is_left_in_it(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("stays")
    facts = gather_folder(tmp_path)
    assert facts.failed == ""
    assert facts.bytes_per_s is not None
    assert facts.bytes_per_s > 0
    assert facts.abilities == ALL_ABILITIES
    assert facts.free_bytes > 0
    assert facts.file_system != ""
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("operation", ["create", "write_some", "sync", "rename", "publish", "sync_folder"])
def test_whatever_the_disk_refuses_is_told(tmp_path: Path, operation: str) -> None:
    disk = FaultyDisk(full_at(operation))
    (finding,) = judge_folder(gather_folder(tmp_path, disk=disk), None)
    disk.require_struck()
    assert finding.level == Level.ERROR
    assert "No space left" in finding.because
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("fault", "level", "said"),
    [
        (
            no_locks(524),
            Level.WARNING,
            "no locks (flock)",
        ),
        (no_folder_rename(errno.EXDEV), Level.WARNING, "no rename of folders"),
        (no_folder_fsync(errno.EPERM), Level.WARNING, "no fsync of folders"),
        (no_folder_fsync(errno.EINVAL), Level.OK, "free"),  # it orders names by itself
        (no_links(errno.EPERM), Level.OK, "no hard links (link)"),
        (no_free_space(), Level.OK, "room unknown"),
        (no_fsync(errno.ENOSYS), Level.ERROR, "has no fsync of files"),
        (no_rename_over(errno.EPERM), Level.ERROR, "may have no rename over an existing file"),
    ],
    ids=lambda value: value.verb if isinstance(value, FileSystemFault) else "",
)
def test_what_a_file_system_lacks_is_named_with_what_follows(
    tmp_path: Path, fault: FileSystemFault, level: Level, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with file_system_without(tmp_path, fault) as refused:
        (finding,) = judge_folder(gather_folder(tmp_path), None)
    refused.require_struck()
    assert finding.level == level
    assert said in f"{finding.what} {finding.because}"
    assert "make it writable" not in finding.remedy
    assert (finding.remedy != "") == (level != Level.OK)
    assert list(tmp_path.iterdir()) == [], "nothing is left, whatever was refused"
    assert not caplog.records, "said once"


def as_nobody(act: Callable[[], Any]) -> Any:
    """The JSON of what `act` returns, done by a child without root's rights."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            if os.geteuid() == 0:
                os.setgid(65534)
                os.setuid(65534)
            os.write(writer, json.dumps(act()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answers:
        data = answers.read()
    os.waitpid(pid, 0)
    return json.loads(data)


def test_a_folder_that_this_user_may_not_write_is_an_error(tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents):
        if not folder.stat().st_mode & 0o001:
            folder.chmod(0o755)  # so that nobody gets there at all
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)

    def look() -> list[object]:
        facts, below = gather_folder(closed), gather_folder(closed / "below")
        return [facts.failed, judge_folder(facts, None)[0].level, below.may_be_made, judge_folder(below, None)[0].level]

    failed, level, may_be_made, level_below = as_nobody(look)
    assert "Permission denied" in failed
    assert level == Level.ERROR
    assert may_be_made is False
    assert level_below == Level.ERROR


def test_a_folder_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    (finding,) = judge_folder(gather_folder(tmp_path / "a" / "b"), None)
    assert finding.level == Level.WARNING
    assert "does not exist" in finding.what
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    assert "is no folder" in judge_folder(gather_folder(tmp_path / "file"), None)[0].what


# Memory and limits ----------------------------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 8 MiB."""
    folder = tmp_path / "memory"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={8 * MIB}", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount a small tmpfs ({done.stderr.strip()}): run `sudo make test`")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_small_tmpfs_is_seen_as_shared_memory_and_as_a_folder(small: Path) -> None:
    facts = gather_memory(None, small)
    assert (facts.is_tmpfs, facts.size_bytes) == (True, 8 * MIB)
    finding = judge_shared_memory(facts)
    assert finding.level == Level.ERROR
    assert "8.00 MiB" in finding.what
    found = judge_folder(gather_folder(small), None)  # it is full before all of the probe is written
    assert [one.level for one in found] == [Level.ERROR]
    assert "No space left" in found[0].because
    assert list(small.iterdir()) == []


def test_a_low_limit_on_open_files_is_seen() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (600, hard))
    try:
        facts = gather_limits()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert facts.files == 600
    assert judge_files(facts, 8).level == Level.NOTE
    assert judge_files(facts, 64).level == Level.WARNING
    assert facts.tasks >= 1


def test_the_strictest_control_group_limits_processes(tmp_path: Path) -> None:
    for path, most, now in (("a", "max", "70"), ("a/b", "100", "60"), ("a/b/c", "500", "10")):
        group = tmp_path / "cgroup" / path
        group.mkdir(parents=True)
        (group / "pids.max").write_text(f"{most}\n")
        (group / "pids.current").write_text(f"{now}\n")
    own = tmp_path / "own"
    own.write_text("0::/a/b/c\n")
    assert _most_processes(tmp_path / "cgroup", own) == (100, 60)
    own.write_text("0::/a\n")
    assert _most_processes(tmp_path / "cgroup", own) == (None, 0)
    own.write_text("8:pids:/b\n9:memory:/b/c\n")
    assert _most_processes(tmp_path / "cgroup", own) == (None, 0)
    assert _most_processes(tmp_path / "cgroup", tmp_path / "nowhere") == (None, 0)


# Deadlines, clock, versions, torch ------------------------------------------------------------------------------------


def deadlines(**variables: str) -> LifetimeFacts:
    return on_a_thread(lambda: gather_lifetime({"TORCHELASTIC_METADATA": "none", **variables}))


def test_deadlines_are_asked_for_once_and_no_signal_is_handled(tmp_path: Path) -> None:
    end = tmp_path / "end"
    end.write_text(f"{time.time() + 3600:.0f}")
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    threads = set(threading.enumerate())
    facts = deadlines(
        TORCHELASTIC_TERMINATION_FILE=str(end),
        TORCHELASTIC_DEADLINE_SIGNALS="SIGTERM=7,SIGUSR1",
        TORCHELASTIC_TERM_GRACE_S="45",
    )
    assert {number: signal.getsignal(number) for number in before} == before
    wait_until(lambda: set(threading.enumerate()) <= threads, 20, "it had no thread but its own, which ends")
    (source,) = facts.sources
    assert source.remaining_s is not None
    assert 3000 < source.remaining_s <= 3601
    assert facts.grace_s == 45.0
    assert facts.complaints == ()
    assert [one.level for one in judge_lifetime(facts)] == [Level.OK]


def test_torch_is_asked_in_a_child_without_the_password(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(
        "import os, sys\n"
        f"sys.exit('password there' if {PASSWORD_VARIABLE!r} in os.environ else 'libcudart.so is missing')"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), PASSWORD_VARIABLE: PASSWORD}
    facts = gather_accelerators(environment, LONG_S)
    assert facts.failure == "libcudart.so is missing"
    assert judge_accelerators(facts, None)[0].level == Level.ERROR


def test_torch_says_which_nccl_it_loads_and_which_engine_makes_its_groups(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(TORCH_WITH_GPUS)
    (tmp_path / "torch" / "distributed.py").write_text(
        "is_available = is_gloo_available = is_nccl_available = lambda: True\n"
        "class Backend:\n    backend_list = ['undefined', 'gloo', 'nccl', 'nccl-legacy']\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    environment.pop("TORCH_DIST_USE_NCCL2", None)
    facts = gather_accelerators(environment, LONG_S)
    assert (facts.failure, facts.nccl_version, facts.is_nccl2) == ("", "2.28.3", True)
    found = judge_nccl(nccl_facts(facts, {}))
    assert (found[0].level, "nvidia-nccl-cu13" in found[0].remedy) == (Level.WARNING, True)
    environment.update(TORCH_DIST_USE_NCCL2="0", NCCL_MULTI_RANK_GPU_ENABLE="1")
    legacy = gather_accelerators(environment, LONG_S)
    assert (legacy.failure, legacy.is_nccl2, legacy.may_share) == ("", False, False)


@pytest.mark.long
def test_the_torch_that_is_installed_answers_all_that_is_asked() -> None:
    facts = gather_accelerators(os.environ, LONG_S)
    assert (facts.failure, facts.torch) == ("", str(torch.__version__))
    assert facts.nccl == torch.distributed.is_nccl_available()
    assert bool(facts.nccl_version) == facts.nccl
    made_by = vars(torch.distributed.Backend)["_plugins"].get("NCCL")  # not there where torch makes it without asking
    assert facts.is_nccl2 == ("nccl2" in getattr(getattr(made_by, "creator_fn", None), "__name__", ""))


def test_a_torch_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import time\ntime.sleep(1000)")
    facts = gather_accelerators({**os.environ, "PYTHONPATH": str(tmp_path)}, 0.3)
    assert facts.is_late
    assert judge_accelerators(facts, None)[0].level == Level.WARNING


#: A torch whose NCCL crashes in an abort.
TORCH_WITH_GPUS = """
import types
__version__ = "2.15.0"
version = types.SimpleNamespace(cuda="13.2")
cuda = types.SimpleNamespace(
    is_available=lambda: True,
    device_count=lambda: 1,
    get_device_name=lambda number: "H100",
    get_device_capability=lambda number: (9, 0),
    get_arch_list=lambda: ["sm_90"],
    nccl=types.SimpleNamespace(version=lambda: (2, 28, 3)),
)
"""

# The command ----------------------------------------------------------------------------------------------------------


def doctor(*words: str, limit_files: int | None = None, **variables: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "torchelastic.launch", "doctor", *words]
    if limit_files is not None:
        command = ["sh", "-c", f'ulimit -n {limit_files}; exec "$@"', "sh", *command]
    environment = {**os.environ, "TORCHELASTIC_METADATA": "none", **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LONG_S)
    return done.returncode, done.stdout, done.stderr


def by_check(output: str) -> Mapping[str, list[dict[str, str]]]:
    found: dict[str, list[dict[str, str]]] = {}
    for finding in json.loads(output)["findings"]:
        found.setdefault(finding["check"], []).append(finding)
    return found


def test_the_command_finds_what_is_wrong_and_says_it_to_programs(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        code, out, err = doctor(
            *("--json", "--checkpoint-dir", str(tmp_path / "nowhere"), "--port", port, "--rdzv-endpoint=127.0.0.1:1"),
            *("--etcd-user", "trainer"),
            limit_files=100,
            GLOO_SOCKET_IFNAME="nosuch0",
            TORCHELASTIC_ETCD_PASSWORD=PASSWORD,
        )
    found = by_check(out)
    assert (code, err) == (1, "")
    assert json.loads(out)["exit_code"] == 1
    levels = {check: [one["level"] for one in of_check] for check, of_check in found.items()}
    assert levels["open files"] == ["error"]
    assert levels["gloo interface"] == ["error"]
    assert levels["ports"] == ["error"]
    assert levels["checkpoint folder"] == ["warning"]
    assert levels["etcd"] == ["error"]
    assert "127.0.0.1:1 is unreachable" in found["etcd"][0]["what"]
    assert PASSWORD not in out + err
    assert all(one["remedy"] for of_check in found.values() for one in of_check if one["level"] in ("warning", "error"))


def test_a_secret_that_everybody_may_read_is_an_error_and_is_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text(PASSWORD)
    file.chmod(0o644)
    url = parse_url(f"etcd://127.0.0.1:1/doctor?min_workers=1&user=trainer&password_file={file}")
    found = run_checks([check for check in checks(Question(url, hosts=2)) if check.name in ("etcd", "hosts")])
    assert [(one.check, one.level) for one in found] == [("etcd", Level.ERROR), ("hosts", Level.ERROR)]
    assert "chmod o=" in found[0].because
    assert PASSWORD not in str(found)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--nnodes 2", "--rdzv-endpoint"),
        ("--nnodes 0", "start at 1"),
        ("--nproc-per-node 0", "start at 1"),
        ("--etcd-user me", "--rdzv-endpoint"),
        ("--rdzv-endpoint me:horse-battery@etcd:1", "every user of this host"),
        ("--rdzv-endpoint etcd:99999", "port"),
        ("--rdzv-endpoint etcd --rdzv-id a/b", "run id"),
        ("--state-size many", "--state-size"),
        ("--port 0", "--port"),
        ("--checkpoint-dir s3://bucket/run", "--checkpoint-dir s3://bucket/run is a URL"),
        ("--wait nan", "--wait"),
        ("--wait -1", "--wait"),
    ],
)
def test_wrong_words_end_with_2(capsys: pytest.CaptureFixture[str], words: str, said: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *words.split()])
    err = capsys.readouterr().err
    assert ended.value.code == 2
    assert said in err
    assert "battery" not in err


def test_every_flag_and_every_check_is_in_the_page() -> None:
    text = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()
    command = [sys.executable, "-m", "torchelastic.launch", "doctor", "--help"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    flags = set(re.findall(r"--[a-z-]+", told)) - {"--help", "--nodes"}
    assert not {flag for flag in flags if flag not in text}
    url = parse_url("etcd://127.0.0.1:1/doctor?min_workers=1")
    names = {check.name for check in checks(Question(url, hosts=2, folders=(Path("/a"),)))}
    assert not {name for name in names if f"\n| {name} |" not in text}
