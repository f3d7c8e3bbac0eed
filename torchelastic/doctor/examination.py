"""Which checks there are, and with what they are run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from torchelastic.doctor import (
    accelerators,
    etcd_facts,
    etcd_rules,
    folder,
    left_overs,
    lifetime,
    limits,
    meeting,
    meeting_rules,
    network,
    own_clock,
    versions,
)
from torchelastic.doctor.findings import Finding, Level
from torchelastic.doctor.running import Check, run_checks
from torchelastic.rendezvous.credentials import CredentialsError, read_file, resolve
from torchelastic.rendezvous.url import RendezvousUrl

#: What no check is allowed to exceed, but the meeting, by as much as it is told to wait.
LIMIT_S = 12.0


@dataclass(frozen=True)
class Question:
    """What a run is going to need of this host.

    Attributes:
        url: the etcd where the hosts meet; None: it is not looked at.
        hosts: how many there are; more than one: they look at each other, each with a doctor.
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


def examine(question: Question) -> list[Finding]:
    """Look at everything, side by side.

    Takes at most `LIMIT_S` seconds, or if other hosts are waited for, `wait_s` and 6 s. From any thread.
    """
    return run_checks(checks(question))


def checks(question: Question) -> list[Check]:
    """The checks that a question asks for, in the order in which they are shown."""
    endpoint = None if question.url is None else question.url.endpoints[0]
    workers = question.workers or 1
    resolver = "the resolver of this host does not answer: see /etc/resolv.conf"
    found = [
        Check(versions.NAME, versions.check),
        Check(
            accelerators.NAME,
            partial(accelerators.check, question.workers),
            LIMIT_S,
            Level.WARNING,
            "a GPU's driver, or the disk with torch on it, does not answer",
        ),
        Check(limits.MEMORY, partial(limits.check_memory, question.state_bytes)),
        Check(limits.FILES, partial(limits.check_limits, workers, workers * question.hosts)),
        Check(left_overs.NAME, left_overs.check, late=Level.WARNING, why_late="there are very many files"),
        Check(own_clock.NAME, partial(own_clock.check, question.hosts)),
        Check(lifetime.NAME, lifetime.check, LIMIT_S, Level.WARNING, "squeue or a metadata service does not answer"),
        Check(
            network.NAME,
            partial(network.check, endpoint, question.hosts, question.ports, question.iface),
            LIMIT_S,
            why_late=resolver,
        ),
        Check(
            network.REVERSE,
            partial(network.check_reverse_lookup, endpoint, question.iface),
            LIMIT_S,
            Level.WARNING,
            resolver,
        ),
    ]
    for path in question.folders:
        look, late = (
            partial(folder.check, path, question.state_bytes),
            "its file system does not answer: a server is away",
        )
        found.append(Check(folder.NAME, look, why_late=late, remedy=f"see `mount` and the server of {path}"))
    if question.url is not None:
        found += _about_etcd(question, question.url)
    return found


def _about_etcd(question: Question, url: RendezvousUrl) -> list[Check]:
    ask, meet = _with_etcd(question, url)
    found = [Check(etcd_rules.NAME, ask, LIMIT_S, why_late="it does not answer", remedy="see whether it is up")]
    if question.hosts > 1:
        timeout_s = question.wait_s + meeting.BESIDE_WAITING_S + 1.0
        why = "etcd or another host does not answer"
        found.append(Check(meeting_rules.HOSTS, meet, timeout_s, why_late=why, remedy="see what is said of etcd"))
    return found


def _with_etcd(
    question: Question, url: RendezvousUrl
) -> tuple[Callable[[], Sequence[Finding]], Callable[[], Sequence[Finding]]]:
    """The looks at etcd and at the other hosts. Reading a password file may hang, so each does that for itself."""

    def ask() -> Sequence[Finding]:
        return etcd_facts.check(url, credentials())

    def credentials() -> etcd_facts.CredentialsOrReason:
        try:
            return resolve(url.access, question.environment, read_file)
        except CredentialsError as error:
            return str(error)

    def meet() -> Sequence[Finding]:
        facts = versions.compared()
        facts.update((f"file system of {path}", folder.file_system_of(path) or "none") for path in question.folders)
        told = credentials()
        return meeting.check(url, told, question.hosts, question.wait_s, question.ports, facts, question.iface)

    return ask, meet
