"""One process that trains alone, started without a launcher: in a notebook, in a debugger, in a test."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torchelastic.rendezvous import wire
from torchelastic.rendezvous.handler import (
    RendezvousClosedException,
    RendezvousDrainedException,
    RendezvousHandler,
)
from torchelastic.rendezvous.records import NO_ROUND, Round, RoundState, StateStatus

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

log = logging.getLogger(__name__)

#: Used in place of a URL where there is none.
SOLO_URL = "solo://"
#: Says how many processes another launcher has started: torchrun, srun, mpirun.
_SIZE_VARIABLES = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")

_HOW = "start the script with `torchelastic run --nproc-per-node 2 train.py`"
_OR_URL = "or give init_method='etcd://HOST:PORT/RUN_ID?min_workers=N&max_workers=M'"

#: Checkpoints carry the number of their round: in one process, a notebook for example, it never falls.
_round_numbers = itertools.count(1)


def why_not_alone(environment: Mapping[str, str]) -> str | None:
    """Why a process without a rendezvous URL must not train alone, with the remedy; None: it may.

    Args:
        environment: of the process.

    >>> why_not_alone({"WORLD_SIZE": "1"}) is None
    True
    """
    if wire.SOCKET_VARIABLE in environment:
        return f"no rendezvous: {wire.SOCKET_VARIABLE} is set, {wire.INIT_METHOD_VARIABLE} is not: {_HOW}, {_OR_URL}"
    for name in _SIZE_VARIABLES:
        size = environment.get(name, "")
        if size.isdecimal() and int(size) > 1:
            return f"no rendezvous, and {name}={size}: each of these processes would train alone: {_HOW}, {_OR_URL}"
    return None


class SoloRendezvousHandler(RendezvousHandler):
    """A world of one: no agent, no etcd, no socket. Every rendezvous succeeds at once, until the run is closed.

    `leave` and `can_leave` are called from any thread, everything else on the training thread.
    """

    def __init__(self) -> None:
        self._joined = NO_ROUND
        self._step, self._state_status = 0, StateStatus.INITIAL
        self._is_closed = self._leaves = False
        log.warning("no launcher and no init_method: this process trains alone; for more workers, %s", _HOW)

    @property
    def round(self) -> Round:
        """The round of the last `next_rendezvous`."""
        return self._joined

    @property
    def joined(self) -> Round:
        """The same: nobody else makes rounds."""
        return self._joined

    def report(self, *, step: int, state_status: StateStatus, failed: bool, patience_s: float) -> None:
        """Remember what the next round begins with; nobody waits for this worker."""
        del failed, patience_s
        self._step, self._state_status = step, state_status

    def next_rendezvous(self) -> tuple[Store, int, int]:
        """A round of this process alone, with a fresh store in its memory; see `RendezvousHandler`."""
        from torchelastic.torch_internals.c10d_types import HashStore

        if self._leaves:
            raise RendezvousDrainedException("this process was asked to stop")
        if self._is_closed:
            raise RendezvousClosedException("the run is finished")
        number = next(_round_numbers)
        self._joined = Round(number, RoundState.RUNNING, ("solo",), step=self._step, state_status=self._state_status)
        return HashStore(), 0, 1

    def is_closed(self) -> bool:
        """Whether the run is finished."""
        return self._is_closed

    def set_closed(self) -> None:
        """The run is finished. Idempotent."""
        self._is_closed = True

    def num_nodes_waiting(self) -> int:
        """Nobody: 0."""
        return 0

    def can_leave(self) -> bool:
        """Whether this process trains; see `RendezvousHandler`."""
        return self._joined is not NO_ROUND and not self._is_closed

    def leave(self) -> None:
        """Stop after the present step, with a checkpoint if there is a manager."""
        self._leaves = True

    def close(self) -> None:
        """The run is over for this process: SIGTERM ends it from now on. Idempotent."""
        self._is_closed = True

    def somebody_leaves(self) -> bool:
        """Whether this process was asked to stop."""
        return self._leaves

    def leaves_last(self) -> bool:
        """Whether it was: there is nobody else to go on."""
        return self._leaves
