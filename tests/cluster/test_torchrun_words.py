"""A command line of torchrun with its first word replaced, started as a user would."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.ordinary_script import script


def run(*words: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torchelastic", "run", *words]
    environment = {**os.environ, **variables}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=100)


def test_one_host_needs_no_word_about_where_to_meet_and_output_goes_where_torchrun_sends_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, sys\nprint('out', os.environ['LOCAL_RANK'], os.environ['ROLE_NAME'], sys.argv[1:])\n"
        "print('err', os.environ['LOCAL_RANK'], file=sys.stderr)\n"
    )
    done = run(
        *("--nnodes=1", "--nproc_per_node=3", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--role=trainer"),
        *("--master_port", "29512", "--monitor-interval=5", "-r", "1:1", "-t", "2:3", "--local-ranks-filter", "1,2"),
        *("train.py", "--role", "its own"),
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(re.findall(r"out \d.*", done.stdout)) == ["out 2 trainer ['--role', 'its own']"]
    assert sorted(re.findall(r"err \d", done.stderr)) == ["err 1", "err 2"]
    notes = [line for line in done.stderr.splitlines() if " no effect: " in line]
    assert notes == [
        "--monitor-interval has no effect: the death of a worker is seen at once",
        "--master-port, --rdzv-backend, --rdzv-endpoint have no effect: one host needs no address to meet at",
    ]
    folder = Path(re.findall(r"the workers' output is written to files in (\S+)", done.stderr)[0])
    written = {path.name: path.read_text() for path in folder.glob("worker_*")}
    assert sorted(written["worker_1.0.log"].splitlines()) == ["err 1", "out 1 trainer ['--role', 'its own']"]
    assert set(written) == {"worker_0.0.log", "worker_1.0.log", "worker_2.0.log"}


def test_lines_begin_as_the_template_says_and_what_is_both_redirected_and_teed_is_shown(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os, sys\nprint('out', sys.argv[1:])\nprint('err', file=sys.stderr)\n")
    template = "${hostname}|${rank}|${role_name}: "
    done = run(
        *("--nproc_per_node=2", "--role", "rank", "--log-line-prefix-template", template),
        *("-r", "3", "--tee", "0:1,1:1", "train.py", "--local-rank=${local_rank}"),
        cwd=tmp_path,
    )  # fmt: skip
    host = socket.gethostname()
    assert sorted(done.stdout.splitlines()) == [
        f"{host}|{rank}|rank: out ['--local-rank={rank}']" for rank in range(2)
    ], done.stderr
    assert "err" not in done.stderr.splitlines()


def test_each_worker_may_see_one_gpu_as_the_first_and_is_still_known_by_its_number(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, torchelastic\nfrom torchelastic.rendezvous.wire import who\n"
        "print('sees', os.environ['LOCAL_RANK'], os.environ['CUDA_VISIBLE_DEVICES'], who(os.environ)['local_rank'])\n"
    )
    words = ("--virtual-local-rank", "--nproc-per-node", "2", "--role", "rank", "train.py")
    done = run(*words, cwd=tmp_path, CUDA_VISIBLE_DEVICES="5,3")
    assert sorted(done.stdout.splitlines()) == ["[rank0]:sees 0 5 0", "[rank1]:sees 0 3 1"], done.stderr
    refused = run(*words, cwd=tmp_path, CUDA_VISIBLE_DEVICES="5")
    assert refused.returncode == 2
    assert "there is no GPU for worker 1: CUDA_VISIBLE_DEVICES is '5'" in refused.stderr.splitlines()[-1]


@pytest.mark.long
def test_lines_of_elastic_workers_begin_with_their_ranks_in_the_group(tmp_path: Path) -> None:
    prepares = (
        "place = int(os.environ['LOCAL_RANK'])\n"
        "def say():\n"
        "    print('step of', coordinator.rank, 'in place', place, flush=True)\n"
        "    if place == 0 and state.step == 3 and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "        os.kill(os.getpid(), 9)\n"
    )
    (tmp_path / "train.py").write_text(script(in_step="say()", prepares=prepares, epochs=4))
    template = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "rank ${rank}: "}
    done = run("--nproc-per-node", "2", "train.py", cwd=tmp_path, **template)
    steps = {line for line in done.stdout.splitlines() if "step of" in line}
    assert "rank 0: step of 0 in place 1" in steps, done.stdout + done.stderr
    assert all(re.fullmatch(r"rank (\d): step of \1 in place \d", line) for line in steps), steps


def test_a_program_that_is_not_pythons_is_started_for_every_worker(tmp_path: Path) -> None:
    done = run("--no-python", "--nproc-per-node", "cpu", "sh", "-c", "echo worker=$LOCAL_RANK", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"worker=\d+$", done.stdout, re.MULTILINE)) == len(os.sched_getaffinity(0))
    refused = run("--no-python", "no-such-program", cwd=tmp_path)
    assert refused.returncode == 2
    assert refused.stderr.splitlines() == [
        "torchelastic run: --no-python: there is no program 'no-such-program' that this user may start; "
        "see torchelastic run --help"
    ]


def test_workers_of_a_host_share_its_cores_unless_the_user_says_otherwise(tmp_path: Path) -> None:
    say = ("--no-python", "--nproc-per-node", "2", "sh", "-c", "echo threads=$OMP_NUM_THREADS")
    shared = os.environ.get("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // 2)))
    for said, threads in (({}, shared), ({"OMP_NUM_THREADS": "7"}, "7")):
        done = run(*say, cwd=tmp_path, **said)
        assert re.findall(r"threads=(\d*)$", done.stdout, re.MULTILINE) == [threads] * 2, done.stderr


@pytest.mark.long
def test_workers_have_the_protobuf_that_the_user_has_chosen(tmp_path: Path) -> None:
    name = "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"
    (tmp_path / "train.py").write_text(f"import os\nprint(os.environ[{name!r}])\n")
    assert run("train.py", cwd=tmp_path, **{name: "python"}).stdout == "[worker 0] python\n"


@pytest.mark.long
def test_large_tensors_of_workers_are_in_huge_pages_unless_the_user_says_otherwise(tmp_path: Path) -> None:
    policy = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not policy.is_file() or "[madvise]" not in policy.read_text():
        pytest.skip("the kernel's policy is not madvise: `echo madvise >/sys/kernel/mm/transparent_hugepage/enabled`")
    (tmp_path / "train.py").write_text(
        "import re, torch\nlarge = torch.ones(2**24)\n"
        "print('huge', re.search(r'AnonHugePages: +(\\d+) kB', open('/proc/self/smaps_rollup').read())[1])\n"
    )
    for said, least_kb, most_kb in (({}, 2**15, 2**20), ({"THP_MEM_ALLOC_ENABLE": "0"}, 0, 0)):
        done = run("train.py", cwd=tmp_path, **said)
        (huge_kb,) = re.findall(r"huge (\d+)$", done.stdout, re.MULTILINE)
        assert least_kb <= int(huge_kb) <= most_kb, done.stdout + done.stderr


def test_variables_of_torchrun_count(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os\nprint('worker', os.environ['LOCAL_RANK'])\n")
    done = run("train.py", cwd=tmp_path, PET_NPROC_PER_NODE="2", PET_RDZV_BACKEND="c10d")
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"worker \d$", done.stdout, re.MULTILINE)) == 2


def test_a_host_that_is_unknown_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    where = ("--rdzv-backend=c10d", "--rdzv-endpoint=nobody.invalid:29400", "--connect-timeout=1")
    done = run("--nnodes", "2", *where, "train.py", cwd=tmp_path)
    assert done.returncode == 2
    assert "waiting for the name nobody.invalid, which is not known yet, up to 1 s" in done.stderr
    assert "the hosts cannot meet at nobody.invalid:29400" in done.stderr.splitlines()[-1]
