"""The workers of a host as torchrun would start them: one group, of fixed ranks, that meets at an address and a port.

For scripts that do not ask the agent for a group but call `init_process_group`, or have Lightning, Accelerate or
Transformers call it. Which of the two a script is, is seen at the port: nobody else uses it.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchelastic.network.ports import is_in, kernel_tables, unused_ports
from torchelastic.rendezvous.member_id import MemberId

if TYPE_CHECKING:
    from torchelastic.agent.worker import Worker

log = logging.getLogger(__name__)

_ADDRESS = "127.0.0.1"
_MISSES = re.compile(r"KeyError: '(RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT)'|environment variable [A-Z_]+ expected")

#: Said once per host, when a script has failed since it knows no rank.
STANDS_IN = (
    "this script initialises by the environment (RANK, MASTER_ADDR): it is started again with its rank; when the group "
    "changes all workers are started again, as torchrun would; with torchelastic.train only the lost one would be"
)
#: What to tell who misses them where the others train in a group of the agent.
NOT_AGAIN = (
    "this script calls init_process_group, or has it called, and asks for a group too: a worker that is started again "
    "cannot meet the others by the environment, so take init_process_group out"
)


def stand_in(command: Sequence[str]) -> list[str]:
    """The command of a worker that asks for a group in the place of this command."""
    return [sys.executable, "-m", "torchelastic.agent.plain_member", *command]


def host_by_host(roster: Sequence[str]) -> list[str]:
    """Members in the order of torchrun's ranks: those of a host are neighbours, by their numbers there."""
    hosts: dict[str, list[tuple[int, str]]] = {}
    for each in roster:
        parts = MemberId.of(each)
        hosts.setdefault(parts.incarnation, []).append((int(parts.place), each))
    return [each for places in hosts.values() for _, each in sorted(places)]


def rank_variables(rank: int, world_size: int, host: int, hosts: int) -> dict[str, str]:
    """What torchrun sets for the process with this rank, on the host with this number; all have one role."""
    numbers = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world_size,
        "GROUP_RANK": host,
        "GROUP_WORLD_SIZE": hosts,
    }
    return {name: str(number) for name, number in numbers.items()}


class PlainGroup:
    """What the supervisor knows of it. Use it on the agent's event loop.

    Args:
        nproc: workers of this host, which are all of the run.
        max_restarts: how often the group may be started again.
    """

    def __init__(self, nproc: int, max_restarts: int) -> None:
        self._nproc, self._max_restarts = nproc, max_restarts
        (self._port,) = unused_ports(_ADDRESS)
        self._restarts = 0
        #: a worker has opened the port, in this life of the group or in an earlier one
        self.is_initialised = False
        #: it is being ended, to be started again or for good
        self.is_ending = False

    def variables(self, local_rank: int, *, may_meet: bool) -> dict[str, str]:
        """What torchrun would set for this worker, besides what all of ours have.

        Args:
            local_rank: of the worker.
            may_meet: whether it may meet others at the port. Where they train in a group of the agent nobody is there
                any more, and a script that initialises by the environment besides would wait for them in vain.
        """
        where = {"MASTER_ADDR": _ADDRESS, "MASTER_PORT": str(self._port)} if may_meet else {}
        return where | rank_variables(local_rank, self._nproc, 0, 1)

    def look(self) -> None:
        """See whether a worker has opened the port; call it now and then, and when one has just ended."""
        if not self.is_initialised and is_in(kernel_tables(), self._port):
            self.is_initialised = True
            log.info("no worker has asked for a group: this script initialises by the environment (RANK, MASTER_ADDR)")

    def begins_to_end(self, lost: Worker, how: str) -> bool:
        """A worker is lost, and the others are ended; returns whether all are then started again."""
        self.is_ending, goes_on = True, self._restarts < self._max_restarts
        again = (
            f"all {self._nproc} workers are started again, as torchrun would (restart {self._restarts + 1} of "
            f"{self._max_restarts}); with torchelastic.train only the lost one would be"
        )
        over = f"all {self._nproc} workers are ended: the restarts are used up (--max-restarts {self._max_restarts})"
        log.warning(
            "worker %d: %s; no worker has asked for a group: this script initialises by the environment (RANK, "
            "MASTER_ADDR), so %s",
            lost.local_rank, how, again if goes_on else over,
        )  # fmt: skip
        return goes_on

    def begins_anew(self, workers: Sequence[Worker]) -> None:
        """All of these are about to be started again: with a port at which no process of the last group is known."""
        self.is_ending = False
        self._restarts += 1
        (self._port,) = unused_ports(_ADDRESS)
        for worker in workers:
            # whoever has finished, or has taken our SIGTERM for a notice to stop, is needed again
            worker.restarts, worker.leaves, worker.gave_up = worker.restarts + 1, False, False


def misses_ranks(error: str) -> bool:
    """Whether a script has failed since it knows no rank, or no address to meet at, by the last line that it said.

    >>> misses_ranks("KeyError: 'RANK'"), misses_ranks("KeyError: 'loss'")
    (True, False)
    """
    return _MISSES.search(error) is not None
