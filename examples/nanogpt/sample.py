"""Prints text that a trained model makes up: `python sample.py --out_dir=out-char --start="def "`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from examples.nanogpt.model import GPT
from examples.nanogpt.options import OptionError
from examples.nanogpt.training import ELASTIC_FOLDER, PLAIN_FOLDER, read_description
from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.store import list_checkpoints, open_checkpoint


def newest_weights(out_dir: Path) -> dict[str, Tensor]:
    """The model's weights in the newest whole checkpoint of a run, every byte compared with its checksum.

    Raises:
        OptionError: there is none.
        CheckpointError: it is damaged, or cannot be read.
    """
    infos = [info for name in (PLAIN_FOLDER, ELASTIC_FOLDER) for info in list_checkpoints(out_dir / name)]
    whole = [info for info in infos if info.damage is None]
    if not whole:
        raise OptionError(f"there is no checkpoint in {out_dir}: train a model with --out_dir={out_dir} first")
    with open_checkpoint(whole[0].folder) as checkpoint:
        checkpoint.verify()
        tree: dict[str, Any] = checkpoint.read_tree()
    weights: dict[str, Tensor] = tree["model"]["parameters"] if "model" in tree else tree["module"]
    return weights


def load(out_dir: Path) -> tuple[GPT, Any]:
    """The model of a run, on the CPU and ready to be asked, and its vocabulary. Errors as `newest_weights`."""
    shape, vocabulary = read_description(out_dir)
    model = GPT(shape)
    try:
        model.load_state_dict(newest_weights(out_dir))
    except (RuntimeError, KeyError) as error:
        raise OptionError(f"the checkpoint in {out_dir} is not of the model that its model.json describes") from error
    return model.eval(), vocabulary


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the samples; returns the exit code."""
    parser = argparse.ArgumentParser(prog="sample.py", description="Prints text that a trained model makes up.")
    parser.add_argument("--out_dir", "--out-dir", type=Path, default=Path("out-char"), help="of the run [%(default)s]")
    parser.add_argument("--start", default="\n", help="what the text begins with [a new line]")
    parser.add_argument("--num_samples", "--num-samples", type=int, default=1, help="[%(default)s]")
    parser.add_argument("--max_new_tokens", "--max-new-tokens", type=int, default=500, help="[%(default)s]")
    parser.add_argument("--temperature", type=float, default=0.8, help="[%(default)s]")
    parser.add_argument("--top_k", "--top-k", type=int, help="draw from so many of the likeliest [from all]")
    parser.add_argument("--seed", type=int, default=1337, help="[%(default)s]")
    parser.add_argument("--device", default="cpu", help="[%(default)s]")
    given = parser.parse_args(arguments)
    try:
        model, vocabulary = load(given.out_dir)
        if not given.start:
            raise OptionError("start is empty: give at least one character")
        tokens = torch.from_numpy(vocabulary.encode(given.start).astype("int64")).to(given.device)
        torch.manual_seed(given.seed)
        begin = tokens.expand(given.num_samples, -1)
        made = model.to(given.device).generate(
            begin, given.max_new_tokens, temperature=given.temperature, top_k=given.top_k
        )
    except (OptionError, CheckpointError, ValueError) as error:
        print(f"sample.py: {error}", file=sys.stderr)
        return 2
    for sample in made.tolist():
        print(vocabulary.decode(sample))
        print("---")
    return 0


if __name__ == "__main__":
    sys.exit(main())
