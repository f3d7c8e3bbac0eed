from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest

from torchelastic.metrics.exposition import MetricsRegistry, prometheus_naming


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


@pytest.mark.parametrize(
    ("group", "name", "kind", "result"),
    [
        (
            "torch_elastic",
            "outer_train_loop.duration.ms",
            "histogram",
            "torch_elastic_outer_train_loop_duration_seconds",
        ),
        ("", "loss", "gauge", "loss"),
        ("g", "queue.wait.ms", "gauge", "g_queue_wait_seconds"),
        ("g", "samples.total", "gauge", "g_samples_total_value"),
        ("g", "rows_count", "gauge", "g_rows_count_value"),
        ("", "50%", "gauge", "metric_50"),
        ("", "...", "gauge", "unnamed"),
        ("", "Überlänge", "gauge", "berl_nge"),
        ("g", "steps_total.success", "counter", "g_steps_total"),
    ],
)
def test_names_follow_prometheus_conventions(group: str, name: str, kind: str, result: str) -> None:
    naming = prometheus_naming(group, name)
    assert (naming.kind, naming.name) == (kind, result)


@given(st.text(max_size=30), st.text(min_size=1, max_size=30), st.sampled_from(["", ".duration.ms", ".success", ".ms"]))
def test_any_name_can_be_scraped(group: str, stem: str, ending: str) -> None:
    registry = MetricsRegistry()
    registry.record(0, group, stem + ending, 1.0)
    text = generate_latest(registry.collector_registry).decode()
    families = re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE)
    # what `promtool check metrics` complains about: case, suffixes, missing help, units that are not base units
    for name, kind in families:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", name)
        assert name.endswith("_total") == (kind == "counter")
        assert not name.endswith("_ms")
        assert re.search(rf"^# HELP {name} \S", text, re.MULTILINE)


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, "g", "loss", "0.5"), "takes a number, got '0.5'"),
        ((0, "g", "loss", None), "takes a number, got None"),
        ((0, "g", "loss", [1.0]), "takes a number"),
        ((0, "g", "loss", 10**400), "does not fit a float"),
        ((0, "g", "", 1.0), "name is a string"),
        ((0, "g", 7, 1.0), "name is a string"),
        ((0, "g", "x" * 201, 1.0), "1 to 200 characters"),
        ((0, None, "loss", 1.0), "group is a string"),
        (("0", "g", "loss", 1.0), "local_rank"),
        ((True, "g", "loss", 1.0), "local_rank"),
        ((-1, "g", "loss", 1.0), "local_rank"),
        ((5000, "g", "loss", 1.0), "0 to 1023"),
        ((0, "g", "step.duration.ms", -1.0), "finite numbers from 0 up"),
        ((0, "g", "step.duration.ms", math.nan), "finite numbers from 0 up"),
        ((0, "g", "step.success", math.inf), "finite numbers from 0 up"),
    ],
)
def test_garbage_is_refused_with_a_value_error_that_says_why(arguments: tuple[object, ...], message: str) -> None:
    registry = MetricsRegistry()
    with pytest.raises(ValueError, match=message):
        registry.record(*arguments)  # type: ignore[arg-type] # what a broken trainer may send
    assert sample(registry, "g_loss", local_rank="0") is None
    assert sample(registry, "g_step_duration_seconds_count", local_rank="0") in (None, 0)


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
