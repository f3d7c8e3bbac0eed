"""What the benchmark of the memory tier makes of its measurements."""

from __future__ import annotations

import pytest

from benchmarks.memory_tier.endurance import Sample, growth
from benchmarks.memory_tier.figures import ALL, PARTS, Part, batches, summary_of, verdicts

SAVE: Part = PARTS["save"]


def test_a_row_is_of_the_slowest_rank_and_its_own_floor() -> None:
    row = SAVE.row([[{"memcpy_ms": 2.0, "ms": 5.0}, {"memcpy_ms": 3.0, "ms": 12.0}]])
    assert row == {"memcpy_ms": 3.0, "x": 4.0}


def test_a_row_with_a_floor_of_one_rank_alone_has_both_ratios() -> None:
    row = PARTS["replicated"].row([[{"memcpy_ms": 3.0, "memcpy_alone_ms": 2.0, "ms": 12.0}]])
    assert (row["x"], row["x_alone"]) == (4.0, 6.0)


def test_all_figures_of_a_save_in_the_background_are_ratios() -> None:
    row = PARTS["async_thread"].row([[{"memcpy_ms": 2.0, "ms": 2.0, "done_ms": 6.0, "cpu_ms": 5.0}]])
    assert row == {"memcpy_ms": 2.0, "x": 1.0, "done_x": 3.0, "cpu_x": 2.5}


def test_the_last_question_of_a_round_is_what_counts() -> None:
    row = PARTS["load"].row([[{"memcpy_ms": 1.0, "ms": 9.0}], [{"memcpy_ms": 2.0, "ms": 3.0}]])
    assert row["x"] == 1.5


def test_contenders_that_do_not_fit_into_memory_together_come_one_after_the_other() -> None:
    # a source and a target, and four states for each of two contenders
    assert batches(["a", "b"], 100, 1, 1000) == [["a", "b"]]
    assert batches(["a", "b"], 100, 1, 999) == [["a"], ["b"]]


def test_replicas_need_more_memory() -> None:
    assert batches(["a"], 100, 2, 1500) == [["a"]]
    assert batches(["a", "b"], 100, 2, 2699) == [["a"], ["b"]]
    assert batches(["a", "b"], 100, 2, 2700) == [["a", "b"]]


def test_a_summary_has_medians_and_the_best_of_each_figure() -> None:
    rows = [{"memcpy_ms": 1.0, "x": 3.0}, {"memcpy_ms": 2.0, "x": 1.0}, {"memcpy_ms": 9.0, "x": 2.0}]
    assert summary_of(rows) == {"memcpy_ms": 2.0, "x": 2.0, "best_x": 1.0, "runs": 3}


def test_ratios_to_others_are_taken_round_by_round() -> None:
    ours = [{"x": 1.0, "cpu_x": 2.0}, {"x": 4.0, "cpu_x": 3.0}, {"x": 1.0, "cpu_x": 3.0}]
    theirs = [{"x": 2.0, "cpu_x": 4.0}, {"x": 8.0, "cpu_x": 5.0}, {"x": 2.0, "cpu_x": 5.0}]
    found = verdicts(PARTS["async_thread"], {"ours": ours, "flashpoint_pool": theirs})
    assert found["ours_over_flashpoint_pool"] == 0.5
    assert found["cpu_ratio"] == 0.6
    assert found["met"] == {"x": True, "cpu_ratio": True}


def test_a_target_that_is_missed_is_said() -> None:
    assert verdicts(SAVE, {"ours": [{"x": 1.7}], "dcp": [{"x": 5.0}]})["met"] == {"x": False}


def test_without_ours_nothing_is_claimed() -> None:
    assert verdicts(SAVE, {"dcp": [{"x": 1.0}]}) == {"targets": {"x": 1.6}}


def test_growth_is_between_the_first_and_the_last_quarter_without_the_warm_up() -> None:
    resident = [5000, 100, 100, 100, 100, 100, 100, 130, 130, 130]
    samples = [Sample(float(number), each, 7, 3, 10, 4) for number, each in enumerate(resident)]
    found = growth(samples)
    assert found["resident_bytes"] == {"growth": 30, "min": 100, "max": 130}
    assert found["files"]["growth"] == 0
    assert found["samples"] == 9


@pytest.mark.parametrize("name", PARTS)
def test_ours_takes_part_in_everything(name: str) -> None:
    assert "ours" in PARTS[name].contenders
    assert set(PARTS[name].contenders) <= set(ALL)
