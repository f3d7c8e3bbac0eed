"""What decides whether a host may take part: a command that passes, fails, hangs or is not there; who hears of it."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from tests.memory_store import MemoryStore
from tests.waiting import until, wait_until
from torchelastic.agent.health_check import Admission, HealthCheck, failure_of
from torchelastic.processes.exit_codes import COMPUTES_WRONG
from torchelastic.rendezvous.records import KeptOut, Keys
from torchelastic.rendezvous.store import StoreUnavailableError

KEYS = Keys("/torchelastic/job7")
#: Long after this, a command that must have been ended has not.
LONG_S = 30.0


def check(command: str, timeout_s: float = LONG_S, **variables: str) -> HealthCheck:
    return HealthCheck(command, timeout_s, {**os.environ, **variables})


def is_alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_a_command_that_ends_with_0_passes_and_sees_its_environment(tmp_path: Path) -> None:
    command = f"echo $OMP_NUM_THREADS > {tmp_path}/seen"
    assert asyncio.run(failure_of(check(command, OMP_NUM_THREADS="4"))) is None
    assert (tmp_path / "seen").read_text() == "4\n"


def test_the_last_lines_of_one_that_fails_are_shown_and_the_others_get_the_one_that_says_most() -> None:
    script = "for n in $(seq 50); do echo line $n; done; echo 'error    burn-in  core 3 computes wrong' >&2"
    script += "; echo 1 error; exit 3"
    failure = asyncio.run(failure_of(check(script)))
    assert failure is not None
    assert failure.exit_code == COMPUTES_WRONG == 76
    assert failure.because == "its health check failed: exit code 3: error burn-in core 3 computes wrong"
    lines = failure.text().splitlines()
    assert lines[0] == f"the health check failed: exit code 3: {script}"
    assert lines[1] == "line 33", "the last twenty"
    assert lines[-3].endswith("core 3 computes wrong")
    assert lines[-1] == "this host is kept out of the run: repair it before it is started here again (exit code 76)"


def test_one_that_is_killed_has_failed() -> None:
    failure = asyncio.run(failure_of(check("echo half; kill -SEGV $$")))
    assert failure is not None
    assert (failure.how, failure.exit_code) == ("killed by SIGSEGV", COMPUTES_WRONG)


def test_one_that_hangs_is_ended_with_all_that_it_has_started(tmp_path: Path) -> None:
    failure = asyncio.run(failure_of(check(f"sleep 600 & echo $! > {tmp_path}/child; echo begun; wait", 1.0)))
    assert failure is not None
    assert (failure.how, failure.lines, failure.exit_code) == ("it did not end within 1 s", ("begun",), COMPUTES_WRONG)
    child = int((tmp_path / "child").read_text())
    wait_until(lambda: not is_alive(child), LONG_S, "what it has started has ended")


@pytest.mark.parametrize("command", ["nonesuch-program --fast", "/etc/passwd"])
def test_a_command_that_cannot_be_run_says_nothing_of_the_host(command: str) -> None:
    failure = asyncio.run(failure_of(check(command)))
    assert failure is not None
    assert failure.exit_code == 2, "a scheduler that takes hosts out of service goes by the other code"
    assert "give --health-check a command that can be run here" in failure.text()


def test_who_is_asked_to_stop_meanwhile_ends_it(tmp_path: Path) -> None:
    async def stopped() -> int:
        running = asyncio.ensure_future(failure_of(check(f"echo $$ > {tmp_path}/pid; sleep 600")))
        await until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip(), LONG_S, "it runs")
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        return int((tmp_path / "pid").read_text())

    assert not is_alive(asyncio.run(stopped()))


# What the others hear -------------------------------------------------------------------------------------------------


def test_the_others_say_once_who_is_kept_out_until_it_passes(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    key = KEYS.kept_out_of("b")

    async def run() -> None:
        good = Admission(store, KEYS, "a", None)
        await good.decide()
        assert good.failure is None
        bad = Admission(store, KEYS, "b", check("echo core 3 computes wrong; exit 1"), wall_s=lambda: 7.0)
        await bad.decide()
        stored = store.get(key)
        assert stored is not None
        assert KeptOut.decode(key, stored.value) == KeptOut(7.0, SAID)
        following = asyncio.ensure_future(good.follow())
        await until(lambda: good.others, LONG_S, "the other one has heard of it")
        assert good.others_text() == f"host b is kept out: {SAID}"
        following.cancel()
        repaired = Admission(store, KEYS, "b", check("true"))
        await repaired.decide()
        following = asyncio.ensure_future(repaired.follow())
        await until(lambda: store.get(key) is None, LONG_S, "it takes part again")
        following.cancel()

    asyncio.run(run())
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        f"host b is kept out of the run: {SAID}"
    ]


SAID = "its health check failed: exit code 1: core 3 computes wrong"


def test_a_store_that_is_away_does_not_hide_why_this_host_is_kept_out(caplog: pytest.LogCaptureFixture) -> None:
    class Away(MemoryStore):
        def put(self, key: str, value: bytes, lease_id: int = 0) -> int:
            raise StoreUnavailableError("no answer")

    admission = Admission(Away(), KEYS, "b", check(f"kill -{signal.SIGKILL.name[3:]} $$"))
    asyncio.run(admission.decide())
    assert admission.failure is not None
    assert admission.failure.how == "killed by SIGKILL"
    assert "the other hosts were not notified that this one is kept out: no answer" in caplog.text
