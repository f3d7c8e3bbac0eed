from __future__ import annotations

import math

import pytest

from torchelastic.agent.host_events import MetricsPublished
from torchelastic.agent.metrics_endpoint import MetricsEndpoint
from torchelastic.metrics.exposition import MetricsRegistry


def sample(registry: MetricsRegistry, name: str, **labels: str) -> float | None:
    return registry.collector_registry.get_sample_value(name, labels)


def test_a_duration_becomes_a_histogram_in_seconds() -> None:
    registry = MetricsRegistry()
    registry.record(1, "torchelastic", "train_step.duration.ms", 250)
    registry.record(1, "torchelastic", "train_step.duration.ms", 0.5)
    name = "torchelastic_train_step_duration_seconds"
    assert sample(registry, f"{name}_count", local_rank="1") == 2
    assert sample(registry, f"{name}_sum", local_rank="1") == pytest.approx(0.2505)
    assert sample(registry, f"{name}_bucket", local_rank="1", le="0.0005") == 1
    assert sample(registry, f"{name}_bucket", local_rank="1", le="0.25") == 2


def test_success_and_failure_become_one_counter_with_outcomes() -> None:
    registry = MetricsRegistry()
    for outcome in ("success", "success", "failure"):
        registry.record(0, "torchelastic", f"rendezvous_barrier.{outcome}", 1)
    name = "torchelastic_rendezvous_barrier_total"
    assert sample(registry, name, local_rank="0", outcome="success") == 2
    assert sample(registry, name, local_rank="0", outcome="failure") == 1


def test_anything_else_becomes_a_gauge_that_keeps_the_last_value_per_worker() -> None:
    registry = MetricsRegistry()
    registry.record(0, "my group", "valLoss", 0.5)
    registry.record(0, "my group", "valLoss", 0.25)
    registry.record(1, "my group", "valLoss", math.nan)
    registry.record(None, "my group", "valLoss", math.inf)
    assert sample(registry, "my_group_val_loss", local_rank="0") == 0.25
    assert math.isnan(sample(registry, "my_group_val_loss", local_rank="1") or 0)
    assert sample(registry, "my_group_val_loss", local_rank="") == math.inf


def test_names_beyond_the_limit_are_dropped_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    registry = MetricsRegistry(max_names=3)
    for step in range(10):
        registry.record(0, "g", f"loss_at_step_{step}", 1.0)
        registry.record(1, "g", "loss_at_step_0", 2.0)
    assert sample(registry, "torchelastic_metrics_dropped_total") == 7
    assert sample(registry, "g_loss_at_step_2", local_rank="0") == 1
    assert sample(registry, "g_loss_at_step_3", local_rank="0") is None
    assert sample(registry, "g_loss_at_step_0", local_rank="1") == 2
    assert len(caplog.records) == 1


def test_a_name_that_exists_with_another_type_is_refused_and_the_first_one_lives_on() -> None:
    registry = MetricsRegistry()
    registry.record(0, "g", "step.duration.ms", 5)
    with pytest.raises(ValueError, match="exists with another type"):
        registry.record(0, "g", "step_duration_seconds", 5)
    registry.record(0, "g", "step.success", 1)
    with pytest.raises(ValueError, match="exists with another type"):
        registry.record(0, "g", "step", 5)
    with pytest.raises(ValueError, match="exists with another type"):
        registry.record(0, "torchelastic", "metrics_dropped.success", 1)
    assert sample(registry, "g_step_duration_seconds_count", local_rank="0") == 1


def test_a_metric_that_is_refused_at_every_step_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    endpoint = MetricsEndpoint("run", "host")
    for _ in range(100):
        endpoint.on_event(MetricsPublished(0, [["g", "work.success", 1], ["g", "work", 0.5], ["g", ["work"], 0.5]]))
    endpoint.on_event(MetricsPublished(0, [["g", "work.failure", -1]]))
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["a metric was skipped"] * 3
