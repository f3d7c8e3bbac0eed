"""The command line of examples/transformer_slurm, the names of its checkpoints, and who a process is."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.transformer_slurm.arguments import parse_options
from examples.transformer_slurm.checkpoint_names import SavedName, newest_first, superfluous
from examples.transformer_slurm.ranks import Ranks, StartError, ranks_in

#: What PyRecover's users can say, and its default where ours is the same.
PYRECOVER: dict[str, tuple[str, object]] = {
    "--dataset": ("d.parquet", ...),
    "--tokenizer-name-or-path": ("folder", ...),
    "--sequence-length": ("64", 2048),
    "--batch-size": ("4", 1),
    "--fused-optimizer": ("", False),
    "--learning-rate": ("0.1", 1e-5),
    "--lr-warmup-steps": ("3", 10),
    "--training-steps": ("7", 1000),
    "--logging-frequency": ("2", 5),
    "--profile": ("", False),
    "--profile-step-start": ("4", 10),
    "--profile-step-end": ("20", 12),
    "--grad-max-norm": ("0.5", 1.0),
    "--model-dtype": ("fp64", ...),
    "--compile": ("", False),
    "--distributed": ("", False),
    "--checkpoint-dir": ("there", Path("checkpoints/")),
    "--checkpoint-frequency": ("-1", 10),
    "--resume-from-checkpoint": ("latest", None),
    "--experiment_name": ("mine", "default-exp"),
    "--verify-checkpoints": ("", False),
    "--max-kept-checkpoints": ("5", 3),
    "--use-torch-distributed-ckpt": ("", False),
    "--default-iter-time": ("2.5", ...),
    "--default-ckpt-time": ("20", ...),
    "--timeaware-checkpointing": ("", False),
    "--use_flash_attention": ("", False),
    "--log-loss-to-csv": ("", False),
}


def attribute(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


@pytest.mark.parametrize("flag", PYRECOVER)
def test_each_argument_of_pyrecover_is_taken_as_it_is_spelled_there(flag: str) -> None:
    value, default = PYRECOVER[flag]
    given = parse_options(
        [*(["--dataset", "d.parquet"] if flag != "--dataset" else []), flag, *([value] if value else [])]
    )
    kind = type(getattr(given, attribute(flag)))
    assert getattr(given, attribute(flag)) == (kind(value) if value else True)
    if default is not ...:
        assert getattr(parse_options(["--dataset", "d.parquet"]), attribute(flag)) == default


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "--dataset is missing: give a parquet file with a text column, or make one with"),
        (["--dataset", "d", "--batch-size", "0"], "'0' is not a whole number of at least 1"),
        (["--dataset", "d", "--checkpoint-frequency", "0"], "at least 1, or -1"),
        (["--dataset", "d", "--learning-rate", "nan"], "'nan' is not a number above 0"),
        (["--dataset", "d", "--grad-max-norm", "inf"], "'inf' is not a number of at least 0"),
        (["--dataset", "d", "--experiment_name", "../x"], "names a folder in --checkpoint-dir"),
        (["--dataset", "d", "--profile", "--profile-step-end", "3"], "--profile-step-end is behind"),
        (["--dataset", "d", "--dim", "100", "--heads", "3"], "even, whole width"),
        (["--dataset", "d", "--model-dtype", "int8"], "invalid choice: 'int8'"),
        (["--dataset", "d", "--frequency", "3"], "unrecognized arguments"),
    ],
)
def test_words_that_make_no_sense_are_refused(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_options(arguments)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------- names and retention


def names(*texts: str) -> list[SavedName]:
    return newest_first(texts)


def test_a_final_one_never_goes_for_a_periodic_one() -> None:
    there = names("ckpt_12_final", *(f"ckpt_{step}" for step in range(13, 30)))
    assert "ckpt_12_final" not in [name.text for name in superfluous(there, keep=1)]
    finals = names("ckpt_1_final", "ckpt_2_final", "ckpt_3_final")
    assert [name.step for name in superfluous(finals, keep=2)] == [1]


# ------------------------------------------------------------------------------------------------------ who I am


SRUN = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0"}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}


def test_ranks_are_those_of_srun_or_torchrun() -> None:
    assert ranks_in(SRUN, distributed=True) == Ranks(3, 4, 1)
    assert ranks_in(TORCHRUN, distributed=True) == Ranks(1, 2, 1)
    assert ranks_in({**SRUN, **TORCHRUN}, distributed=True) == Ranks(1, 2, 1), "torchrun in a task of srun"
    assert ranks_in({}, distributed=True) == Ranks()


@pytest.mark.parametrize("environment", [SRUN, TORCHRUN])
def test_several_processes_that_do_not_train_together_are_refused(environment: dict[str, str]) -> None:
    with pytest.raises(StartError, match="add --distributed"):
        ranks_in(environment, distributed=False)
