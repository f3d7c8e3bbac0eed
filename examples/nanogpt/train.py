"""Trains a GPT on characters: `torchrun --nproc-per-node 2 train.py config/train_char.py --batch_size=32`.

Works as one process, under torchrun (or anything that sets its variables), and under `torchelastic run`; and with
`torchelastic simulate-esi` around any of these. See README.md.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.nanogpt.data import DataError
from examples.nanogpt.options import OptionError, Options, parse
from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.lifetime import STOPPED_EARLY


def mode_of(options: Options, environment: Mapping[str, str]) -> str:
    """Whether "plain" or "elastic": as the options say, else as the launcher. Pure."""
    if options.mode != "auto":
        return options.mode
    return "elastic" if environment.get("TORCHELASTIC_INIT_METHOD") else "plain"


def exit_code_for(code: int, environment: Mapping[str, str]) -> int:
    """What this process ends with, so that whoever has started it understands. Pure.

    torchrun takes every code but 0 for a failure: it kills the other workers, prints a traceback, and ends with 1. So
    under torchrun a worker that has stopped in good order says 0; that steps are left, the IterManager has told.

    Args:
        code: of the run.
        environment: of this process.
    """
    is_under_torchrun = "TORCHELASTIC_USE_AGENT_STORE" in environment
    return 0 if code == STOPPED_EARLY and is_under_torchrun else code


def main(words: Sequence[str] | None = None) -> int:
    """Trains; every rank runs this. Returns the exit code."""
    try:
        options = parse(sys.argv[1:] if words is None else words)
        if mode_of(options, os.environ) == "elastic":
            from examples.nanogpt import elastic

            return elastic.train(options)
        for name in ("stream", "sharded"):
            if getattr(options, name):
                raise OptionError(f"{name} is for `torchelastic run`: start train.py with that, or leave out --{name}")
        from examples.nanogpt import plain

        return exit_code_for(plain.train(options, is_distributed="RANK" in os.environ), os.environ)
    except (OptionError, DataError, CheckpointError) as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
