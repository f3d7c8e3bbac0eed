"""The command line of examples/transformer_slurm, the names of its checkpoints, and who a process is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from examples.transformer_slurm.arguments import parse_options
from examples.transformer_slurm.checkpoint_names import SavedName, newest_first, superfluous
from examples.transformer_slurm.compare_weights import differences
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


def test_pyrecover_has_28_arguments() -> None:
    assert len(PYRECOVER) == 28


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


def test_the_8b_preset_is_llama_3() -> None:
    shape = parse_options(["--dataset", "d", "--model-preset", "8b"]).shape(128_256)
    embeddings = 2 * shape.vocabulary * shape.dim
    attention = 2 * shape.dim**2 + 2 * shape.dim * shape.kv_heads * shape.head_dim
    block = attention + 3 * shape.dim * shape.hidden + 2 * shape.dim
    assert embeddings + shape.layers * block + shape.dim == 8_030_261_248  # as its model card says: 8.03 B


def test_the_usual_dtype_is_that_of_the_device() -> None:
    usual = parse_options(["--dataset", "d"])
    assert usual.dtype(torch.device("cuda")) is torch.bfloat16
    assert usual.dtype(torch.device("cpu")) is torch.float32
    told = parse_options(["--dataset", "d", "--model-dtype", "bf16"])
    assert told.dtype(torch.device("cpu")) is torch.bfloat16


# ------------------------------------------------------------------------------------------------- names and retention


def names(*texts: str) -> list[SavedName]:
    return newest_first(texts)


def test_checkpoints_are_ordered_by_number() -> None:
    found = names("ckpt_70.shard", "ckpt_100.shard", "ckpt_9", "ckpt_1000_final.shard", "ckpt_100_final")
    assert [name.text for name in found] == [
        *("ckpt_1000_final.shard", "ckpt_100_final", "ckpt_100.shard", "ckpt_70.shard", "ckpt_9"),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "ckpt_",
        "ckpt_07",
        "ckpt_7.pt",
        "ckpt_7.shard.md5",
        "tensorboard_logs",
        ".tmp-ckpt_7",
        "ckpt_-1",
        "ckpt_7_finally",
    ],
)
def test_what_is_no_checkpoint_is_left_alone(text: str) -> None:
    assert SavedName.find(text) is None


def test_a_final_one_never_goes_for_a_periodic_one() -> None:
    there = names("ckpt_12_final", *(f"ckpt_{step}" for step in range(13, 30)))
    assert "ckpt_12_final" not in [name.text for name in superfluous(there, keep=1)]
    finals = names("ckpt_1_final", "ckpt_2_final", "ckpt_3_final")
    assert [name.step for name in superfluous(finals, keep=2)] == [1]


def test_all_are_kept_if_so_told() -> None:
    assert superfluous(names("ckpt_1", "ckpt_2"), keep=-1) == []


# ------------------------------------------------------------------------------------------------------ who I am


SRUN = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0"}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}


def test_ranks_are_those_of_srun_or_torchrun() -> None:
    assert ranks_in(SRUN, distributed=True) == Ranks(3, 4, 1)
    assert ranks_in(TORCHRUN, distributed=True) == Ranks(1, 2, 1)
    assert ranks_in({**SRUN, **TORCHRUN}, distributed=True) == Ranks(1, 2, 1), "torchrun in a task of srun"
    assert ranks_in({}, distributed=True) == Ranks()


def test_in_an_allocation_without_srun_a_process_is_alone() -> None:
    assert ranks_in({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}, distributed=False) == Ranks()


@pytest.mark.parametrize("environment", [SRUN, TORCHRUN])
def test_several_processes_that_do_not_train_together_are_refused(environment: dict[str, str]) -> None:
    with pytest.raises(StartError, match="add --distributed"):
        ranks_in(environment, distributed=False)


def test_garbage_in_a_variable_is_named() -> None:
    with pytest.raises(StartError, match="WORLD_SIZE='two'"):
        ranks_in({**TORCHRUN, "WORLD_SIZE": "two"}, distributed=True)


# ------------------------------------------------------------------------------------------------------- comparing


def tensors(*values: float) -> dict[str, torch.Tensor]:
    return {"w": torch.tensor(values)}


def test_what_is_within_the_tolerance_is_equal() -> None:
    assert differences(tensors(1.0, 2.0), tensors(1.0, 2.5), tolerance=0.5) == []
    (found,) = differences(tensors(1.0, 2.0), tensors(1.0, 2.5), tolerance=0.4)
    assert str(found) == "w: 1 of 2 elements, by 0.5 at most"


def test_not_a_number_equals_only_itself() -> None:
    nan, inf = float("nan"), float("inf")
    assert differences(tensors(nan, 1.0), tensors(nan, 1.0), 1e9) == []
    assert "1 are NaN in one only" in str(differences(tensors(nan, 1.0), tensors(0.0, 1.0), 1e9)[0])
    assert differences(tensors(inf), tensors(inf), 0.0) == []
    assert differences(tensors(inf), tensors(-inf), 1e9) != []


def test_shapes_dtypes_and_names_are_compared() -> None:
    one = torch.ones(2)
    found = differences({"a": one, "b": one, "c": one}, {"b": torch.ones(3), "c": one.double(), "d": one}, 1.0)
    assert [str(each) for each in found] == [
        "a: only in the first",
        "b: shape (2,) and (3,)",
        "c: torch.float32 and torch.float64",
        "d: only in the second",
    ]
