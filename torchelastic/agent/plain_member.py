"""A worker whose script initialises by the environment, where several hosts take part in the run.

    agent -> this process, a member of the run like any other -> the script, a new process in each round

It asks for a group in the script's place, starts the script with the ranks of that group as torchrun would (`RANK`,
`MASTER_ADDR`, ..), and ends it and asks again when the group is no more: on a change of membership such a group is
started again as a whole. Rank 0's store is the script's own: it opens `MASTER_PORT`, which a member has found unused.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from torchelastic.agent.plain_group import host_by_host, rank_variables
from torchelastic.lifetime.grace import LAUNCHER_GRACE_VARIABLE, SHORTEST_GRACE_S
from torchelastic.network.ports import unused_ports
from torchelastic.processes import boot_time_s, dies_with_parent
from torchelastic.rendezvous import wire
from torchelastic.rendezvous.client import AgentClient, AgentError
from torchelastic.rendezvous.member_id import MemberId
from torchelastic.rendezvous.records import JoinRequest, Round, RoundState, StateStatus
from torchelastic.rendezvous.url import RendezvousUrl, parse_url
from torchelastic.rendezvous.worker_rules import is_replaced
from torchelastic.text import host_port

#: How long the script may take after SIGTERM: one that saves then counts on no more than this.
END_GRACE_S = SHORTEST_GRACE_S
#: The others wait so long for a member that has to end its script first.
PATIENCE_S = 2 * END_GRACE_S
#: A script that fails with an error may only have lost a peer: whether the group is no more is waited for so long.
BLAME_S = 2.0
#: After a loss so long passes before the next group is asked for: the lost one is started again meanwhile, and each
#: further change of the group would cost a start of all scripts.
REJOIN_AFTER_S = 1.0
_LOOK_S = 1.0
_DONE_TIMEOUT_S = 10.0


def ranks(member: str, round_: Round) -> dict[str, str]:
    """What torchrun would set for a member's script, besides what the agent sets; the ranks of a host are neighbours.

    Args:
        member: its id, on the roster.
        round_: the round that it has joined.
    """
    hosts = list(dict.fromkeys(MemberId.of(each).incarnation for each in round_.roster))
    in_order, host = host_by_host(round_.roster), MemberId.of(member).incarnation
    address, _, port = round_.store_address.rpartition(":")
    return {
        **rank_variables(in_order.index(member), len(in_order), hosts.index(host), len(hosts)),
        "LOCAL_WORLD_SIZE": str(sum(MemberId.of(each).incarnation == host for each in in_order)),
        "MASTER_ADDR": address.strip("[]"),
        "MASTER_PORT": port,
        "TORCHELASTIC_RESTART_COUNT": str(round_.number - 1),
    }


class PlainMember:
    """Use it on the main thread.

    Args:
        command: the script's.
        url: of the run.
        socket_path: where the agent is.
    """

    def __init__(self, command: Sequence[str], url: RendezvousUrl, socket_path: str) -> None:
        self._command, self._url = list(command), url
        self._changed = threading.Event()  # the round, or the script has ended
        self._client = AgentClient(
            socket_path, connect_timeout_s=url.connect_timeout_s + 10.0, on_round=lambda _round: self._changed.set()
        )
        self._script: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """Train in one group after the other until the run is over; returns the exit code. Raises AgentError."""
        if self._client.run_was_closed:
            raise AgentError(
                "closed", f"run {self._url.run_id!r} was finished before: choose another run id (--rdzv-id)"
            )
        failed = False
        while True:
            address = self._client.address
            (port,) = unused_ports(address)
            try:
                store_address = host_port(address, port)
                round_ = self._client.join(JoinRequest(store_address, 0, StateStatus.INITIAL, failed, PATIENCE_S))
            except AgentError as error:
                if error.kind in ("closed", "drained"):
                    return 0
                raise
            exit_code = self._train(round_)
            if exit_code == 0:
                self._client.done(0, _DONE_TIMEOUT_S)
                self._client.wait_closed(self._url.timeout_s)
            if exit_code is not None:
                return exit_code if exit_code >= 0 else 128 - exit_code
            failed = True
            time.sleep(REJOIN_AFTER_S)

    def end(self, number: int, _frame: FrameType | None) -> NoReturn:
        """For SIGTERM: end the script, leave the run, and end."""
        self._end_script()
        self._client.close()
        raise SystemExit(128 + number)

    def _train(self, round_: Round) -> int | None:
        """Run the script in a group; returns its exit code, or None: the group is no more, and the script was ended."""
        script = self._script = subprocess.Popen(
            dies_with_parent(self._command),
            env={**os.environ, **ranks(self._client.member_id, round_), LAUNCHER_GRACE_VARIABLE: f"{END_GRACE_S:.0f}"},
            start_new_session=True,  # it is ended together with its data loaders
        )
        threading.Thread(target=self._report_end, args=(script,), name="script", daemon=True).start()
        while script.poll() is None and not self._is_over(round_):
            self._changed.wait(_LOOK_S)
            self._changed.clear()
        if script.poll() is None:
            self._end_script()  # with 0, if it takes SIGTERM as a notice: it has not finished all the same
            return None
        if script.returncode > 0:
            self._wait_for_blame(round_)
        return None if script.returncode != 0 and self._is_over(round_) else script.returncode

    def _report_end(self, script: subprocess.Popen[bytes]) -> None:
        script.wait()
        self._changed.set()

    def _wait_for_blame(self, round_: Round) -> None:
        until_s = boot_time_s() + BLAME_S
        while not self._is_over(round_) and boot_time_s() < until_s:
            self._changed.wait(max(0.0, until_s - boot_time_s()))
            self._changed.clear()

    def _is_over(self, joined: Round) -> bool:
        """Whether the group is no more: broken, to be made larger or smaller, or without etcd for too long."""
        now = self._client.round
        grows = now.state is RoundState.GATHERING and (now.waiting > 0 and len(joined.roster) < self._url.max_workers)
        shrinks = now.state is RoundState.GATHERING and bool(now.leaving)
        is_orphan = boot_time_s() > self._client.contact.leave_at_s
        return is_replaced(joined, now) or grows or shrinks or is_orphan or self._client.is_lost

    def _end_script(self) -> None:
        script = self._script
        # its data loaders get no SIGTERM: it may need them until it has saved
        for number, send in ((signal.SIGTERM, os.kill), (signal.SIGKILL, os.killpg)):
            if script is None or script.poll() is not None:
                return
            try:
                send(script.pid, number)
                script.wait(END_GRACE_S)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


def main() -> int:
    """See the module's docstring; the arguments are the script's command."""
    member = PlainMember(
        sys.argv[1:], parse_url(os.environ[wire.INIT_METHOD_VARIABLE]), os.environ[wire.SOCKET_VARIABLE]
    )
    signal.signal(signal.SIGTERM, member.end)
    try:
        return member.run()
    except AgentError as error:
        sys.stderr.write(f"torchelastic: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
