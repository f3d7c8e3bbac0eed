"""Notes to workers that were new in a group, in the store of its round: the others go on without them, and why.

They are written before the group is given up, so that whoever fails by that finds them. The store is rank 0's, which
holds the best state and so is no newcomer. The group's own connection to it may be cut any time, and it does not do to
wait for a rank 0 that has ended or is stopped: the others wait for whoever looks. So each look is a connection of its
own, in bounded time.
"""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from torchelastic.join_rules import Dismissal
from torchelastic.processes.sockets import SocketSet
from torchelastic.rendezvous.records import Round

if TYPE_CHECKING:
    from torchelastic.torch_internals.c10d_types import TCPStore

T = TypeVar("T")

log = logging.getLogger(__name__)

#: So long a worker that has failed by itself waits for the others, who may fail of the same a moment later.
WAIT_S = 1.0
LOOK_EVERY_S = 0.02
#: A store answers within milliseconds, on a thread that needs no interpreter.
ANSWER_S = 0.5
#: A process that is ending may still take a connection; then it is closed within so long.
ENDING_S = 0.02
#: A killed process takes connections until its memory is gone, and torch tries for a second or two whether somebody is
#: there. That it was killed is known sooner: within so long, if anybody is lost.
NEWS_S = 0.15


def dismiss(round_: Round, ranks: Sequence[int], dismissal: Dismissal) -> None:
    """Leave a note for each of these ranks; without one, if rank 0 is lost, they come back and fail once more."""
    words = json.dumps(asdict(dismissal))

    def write(store: TCPStore) -> None:
        for rank in ranks:
            store.set(_key(round_, rank), words)

    try:
        _ask(round_, write)
    except (RuntimeError, OSError) as error:
        log.info("the newcomers could not be notified: %s", error)


def find_dismissal(
    round_: Round, rank: int, *, may_wait: bool, now: Callable[[], Round] | None = None
) -> Dismissal | None:
    """The note for this rank; None: there is none, or rank 0 is gone.

    Args:
        round_: that the group was of.
        rank: of this worker in it.
        may_wait: for up to `WAIT_S`.
        now: the newest round, or edition of this one, that is known: who is lost by it is waited for up to `NEWS_S`.
    """
    until_s = time.monotonic() + (NEWS_S if now is not None else 0.0)
    lost = _lost(round_, now)
    while not lost and time.monotonic() < until_s:
        time.sleep(LOOK_EVERY_S / 4)
        lost = _lost(round_, now)
    if lost and round_.roster[0] in lost:
        return None
    key, until_s = _key(round_, rank), time.monotonic() + (WAIT_S if may_wait else 0.0)

    def read(store: TCPStore) -> bytes | None:
        while not store.check([key]):
            if time.monotonic() >= until_s:
                return None
            time.sleep(LOOK_EVERY_S)
        return store.get(key)

    try:
        words = _ask(round_, read, WAIT_S if may_wait else 0.0)
    except (RuntimeError, OSError) as error:
        log.debug("rank 0 of round %d is gone: %s", round_.number, error)
        return None
    return None if words is None else Dismissal(**json.loads(words))


def _lost(round_: Round, now: Callable[[], Round] | None) -> Collection[str]:
    newest = round_ if now is None else now()
    return newest.departed if newest.number == round_.number else newest.lost


def _ask(round_: Round, what: Callable[[TCPStore], T], more_s: float = 0.0) -> T:
    """What `what` returns, given a connection to the store of a round.

    Raises:
        RuntimeError, OSError: rank 0 has ended, or does not answer within `ANSWER_S`; with `more_s`, that much later.
    """
    from torchelastic.torch_internals.c10d_types import TCPStore

    host, _, port_text = round_.store_address.rpartition(":")
    port = int(port_text)
    with closing(socket.create_connection((host, port), ANSWER_S)) as first:  # torch would try again for long
        first.settimeout(ENDING_S)
        try:
            is_closed = first.recv(1) == b""
        except TimeoutError:
            is_closed = False  # it is there, and waits for a request
    if is_closed:
        raise ConnectionError(f"{host}:{port} has closed the connection")
    sockets = SocketSet(lambda connection: int(connection.getpeername()[1]) == port)
    with sockets.recording(), sockets.cutting_every(ANSWER_S + more_s):
        store = TCPStore(host, port, None, False, timedelta(seconds=ANSWER_S), wait_for_workers=False)
        return what(store)


def _key(round_: Round, rank: int) -> str:
    return f"dismissal/{round_.number}/{rank}"
