"""Trains a Llama-style transformer on a parquet text file: `python train.py --dataset text.parquet`; see README.md."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import torch.distributed as dist

if not __package__:  # started as a file, from wherever: find the package that it belongs to
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from examples.transformer_slurm.arguments import parse_options
from examples.transformer_slurm.parquet_text import DatasetError
from examples.transformer_slurm.ranks import Ranks, StartError, join, ranks_in
from examples.transformer_slurm.training import Training
from torchelastic.checkpoint.format.disk import REAL_DISK, Disk


def main(arguments: Sequence[str] | None = None, *, disk: Disk = REAL_DISK) -> int:
    """Trains; every rank runs this.

    Args:
        arguments: the command line; None: of this process.
        disk: what touches files of checkpoints.

    Returns:
        The exit code: 0 finished, 75 saved and stopped before the time was over, 1 failed.
    """
    options = parse_options(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    is_mine = not dist.is_initialized()
    try:
        ranks = ranks_in(os.environ, distributed=options.distributed) if is_mine else Ranks(local_rank=dist.get_rank())
        device = join(ranks, os.environ)
        with closing(Training(options, device, disk)) as training:
            code = training.run()
    except (OSError, DatasetError, StartError) as error:  # a CheckpointError is an OSError
        print(f"train.py: error: {error}", file=sys.stderr, flush=True)
        return 1  # the group is not taken down: another rank may be in the middle of something
    if is_mine and dist.is_initialized():
        dist.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(main())
