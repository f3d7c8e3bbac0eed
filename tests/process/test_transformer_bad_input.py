"""What examples/transformer_slurm says of bad input; what was saved stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.process.transformer_jobs import (
    LATEST,
    PARTS,
    command,
    experiment,
    fail,
    finish,
    found,
    life,
    losses,
    torn,
)
from torchelastic.testing.disk_faults import FaultyDisk, full_at


@pytest.mark.parametrize("kind", [(), PARTS], ids=["file", "parts"])
def test_a_full_disk_is_named_and_the_checkpoint_before_stays(kind: tuple[str, ...], corpus: Path) -> None:
    finish(command(corpus, "run", 3, *kind))
    disk = FaultyDisk(full_at("write_some"))
    code, _, err = life(command(corpus, "run", 9, *kind, *LATEST), disk)
    disk.require_struck()
    assert code == 1
    assert "the disk is full; free space" in err
    assert len(found(corpus, "run")) == 1
    finish(command(corpus, "run", 6, *kind, *LATEST))
    assert len(losses(corpus, "run")) == 6


@pytest.mark.parametrize("how", ["cut", "flipped", "empty"])
@pytest.mark.parametrize("kind", [(), PARTS], ids=["file", "parts"])
def test_a_torn_newest_checkpoint_is_named_and_the_one_before_taken(
    kind: tuple[str, ...], how: str, corpus: Path, caplog: pytest.LogCaptureFixture
) -> None:
    finish(command(corpus, "run", 9, *kind))
    whole = losses(corpus, "run")
    newest = experiment(corpus, "run") / ("ckpt_9" if kind else "ckpt_9.shard")
    torn(newest, how)
    with caplog.at_level("WARNING"):
        out = finish(command(corpus, "run", 9, *kind, *LATEST))
    assert f"{newest} is damaged, so the one before is taken" in caplog.text
    assert f"resumed from {newest.with_name(newest.name.replace('9', '6'))}: step 6" in out
    assert losses(corpus, "run") == whole
    assert [path.name.partition("-")[2] for path in (newest.parent / "set-aside").iterdir()] == [newest.name]


def test_if_all_are_torn_nothing_is_lost_and_each_is_named(corpus: Path) -> None:
    finish(command(corpus, "run", 6))
    for name in found(corpus, "run"):
        torn(experiment(corpus, "run") / name, "cut")
    told = fail(command(corpus, "run", 9, *LATEST))
    assert "ckpt_3.shard" in told
    assert "ckpt_6.shard" in told
    assert "give another --experiment_name" in told
    assert found(corpus, "run") == ["ckpt_3.shard", "ckpt_6.shard"]


def test_a_checkpoint_that_is_not_there_is_an_error_that_names_its_neighbours(corpus: Path) -> None:
    finish(command(corpus, "run", 3))
    missing = experiment(corpus, "run") / "ckpt_4.shard"
    told = fail(command(corpus, "run", 6, "--resume-from-checkpoint", str(missing)))
    assert "ckpt_4.shard: no such checkpoint; beside it are ckpt_3.shard" in told
    assert "is no checkpoint" in fail(command(corpus, "run", 6, "--resume-from-checkpoint", str(missing.parent)))


@pytest.mark.parametrize("kind", [(), PARTS], ids=["file", "parts"])
def test_another_model_is_refused_by_the_names_that_differ(kind: tuple[str, ...], corpus: Path) -> None:
    finish(command(corpus, "run", 3, *kind))
    told = fail(command(corpus, "run", 6, *kind, *LATEST, "--layers", "2"))
    assert "the checkpoint does not fit: the checkpoint lacks 'blocks.1." in told
    assert "'blocks.0.gate.weight' was a float32 of shape (32, 16)" in fail(
        command(corpus, "run", 6, *kind, *LATEST, "--hidden", "64")
    )
    assert len(found(corpus, "run")) == 1


def test_another_tokenizer_is_refused(corpus: Path) -> None:
    finish(command(corpus, "run", 3))
    finish(command(corpus, "other", 1, "--text-column", "text", "--vocabulary", "260"))
    tokenizer = experiment(corpus, "other") / "tokenizer.json"
    assert "does not fit" in fail(command(corpus, "run", 6, *LATEST, "--tokenizer-name-or-path", str(tokenizer)))
    text = (experiment(corpus, "run") / "tokenizer.json").read_text()
    tokenizer.write_text(text.replace('"<|endoftext|>"', '"</s>"'))
    told = fail(command(corpus, "run", 6, *LATEST, "--tokenizer-name-or-path", str(tokenizer)))
    assert "was trained with another tokenizer" in told


def test_shards_that_do_not_fit_are_refused(corpus: Path) -> None:
    told = fail(command(corpus, "run", 3, "--stream-shards", "4"))
    assert "--stream-shards 4: 1 rank(s) must divide it, and it must divide the 2 sequences of a step" in told
    told = fail(command(corpus, "run", 3, "--stream-shards", "6", "--batch-size", "6"))
    assert "text.parquet has 5 row groups, and each of 6 shards needs one at least" in told
    finish(command(corpus, "run", 3, "--stream-shards", "2"))
    told = fail(command(corpus, "run", 6, *LATEST))
    assert "was trained with --stream-shards 2: give the same, or begin another run" in told
    told = fail(command(corpus, "run", 6, *LATEST, "--stream-shards", "1"))
    assert "logical_shards is 1 here but 2 in the saved state" in told
