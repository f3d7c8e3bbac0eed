"""Statuses as JSON: what an agent writes into etcd, and a whole run for programs. Nothing that is read is trusted.

Defaults are left out, and a host's name is written once. What is too long is cut: events go first, then what
workers have published, then where the time of each went (that of the host stays), last of all workers.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torchelastic.foreign_json import RecordError, checked, decode_json
from torchelastic.observe.ledger.accounts import NOTHING, Account, by_label
from torchelastic.observe.ledger.figures import Figure
from torchelastic.observe.status.event_lines import newest
from torchelastic.observe.status.run_status import EventLine, HostStatus, RunStatus, notes_of
from torchelastic.rendezvous.records import MAX_VALUE_BYTES, Member

#: A host's status is no longer.
MOST_BYTES = 30_000
#: But for these so many bytes are always there, however many hosts there are.
LEAST_BYTES = 2_000
#: All statuses of a run together: gRPC takes 4 MiB in one answer by default.
MOST_TOGETHER_BYTES = 3_000_000

#: What is shown of a host that has left.
_LEFT = ("host", "incarnation", "at_s", "journal")
_LABELS = frozenset(account.label for account in Account)


def most_bytes(hosts: int) -> int:
    """How long the status of each of so many hosts may be.

    >>> most_bytes(4), most_bytes(500)
    (30000, 6000)
    """
    return max(LEAST_BYTES, min(MOST_BYTES, MOST_TOGETHER_BYTES // max(1, hosts)))


# --- a host -----------------------------------------------------------------------------------------------------------


def encode_host(status: HostStatus, at_most_bytes: int = MOST_BYTES) -> bytes:
    """As it is written into etcd, cut to a length; see the module's docstring."""
    value = b""
    for shorter in _cut(status):
        value = json.dumps(host_to_plain(shorter), separators=(",", ":"), ensure_ascii=False).encode()
        if len(value) <= at_most_bytes:
            break
    return value


def decode_host(key: str, value: bytes) -> HostStatus:
    """What `encode_host` made. Raises RecordError, which names the key: it is something else."""
    return host_from_plain(key, decode_json(key, value, most_bytes=MAX_VALUE_BYTES))


def host_to_plain(status: HostStatus) -> dict[str, Any]:
    """For JSON."""
    plain = _unusual(status, ("workers", "seen", "events"))
    plain["workers"] = [_unusual(worker, ("host",)) for worker in status.workers]
    plain["seen"] = dataclasses.asdict(status.seen)
    plain["events"] = [_unusual(line, ("host",)) for line in status.events]
    return plain


def host_from_plain(source: str, document: object) -> HostStatus:
    """What `host_to_plain` made; unknown fields are left out, missing ones are the defaults.

    Args:
        source: named in errors.
        document: as JSON was read.

    Raises:
        RecordError: it is something else.
    """
    status = checked(source, document, HostStatus)
    accounts, worker_ns = sum(status.seen.amounts), status.seen.worker_ns
    if accounts != worker_ns:
        raise RecordError(f"{source}: seen: accounts of {accounts} ns of {worker_ns} ns on the wall")
    for worker in status.workers:
        if worker.account not in _LABELS:
            raise RecordError(f"{source}: workers: there is no account {worker.account!r}")
    return replace(
        status,
        workers=tuple(replace(worker, host=status.host) for worker in status.workers),
        events=tuple(replace(line, host=status.host) for line in status.events),
    )


def _unusual(value: Any, omitted: tuple[str, ...]) -> dict[str, Any]:
    """The fields that are not as they are by default."""
    fields = [one for one in dataclasses.fields(value) if one.name not in omitted]
    return {one.name: found for one in fields if (found := getattr(value, one.name)) not in (one.default, {})}


def _cut(status: HostStatus) -> Iterator[HostStatus]:
    """The status, shorter and shorter."""
    yield status
    for kept in (10, 5, 2):
        yield replace(status, events=newest(status.events, kept, lambda line: line.kind))
    status = replace(status, events=())
    yield status
    status = replace(status, workers=tuple(replace(worker, values={}) for worker in status.workers))
    yield status
    status = replace(status, workers=tuple(replace(worker, amounts=NOTHING) for worker in status.workers))
    yield status
    while status.workers:
        status = replace(status, workers=status.workers[: len(status.workers) // 2])
        yield status


# --- a run ------------------------------------------------------------------------------------------------------------


def run_to_plain(status: RunStatus) -> dict[str, Any]:
    """A run for programs: what `torchelastic status --json` prints and the live page receives. No field is left out."""
    round_ = status.round
    return {
        "run_id": status.run_id,
        "at_s": status.at_s,
        "round": {
            "number": round_.number,
            "state": round_.state.value,
            "since_s": status.round_since_s,
            "because": round_.because,
            "waiting": round_.waiting,
        },
        "world_size": status.world_size,
        "step": status.step,
        "end_step": status.progress.end_step,
        "steps_per_s": status.steps_per_s,
        "members": _members_to_plain(status),
        "workers": [{**with_labels(worker), "values": dict(worker.values)} for worker in status.workers],
        "hosts": [_whole_host(host) for host in status.hosts],
        "silent": [_whole_host(host) for host in status.silent],
        "left": [{name: getattr(host, name) for name in _LEFT} for host in status.left],
        "notes": notes_to_plain(status),
        "kept_out": [{"host": host, **dataclasses.asdict(record)} for host, record in status.kept_out.items()],
        "events": [event_to_plain(line) for line in status.events],
        "seen": with_labels(status.seen),
        "figures": {figure.name: figure_to_plain(figure) for figure in status.figures},
    }


def with_labels(value: Any, *omitted: str) -> dict[str, Any]:
    """The fields of a dataclass with `amounts`, but for some, for JSON: `amounts_ns` by account instead."""
    names = [one.name for one in dataclasses.fields(value) if one.name not in ("amounts", *omitted)]
    return {**{name: getattr(value, name) for name in names}, "amounts_ns": by_label(value.amounts)}


def notes_to_plain(status: RunStatus, *, is_etcd_away: bool = False) -> list[dict[str, Any]]:
    """For JSON; as `notes_of`."""
    return [dataclasses.asdict(note) for note in notes_of(status, is_etcd_away=is_etcd_away)]


def event_to_plain(line: EventLine) -> dict[str, Any]:
    """For JSON."""
    return dataclasses.asdict(line)


def figure_to_plain(figure: Figure) -> dict[str, Any]:
    """For JSON, which knows no infinity: null."""
    value, attainable = (number if math.isfinite(number) else None for number in (figure.value, figure.attainable))
    return {"value": value, "attainable": attainable, "because": figure.because}


def _members_to_plain(status: RunStatus) -> list[dict[str, Any]]:
    ranks = {member_id: rank for rank, member_id in enumerate(status.round.roster)}

    def plain(member: Member) -> dict[str, Any]:
        return {
            "member_id": member.member_id,
            "host": member.host,
            "rank": ranks.get(member.member_id, -1),
            "is_leaving": member.leaving,
        }

    everybody = [plain(member) for member in status.members]
    return sorted(everybody, key=lambda one: (one["rank"] < 0, one["rank"], one["member_id"]))


def _whole_host(host: HostStatus) -> dict[str, Any]:
    """All but its workers and events, which are listed elsewhere."""
    named = [one.name for one in dataclasses.fields(host) if one.name not in ("workers", "events")]
    return {**{name: getattr(host, name) for name in named}, "seen": with_labels(host.seen)}
