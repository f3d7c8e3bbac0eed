"""examples/transformer_slurm goes on after a stop or a kill as if nothing had happened."""

from __future__ import annotations

import time
import warnings
from pathlib import Path

import pytest

from examples.transformer_slurm import compare_weights
from tests.process.forked_ranks import Ended, run_ranks, values
from tests.process.local_ranks import Crew, succeeded
from tests.process.transformer_jobs import (
    LATEST,
    PARTS,
    calls_of,
    command,
    experiment,
    fail,
    finish,
    found,
    life,
    losses,
)

CREW_SIZE = 3


# ------------------------------------------------------------------------------------------------- the same losses


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", [(), PARTS], ids=["file", "parts"])
def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one(kind: tuple[str, ...], dtype: str, corpus: Path) -> None:
    more = (*kind, "--model-dtype", dtype)
    finish(command(corpus, "whole", 8, *more))
    finish(command(corpus, "halves", 4, *more))
    assert "resumed from" in finish(command(corpus, "halves", 8, *more, *LATEST))
    assert losses(corpus, "halves") == losses(corpus, "whole")
    assert list(losses(corpus, "whole")) == list(range(1, 9))
    assert len(set(losses(corpus, "whole").values())) == 8


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "ranks"), [((), 2), (PARTS, 2), ((), 3), pytest.param(PARTS, 3, marks=pytest.mark.slow)]
)
def test_several_ranks_have_them_too(kind: tuple[str, ...], ranks: int, corpus: Path, crew: Crew) -> None:
    # wide enough for several buckets of DDP, whose order of sums three ranks can tell
    more = (*kind, "--distributed", *(("--dim", "256", "--hidden", "768", "--layers", "2") if ranks == 3 else ()))

    def run(name: str, steps: int, *also: str) -> list[tuple[int, str, str]]:
        return list(succeeded(crew.run(life, command(corpus, name, steps, *more, *also), ranks=ranks)))

    for answers in (run("whole", 6), run("halves", 3), run("halves", 6, *LATEST)):
        assert [code for code, _, _ in answers] == [0] * ranks, answers
        assert "step" not in answers[1][1], "rank 1 repeats what rank 0 says"
    assert losses(corpus, "halves") == losses(corpus, "whole")
    first, second = (experiment(corpus, name) / found(corpus, name)[-1] for name in ("whole", "halves"))
    assert compare_weights.main([str(first), str(second), "--optimizer", "--tolerance", "0"]) == 0


SHARDS = ("--stream-shards", "4")


@pytest.mark.long
def test_with_shards_other_ranks_have_the_batches_of_an_uninterrupted_run(corpus: Path, crew: Crew) -> None:
    finish(command(corpus, "whole", 9, *SHARDS, "--batch-size", "4"))
    assert "resumed" not in finish(command(corpus, "run", 3, *SHARDS, "--batch-size", "4"))
    more = command(corpus, "run", 6, *SHARDS, "--distributed", *LATEST)  # two sequences for each rank
    assert [code for code, _, _ in succeeded(crew.run(life, more, ranks=2))] == [0, 0]
    with warnings.catch_warnings(record=True):  # that the extra state of other ranks is not used
        finish(command(corpus, "run", 9, *SHARDS, "--batch-size", "4", *LATEST))
    whole = losses(corpus, "whole")
    assert losses(corpus, "run") == pytest.approx(whole, rel=1e-5)  # two ranks add in another order
    assert len(set(whole.values())) == 9


def test_a_run_may_change_its_kind_of_checkpoint(corpus: Path) -> None:
    finish(command(corpus, "whole", 9))
    finish(command(corpus, "changing", 3))
    finish(command(corpus, "changing", 6, *PARTS, *LATEST))
    finish(command(corpus, "changing", 9, *LATEST))
    assert losses(corpus, "changing") == losses(corpus, "whole")
    assert found(corpus, "changing") == ["ckpt_3.shard", "ckpt_6", "ckpt_9.shard"]


@pytest.mark.long
@pytest.mark.parametrize("kind", [(), PARTS], ids=["file", "parts"])
def test_a_job_killed_in_mid_save_goes_on_from_the_checkpoint_before(kind: tuple[str, ...], corpus: Path) -> None:
    _sweep(1, 17 if kind else 67, corpus, *kind)


def _sweep(ranks: int, every: int, corpus: Path, *more: str) -> None:
    """Kills a rank at every `every`-th call that its disk gets in a life."""
    distributed = ["--distributed"] if ranks > 1 else []

    def lives(name: str, killed: tuple[int, int] | None, *also: str) -> list[Ended]:
        return run_ranks(calls_of, command(corpus, name, 7, *distributed, *more, *also), killed, ranks=ranks)

    calls, whole = values(lives("whole", None)), losses(corpus, "whole")
    assert len(whole) == 7
    kills = [(rank, call) for rank in range(ranks) for call in range(1 + rank % every, calls[rank], every)]
    assert len(kills) >= 3
    for rank, call in kills:
        name = f"killed{rank}-{call}"
        assert lives(name, (rank, call))[rank].was_killed, name
        values(lives(name, None, *LATEST))
        assert losses(corpus, name) == whole, name
        assert list(experiment(corpus, name).glob(".tmp*")) == [], name


# ---------------------------------------------------------------------------------------------------- what is kept


def test_a_run_that_nobody_said_to_resume_overwrites_nothing(corpus: Path) -> None:
    finish(command(corpus, "run", 3))
    assert "has checkpoints already (the newest: ckpt_3.shard): go on with --resume" in fail(command(corpus, "run", 6))
    assert "step 3" in finish(command(corpus, "run", 3, *LATEST)), "a run that is over has nothing to do"


# ---------------------------------------------------------------------------------------------------- time is over


@pytest.mark.parametrize("kind", [(), PARTS], ids=["file", "parts"])
def test_it_saves_stops_and_goes_on_when_its_time_is_over(
    kind: tuple[str, ...], corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish(command(corpus, "whole", 9, *kind))
    monkeypatch.setenv("TORCHELASTIC_METADATA", "none")
    monkeypatch.setenv("TORCHELASTIC_TERMINATION_TIME", str(time.time() + 300))
    timeaware = ("--timeaware-checkpointing", "--max-kept-checkpoints", "1", "--default-ckpt-time", "600")
    code, out, _ = life(command(corpus, "run", 9, *kind, *timeaware))
    assert code == 75
    assert "requeue: this is no SLURM job" in out
    (final,) = found(corpus, "run")
    assert "_final" in final
    assert f"saved {experiment(corpus, 'run') / final}" in out
    monkeypatch.delenv("TORCHELASTIC_TERMINATION_TIME")
    assert f"{final}: step" in finish(command(corpus, "run", 9, *kind, *timeaware, *LATEST))
    assert losses(corpus, "run") == losses(corpus, "whole")
    assert final in found(corpus, "run"), "a final checkpoint was deleted"
