"""Workers that are not the launcher's direct child: a wrapper script stands between (a shell, conda run, nsys)."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from tests.process.supervised import PATIENCE_S, ask, pid_of, supervise
from tests.waiting import is_gone, until
from torchelastic.agent.host_events import Event, WorkerLeaves, WorkerNotRestarted
from torchelastic.agent.signals import forward
from torchelastic.agent.supervisor import Supervisor
from torchelastic.processes.family import below
from torchelastic.processes.identity import Process

#: Starts what trains, in a session of its own too if it is told so, and passes its exit code on as a shell does.
WRAPPER = """
import os, subprocess, sys
inner = [sys.executable, "-c", os.environ["INNER"]]
code = subprocess.call(inner, start_new_session=bool(os.environ.get("OWN")))
print("the wrapper ends", file=sys.stderr, flush=True)
sys.exit(128 - code if code < 0 else code)
"""
WAITS = "import sys, time; print('ready', file=sys.stderr, flush=True); time.sleep(60)"
TAKES_NOTICE = """
import pathlib, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: (print("told", file=sys.stderr, flush=True), sys.exit(0)))
signal.signal(signal.SIGTERM, lambda *_: (print("saved", file=sys.stderr, flush=True), sys.exit(0)))
print("ready", file=sys.stderr, flush=True)
time.sleep(60)
"""


async def trainer_of(supervisor: Supervisor) -> int:
    """The process that worker 0's wrapper has started, once it runs."""
    await until(lambda: "ready" in supervisor.workers[0].tail)
    (trainer,) = below(pid_of(supervisor, 0))
    return trainer


@pytest.mark.parametrize("own", ["", "1"], ids=["in its group", "in a session of its own"])
def test_one_that_hangs_is_ended_with_its_wrapper_and_started_again(own: str) -> None:
    async def scenario(supervisor: Supervisor) -> None:
        wrapper, trainer = pid_of(supervisor, 0), await trainer_of(supervisor)
        ask(supervisor, trainer, 0)
        supervisor.end_hung(trainer)
        await until(lambda: supervisor.workers[0].restarts == 1)
        await until(lambda: is_gone(trainer) and is_gone(wrapper))

    supervise(1, scenario, WRAPPER, INNER=WAITS, OWN=own)


def test_one_that_was_to_leave_is_not_started_again_whatever_its_exit_code() -> None:
    async def scenario(supervisor: Supervisor) -> None:
        trainer = await trainer_of(supervisor)
        ask(supervisor, trainer, 0)
        supervisor.on_event(WorkerLeaves(trainer, 0))
        os.kill(trainer, signal.SIGKILL)
        await asyncio.wait_for(supervisor.all_over.wait(), PATIENCE_S)
        assert supervisor.workers[0].exit_code == 128 + signal.SIGKILL
        assert supervisor.total_restarts == 0

    supervise(1, scenario, WRAPPER, INNER=WAITS)


def test_the_others_learn_that_one_is_not_started_again() -> None:
    told: list[int] = []

    def publish(event: Event) -> None:
        if isinstance(event, WorkerNotRestarted):
            told.append(event.pid)

    async def scenario(supervisor: Supervisor) -> None:
        trainer = await trainer_of(supervisor)
        ask(supervisor, trainer, 0)
        supervisor.workers[0].fails_for_good = True
        os.kill(trainer, signal.SIGUSR1)
        await asyncio.wait_for(supervisor.all_over.wait(), PATIENCE_S)
        assert trainer in told

    supervise(1, scenario, WRAPPER, publish=publish, INNER=TAKES_NOTICE.replace("sys.exit(0)", "sys.exit(1)"))


def test_whoever_asks_in_its_place_without_being_started_by_it_is_left_alone() -> None:
    async def scenario(supervisor: Supervisor) -> None:
        trainer = await trainer_of(supervisor)
        ask(supervisor, os.getpid(), 0)
        assert supervisor.workers[0].trainers == set()
        ask(supervisor, trainer, 0)
        assert supervisor.workers[0].trainers == {Process.of(trainer)}

    supervise(1, scenario, WRAPPER, INNER=WAITS)


def test_signals_go_past_the_wrapper_to_what_handles_them() -> None:
    async def scenario(supervisor: Supervisor) -> None:
        wrapper, trainer = pid_of(supervisor, 0), await trainer_of(supervisor)
        assert forward(signal.SIGUSR1, [wrapper]) == [trainer]
        await until(lambda: "told" in supervisor.workers[0].tail)
        await asyncio.wait_for(supervisor.all_over.wait(), PATIENCE_S)
        assert supervisor.workers[0].exit_code == 0

    supervise(1, scenario, WRAPPER, INNER=TAKES_NOTICE)


def test_a_script_that_has_asked_for_no_group_saves_at_sigterm_and_its_wrapper_lives_until_it_has() -> None:
    async def scenario(supervisor: Supervisor) -> None:
        await trainer_of(supervisor)
        supervisor.stop_starting()
        await asyncio.wait_for(supervisor.all_over.wait(), PATIENCE_S)
        assert list(supervisor.workers[0].tail) == ["ready", "saved", "the wrapper ends"]

    supervise(1, scenario, WRAPPER, INNER=TAKES_NOTICE)
