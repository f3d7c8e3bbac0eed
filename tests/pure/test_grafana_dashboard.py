"""The dashboard and the rules in deploy/prometheus ask only for metrics that exist; the dashboard is a whole one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from torchelastic.metrics.exposition import MetricsRegistry
from torchelastic.observe.ledger.host_ledger import HostLedger
from torchelastic.observe.status.ledger_collector import HostSnapshot, LedgerCollector

FOLDER = Path(__file__).parents[2] / "deploy" / "prometheus"
#: What the agent and workers publish under 0.1's names; tests/cluster/test_prometheus_real.py has some of them scraped.
PUBLISHED = (
    "rendezvous.round", "rendezvous.world_size", "train_step.duration.ms", "recovery.duration.ms",
    "checkpoint.stall.duration.ms", "checkpoint.failed", "checkpoint.put_off",
)  # fmt: skip
#: Of the push gateway itself.
FOREIGN = {"push_time_seconds"}
LABELS = {"run_id", "host", "version", "account", "source", "local_rank", "outcome", "le", "job", "instance"}


def existing() -> set[str]:
    """The names of all samples that a scrape may have, those of the recording rules not among them."""
    registry = MetricsRegistry()
    registry.add(LedgerCollector(lambda: HostSnapshot(HostLedger(), 0), run_id="r", host="h"))
    for name in PUBLISHED:
        registry.record(0, "torchelastic", name, 1.0)
    names = set()
    for family in registry.collector_registry.collect():
        suffixes = {"counter": ("_total",), "info": ("_info",), "histogram": ("_bucket", "_sum", "_count")}
        names |= {family.name + suffix for suffix in suffixes.get(family.type, ("",))}
    return names


def asked_for(expression: str) -> set[str]:
    """The metrics in a PromQL expression: names that are no label, function, number or recording rule."""
    return set(re.findall(r"(?<![\w:$\"])(?:torchelastic|push)_\w+(?!\w*:)", re.sub(r"\b\w+:\w+:\w+", "", expression)))


def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((FOLDER / "grafana-dashboard.json").read_text())
    return loaded


def targets() -> list[tuple[str, dict[str, Any]]]:
    return [(panel["title"], target) for panel in dashboard()["panels"] for target in panel.get("targets", ())]


def rule_expressions() -> str:
    text = (FOLDER / "torchelastic.rules.yml").read_text()
    return "\n".join(re.findall(r"expr: (?:>\n)?((?:.*\n)(?: {10}.*\n)*)", text))


@pytest.mark.parametrize(("title", "target"), targets(), ids=[f"{t}-{one['refId']}" for t, one in targets()])
def test_every_panel_asks_for_metrics_that_exist_and_of_the_chosen_hosts(title: str, target: dict[str, Any]) -> None:
    names = asked_for(target["expr"])
    assert names, title
    assert names <= existing()
    selectors = re.findall(r"torchelastic_\w+(\{[^}]*\})?", target["expr"])
    assert all('instance=~"$instance"' in selector for selector in selectors), "a metric of all runs"


def test_every_rule_asks_for_metrics_that_exist_or_other_rules_record() -> None:
    expressions = rule_expressions()
    assert asked_for(expressions) <= existing() | FOREIGN
    assert len(asked_for(expressions)) > 12
    recorded = set(re.findall(r"record: (\S+)", (FOLDER / "torchelastic.rules.yml").read_text()))
    assert set(re.findall(r"\b\w+:\w+:\w+", expressions)) <= recorded


def test_labels_that_rules_and_panels_name_are_there() -> None:
    text = rule_expressions() + "".join(target["expr"] for _, target in targets())
    named = {label for group in re.findall(r"(?:by|on|group_left) \(([^)]*)\)", text) for label in group.split(", ")}
    named |= set(re.findall(r"[{,] ?(\w+)=", text))
    assert named <= LABELS


def test_the_dashboard_is_whole() -> None:
    board = dashboard()
    assert {"uid", "title", "schemaVersion", "panels", "templating", "time", "refresh", "annotations"} <= set(board)
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    for panel in board["panels"]:
        assert panel["type"] in ("row", "stat", "timeseries", "bargauge", "table")
        assert panel["title"]
        if panel["type"] == "row":
            continue
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert {"defaults", "overrides"} <= set(panel["fieldConfig"])
        references = [target["refId"] for target in panel["targets"]]
        assert references
        assert len(references) == len(set(references))
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert list(variables) == ["datasource", "run_id", "instance"]
    assert asked_for(variables["instance"]["definition"]) == {"torchelastic_agent_info"}
    annotations = board["annotations"]["list"]
    assert all(asked_for(annotation["expr"]) <= existing() for annotation in annotations)


def test_every_alert_is_tested_and_explained() -> None:
    alerts = re.findall(r"alert: (\w+)", (FOLDER / "torchelastic.rules.yml").read_text())
    assert len(alerts) == len(set(alerts)) >= 8
    tests = (FOLDER / "torchelastic.rules.test.yml").read_text()
    readme = (FOLDER / "README.md").read_text()
    for alert in alerts:
        assert f"alertname: {alert}" in tests
        assert f"`{alert}`" in readme
