"""Runs as `torchelastic status` sees them, made by hand."""

from __future__ import annotations

from typing import Any

from torchelastic.observe.ledger.accounts import Account
from torchelastic.observe.ledger.figures import Seen
from torchelastic.observe.status.run_status import EventLine, HostStatus, RunStatus, WorkerStatus, combined
from torchelastic.rendezvous.records import Member, Round, RoundState

S = 10**9
NOW_S = 1_700_000_000.0


def a_worker(rank: int, host: str, **changes: Any) -> WorkerStatus:
    known: dict[str, Any] = {
        "worker": f"{host}-1/{rank}.0", "host": host, "pid": 4000 + rank, "rank": rank, "round": 4, "step": 1200,
        "steps_per_s": 31.25, "account": "productive", "began_s": NOW_S - 7200, "values": {"loss": 0.125 + rank},
    }  # fmt: skip
    return WorkerStatus(**{**known, **changes})


def a_host(host: str, *ranks: int, **changes: Any) -> HostStatus:
    amounts = tuple(
        {Account.PRODUCTIVE: 930, Account.RE_FORM: 20, Account.DATA_WAIT: 50}.get(a, 0) * S for a in Account
    )
    known: dict[str, Any] = {
        "host": host, "incarnation": f"{host}1", "at_s": NOW_S - 0.5, "began_s": NOW_S - 1000, "round": 4,
        "round_state": "running", "round_since_s": NOW_S - 180,
        "workers": tuple(a_worker(rank, host) for rank in ranks),
        "seen": Seen(1000 * S, 1000 * S, amounts, 0, len(ranks), 1200, 1, 1, 0, 1, 4),
        "events": tuple(
            EventLine(at_s=NOW_S - 60 + n, host=host, kind="save", text=f"saved step {n}", worker=f"{host}-1/0", rank=0)
            for n in range(4)
        ),
    }  # fmt: skip
    return HostStatus(**{**known, **changes})


def a_run(*hosts: HostStatus, **changes: Any) -> RunStatus:
    workers = [worker for host in hosts for worker in host.workers if worker.rank >= 0]
    roster = tuple(f"m{worker.rank}" for worker in workers)
    round_ = Round(**{"number": 4, "state": RoundState.RUNNING, "roster": roster, "because": "a newcomer", **changes})
    members = [Member(f"m{worker.rank}", worker.host) for worker in workers]
    return combined("job7", NOW_S, round_, members, hosts)
