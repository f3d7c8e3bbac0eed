"""The command line: every option that users of PyRecover's `train.py` know, spelled as there, and a few more."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from examples.transformer_slurm.model import ModelShape, usual_hidden
from examples.transformer_slurm.parquet_text import MAKE_ONE

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
LATEST = "latest"

#: Sizes by name: "small" is for CPUs, "8b" is that of Llama 3 8B (arXiv:2407.21783).
PRESETS = {
    "small": {"dim": 128, "layers": 4, "heads": 4, "kv_heads": 2, "hidden": usual_hidden(128)},
    "8b": {"dim": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "hidden": 14336},
}


@dataclass(frozen=True)
class Options:
    """What was asked for; the names are those of the options."""

    dataset: Path
    text_column: str
    tokenizer_name_or_path: Path | None
    vocabulary: int
    sequence_length: int
    batch_size: int
    stream_shards: int
    model_preset: str
    dim: int | None
    layers: int | None
    heads: int | None
    kv_heads: int | None
    hidden: int | None
    model_dtype: str | None
    compile: bool
    use_flash_attention: bool
    learning_rate: float
    lr_warmup_steps: int
    weight_decay: float
    fused_optimizer: bool
    grad_max_norm: float
    training_steps: int
    seed: int
    distributed: bool
    logging_frequency: int
    log_loss_to_csv: bool
    profile: bool
    profile_step_start: int
    profile_step_end: int
    checkpoint_dir: Path
    experiment_name: str
    checkpoint_frequency: int
    resume_from_checkpoint: str | None
    use_torch_distributed_ckpt: bool
    verify_checkpoints: bool
    max_kept_checkpoints: int
    timeaware_checkpointing: bool
    default_iter_time: float
    default_ckpt_time: float

    @property
    def folder(self) -> Path:
        """Of the experiment."""
        return self.checkpoint_dir / self.experiment_name

    def shape(self, vocabulary: int) -> ModelShape:
        """How large the model is: the preset, and what was said otherwise. Raises: ValueError."""
        sizes = dict(PRESETS[self.model_preset])
        if self.dim is not None:
            sizes["hidden"] = usual_hidden(self.dim)
        if self.heads is not None:
            sizes["kv_heads"] = self.heads
        given = {name: getattr(self, name) for name in sizes}
        return ModelShape(vocabulary, **{**sizes, **{name: size for name, size in given.items() if size is not None}})

    def dtype(self, device: torch.device) -> torch.dtype:
        """Of the parameters: as told, else bf16 on a GPU and fp32 on a CPU, which has no fast bf16 as a rule."""
        default = "bf16" if device.type == "cuda" else "fp32"
        return DTYPES[self.model_dtype or default]


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    """Reads the command line (of this process if None); ends the process with 2 and a message if it is invalid."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.dataset is None:
        parser.error(f"--dataset is missing: give a parquet file with a text column, or make one with `{MAKE_ONE}`")
    if Path(given.experiment_name).name != given.experiment_name or given.experiment_name.startswith("."):
        parser.error(
            f"--experiment_name {given.experiment_name!r} names a folder in --checkpoint-dir: no slash, no dot"
        )
    if given.profile and given.profile_step_end <= given.profile_step_start:
        parser.error("--profile-step-end is behind --profile-step-start")
    options = Options(**{field.name: getattr(given, field.name) for field in fields(Options)})
    try:
        options.shape(vocabulary=1)
    except ValueError as error:
        parser.error(str(error))
    return options


def _whole(least: int, or_else: int | None = None) -> Callable[[str], int]:
    def whole(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least and (or_else is None or value != or_else):
            also = "" if or_else is None else f", or {or_else}"
            raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of at least {least}{also}")
        return value

    return whole


def _real(above: float | None = None) -> Callable[[str], float]:
    def real(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (value >= 0 if above is None else value > above) or math.isinf(value):
            raise argparse.ArgumentTypeError(
                f"'{text}' is not a number of at least 0"
                if above is None
                else f"'{text}' is not a number above {above:g}"
            )
        return value

    return real


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train.py",
        allow_abbrev=False,
        description="Trains a Llama-style transformer on a parquet text file; saves and stops before its time is over.",
        epilog="Exit codes: 0 finished; 75 stopped before its time was over, start it again; 1 failed; 2 wrong words.",
    )
    _add_data(parser.add_argument_group("data"))
    _add_model(parser.add_argument_group("model"))
    _add_training(parser.add_argument_group("training"))
    _add_checkpoints(parser.add_argument_group("checkpoints"))
    _add_output(parser.add_argument_group("output"))
    return parser


def _add_data(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--dataset", type=Path, metavar="FILE", help=f"parquet file with text; make one: {MAKE_ONE}")
    group.add_argument("--text-column", default="text", metavar="NAME", help="[%(default)s]")
    group.add_argument(
        "--tokenizer-name-or-path",
        type=Path,
        metavar="PATH",
        help="a local tokenizer.json, or its folder [trained on the data set, kept in the experiment's folder]",
    )
    group.add_argument(
        "--vocabulary", type=_whole(257), default=4096, metavar="N", help="of a tokenizer that is trained [%(default)s]"
    )
    group.add_argument("--sequence-length", type=_whole(1), default=2048, metavar="N", help="tokens [%(default)s]")
    group.add_argument("--batch-size", type=_whole(1), default=1, metavar="N", help="sequences per GPU [%(default)s]")
    group.add_argument(
        "--stream-shards",
        type=_whole(0),
        default=0,
        metavar="N",
        help="deal the file to N shards, so that another number of ranks goes on as if it had always been that; the "
        "ranks divide N, and N divides the sequences of a step [each rank reads documents of its own]",
    )


def _add_model(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--model-preset", choices=list(PRESETS), default="small", help="[%(default)s]")
    for name in ("dim", "layers", "heads", "kv-heads", "hidden"):
        group.add_argument(f"--{name}", type=_whole(1), metavar="N", help="instead of the preset's")
    group.add_argument("--model-dtype", choices=list(DTYPES), help="of the parameters [bf16 on a GPU, fp32 on a CPU]")
    group.add_argument("--compile", action="store_true", help="torch.compile the model")
    group.add_argument(
        "--use_flash_attention",
        "--use-flash-attention",
        action="store_true",
        help="this attention kernel or none [the best that torch has for the device]",
    )


def _add_training(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--learning-rate", type=_real(0.0), default=1e-5, metavar="RATE", help="[%(default)s]")
    group.add_argument(
        "--lr-warmup-steps", type=_whole(0), default=10, metavar="N", help="linear, then constant [%(default)s]"
    )
    group.add_argument("--weight-decay", type=_real(), default=0.01, metavar="X", help="of AdamW [%(default)s]")
    group.add_argument("--fused-optimizer", action="store_true", help="AdamW in one kernel")
    group.add_argument(
        "--grad-max-norm", type=_real(), default=1.0, metavar="X", help="clip gradients to this; 0: never [%(default)s]"
    )
    group.add_argument("--training-steps", type=_whole(1), default=1000, metavar="N", help="[%(default)s]")
    group.add_argument("--seed", type=_whole(0), default=0, metavar="N", help="of weights and order [%(default)s]")
    group.add_argument(
        "--distributed", action="store_true", help="DDP over the ranks that srun or torchrun has started"
    )


def _add_checkpoints(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--checkpoint-dir", type=Path, default=Path("checkpoints/"), metavar="DIR", help="[%(default)s]")
    group.add_argument(
        "--experiment_name", "--experiment-name", default="default-exp", metavar="NAME", help="its folder [%(default)s]"
    )
    group.add_argument(
        "--checkpoint-frequency", type=_whole(1, -1), default=10, metavar="STEPS", help="-1: never [%(default)s]"
    )
    group.add_argument(
        "--resume-from-checkpoint", metavar="PATH|latest", help="a checkpoint, or the newest if there is any"
    )
    group.add_argument(
        "--use-torch-distributed-ckpt", action="store_true", help="each rank writes its part [rank 0 writes one file]"
    )
    group.add_argument("--verify-checkpoints", action="store_true", help="read each one back (loading always verifies)")
    group.add_argument(
        "--max-kept-checkpoints",
        type=_whole(1, -1),
        default=3,
        metavar="N",
        help="newest by step; -1: all [%(default)s]",
    )
    group.add_argument(
        "--timeaware-checkpointing", action="store_true", help="save and stop (exit code 75) before the time is over"
    )
    group.add_argument(
        "--default-iter-time",
        type=_real(),
        default=5.0,
        metavar="S",
        help="kept in reserve for an iteration [%(default)s]",
    )
    group.add_argument(
        "--default-ckpt-time", type=_real(), default=0.0, metavar="S", help="a save takes at least this [as measured]"
    )


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--logging-frequency", type=_whole(1), default=5, metavar="STEPS", help="[%(default)s]")
    group.add_argument(
        "--log-loss-to-csv", action="store_true", help="each step's loss into EXPERIMENT_loss_log.csv in its folder"
    )
    group.add_argument("--profile", action="store_true", help="torch.profiler; a trace of rank 0 in the folder")
    group.add_argument("--profile-step-start", type=_whole(0), default=10, metavar="N", help="[%(default)s]")
    group.add_argument("--profile-step-end", type=_whole(1), default=12, metavar="N", help="[%(default)s]")
