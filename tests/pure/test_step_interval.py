"""How often ranks talk to agree on leaving: cheap, and still prompt."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torchelastic.agent.supervisor import restart_delay_s
from torchelastic.p2p.step_agreement import MAX_DELAY_S, MAX_SHARE, interval_steps

durations_s = st.floats(1e-6, 100.0)


@given(durations_s, st.floats(1e-6, 1.0))
def test_it_costs_its_share_at_most_unless_that_would_keep_a_newcomer_waiting(step_s: float, cost_s: float) -> None:
    interval = interval_steps(step_s, cost_s)
    assert interval >= 1
    cheap = cost_s / (interval * step_s) <= MAX_SHARE * (1 + 1e-6)
    as_rare_as_allowed = (interval + 1) * step_s >= MAX_DELAY_S
    assert cheap or as_rare_as_allowed


@given(durations_s, st.floats(1e-6, 1.0))
def test_nobody_waits_longer_than_the_bound_or_one_step(step_s: float, cost_s: float) -> None:
    assert interval_steps(step_s, cost_s) * step_s <= max(MAX_DELAY_S, step_s) * (1 + 1e-6)


def test_restarts_come_later_each_time_and_never_later_than_half_a_minute() -> None:
    delays = [restart_delay_s(number) for number in range(1, 20)]
    assert delays[0] < 0.5
    assert delays == sorted(delays)
    assert delays[-1] == 30.0
