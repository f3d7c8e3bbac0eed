"""Whether an earlier agent of this host still lives: said only where it is certain."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from torchelastic.agent.identity import has_ended, this_process

ANOTHER = "import json, torchelastic.agent.identity as i; print(json.dumps(i.this_process()), flush=True); input()"


def test_a_process_that_lives_has_not_ended_and_one_that_was_killed_has() -> None:
    with subprocess.Popen([sys.executable, "-c", ANOTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        about = other.stdout.readline()
        assert json.loads(about)["pid"] == other.pid
        assert not has_ended(about)
        other.kill()
        other.wait()
    assert has_ended(about)


def test_a_process_that_nobody_has_waited_for_yet_has_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", ANOTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        about = other.stdout.readline()
        other.kill()
        while not has_ended(about):  # a zombie by now; the test's time-out is the bound
            pass


def test_another_process_with_the_same_pid_is_not_the_one_that_wrote() -> None:
    assert not has_ended(json.dumps(this_process()).encode())
    assert has_ended(json.dumps({**this_process(), "started_ticks": 1}).encode())


@pytest.mark.parametrize(
    "about",
    [
        json.dumps({**this_process(), "boot": "another", "pid": 2**22 + 1}).encode(),
        json.dumps({**this_process(), "namespace": "pid:[1]", "pid": 2**22 + 1}).encode(),
        b"",
        b"[]",
        b"{}",
        b"\x80\x04not json",
        b"[" * 100_000,
    ],
    ids=["another boot", "another namespace", "nothing", "list", "empty", "not json", "bottomless"],
)
def test_of_other_boots_and_containers_and_of_garbage_nothing_is_said(about: bytes) -> None:
    assert not has_ended(about)
