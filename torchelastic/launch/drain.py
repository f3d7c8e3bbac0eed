"""`torchelastic drain`: lets members of a run leave it at an agreed step, wherever they are."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterable, Sequence

from torchelastic.launch.run_address import opened
from torchelastic.rendezvous.leadership import read_members
from torchelastic.rendezvous.records import Keys, Member, RecordError, RoundState, decode_round
from torchelastic.rendezvous.store import CoordinationStore, Put
from torchelastic.usage import UsageError

#: A request that no agent carries out ends with this lease, if this command does not live to take it back.
REQUEST_TTL_S = 10.0
#: Between two looks whether they have left.
LOOK_S = 0.1
#: Requests in one transaction; etcd takes 128 operations by default (--max-txn-ops).
MAX_WRITES = 100


def drain(options: argparse.Namespace) -> int:
    """Ask, and wait until they have left. Exit code 0 if all have, 1 if not, 2 for a name that is none."""
    if not 0.0 <= options.timeout < math.inf:
        raise UsageError(f"--timeout {options.timeout:g}: give seconds, 0 or more")
    with opened(options) as (store, url):
        keys = Keys(url.root)
        return 0 if drained(store, keys, choose(store, keys, options.members, options.host), options.timeout) else 1


def choose(store: CoordinationStore, keys: Keys, names: Sequence[str], host: str | None) -> list[Member]:
    """The members with these names and those of a host. Raises UsageError, which lists the members that there are."""
    present = {m.member_id: m for m in read_members(store.list_prefix(keys.members).items) if not m.departed}
    unknown = [name for name in names if name not in present]
    chosen = {name for name in present if name in names or present[name].host == host}
    if chosen and not unknown:
        return [member for name, member in present.items() if name in chosen]
    if not present:
        raise UsageError(f"nobody is in run {keys.root.rpartition('/')[2]!r}: it is over, or --rdzv-id names another")
    what = f"no member is called {', '.join(unknown)}" if unknown else "give a member, or --host HOST"
    if host is not None and not unknown:
        what = f"no member is on a host called {host}"
    listed = "\n".join(f"  {member.member_id}  on host {member.host}" for member in present.values())
    raise UsageError(f"{what}; the members of this run:\n{listed}")


def drained(store: CoordinationStore, keys: Keys, members: Iterable[Member], timeout_s: float) -> bool:
    """Ask these members to leave; whether they have left within `timeout_s`. What nobody has taken up is taken back.

    Raises:
        StoreError: etcd is out of reach, or refuses.
    """
    remaining = {member.member_id: member for member in members}
    deadline_s = time.monotonic() + timeout_s
    lease = store.grant_lease(REQUEST_TTL_S)
    try:
        requests = [Put(keys.drain_of(member), b"{}", lease.lease_id) for member in remaining.values()]
        for start in range(0, len(requests), MAX_WRITES):
            store.txn((), requests[start : start + MAX_WRITES])
        renewed_s = time.monotonic()
        while remaining:
            for name in [name for name in remaining if _has_left(store, keys, name)]:
                print(f"{name} has left", flush=True)  # noqa: T201 - what the command is for
                del remaining[name]
            if remaining and time.monotonic() > deadline_s:
                _complain(remaining, timeout_s)
                return False
            if time.monotonic() - renewed_s > lease.ttl_s / 3:
                renewed_s = time.monotonic()
                store.keep_alive(lease.lease_id)
            time.sleep(LOOK_S if remaining else 0)
    finally:
        store.revoke_lease(lease.lease_id)
    return True


def _has_left(store: CoordinationStore, keys: Keys, name: str) -> bool:
    kv = store.get(keys.member(name))
    if kv is None or any(member.departed for member in read_members([kv])):
        return True
    stored = store.get(keys.round)
    try:
        return stored is not None and decode_round(keys.round, stored.value).state is RoundState.CLOSED
    except RecordError:
        return False  # the agents report it


def _complain(names: Iterable[str], timeout_s: float) -> None:
    print(  # noqa: T201 - the last word on the screen
        f"torchelastic drain: not within {timeout_s:g} s: {', '.join(names)}; who has received it leaves all the same",
        file=sys.stderr,
    )
