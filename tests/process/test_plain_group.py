"""A group that met by the environment, and workers that ask the agent for one: which of the two is ended as a whole."""

from __future__ import annotations

import os
import signal
import socket

import psutil
import pytest

from tests.process.supervised import ask, pid_of, supervise
from tests.waiting import until
from torchelastic.agent.plain_group import PlainGroup
from torchelastic.agent.supervisor import Supervisor
from torchelastic.network.ports import is_in, kernel_tables, unused_ports

#: Rank 0 opens the port that torch's store would, each time it is started.
OPENS = """
import os, socket, time
if os.environ["RANK"] == "0":
    server = socket.create_server((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
time.sleep(60)
"""


def restarts(supervisor: Supervisor) -> list[int]:
    return [worker.restarts for worker in supervisor.workers]


def test_one_that_nobody_has_asked_for_is_started_again_as_a_whole(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(supervisor: Supervisor) -> None:
        await until(lambda: supervisor.is_plain_group)
        first = [pid_of(supervisor, rank) for rank in (0, 1)]
        os.kill(first[1], signal.SIGKILL)
        await until(lambda: restarts(supervisor) == [1, 1] and all(worker.process for worker in supervisor.workers))
        assert not {*first} & {pid_of(supervisor, rank) for rank in (0, 1)}
        assert supervisor.total_restarts == 2

    supervise(2, scenario, OPENS, plain=PlainGroup(2, max_restarts=3))
    assert "worker 1: killed by SIGKILL; no worker has asked for a group" in caplog.text


def test_where_a_worker_has_asked_only_the_lost_one_is_started_again(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(supervisor: Supervisor) -> None:
        await until(lambda: supervisor.is_plain_group)
        survivor = pid_of(supervisor, 0)
        ask(supervisor, survivor, 0)
        assert not supervisor.is_plain_group
        os.kill(pid_of(supervisor, 1), signal.SIGKILL)
        await until(lambda: restarts(supervisor) == [0, 1] and supervisor.workers[1].process is not None)
        assert pid_of(supervisor, 0) == survivor
        # between fork and exec a process has no variables that could be read
        await until(lambda: "RANK" in psutil.Process(pid_of(supervisor, 1)).environ())
        first, again = (psutil.Process(pid_of(supervisor, rank)).environ() for rank in (0, 1))
        assert (first["RANK"], again["RANK"]) == ("0", "1")
        # nobody is there any more: a script that initialises by the environment besides fails at once
        assert ("MASTER_PORT" in first, "MASTER_PORT" in again) == (True, False)

    supervise(2, scenario, OPENS, plain=PlainGroup(2, max_restarts=3))
    assert "no worker has asked" not in caplog.text


def test_one_that_is_stopped_while_it_is_ended_stays_ended() -> None:
    async def scenario(supervisor: Supervisor) -> None:
        await until(lambda: supervisor.is_plain_group)
        os.kill(pid_of(supervisor, 1), signal.SIGKILL)
        await until(lambda: supervisor.workers[0].process is None)  # a delay before all are started again
        await supervisor.stop(5.0)
        assert supervisor.all_over.is_set()
        assert restarts(supervisor) == [0, 0]

    supervise(2, scenario, OPENS, plain=PlainGroup(2, max_restarts=3))


def test_a_port_is_in_use_from_its_server_on_to_the_last_end_of_a_connection() -> None:
    (port,) = unused_ports("127.0.0.1")
    assert not is_in(kernel_tables(), port)
    with socket.create_server(("127.0.0.1", port)) as server:
        assert is_in(kernel_tables(), port)
        peer = socket.create_connection(("127.0.0.1", port))
        accepted, _ = server.accept()
    accepted.close()
    with peer:  # whoever served is gone, and who was connected still shows that there was somebody
        assert is_in(kernel_tables(), port)
