"""Runs over an etcd that wants certificates or a login; what happens without them; and where a password can be read."""

from __future__ import annotations

import re
import shlex
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cluster.harness import Job
from tests.cluster.secured_etcd import PASSWORD, Authority, Pair, SecuredEtcd, etcdctl, guard
from tests.few_examples import some_daily
from tests.waiting import wait_until
from torchelastic.agent.etcd_opening import connect
from torchelastic.rendezvous.credentials import Credentials
from torchelastic.rendezvous.etcd import EtcdStore
from torchelastic.rendezvous.etcd_wire import etcd3, etcdrpc, grpc
from torchelastic.rendezvous.server import EtcdServer
from torchelastic.rendezvous.store import StoreAccessError, StoreUnavailableError
from torchelastic.rendezvous.url import parse_url
from torchelastic.testing.etcd import running_etcd

MakeJob = Callable[..., Job]

QUOTED = "correct%3Ahorse%40battery%2Fstaple%3F9f3c%2341"
#: What to search for: the whole might have been cut, escaped or unescaped on its way.
TRACES = ("horse@battery", "horse%40battery", "staple?9f3c", "staple%3F9f3c")
QUICK_S = 20.0  # against a time-out of 60 s for an etcd that is not there


# Certificates and servers ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "authority")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """An authority that the server does not know."""
    return Authority(tmp_path_factory.mktemp("tls") / "stranger")


@pytest.fixture(scope="module")
def client(authority: Authority) -> Pair:
    return authority.issue("client", common_name="trainer")


@pytest.fixture(scope="module")
def tls_etcd(authority: Authority) -> Iterator[EtcdServer]:
    """An etcd that wants a client certificate."""
    pair = authority.issue("server", common_name="etcd", names="IP:127.0.0.1")
    with SecuredEtcd(pair.cert, pair.key, authority.cert) as server:
        yield server


@pytest.fixture
def guarded_etcd(run_id: str) -> Iterator[EtcdServer]:
    with running_etcd() as server:
        guard(server, run_id)
        etcdctl(server, "user", "add", "idler", ETCDCTL_USER=f"root:{PASSWORD}")
        etcdctl(server, "role", "add", "reader", ETCDCTL_USER=f"root:{PASSWORD}")
        permission = ("role", "grant-permission", "reader", "read", "--prefix=true", f"/torchelastic/{run_id}/")
        etcdctl(server, *permission, ETCDCTL_USER=f"root:{PASSWORD}")
        etcdctl(server, "user", "add", "reader", ETCDCTL_USER=f"root:{PASSWORD}")
        etcdctl(server, "user", "grant-role", "reader", "reader", ETCDCTL_USER=f"root:{PASSWORD}")
        yield server


@pytest.fixture
def password_file(tmp_path: Path) -> Path:
    path = tmp_path / "password"
    path.write_text(PASSWORD + "\n")
    path.chmod(0o600)
    return path


def rendezvous(server: EtcdServer, run_id: str) -> tuple[str, str]:
    return f"--rdzv-endpoint={server.endpoint}", f"--rdzv-id={run_id}"


def last_line(job: Job) -> str:
    return job.output().rstrip().splitlines()[-1]


# Whole runs -----------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_script_without_the_launcher_takes_certificates_from_its_url(
    jobs: MakeJob, tls_etcd: EtcdServer, run_id: str, authority: Authority, client: Pair
) -> None:
    job = jobs(epochs=1)
    query = f"min_workers=1&protocol=https&cacert={authority.cert}&cert={client.cert}&key={client.key}"
    job.start_alone(f"etcd://{tls_etcd.endpoint}/{run_id}?{query}", "alone")
    assert job.wait() == [0], job.output()[-4000:]
    job.check_identity(finishers=1)


@pytest.mark.long
def test_a_run_may_be_authenticated_by_its_certificate_alone(
    jobs: MakeJob, run_id: str, authority: Authority, client: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = authority.issue("named-server", common_name="root", names="IP:127.0.0.1")
    environment = {"ETCDCTL_CACERT": authority.cert, "ETCDCTL_CERT": pair.cert, "ETCDCTL_KEY": pair.key}
    with SecuredEtcd(pair.cert, pair.key, authority.cert) as server:
        guard(server, run_id, **{name: str(path) for name, path in environment.items()})
        job = jobs(epochs=1)
        for name, path in {"CACERT": authority.cert, "CERT": client.cert, "KEY": client.key}.items():
            monkeypatch.setenv(f"TORCHELASTIC_ETCD_{name}", str(path))
        job.start(*rendezvous(server, run_id), nproc=1)
        assert job.wait() == [0], job.output()[-4000:]
        job.check_identity(finishers=1)
        nobody = authority.issue("nobody", common_name="nobody")
        store = EtcdStore(
            [(server.host, server.port)],
            credentials=Credentials(str(authority.cert), str(nobody.cert), str(nobody.key)),
            root=f"/torchelastic/{run_id}",
        )
        with pytest.raises(StoreAccessError, match=r"permission denied: the client with certificate .*nobody\.pem"):
            store.get(f"/torchelastic/{run_id}/round")
        store.close()


# A long run -----------------------------------------------------------------------------------------------------------


def has_expired(server: EtcdServer, metadata: tuple[tuple[str, str], ...]) -> bool:
    client = etcd3.client(server.host, server.port)
    try:
        client.kvstub.Range(etcdrpc.RangeRequest(key=b"x"), 5.0, metadata=metadata)
    except grpc.RpcError as error:
        return "invalid auth token" in (error.details() or "")
    finally:
        client.close()
    return False


@pytest.mark.long
def test_the_documented_commands_give_a_user_all_that_a_run_needs_though_its_token_ends_and_a_worker_is_lost(
    jobs: MakeJob, tmp_path: Path, run_id: str, password_file: Path
) -> None:
    private, public = tmp_path / "jwt.key", tmp_path / "jwt.pub"
    for arguments in (f"genrsa -out {private} 2048", f"rsa -in {private} -pubout -out {public}"):
        subprocess.run(["openssl", *shlex.split(arguments)], check=True, capture_output=True)
    # simple tokens are renewed by their use; these end when they end
    token = f"jwt,pub-key={public},priv-key={private},sign-method=RS256,ttl=2s"
    with running_etcd(options=("--auth-token", token)) as server:
        guard(server, run_id)
        job = jobs(gates=[5])
        login = ("--etcd-user=trainer", f"--etcd-password-file={password_file}")
        job.start(*rendezvous(server, run_id), *login, "--max-restarts=1", nproc=2)
        job.wait_for("held", count=2, step=5)
        with grpc.insecure_channel(server.endpoint) as channel:
            request = etcdrpc.AuthenticateRequest(name="root", password=PASSWORD)
            token_of_now = etcdrpc.AuthStub(channel).Authenticate(request, 5.0).token
        assert not has_expired(server, (("token", token_of_now),))
        wait_until(
            lambda: has_expired(server, (("token", token_of_now),)), 30, "a token younger than the run's expires"
        )
        job.kill_worker(0)  # what happens now has to be written
        job.open_gate(5)
        assert job.wait() == [0], job.output()[-4000:]
        with pytest.raises(StoreAccessError, match="permission denied"):
            EtcdStore([(server.host, server.port)], credentials=Credentials(user="trainer", password=PASSWORD)).get(
                "/x"
            )
    job.check_identity(finishers=2)
    assert len(job.of("started")) == 3
    assert job.output().count("connected to etcd at") >= 2, "it logged in again"
    assert "permission denied" not in job.output()


@pytest.mark.long
def test_a_password_that_is_changed_during_a_run_stops_membership_but_not_training(
    jobs: MakeJob, guarded_etcd: EtcdServer, run_id: str, password_file: Path
) -> None:
    root = {"ETCDCTL_USER": f"root:{PASSWORD}"}
    job = jobs(gates=[5], epochs=1)
    login = ("--etcd-user=trainer", f"--etcd-password-file={password_file}")
    job.start(*rendezvous(guarded_etcd, run_id), *login, nproc=1)
    job.wait_for("held", step=5)
    etcdctl(guarded_etcd, "user", "passwd", "trainer", answer="hunter2", **root)  # etcd forgets its tokens by that
    job.open_gate(5)
    job.wait_for_step(9)
    wait_until(
        lambda: "unknown there or has another password" in job.output(), 30, "the log says why nothing is written"
    )
    etcdctl(guarded_etcd, "user", "passwd", "trainer", **root)
    assert job.wait() == [0], job.output()[-4000:]
    job.check_identity(finishers=1)
    assert not any(trace in texts_of(job) for trace in (*TRACES, "hunter2"))


# Bad ends -------------------------------------------------------------------------------------------------------------


def refusal(server: EtcdServer, *, root: str = "", **login: Any) -> str:
    """What a store says that cannot get in, and it must say so at once."""
    store = EtcdStore([(server.host, server.port)], timeout_s=10.0, credentials=Credentials(**login), root=root)
    began_s = time.monotonic()
    with pytest.raises(StoreAccessError) as caught:
        store.get(f"{root or '/torchelastic'}/key")
    store.close()
    assert time.monotonic() - began_s < 5.0
    assert server.endpoint in str(caught.value)
    assert PASSWORD not in str(caught.value)
    return str(caught.value)


def test_certificates_that_do_not_fit_are_named_each_with_its_remedy(
    tls_etcd: EtcdServer, etcd: EtcdServer, authority: Authority, stranger: Authority, client: Pair, tmp_path: Path
) -> None:
    def with_client(pair: Pair, ca: Path = authority.cert) -> dict[str, str]:
        return {"ca_cert": str(ca), "cert_cert": str(pair.cert), "cert_key": str(pair.key)}

    expired = authority.issue("expired", days=-1)
    unknown = stranger.issue("unknown")
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("-----BEGIN CERTIFICATE-----\nnone\n")
    assert re.search(
        "certificate that does not hold.*issuer.*cacert", refusal(tls_etcd, **with_client(client, stranger.cert))
    )
    assert "wants a client certificate: give cert=FILE and key=FILE" in refusal(tls_etcd, ca_cert=str(authority.cert))
    assert re.search(r"refuses the client certificate .*expired\.pem", refusal(tls_etcd, **with_client(expired)))
    assert re.search(r"refuses the client certificate .*unknown\.pem", refusal(tls_etcd, **with_client(unknown)))
    assert "speaks TLS and this client does not: give cacert=FILE" in refusal(tls_etcd)
    assert "does not speak TLS: leave out cacert" in refusal(etcd, ca_cert=str(authority.cert))
    swapped = Pair(client.cert, expired.key)
    assert re.search(r"expired\.key' does not belong to .*client\.pem", refusal(tls_etcd, **with_client(swapped)))
    assert re.search(r"no certificate in .*garbage\.pem", refusal(tls_etcd, **with_client(client, garbage)))


def test_a_server_whose_certificate_has_expired_or_names_another_host_is_not_believed(authority: Authority) -> None:
    for name, names, days, because in (
        ("old-server", "IP:127.0.0.1", -1, "certificate has expired"),
        ("other-server", "DNS:etcd.example", 2, "IP address mismatch"),
    ):
        pair = authority.issue(name, names=names, days=days)
        with SecuredEtcd(pair.cert, pair.key) as server:
            assert because in refusal(server, ca_cert=str(authority.cert))


def test_logins_that_do_not_fit_are_named_each_with_its_remedy(guarded_etcd: EtcdServer, run_id: str) -> None:
    root = f"/torchelastic/{run_id}"
    wrong = refusal(guarded_etcd, user="trainer", password="hunter2")
    assert "user 'trainer' is unknown there or has another password" in wrong
    assert "hunter2" not in wrong
    assert "wants a login: give user and password_file" in refusal(guarded_etcd)
    for user in ("idler", "reader"):  # no role; a role that may only read
        text = refusal(guarded_etcd, root=root, user=user, password=PASSWORD)
        assert f"user {user!r} needs a role" in text
        assert f"grant-permission ROLE readwrite --prefix=true {root}/" in text


def test_an_endpoint_that_refuses_us_does_not_hide_one_that_serves_or_is_away(
    tls_etcd: EtcdServer, etcd: EtcdServer, run_id: str, authority: Authority, client: Pair
) -> None:
    plain, secured = (etcd.host, etcd.port), (tls_etcd.host, tls_etcd.port)
    pem = Credentials(str(authority.cert), str(client.cert), str(client.key))
    store = EtcdStore([plain, secured], timeout_s=10.0, credentials=pem)
    assert store.put(f"{run_id}/key", b"1") > 1
    store.close()
    store = EtcdStore([plain, ("127.0.0.1", 1)], timeout_s=3.0, credentials=pem)
    with pytest.raises(StoreUnavailableError, match=r"does not speak TLS.*refused"):
        store.get(f"{run_id}/key")
    store.close()


@pytest.mark.parametrize(
    ("case", "complaint"),
    some_daily(
        [
            ("unknown authority", "a certificate that does not hold"),
            ("expired certificate", "refuses the client certificate"),
            ("no TLS", "speaks TLS and this client does not"),
        ],
        lambda case: case[0] == "unknown authority",
    ),
)
def test_a_run_that_cannot_show_itself_by_tls_ends_at_once_with_one_message(
    jobs: MakeJob,
    tls_etcd: EtcdServer,
    run_id: str,
    authority: Authority,
    stranger: Authority,
    client: Pair,
    case: str,
    complaint: str,
) -> None:
    expired = authority.issue("expired", days=-1)
    pair = expired if case == "expired certificate" else client
    ca = stranger if case == "unknown authority" else authority
    tls = (f"--etcd-cacert={ca.cert}", f"--etcd-cert={pair.cert}", f"--etcd-key={pair.key}")
    job = jobs()
    ends_at_once(job, tls_etcd, run_id, *(() if case == "no TLS" else tls), complaint=complaint)


@pytest.mark.parametrize("user", some_daily(["trainer", "reader"], lambda user: user == "trainer"))
def test_a_run_with_a_wrong_password_or_too_few_permissions_ends_at_once_with_one_message(
    jobs: MakeJob, guarded_etcd: EtcdServer, run_id: str, password_file: Path, user: str
) -> None:
    if user == "trainer":
        password_file.write_text("hunter2")
    complaint = f"user {user!r} " + (
        "is unknown there or has another password" if user == "trainer" else "needs a role"
    )
    login = (f"--etcd-user={user}", f"--etcd-password-file={password_file}")
    job = jobs()
    ends_at_once(job, guarded_etcd, run_id, *login, complaint=complaint)
    assert not any(trace in job.output() for trace in (*TRACES, "hunter2"))


def ends_at_once(job: Job, server: EtcdServer, run_id: str, *options: str, complaint: str) -> None:
    began_s = time.monotonic()
    job.start(*rendezvous(server, run_id), "--connect-timeout=60", *options, nproc=1)
    assert job.wait(60) == [1], job.output()[-3000:]
    assert time.monotonic() - began_s < QUICK_S
    assert complaint in last_line(job)
    assert server.endpoint in last_line(job)
    assert job.output().count(complaint) == 1
    assert "OPENSSL_internal" not in job.output(), "what gRPC itself has to say of certificates"
    assert not job.of("started"), "no worker is started for nothing"


@pytest.mark.long
def test_a_script_with_a_wrong_password_ends_at_once_with_that_message(
    jobs: MakeJob, guarded_etcd: EtcdServer, run_id: str
) -> None:
    job = jobs()
    began_s = time.monotonic()
    url = f"etcd://{guarded_etcd.endpoint}/{run_id}?min_workers=1&connect_timeout=60&user=trainer"
    job.start_alone(url, "alone", TORCHELASTIC_ETCD_PASSWORD="hunter2")
    assert job.wait(60) == [1]
    assert time.monotonic() - began_s < QUICK_S
    assert "user 'trainer' is unknown there or has another password" in last_line(job)
    assert "hunter2" not in job.output()


def test_a_password_on_the_command_line_is_refused_and_not_repeated(jobs: MakeJob, etcd: EtcdServer) -> None:
    job = jobs()
    job.start(f"--rdzv-endpoint=trainer:hunter2@{etcd.endpoint}", "--rdzv-id=x", nproc=1)
    assert job.wait(30) == [2]
    assert "every user of this host may read a command line" in last_line(job)
    assert "hunter2" not in job.output()


@pytest.mark.long
def test_a_password_file_for_everybody_is_refused_by_launcher_and_script(
    jobs: MakeJob, etcd: EtcdServer, run_id: str, password_file: Path
) -> None:
    password_file.chmod(0o604)
    with_launcher, alone = jobs(), jobs()
    login = ("--etcd-user=trainer", f"--etcd-password-file={password_file}")
    with_launcher.start(*rendezvous(etcd, run_id), *login, nproc=1)
    url = f"etcd://trainer@{etcd.endpoint}/{run_id}?min_workers=1&password_file={password_file}"
    alone.start_alone(url, "alone")
    assert [*with_launcher.wait(30), *alone.wait(30)] == [2, 1]
    for job in (with_launcher, alone):
        assert f"every user of this host may use it (mode 0604): chmod o= {password_file}" in last_line(job)


# Where the password can be read ---------------------------------------------------------------------------------------


def places_with_the_password(pid: int) -> set[str]:
    """The command lines and environments, of a process and all that it has started, that have the password."""
    found = set()
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    assert len(processes) > 1
    for process in processes:
        role = "it" if process.pid == pid else "agent" if "torchelastic.agent" in process.cmdline() else "worker"
        for name in ("cmdline", "environ"):
            text = Path(f"/proc/{process.pid}/{name}").read_text(errors="replace")
            assert text
            if any(trace in text for trace in TRACES):
                found.add(f"{role}: {name}")
    return found


def texts_of(job: Job) -> str:
    files = [path for path in job.folder.rglob("*") if path.is_file() and path.suffix in (".txt", ".log", ".jsonl")]
    return "\n".join(path.read_text(errors="replace") for path in files)


@pytest.mark.long
@pytest.mark.parametrize(
    ("source", "where_it_may_be"),
    [pytest.param("environment", {"it: environ"}, id="environment", marks=pytest.mark.long), ("file", set())],
)
def test_under_the_launcher_the_password_is_nowhere_but_in_the_environment_that_had_it(
    jobs: MakeJob, guarded_etcd: EtcdServer, run_id: str, password_file: Path, source: str, where_it_may_be: set[str]
) -> None:
    job = jobs(gates=[5], epochs=1, metrics="prometheus")
    log_dir = job.folder / "logs"
    options = [*rendezvous(guarded_etcd, run_id), "--etcd-user=trainer", "--metrics-port=0", f"--log-dir={log_dir}"]
    if source == "file":
        agent = job.start(*options, f"--etcd-password-file={password_file}", nproc=2)
    else:
        agent = job.start(*options, nproc=2, TORCHELASTIC_ETCD_PASSWORD=PASSWORD)
    job.wait_for("held", count=2, step=5)
    assert places_with_the_password(agent.pid) == where_it_may_be
    (address,) = re.findall(r"metrics at (http://\S+)", job.output())
    with urllib.request.urlopen(address, timeout=10) as response:
        metrics = response.read().decode()
    assert "torchelastic_" in metrics
    job.open_gate(5)
    assert job.wait() == [0], job.output()[-4000:]
    job.check_identity(finishers=2)
    everything = texts_of(job) + metrics
    assert "connected to etcd" in everything
    journal, *logs = sorted(path.name for path in log_dir.iterdir())
    assert logs == ["worker_0.0.log", "worker_1.0.log"]
    assert journal.startswith("ledger-")
    assert (log_dir / journal).read_text() in everything
    assert not any(trace in everything for trace in TRACES)


def test_a_password_that_goes_in_clear_over_a_network_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    login, secured = Credentials(user="trainer", password=PASSWORD), Credentials("ca.pem", user="u", password=PASSWORD)
    for hosts, credentials, warnings in (
        ("localhost,127.0.0.1:1,[::1]:2", login, 0),
        ("etcd.example", secured, 0),
        ("localhost,etcd.example", login, 1),
    ):
        caplog.clear()
        connect(parse_url(f"etcd://{hosts}/run?min_workers=1"), credentials).close()
        assert caplog.text.count("of user 'trainer' goes to etcd at localhost:2379,etcd.example:2379 unenc") == warnings
        assert not any(trace in caplog.text for trace in TRACES)


@pytest.mark.long
@pytest.mark.parametrize("source", ["variable", "url"])
def test_a_private_agent_has_the_password_neither_in_its_command_line_nor_in_its_environment(
    jobs: MakeJob, guarded_etcd: EtcdServer, run_id: str, source: str
) -> None:
    job = jobs(gates=[5], epochs=1)
    query = f"{guarded_etcd.endpoint}/{run_id}?min_workers=1"
    if source == "variable":
        url = f"etcd://trainer@{query}"
        script = job.start_alone(url, "alone", TORCHELASTIC_ETCD_PASSWORD=PASSWORD)
    else:
        url = f"etcd://trainer:{QUOTED}@{query}"
        script = job.start_alone("", "alone", TORCHELASTIC_INIT_METHOD=url)
    job.wait_for("held", step=5)
    assert places_with_the_password(script.pid) == {"it: environ"}, "where the test itself put it"
    job.open_gate(5)
    assert job.wait() == [0], job.output()[-4000:]
    job.check_identity(finishers=1)
    assert not any(trace in texts_of(job) for trace in TRACES)
