"""The command line of the example."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.imagenet.resnet import STAGE_BLOCKS

DIGITS = "digits"


@dataclass(frozen=True)
class Recipe:
    """What depends on the kind of data; the command line overrides the upper half."""

    arch: str
    width: int
    image_size: int
    epochs: int
    batch_size: int
    learning_rate: float
    num_data_workers: int

    weight_decay: float
    min_crop_area: float
    max_stretch: float
    flip: bool
    kept_in_validation: float
    cache: bool


# Goyal et al., arXiv:1706.02677: 90 epochs, rate 0.1 for 256 images, weight decay 1e-4.
PHOTOGRAPHS = Recipe(
    arch="resnet50",
    width=64,
    image_size=224,
    epochs=90,
    batch_size=256,
    learning_rate=0.1,
    num_data_workers=4,
    weight_decay=1e-4,
    min_crop_area=0.08,
    max_stretch=4 / 3,
    flip=True,
    kept_in_validation=0.875,
    cache=False,
)

# Found on one core: 98 to 99 % after 12 epochs (180 steps, 20 s), with batch statistics over 32 images as over 96.
HANDWRITTEN_DIGITS = Recipe(
    arch="resnet18",
    width=16,
    image_size=16,
    epochs=12,
    batch_size=96,
    learning_rate=0.1,
    num_data_workers=0,
    weight_decay=5e-4,
    min_crop_area=0.6,
    max_stretch=1.2,
    flip=False,
    kept_in_validation=1.0,
    cache=True,
)

SMALL_IMAGE_EDGE = 64  # up to this size the paper's 7x7 stem with pooling would throw too much away


@dataclass(frozen=True)
class Options:
    """What was asked for, with the recipe's values where nothing was said.

    Attributes:
        recipe: everything about data, model and training.
        data: folder of the images; of the digits, the folder that they are written to.
        is_digits: whether ``data`` holds the digits, written on demand.
        backend: of the process group; None leaves the choice to torchelastic.
        init_method: where to meet; None is what ``torchelastic run`` has set.
        checkpoint_dir: None saves nothing.
        resume: whether a checkpoint that is there is loaded.
        seed: of weights, order and augmentation.
        output: where rank 0 writes its report, or None.
        events_dir: where each worker writes its events, or None.
        progress: whether rank 0 shows a progress bar.
    """

    recipe: Recipe
    data: Path
    is_digits: bool
    backend: str | None
    init_method: str | None
    checkpoint_dir: Path | None
    resume: bool
    seed: int
    output: Path | None
    events_dir: Path | None
    progress: bool


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    """Reads the command line (of this process if None); ends the process with a message if it is invalid."""
    parser = _parser()
    given = parser.parse_args(arguments)
    is_digits = given.data == DIGITS
    default = HANDWRITTEN_DIGITS if is_digits else PHOTOGRAPHS
    batch_size = _first(given.batch_size, default.batch_size)
    recipe = Recipe(
        arch=_first(given.arch, default.arch),
        width=_first(given.width, default.width),
        image_size=_first(given.image_size, default.image_size),
        epochs=_first(given.epochs, default.epochs),
        batch_size=batch_size,
        # The linear scaling rule (arXiv:1706.02677 section 2.1) unless a rate was named.
        learning_rate=_first(given.lr, default.learning_rate * (batch_size / default.batch_size)),
        num_data_workers=_first(given.num_data_workers, default.num_data_workers),
        weight_decay=default.weight_decay,
        min_crop_area=default.min_crop_area,
        max_stretch=default.max_stretch,
        flip=default.flip,
        kept_in_validation=default.kept_in_validation,
        cache=default.cache,
    )
    if not is_digits and not Path(given.data).is_dir():
        parser.error(f"--data {given.data}: no such folder; name one with train/CLASS/*.jpg in it, or say '{DIGITS}'")
    if not given.resume and given.checkpoint_dir is None:
        parser.error("--no-resume says what to do with checkpoints: name their folder with --checkpoint-dir")
    return Options(
        recipe=recipe,
        data=given.digits_dir if is_digits else Path(given.data),
        is_digits=is_digits,
        backend=given.backend,
        init_method=given.init_method,
        checkpoint_dir=given.checkpoint_dir,
        resume=given.resume,
        seed=given.seed,
        output=given.output,
        events_dir=given.events_dir,
        progress=given.progress,
    )


def depth_of(arch: str) -> int:
    """``resnet18`` -> 18."""
    return int(arch.removeprefix("resnet"))


def _first(given: int | float | str | None, default: int | float | str) -> Any:
    return default if given is None else given


def _positive_int(text: str) -> int:
    value = int(text) if text.isascii() and text.lstrip("-").isdigit() else None
    if value is None or value < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of at least 1")
    return value


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of at least 0")
    return int(text)


def _positive_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"'{text}' is not a positive number")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.imagenet.main",
        description="Elastic training of a ResNet: start it with `torchelastic run`; workers may come and go.",
        epilog="Defaults in brackets: for a folder of photographs / for the digits.",
    )
    photographs, digits = PHOTOGRAPHS, HANDWRITTEN_DIGITS
    data = parser.add_argument_group("data")
    data.add_argument(
        "--data",
        default=DIGITS,
        metavar="DIR|digits",
        help="a folder with train/CLASS/*.jpg and val/CLASS/*.jpg, or handwritten digits (no download) [digits]",
    )
    data.add_argument(
        "--digits-dir", type=Path, default=Path("runs/digits"), metavar="DIR", help="where the digits go [%(default)s]"
    )
    data.add_argument(
        "--image-size", type=_positive_int, metavar="PIXELS", help=f"[{photographs.image_size} / {digits.image_size}]"
    )
    data.add_argument(
        "--num-data-workers",
        type=_count,
        metavar="N",
        help=f"loader processes of each worker [{photographs.num_data_workers} / {digits.num_data_workers}]",
    )
    model = parser.add_argument_group("model and training")
    model.add_argument(
        "--arch", choices=[f"resnet{depth}" for depth in STAGE_BLOCKS], help=f"[{photographs.arch} / {digits.arch}]"
    )
    model.add_argument(
        "--width",
        type=_positive_int,
        metavar="CHANNELS",
        help=f"of the first stage [{photographs.width} / {digits.width}]",
    )
    model.add_argument("--epochs", type=_positive_int, metavar="N", help=f"[{photographs.epochs} / {digits.epochs}]")
    model.add_argument(
        "--batch-size",
        type=_positive_int,
        metavar="N",
        help="images of one step, all workers together: stays the same whoever comes or goes "
        f"[{photographs.batch_size} / {digits.batch_size}]",
    )
    model.add_argument("--lr", type=_positive_float, metavar="RATE", help="peak [0.1, scaled with the batch size]")
    model.add_argument("--seed", type=_count, default=0, metavar="N", help="[%(default)s]")
    group = parser.add_argument_group("group")
    group.add_argument("--backend", choices=["gloo", "nccl"], help="[nccl if each worker has its GPU, else gloo]")
    group.add_argument(
        "--init-method", metavar="URL", help="etcd://HOST:PORT/RUN?min_workers=N [what `torchelastic run` says]"
    )
    output = parser.add_argument_group("checkpoints and output")
    output.add_argument("--checkpoint-dir", type=Path, metavar="DIR", help="save after each epoch [no checkpoints]")
    output.add_argument(
        "--resume",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="go on from the newest checkpoint if there is one [yes]",
    )
    output.add_argument("--output", type=Path, metavar="FILE", help="where rank 0 writes its report, JSON")
    output.add_argument(
        "--events-dir",
        type=Path,
        metavar="DIR",
        help="each worker writes there what it did and when (resume into the same folder)",
    )
    output.add_argument(
        "--progress", action=argparse.BooleanOptionalAction, default=True, help="progress bar on rank 0 [yes]"
    )
    return parser
