"""torch's own engines for NCCL when a peer is lost: real groups of two processes, whose GPU and NCCL are fakes.

What a GPU computes is not tested here, but what torch's classes do about a failure: when they connect, what they tell,
what an abort ends. The torch of everyday tests is built for CPUs; `make test-torch TORCH=2.15.0` has one that is not.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from torchelastic.network.ports import unused_ports

NAMED = [name for name in ("nccl", "nccl2", "nccl-legacy") if dist.is_backend_available(name)]
TELLS = hasattr(getattr(dist, "ProcessGroupNCCL", None), "get_error")
GIVEN_UP = "RetryableException: a collective of NCCL was aborted: another worker is lost or hangs"
NOT_FORMED = "RuntimeError: the group was aborted while it was being formed: another worker was lost or hangs"
#: Two processes that load torch for CUDA, on a busy machine.
LIMIT_S = 110.0

pytestmark = pytest.mark.skipif(
    "nccl" not in NAMED or shutil.which("cc") is None,
    reason="needs a torch with NCCL, and a C compiler: `make test-torch TORCH=2.15.0`",
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("fake") / "libcuda.so.1"  # torch loads the driver by this name
    source = Path(__file__).with_name("fake_gpu.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", built, source], check=True)
    return built


@pytest.fixture
def ranks(library: Path, tmp_path: Path) -> Iterator[Ranks]:
    started = Ranks(library, tmp_path)
    yield started
    for process in started.processes:
        process.kill()
        process.wait()


class Ranks:
    """Starts both."""

    def __init__(self, library: Path, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            **os.environ,
            "FAKE_GPU": str(folder),
            "LD_PRELOAD": str(library),
            "LD_LIBRARY_PATH": f"{library.parent}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":"),
        }
        self.processes: list[subprocess.Popen[str]] = []

    def run(self, case: str, backend: str, **variables: str) -> list[dict[str, str | float]]:
        """What each of them tells."""
        port = str(unused_ports("127.0.0.1")[0])
        for rank in ("0", "1"):
            command = [sys.executable, "-m", "tests.process.fake_gpu_rank", case, backend, rank, port]
            environment = {**self.environment, **variables}
            pipes = {"stdout": subprocess.PIPE, "stderr": (self.folder / f"stderr-{rank}").open("w")}
            self.processes.append(subprocess.Popen(command, env=environment, text=True, **pipes))  # type: ignore[call-overload]
        printed = [process.communicate(timeout=LIMIT_S)[0] for process in self.processes]
        told = (self.folder / "stderr-0").read_text()[-2000:]
        assert [process.returncode for process in self.processes] == [0, 0], told
        return [json.loads(text.strip().splitlines()[-1]) for text in printed]


@pytest.mark.skipif(not TELLS, reason="this torch's NCCL is refused, see the last test: `make test-torch TORCH=2.15.0`")
@pytest.mark.parametrize("backend", NAMED)
def test_a_kernel_that_an_abort_has_ended_does_not_count_and_the_next_group_works(ranks: Ranks, backend: str) -> None:
    expected = {"before": "done", "then": GIVEN_UP, "after": "done"}
    assert ranks.run("aborted", backend) == [expected, expected]
    assert (ranks.folder / "aborted").exists(), "NCCL was told"


@pytest.mark.skipif(not TELLS, reason="this torch's NCCL is refused, see the last test: `make test-torch TORCH=2.15.0`")
@pytest.mark.parametrize("backend", NAMED)
def test_a_peer_that_is_lost_while_nccl_connects_holds_nobody(ranks: Ranks, backend: str) -> None:
    """The default engine of torch 2.15 connects in its constructor, if it may, or by splitting another group."""
    expected = {"default": NOT_FORMED, "own": NOT_FORMED, "after": "done"}
    assert ranks.run("lost", backend) == [expected, expected]


@pytest.mark.skipif(not TELLS, reason="this torch's NCCL is refused, see the last test: `make test-torch TORCH=2.15.0`")
@pytest.mark.parametrize("backend", NAMED)
def test_an_abort_does_not_wait_for_what_torch_does_about_the_same_failure(ranks: Ranks, backend: str) -> None:
    """With its flight recorder on, torch 2.15 writes a file for up to 15 seconds, and nobody can abort meanwhile."""
    for told in ranks.run("seen_by_both", backend):
        assert told["then"] == GIVEN_UP
        assert float(told["took_s"]) < 3.0


@pytest.mark.skipif("nccl2" not in NAMED, reason="this torch has no engine 'nccl2': `make test-torch TORCH=2.15.0`")
@pytest.mark.parametrize(
    "variables", [{}, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}], ids=["default", "ends the process"]
)
def test_a_communicator_that_torch_has_given_up_by_itself_does_not_count(
    ranks: Ranks, variables: dict[str, str]
) -> None:
    """The older engine tells it in the same way, but takes minutes to give up."""
    for told in ranks.run("given_up", "nccl2", **variables):
        assert (told["before"], told["then"], told["after"]) == ("done", GIVEN_UP, "done")
        assert told["was_ours"] is False, "nobody but torch had noticed"


@pytest.mark.skipif(TELLS, reason="this torch's NCCL can be asked for errors: `make test-torch TORCH=2.6.0`")
def test_an_nccl_that_cannot_be_asked_is_refused(ranks: Ranks) -> None:
    with pytest.raises(AssertionError, match=r"UnfitError: the backend 'nccl' of a process group cannot be asked"):
        ranks.run("aborted", "nccl")
