"""A real Prometheus scrapes a real run, a real push gateway keeps its end: both say what the ledger says."""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.conftest import MakeJob
from tests.cluster.harness import Job
from tests.cluster.prometheus_server import (
    DEPLOYED,
    PATIENCE_S,
    Prometheus,
    fetched,
    promtool,
    running_gateway,
    running_prometheus,
    why_impossible,
)
from tests.waiting import wait_until
from torchelastic.launch.main import main
from torchelastic.observe.ledger.accounts import Account, by_label
from torchelastic.observe.ledger.figures import figures_of
from torchelastic.observe.report.journals import find_journals
from torchelastic.observe.status.host_view import seen_of

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
#: Panels of what has not happened in the test's run.
EMPTY_PANELS = {"torchelastic_checkpoint_failed_total", "torchelastic_checkpoint_put_off_total"}


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[str]:
    """The URL of a push gateway; without the packages the test is skipped, and says how to get them."""
    if impossible := why_impossible():
        pytest.skip(impossible)
    with running_gateway(tmp_path) as url:
        yield url


def metrics_url(job: Job) -> str:
    found: str = wait_until(
        lambda: next((line.split()[-1] for line in job.output().splitlines() if "metrics at http://" in line), ""),
        30,
        "the agent tells where its metrics are",
    )
    return found


def check_what_has_happened(prometheus: Prometheus, job: Job, agent: str) -> None:
    """While the job is held in a step after a worker was killed and has come back."""
    for name, value in {
        "failures_total": 1, "workers_lost_total": 1, "worker_starts_total": 3, "etcd_reachable": 1,
        "rendezvous_world_size": 2, "etcd_outages_total": 0, "drains_total": 0,
        "steps_committed_total": len(job.of("committed")),
    }.items():  # fmt: skip
        prometheus.wait_for(f"torchelastic_{name}{{instance='{agent}'}}", value)
    of_workers = {(("local_rank", "0"),): 0.0, (("local_rank", "1"),): 1.0}
    assert prometheus.query(f"torchelastic_worker_restarts_total{{instance='{agent}'}}") == of_workers
    assert set(prometheus.query(f"torchelastic_worker_up{{instance='{agent}'}}").values()) == {1.0}
    up = "run:torchelastic_workers_up:sum"
    wait_until(lambda: prometheus.one(up) in (2, 4), PATIENCE_S, "it is scraped, and has pushed once")
    assert sum(prometheus.query("torchelastic_train_step_duration_seconds_count").values()) > 0


def check_dashboard(prometheus: Prometheus, instance: str) -> None:
    """Every panel has something to show."""
    panels = json.loads((DEPLOYED / "grafana-dashboard.json").read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    assert len(expressions) > 25
    for expression in expressions:
        chosen = expression.replace("$instance", instance).replace("$__rate_interval", "30s").replace("$__range", "1m")
        if any(name in expression for name in EMPTY_PANELS):
            assert not prometheus.query(chosen)
        else:  # a rate needs two scrapes
            prometheus.wait_for_some(chosen)


@pytest.mark.long
def test_prometheus_the_push_gateway_and_the_ledger_say_the_same_of_a_run_that_lost_a_worker(
    jobs: MakeJob, gateway: str, tmp_path: Path
) -> None:
    job = jobs(
        step_ms=20, epochs=4, checkpoint_dir=tmp_path / "saved", checkpoint_every=10, gates=[12, 25],
        wait_for_newcomer_at=[20], full_world=2, metrics="prometheus",
    )  # fmt: skip
    job.start(
        "--standalone", "--rdzv-id=seen", "--metrics-port=0", f"--push-gateway={gateway}",
        f"--log-dir={job.folder / 'logs'}", nproc=2, no_proxy="127.0.0.1",
    )  # fmt: skip
    url = metrics_url(job)
    agent, pushed = (urllib.parse.urlsplit(one).netloc for one in (url, gateway))
    with running_prometheus(tmp_path / "prometheus", [agent], [pushed]) as prometheus:
        job.wait_for("held", step=12, count=2)
        job.kill_worker(1)
        job.open_gate(12)
        job.wait_for("held", step=25, count=2)
        check_what_has_happened(prometheus, job, agent)
        check_dashboard(prometheus, agent)
        text, kind = fetched(url)
        assert "version=0.0.4" in kind or "version=1.0.0" in kind
        linted = promtool("check", "metrics", given=text)
        assert (linted.returncode, linted.stderr) == (0, ""), linted.stdout
        text, kind = fetched(url, OPENMETRICS)
        assert kind.startswith(OPENMETRICS)
        assert text.endswith("# EOF\n")
        start_up = f"torchelastic_ledger_seconds_total{{account='start_up', instance='{agent}'}}"
        held_start_up_s = prometheus.one(start_up)
        job.open_gate(25)
        assert job.wait() == [0], job.output()[-4000:]

        [journal] = find_journals([job.folder / "logs"]).journals.values()
        book = journal.book()
        amounts = book.amounts(0)
        assert amounts[Account.REPLAYED] > 0
        assert held_start_up_s == pytest.approx(1e-9 * amounts[Account.START_UP], abs=1e-6)
        # from the gateway: the run is over, so nothing of it changes any more
        prometheus.wait_for("run:torchelastic_workers_up:sum{run_id='seen'}", 0)
        expected = {(("account", label), ("run_id", "seen")): 1e-9 * ns for label, ns in by_label(amounts).items()}
        in_run = "run_account:torchelastic_ledger_seconds:sum{run_id='seen'}"
        wait_until(  # and the agent's own, which it is added to, is known to be gone
            lambda: prometheus.query(in_run) == pytest.approx(expected, abs=1e-6), PATIENCE_S, f"{in_run} is {expected}"
        )
        figures = figures_of(seen_of(book, book.counts.last_ns))
        for expression, value in {
            "torchelastic_goodput_ratio": figures.goodput.value,
            "run:torchelastic_goodput:ratio": figures.goodput.value,
            "torchelastic_step_efficiency_ratio": figures.step_efficiency.value,
            "torchelastic_steps_committed_total": book.committed(),
            "torchelastic_steps_undone_total": book.undone(),
            "torchelastic_saves_total": book.counts.saves,
            "torchelastic_restores_total{source='peer'}": book.counts.restores_from_peer,
        }.items():
            assert prometheus.one(expression) == pytest.approx(value, rel=1e-9), expression
        assert prometheus.query("torchelastic_agent_info")
        groups = prometheus.api("query", query="push_time_seconds{job='torchelastic'}")["result"]
        assert [group["metric"]["run_id"] for group in groups] == ["seen"], "one group for the run and this host"


def test_the_rules_are_those_that_promtool_and_its_tests_accept() -> None:
    if impossible := why_impossible():
        pytest.skip(impossible)
    for words in (("check", "config", "prometheus.yml"), ("test", "rules", "torchelastic.rules.test.yml")):
        done = promtool(*words)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "SUCCESS" in done.stdout


@pytest.mark.slow
def test_a_run_whose_push_gateway_is_away_says_so_once_and_goes_on(jobs: MakeJob) -> None:
    job = jobs(epochs=1)
    job.start("--standalone", "--push-gateway=127.0.0.1:9", nproc=1, no_proxy="127.0.0.1")
    assert job.wait() == [0], job.output()[-4000:]
    assert job.output().count("metrics could not be pushed to http://127.0.0.1:9") == 1
    job.check_identity(finishers=1)


def test_a_push_gateway_with_a_password_is_refused_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    script = str(Path(__file__))
    with pytest.raises(SystemExit) as ended:
        main(["run", "--standalone", "--push-gateway=http://me:secret@gateway", script])
    assert ended.value.code == 2
    words = capsys.readouterr().err
    assert "--push-gateway: the push gateway's URL has a login in it" in words
    assert "secret" not in words
