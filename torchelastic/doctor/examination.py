"""Which checks there are. They run side by side, each with a time limit: one that hangs becomes a finding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from torchelastic.doctor import (
    accelerators,
    etcd_facts,
    etcd_rules,
    folder_rules,
    host_rules,
    lifetime,
    meeting,
    meeting_rules,
    network,
    versions,
)
from torchelastic.doctor.findings import Finding, Level
from torchelastic.file_systems import file_system_of
from torchelastic.processes.background import side_by_side
from torchelastic.rendezvous.credentials import CredentialsError, read_file, resolve
from torchelastic.rendezvous.url import RendezvousUrl

#: The longest limit of a check, but for that of several hosts, which also waits as long as it is asked to.
LIMIT_S = 12.0


@dataclass(frozen=True)
class Question:
    """What a run is going to need of this host.

    Attributes:
        url: the etcd where the hosts meet; None: it is not checked.
        hosts: how many there are; more than one: they check each other, each with a doctor.
        workers: on each host; None: not known.
        wait_s: how long to wait for the other hosts.
        folders: where checkpoints are to be written.
        state_bytes: what the ranks of a host save together; None: not known.
        ports: that have to be free here, and reached by the others.
        iface: which network the hosts are to meet over, as for `torchelastic run --iface`; None: etcd's.
        environment: variables; the password of etcd may be in here.
    """

    url: RendezvousUrl | None = None
    hosts: int = 1
    workers: int | None = None
    wait_s: float = 7.0
    folders: tuple[Path, ...] = ()
    state_bytes: int | None = None
    ports: tuple[int, ...] = ()
    iface: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Check:
    """One thing to check.

    Attributes:
        name: of its findings.
        run: gathers facts and judges them; may block, on a thread of its own.
        timeout_s: after which it is given up.
        late: how bad it is if it has not ended by then.
        why_late: the most likely reason.
        remedy: what to do then.
    """

    name: str
    run: Callable[[], Sequence[Finding]]
    timeout_s: float = 8.0
    late: Level = Level.ERROR
    why_late: str = "something that it asks does not answer"
    remedy: str = "see what the host is busy with, and run it again"

    def findings(self, ended: Future[Sequence[Finding]] | None) -> Sequence[Finding]:
        """What came of it; None: it did not end in time."""
        if ended is None:
            what = f"no answer within {self.timeout_s:g} s: aborted"
            return [Finding(self.name, self.late, what, self.why_late, self.remedy)]
        error = ended.exception()
        if error is None:
            return ended.result()
        because = f"{type(error).__name__}: {error}"
        remedy = "report it with this line (it is a bug of the doctor, not of this host), and check by hand"
        return [Finding(self.name, Level.WARNING, "this could not be checked", because, remedy)]


def examine(question: Question) -> list[Finding]:
    """Run all checks side by side.

    Takes at most `LIMIT_S` seconds, or if other hosts are waited for, `wait_s` and 6 s. From any thread.
    """
    return run_checks(checks(question))


def run_checks(checks: Sequence[Check]) -> list[Finding]:
    """The findings of all checks, in the order of the checks; takes no longer than the longest of their limits."""
    names = [f"doctor-{number}-{check.name}" for number, check in enumerate(checks)]
    ended = side_by_side(
        {name: check.run for name, check in zip(names, checks, strict=True)},
        {name: check.timeout_s for name, check in zip(names, checks, strict=True)},
    )
    return [one for name, check in zip(names, checks, strict=True) for one in check.findings(ended.get(name))]


def checks(question: Question) -> list[Check]:
    """The table of checks for a question, in the order in which they are shown."""
    endpoint = None if question.url is None else question.url.endpoints[0]
    workers, hosts, state_bytes, iface = question.workers or 1, question.hosts, question.state_bytes, question.iface
    warning = Level.WARNING
    no_gpu = "a GPU's driver, or the disk with torch on it, does not answer"
    no_names = "the resolver of this host does not answer: see /etc/resolv.conf"
    no_service = "squeue or a metadata service does not answer"
    no_disk = "its file system does not answer: a server is unreachable"
    network_check = partial(network.check, endpoint, hosts, question.ports, iface)
    reverse_lookup = partial(network.check_reverse_lookup, endpoint, iface)
    found = [
        Check(versions.NAME, versions.check),
        Check(accelerators.NAME, partial(accelerators.check, question.workers), LIMIT_S, warning, no_gpu),
        Check(host_rules.MEMORY, partial(host_rules.check_memory, state_bytes)),
        Check(host_rules.FILES, partial(host_rules.check_limits, workers, workers * hosts)),
        Check(host_rules.LEFT_OVERS, host_rules.check_left_overs, late=warning, why_late="there are very many files"),
        Check(host_rules.CLOCK, partial(host_rules.check_clock, hosts)),
        Check(lifetime.NAME, lifetime.check, LIMIT_S, warning, no_service),
        Check(network.NAME, network_check, LIMIT_S, why_late=no_names),
        Check(network.REVERSE, reverse_lookup, LIMIT_S, warning, no_names),
    ]
    for path in question.folders:
        run, remedy = partial(folder_rules.check, path, state_bytes), f"see `mount` and the server of {path}"
        found.append(Check(folder_rules.NAME, run, why_late=no_disk, remedy=remedy))
    return found if question.url is None else [*found, *_about_etcd(question, question.url)]


def _about_etcd(question: Question, url: RendezvousUrl) -> list[Check]:
    """The checks of etcd and of the other hosts. Reading a password file may hang, so each does that for itself."""

    def credentials() -> etcd_facts.CredentialsOrReason:
        try:
            return resolve(url.access, question.environment, read_file)
        except CredentialsError as error:
            return str(error)

    def check_etcd() -> Sequence[Finding]:
        return etcd_facts.check(url, credentials())

    def check_hosts() -> Sequence[Finding]:
        facts = versions.compared()
        facts.update((f"file system of {path}", file_system_of(path) or "none") for path in question.folders)
        return meeting.check(url, credentials(), question.hosts, question.wait_s, question.ports, facts, question.iface)

    found = [Check(etcd_rules.NAME, check_etcd, LIMIT_S, why_late="it does not answer", remedy="see whether it is up")]
    if question.hosts > 1:
        timeout_s = question.wait_s + meeting.BESIDE_WAITING_S + 1.0
        why, remedy = "etcd or another host does not answer", "see the findings about etcd"
        found.append(Check(meeting_rules.HOSTS, check_hosts, timeout_s, why_late=why, remedy=remedy))
    return found
