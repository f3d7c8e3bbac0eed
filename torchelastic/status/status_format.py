"""Statuses as JSON: what an agent writes into etcd, and a whole run for programs. Nothing that is read is trusted.

What is as usual is left out, and a host's name is written once. What is too long is cut: events go first, then what
workers have published, then where the time of each went (that of the host stays), last of all workers.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torchelastic.foreign_json import Fields, RecordError, decode_json
from torchelastic.ledger.accounts import NOTHING, Account, Amounts, by_label, from_labels
from torchelastic.ledger.figures import Figure, Seen
from torchelastic.rendezvous.records import MAX_VALUE_BYTES, Member
from torchelastic.status.event_lines import newest
from torchelastic.status.run_status import MOST_EVENTS, MOST_VALUES, EventLine, HostStatus, RunStatus, WorkerStatus

#: A host's status is no longer.
MOST_BYTES = 30_000
#: But for these so many bytes are always there, however many hosts there are.
LEAST_BYTES = 2_000
#: All statuses of a run together: gRPC takes 4 MiB in one answer by default.
MOST_TOGETHER_BYTES = 3_000_000
#: No host has more workers than that.
MOST_WORKERS = 4096

#: What is told of a host that has left.
_LEFT = ("host", "incarnation", "at_s", "journal")
_COUNTS = tuple(one.name for one in dataclasses.fields(Seen) if one.name != "amounts")


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
    plain["workers"] = [_worker_to_plain(worker) for worker in status.workers]
    plain["seen"] = seen_to_plain(status.seen)
    plain["events"] = [_unusual(line, ("host",)) for line in status.events]
    return plain


def host_from_plain(source: str, document: object) -> HostStatus:
    """What `host_to_plain` made; unknown fields are left out, missing ones are as usual.

    Args:
        source: named in errors.
        document: as JSON was read.

    Raises:
        RecordError: it is something else.
    """
    fields = Fields(source, document)
    host = fields.text("host", None)
    return HostStatus(
        host=host,
        incarnation=fields.text("incarnation", None),
        at_s=fields.number("at_s", None),
        began_s=fields.number("began_s"),
        every_s=fields.number("every_s", 1.0),
        round=fields.whole("round", -1, least=-1),
        round_state=fields.text("round_state"),
        round_since_s=fields.number("round_since_s"),
        version=fields.text("version"),
        workers=tuple(_worker_from_plain(host, part) for part in fields.parts("workers", MOST_WORKERS)),
        seen=_seen_from_plain(Fields(f"{source}: seen", fields.object("seen"))),
        events=tuple(_event_from_plain(host, part) for part in fields.parts("events", MOST_EVENTS)),
        journal=fields.text("journal"),
        address=fields.text("address"),
        is_etcd_away=fields.flag("is_etcd_away"),
    )


def seen_to_plain(seen: Seen) -> dict[str, Any]:
    """For JSON: the counts, and `amounts_ns` by account."""
    counts = {name: getattr(seen, name) for name in _COUNTS}
    return {**counts, "amounts_ns": by_label(seen.amounts)}


def _seen_from_plain(fields: Fields) -> Seen:
    counts = {name: fields.whole(name, most=2**63) for name in _COUNTS}
    amounts = _amounts(fields)
    if sum(amounts) != counts["worker_ns"]:
        raise RecordError(f"{fields.source}: accounts of {sum(amounts)} ns of {counts['worker_ns']} ns on the wall")
    return Seen(**counts, amounts=amounts)


def _worker_to_plain(worker: WorkerStatus) -> dict[str, Any]:
    plain = _unusual(worker, ("host", "amounts", "values"))
    if worker.amounts != NOTHING:
        plain["amounts_ns"] = {label: ns for label, ns in by_label(worker.amounts).items() if ns}
    if worker.values:
        plain["values"] = dict(worker.values)
    return plain


def _worker_from_plain(host: str, fields: Fields) -> WorkerStatus:
    account = fields.text("account", Account.START_UP.label)
    if account.upper() not in Account.__members__:
        raise RecordError(f"{fields.source}: there is no account {account!r}")
    return WorkerStatus(
        worker=fields.text("worker", None),
        host=host,
        pid=fields.whole("pid"),
        rank=fields.whole("rank", -1, least=-1),
        round=fields.whole("round", -1, least=-1),
        step=fields.whole("step", -1, least=-1),
        end_step=fields.whole("end_step", -1, least=-1),
        steps_per_s=fields.number("steps_per_s"),
        account=account,
        amounts=_amounts(fields),
        restarts=fields.whole("restarts"),
        began_s=fields.number("began_s"),
        values=fields.numbers("values", MOST_VALUES),
    )


def _event_from_plain(host: str, fields: Fields) -> EventLine:
    return EventLine(
        at_s=fields.number("at_s", None),
        host=host,
        kind=fields.text("kind", None),
        text=fields.text("text", None),
        worker=fields.text("worker"),
        rank=fields.whole("rank", -1, least=-1),
        round=fields.whole("round", -1, least=-1),
        step=fields.whole("step", -1, least=-1),
    )


def _amounts(fields: Fields) -> Amounts:
    try:
        amounts = from_labels(dict(fields.object("amounts_ns")))
    except ValueError as error:
        raise RecordError(f"{fields.source}: {error}") from error
    if min(amounts) < 0 or max(amounts) > 2**63:
        raise RecordError(f"{fields.source}: an account holds {min(amounts)} to {max(amounts)} ns")
    return amounts


def _unusual(value: Any, left_out: tuple[str, ...]) -> dict[str, Any]:
    """The fields that are not as they are by default."""
    fields = [one for one in dataclasses.fields(value) if one.name not in left_out]
    return {one.name: getattr(value, one.name) for one in fields if getattr(value, one.name) != one.default}


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
    """A run for programs: what `torchelastic status --json` prints and the live page is sent. No field is left out."""
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
        "workers": [_whole_worker(worker) for worker in status.workers],
        "hosts": [_whole_host(host) for host in status.hosts],
        "silent": [_whole_host(host) for host in status.silent],
        "left": [{name: getattr(host, name) for name in _LEFT} for host in status.left],
        "events": [event_to_plain(line) for line in status.events],
        "seen": seen_to_plain(status.seen),
        "figures": {figure.name: figure_to_plain(figure) for figure in status.figures},
    }


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


def _whole_worker(worker: WorkerStatus) -> dict[str, Any]:
    plain = {one.name: getattr(worker, one.name) for one in dataclasses.fields(worker) if one.name != "amounts"}
    return {**plain, "values": dict(worker.values), "amounts_ns": by_label(worker.amounts)}


def _whole_host(host: HostStatus) -> dict[str, Any]:
    """All but its workers and events, which are told elsewhere."""
    named = [one.name for one in dataclasses.fields(host) if one.name not in ("workers", "events")]
    return {**{name: getattr(host, name) for name in named}, "seen": seen_to_plain(host.seen)}
