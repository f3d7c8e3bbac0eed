"""Goodput and its kin, and the bounds beside them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pure.ledger_amounts import amounts_of
from torchelastic.observe.ledger.accounts import Account
from torchelastic.observe.ledger.counters import Counters
from torchelastic.observe.ledger.figures import Seen, ettr, figures_of, goodput, participation, seen, step_efficiency
from torchelastic.observe.ledger.host_ledger import HostLedger
from torchelastic.observe.ledger.ledger_events import Counted, End, Failure, Start

S = 10**9

AMOUNTS = st.lists(st.integers(0, 10**15), min_size=len(Account), max_size=len(Account)).map(tuple)
RUNS = st.builds(
    lambda amounts, workers, **numbers: Seen(
        wall_ns=-(-sum(amounts) // workers), worker_ns=sum(amounts), amounts=amounts, workers=workers, **numbers
    ),
    AMOUNTS,
    st.integers(1, 64),
    configured_workers=st.integers(0, 64),
    committed=st.integers(0, 10**7),
    undone=st.integers(0, 10**4),
    failures=st.integers(0, 10**4),
    restores_from_checkpoint=st.integers(0, 10**4),
    lost=st.integers(0, 10**4),
    saves=st.integers(0, 10**4),
)


@given(RUNS)
def test_every_share_and_every_bound_is_between_0_and_1_whatever_was_seen(run: Seen) -> None:
    of_run = figures_of(run)
    for figure in of_run:
        assert math.isfinite(figure.value)
        assert 0.0 <= figure.of_attainable <= 1.0
        if figure is not of_run.whole_job_s:
            assert 0.0 <= figure.value <= 1.0 + 1e-12, figure
            assert 0.0 <= figure.attainable <= 1.0, figure


def test_workers_that_were_wanted_and_not_there_count_for_the_effective_training_time_and_not_for_goodput() -> None:
    run = Seen(100 * S, 150 * S, amounts_of(productive=120 * S, start_up=30 * S), 2, workers=2, committed=100)
    assert goodput(run).value == pytest.approx(0.8)
    assert ettr(run).value == participation(run).value == pytest.approx(0.6)
    assert ettr(run).attainable == goodput(run).attainable == pytest.approx(0.8)


def test_the_bound_of_torchfts_first_run_comes_out_as_they_quote_it() -> None:
    # one fault a minute, steps of 10.9 s: 83.4 % of the steps by Poisson, 82.3 % measured (5,145 of 6,249)
    run = Seen(
        60 * 1_100 * S, 60 * 1_100 * S, amounts_of(productive=int(5_145 * 10.9 * S)), 1,
        workers=1, committed=5_145, undone=1_104, failures=1_100,
    )  # fmt: skip
    efficiency = step_efficiency(run)
    assert efficiency.value == pytest.approx(0.823, abs=1e-3)
    assert efficiency.attainable == pytest.approx(0.834, abs=1e-3)


def test_failures_that_peers_repair_cost_their_recovery_and_half_a_step() -> None:
    # one failure in 60 s, 0.3 s to train again, steps of 1 s: 1 / (1 + 0.8 / 60)
    amounts = amounts_of(productive=600 * S, detect=S, re_form=S, restore=S, replayed=5 * S)
    wall_ns = sum(amounts)
    run = Seen(wall_ns, wall_ns, amounts, 1, workers=1, committed=600, failures=10)
    assert goodput(run).attainable == pytest.approx(1 / (1 + 10 * 0.8 / (wall_ns / S)))


def test_failures_that_go_back_to_a_checkpoint_have_the_bound_of_the_best_period() -> None:
    # C = 1 s, M = 100 s, R = 2 s: Daly's best period is 13.4 s, which gives 84.9 %
    amounts = amounts_of(productive=800 * S, save_stall=100 * S, restore=20 * S, replayed=80 * S)
    run = Seen(1_000 * S, 1_000 * S, amounts, 1, workers=1, committed=8_000, failures=10, saves=100,
               restores_from_checkpoint=10)  # fmt: skip
    assert goodput(run).attainable == pytest.approx(0.849, abs=2e-3)
    longer = replace(run, saves=10)  # each ten times as long
    assert goodput(longer).attainable < goodput(run).attainable


def test_hosts_are_added_up_but_a_failure_that_both_have_noticed_is_one() -> None:
    books = []
    for host in ("a", "b"):
        worker = f"{host}/0.0"
        tally = Counters.begun(0).entered(10, 1, 0, 2).synchronized(20, 0).commits(120).undoes(150)
        books.append(
            HostLedger().after_all(
                [
                    Start(at_ns=0, worker=worker),
                    Counted(at_ns=150, worker=worker, tally=tally),
                    Failure(at_ns=150, worker=worker, round=1, began_ns=120, replayed_ns=30),
                    End(at_ns=150, worker=worker, is_loss=False),
                ]
            )
        )
    run = seen(books, [900, 800], 900, 2)
    assert (run.failures, run.workers, run.committed, run.undone) == (1, 2, 2, 2)
    assert run.worker_ns == sum(run.amounts) == 300
    assert run.amounts[Account.PRODUCTIVE] == 200
