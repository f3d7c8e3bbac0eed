"""A real Accelerator on the CPU: loops that are killed and go on from memory."""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.process.accelerate_runs import (
    ACCUMULATED,
    EPOCH_STEPS,
    EPOCHS,
    Outcome,
    Run,
    accumulate,
    load_of_before,
    load_with_one_model_less,
    offered,
    save_what_cannot_be_saved,
    train,
    with_ddp,
    with_positions,
)
from tests.process.forked_ranks import Ended, run_ranks, values

STEPS = EPOCHS * EPOCH_STEPS
#: The seeds of the first start, and of the one after the crash.
FIRST, SECOND = 5, 6


def start(function: Callable[..., Any], *arguments: Any, ranks: int = 1, hosts: Sequence[Any] = ()) -> list[Ended]:
    return run_ranks(function, *arguments, ranks=ranks, environments=hosts)


def trained(run: Run, seed: int = SECOND, ranks: int = 1, hosts: Sequence[Any] = ()) -> list[Outcome]:
    return values(start(train, run, seed, ranks=ranks, hosts=hosts))


def crash(run: Run, ranks: int = 1, hosts: Sequence[Any] = ()) -> None:
    ended = start(train, run, FIRST, ranks=ranks, hosts=hosts)
    assert ended[0].exit_code == -signal.SIGKILL, ended[0].error


@pytest.fixture
def base() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        yield f"{folder}/job7"


@pytest.fixture(scope="module")
def alone() -> Outcome:
    """A run that nothing disturbs."""
    return trained(Run(""), FIRST)[0]


@pytest.fixture(scope="module")
def pair() -> list[Outcome]:
    return trained(Run(""), FIRST, ranks=2)


@pytest.mark.long
@pytest.mark.parametrize(("kill_at", "async_save"), [(7, True), (9, False)])
def test_a_killed_loop_goes_on_from_memory_and_ends_with_the_same_state(
    base: str, alone: Outcome, kill_at: int, async_save: bool
) -> None:
    crash(Run(base, kill_at, async_save))
    (outcome,) = trained(Run(base))
    loaded = kill_at - 1
    assert outcome.loaded == loaded
    assert outcome.extra == {"epoch": (loaded - 1) // EPOCH_STEPS, "note": "after step", "weights": [loaded, loaded]}
    assert (outcome.losses, outcome.digest) == (alone.losses[loaded:], alone.digest)
    assert outcome.seen == STEPS
    assert not Path(base).exists(), "it was removed"


def test_killed_ranks_go_on_each_with_its_own_random_numbers(base: str, pair: list[Outcome]) -> None:
    crash(Run(base, 7), ranks=2)
    outcomes = trained(Run(base), ranks=2)
    assert pair[0].losses != pair[1].losses
    assert [(one.loaded, one.losses, one.digest) for one in outcomes] == [
        (6, one.losses[6:], one.digest) for one in pair
    ]


def test_a_rank_copies_no_more_than_its_portion_where_all_have_the_same(base: str) -> None:
    zero, one = values(start(offered, base, ranks=2))
    assert (zero[0], one[0]) == (["rank-0/x", "replicated/a"], ["rank-1/x", "replicated/b"])
    assert zero[1] == ["rank-0/x", "replicated/a", "replicated/b"], "the planner has to find out who writes what"
    assert one[1] == ["rank-1/x", "replicated/a", "replicated/b", "replicated/c"]


def test_the_number_of_ranks_may_change(base: str) -> None:
    crash(Run(base, 7), ranks=2)
    shutil.copytree(base, f"{base}-2")
    (outcome,) = trained(Run(base))
    assert (outcome.loaded, outcome.seen) == (6, STEPS)
    crash(Run(f"{base}-1", 5))
    outcomes = trained(Run(f"{base}-1"), ranks=2)
    assert [(one.loaded, one.seen) for one in outcomes] == [(4, STEPS)] * 2


def test_another_number_of_models_is_named(base: str) -> None:
    crash(Run(base, 3))
    (said,) = values(start(load_with_one_model_less, Run(base)))
    assert "has 2 models, and the accelerator has prepared 1" in said


def test_what_cannot_be_saved_is_named(base: str) -> None:
    (said,) = values(start(save_what_cannot_be_saved, Run(base)))
    assert "extra['logger']" in said


@pytest.mark.parametrize(("first", "second"), [(1, 1), pytest.param(2, 2, marks=pytest.mark.long)])
def test_a_loop_that_is_saved_inside_an_accumulation_ends_with_the_same_weights(
    base: str, first: int, second: int
) -> None:
    expected = values(start(accumulate, base, ACCUMULATED, ranks=first))
    saved = values(start(accumulate, f"{base}-2", 6, ranks=first))
    assert saved[0][1] != expected[0][1]
    assert values(start(accumulate, f"{base}-2", ACCUMULATED, ranks=second)) == [(6, one[1]) for one in expected]


@pytest.mark.long
@pytest.mark.parametrize(("first", "second"), [(2, 1), (1, 2)])
def test_other_ranks_go_on_with_the_mean_of_what_was_accumulated(base: str, first: int, second: int) -> None:
    ((_, expected),) = values(start(accumulate, base, ACCUMULATED))
    values(start(accumulate, f"{base}-2", 6, ranks=first))
    for loaded, weights in values(start(accumulate, f"{base}-2", ACCUMULATED, ranks=second)):
        assert loaded == 6
        assert weights == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("skips", [False, True])
def test_a_dataloader_with_a_position_of_its_own_leaves_no_sample_out(base: str, skips: bool) -> None:
    (expected,) = values(start(_seen, base, 0, skips))
    found = [values(start(_seen, f"{base}-2", until, skips))[0] for until in ((4, 0) if skips else (4, 7, 0))]
    assert [sample for seen in found for sample in seen] == expected
    assert sorted(expected) == sorted([*map(float, range(20))] * 2)


def _seen(base: str, until: int, skips: bool) -> list[float]:
    return with_positions(base, until, skips=skips)


def test_a_checkpoint_of_before_is_loaded(base: str) -> None:
    ((saved, loaded, seen),) = values(start(load_of_before, base))
    assert loaded == saved
    assert seen == 1


@pytest.mark.long
def test_ranks_that_ddp_does_not_keep_equal_have_their_own_buffers(base: str) -> None:
    saved = values(start(_ddp, base, True, ranks=2))
    loaded = values(start(_ddp, base, False, ranks=2))
    assert saved[0][0] != saved[1][0]
    assert [buffers for buffers, _ in loaded] == [buffers for buffers, _ in saved]
    # DDP would average nothing of what it has found frozen
    assert [trained for _, trained in loaded] == [[False, True, False]] * 2


def _ddp(base: str, saves: bool) -> tuple[list[float], list[bool]]:
    return with_ddp(base, saves=saves)
