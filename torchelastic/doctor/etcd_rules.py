"""What an etcd's answers mean for a run. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from torchelastic.doctor.findings import Finding, Level
from torchelastic.rendezvous import etcd_versions
from torchelastic.text import bytes_text

NAME = "etcd"
#: A commit waits for the disks of a majority; etcd's tuning guide wants the 99th percentile of one below 10 to 25 ms.
SLOW_COMMIT_S = 0.05
#: The shortest lease (2 s) has to be renewed within a third of its time.
TOO_SLOW_COMMIT_S = 0.6
#: etcd's default for --quota-backend-bytes.
DEFAULT_QUOTA_BYTES = 2 * 2**30


@dataclass(frozen=True)
class EndpointFacts:
    """What one endpoint answered.

    Attributes:
        endpoint: as "host:port".
        failure: why it did not answer; "" if it did.
        is_refusal: it answered with a refusal.
        version: of its server.
        cluster_id: the same for all members of one cluster.
        leader_id: the member that leads; 0: none.
        db_bytes: size of its database on the disk.
        quota_bytes: how large that may become; None: not known.
    """

    endpoint: str
    failure: str = ""
    is_refusal: bool = False
    version: str = ""
    cluster_id: int = 0
    leader_id: int = 0
    db_bytes: int = 0
    quota_bytes: int | None = None


@dataclass(frozen=True)
class EtcdFacts:
    """What the cluster answered.

    Attributes:
        endpoints: in the order in which they were given.
        alarms: names of the alarms that are raised, such as "NOSPACE"; None: this user may not ask.
        commits_s: how long each of some writes took.
        commit_failure: why a write failed; "" if none did.
        is_encrypted: whether the connection is.
        user: the user that logs in; None: no login.
        has_certificate: whether this client shows one.
        asks_for_login: whether somebody without a login is refused; None: not known.
        is_here: whether all endpoints are addresses of this host alone.
    """

    endpoints: tuple[EndpointFacts, ...]
    alarms: tuple[str, ...] | None = ()
    commits_s: tuple[float, ...] = ()
    commit_failure: str = ""
    is_encrypted: bool = False
    user: str | None = None
    has_certificate: bool = False
    asks_for_login: bool | None = None
    is_here: bool = False


def judge_etcd(facts: EtcdFacts) -> list[Finding]:
    """All findings about an etcd. Pure."""
    found = judge_reach(facts.endpoints)
    serving = [endpoint for endpoint in facts.endpoints if not endpoint.failure]
    if not serving:
        return found
    return [
        *found,
        *judge_cluster(serving, is_here=facts.is_here),
        *judge_space(serving, facts),
        *judge_commits(facts),
        *judge_access(facts),
    ]


def judge_reach(endpoints: Sequence[EndpointFacts]) -> list[Finding]:
    """Which endpoints serve. Pure."""
    silent = [endpoint for endpoint in endpoints if endpoint.failure]
    level = Level.ERROR if len(silent) == len(endpoints) else Level.WARNING
    found = []
    for one in silent:
        if one.is_refusal:
            what, remedy = (
                f"{one.endpoint} refuses this client",
                "see docs/security.md for certificates, users and roles",
            )
            found.append(Finding(NAME, Level.ERROR, what, one.failure, remedy))
        else:
            remedy = (
                "start it; check host and port, and that no firewall is between (`nc -vz HOST PORT` from this host)"
            )
            found.append(Finding(NAME, level, f"{one.endpoint} is unreachable", one.failure, remedy))
    return found


def judge_cluster(serving: Sequence[EndpointFacts], *, is_here: bool) -> list[Finding]:
    """Whether those that serve are one cluster with a leader, and of which version. Pure.

    Args:
        serving: the endpoints that answered.
        is_here: whether all endpoints are addresses of this host alone.
    """
    found = []
    clusters = {endpoint.cluster_id for endpoint in serving}
    if len(clusters) > 1:
        names = ", ".join(f"{endpoint.endpoint} in {endpoint.cluster_id:x}" for endpoint in serving)
        because = f"{names}: a run would be split in two"
        remedy = "give endpoints of one cluster (`etcdctl member list` names them)"
        found.append(Finding(NAME, Level.ERROR, "the endpoints belong to different clusters", because, remedy))
    for endpoint in serving:
        if endpoint.leader_id == 0:
            because, remedy = (
                "nothing can be written",
                "bring back the majority of its members (`etcdctl endpoint status`)",
            )
            found.append(Finding(NAME, Level.ERROR, f"{endpoint.endpoint} has no leader", because, remedy))
    for version in sorted({endpoint.version for endpoint in serving}):
        found += _judge_version(version, is_here=is_here)
    names = ", ".join(f"{one.endpoint} ({one.version})" for one in serving)
    return (
        found
        if any(one.level >= Level.ERROR for one in found)
        else [Finding(NAME, Level.OK, f"{names}: it serves"), *found]
    )


def _judge_version(version: str, *, is_here: bool) -> list[Finding]:
    what, remedy = f"its version is {version}", f"use {etcd_versions.GOOD}"
    if etcd_versions.numbers_of(version)[:2] < etcd_versions.OLDEST:
        because = f"torchelastic is tried with {'.'.join(map(str, etcd_versions.OLDEST))} and newer"
        return [Finding(NAME, Level.WARNING, what, because, remedy)]
    if etcd_versions.is_inconsistent(version):
        because = "its makers advise against 3.5.0 to 3.5.2: a member that is killed may miss committed writes"
        return [Finding(NAME, Level.NOTE if is_here else Level.WARNING, what, because, remedy)]
    return []


def judge_space(serving: Sequence[EndpointFacts], facts: EtcdFacts) -> list[Finding]:
    """Whether it has room, and whether an alarm is raised. Pure."""
    alarms = set(facts.alarms or ())
    if "database space exceeded" in facts.commit_failure:
        alarms.add("NOSPACE")
    found = []
    sizes = ", ".join(_space_text(one) for one in serving)
    if "NOSPACE" in alarms:
        remedy = (
            "etcdctl compact REVISION (see `etcdctl endpoint status -w json`), etcdctl defrag, etcdctl alarm disarm; "
            "and start etcd with --auto-compaction-retention, or with a larger --quota-backend-bytes"
        )
        because = f"it takes no writes any more: {sizes}"
        found.append(Finding(NAME, Level.ERROR, "its database is full (alarm NOSPACE)", because, remedy))
    for alarm in sorted(alarms - {"NOSPACE"}):
        remedy = "see https://etcd.io/docs/latest/op-guide/data_corruption/ and `etcdctl alarm list`"
        found.append(Finding(NAME, Level.ERROR, f"alarm {alarm} is raised", "its members disagree", remedy))
    for endpoint in serving:
        quota_bytes = endpoint.quota_bytes or DEFAULT_QUOTA_BYTES
        if "NOSPACE" not in alarms and endpoint.db_bytes > 0.8 * quota_bytes:
            remedy = "etcdctl compact, etcdctl defrag; start it with --auto-compaction-retention"
            because = "when it is full it takes no writes any more"
            found.append(Finding(NAME, Level.WARNING, f"its database: {_space_text(endpoint)}", because, remedy))
    return found or [Finding(NAME, Level.OK, f"its database: {sizes}")]


def _space_text(endpoint: EndpointFacts) -> str:
    if endpoint.quota_bytes is None:
        return f"{bytes_text(endpoint.db_bytes)} (quota not known; {bytes_text(DEFAULT_QUOTA_BYTES)} by default)"
    return f"{bytes_text(endpoint.db_bytes)} of {bytes_text(endpoint.quota_bytes)}"


def judge_commits(facts: EtcdFacts) -> list[Finding]:
    """Whether writes are done, and how soon. Pure."""
    if facts.commit_failure:
        if "database space exceeded" in facts.commit_failure:
            return []  # a finding already
        remedy = "see `etcdctl endpoint health`, and for users docs/security.md"
        return [Finding(NAME, Level.ERROR, "it does not take a write", facts.commit_failure, remedy)]
    if not facts.commits_s:
        return []
    median_s = statistics.median(facts.commits_s)
    worst_s = max(facts.commits_s)
    what = f"a commit takes {_ms(median_s)} (median of {len(facts.commits_s)}, longest {_ms(worst_s)})"
    remedy = "put its data on an SSD that nobody else writes to, give it processor time, and place it near the hosts"
    if median_s > TOO_SLOW_COMMIT_S:
        because = "a lease of 2 s has to be renewed within a third of it: live hosts would count as lost"
        return [Finding(NAME, Level.ERROR, what, because, remedy)]
    if median_s > SLOW_COMMIT_S:
        because = "each recovery waits for some commits, one after the other"
        return [Finding(NAME, Level.WARNING, what, because, remedy)]
    return [Finding(NAME, Level.OK, what)]


def judge_access(facts: EtcdFacts) -> list[Finding]:
    """Who else may write there, and who can read the password on its way. Pure."""
    found = []
    if facts.user is not None and facts.asks_for_login is False:
        because = "its authentication is off, so the login is not checked"
        remedy = "etcdctl auth enable (docs/security.md), or leave the user out"
        found.append(Finding(NAME, Level.WARNING, f"everybody may write there, not only {facts.user}", because, remedy))
    if facts.is_here:
        return found
    if facts.user is not None and not facts.is_encrypted:
        because = "everybody on that network can read it"
        what = f"the password of {facts.user} goes there unencrypted"
        found.append(Finding(NAME, Level.WARNING, what, because, "use TLS: --etcd-cacert FILE (docs/security.md)"))
    elif not facts.has_certificate and facts.asks_for_login is False and facts.user is None:
        because = "who writes below /torchelastic/ decides who trains"
        remedy = "keep it to a network that you trust, or see docs/security.md for certificates and users"
        found.append(Finding(NAME, Level.NOTE, "everybody who reaches it may write there", because, remedy))
    return found


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 0.1 else f"{seconds * 1000:.0f} ms"
