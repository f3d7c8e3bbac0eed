"""Compares the weights of two checkpoints, of either sort: `python compare_weights.py ckpt_100.shard other/ckpt_100`.

Exit codes: 0 equal within the tolerance, 1 different, 2 they cannot be compared.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

if not __package__:  # started as a file, from wherever: find the package that it belongs to
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from examples.transformer_slurm.checkpoints import read_state
from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.shards import flatten

EQUAL, DIFFERENT, NOT_COMPARABLE = 0, 1, 2
TOLERANCE = 1e-7
_SHOWN = 10


@dataclass(frozen=True)
class Difference:
    """One tensor that is not the same in both.

    Attributes:
        name: of the tensor.
        text: how it differs.
    """

    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.name}: {self.text}"


def differences(
    first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor], tolerance: float
) -> list[Difference]:
    """What differs by more than the tolerance, by name. Pure.

    A NaN equals a NaN in the same place, and nothing else; so does an infinity.

    Args:
        first: tensors by name.
        second: the others.
        tolerance: largest absolute difference of two elements that counts as none; 0: none.
    """
    found = []
    for name in sorted(first.keys() | second.keys()):
        if name not in first or name not in second:
            found.append(Difference(name, f"only in the {'first' if name in first else 'second'}"))
        elif text := _difference(first[name], second[name], tolerance):
            found.append(Difference(name, text))
    return found


def _difference(one: torch.Tensor, other: torch.Tensor, tolerance: float) -> str:
    if one.shape != other.shape:
        return f"shape {tuple(one.shape)} and {tuple(other.shape)}"
    if one.dtype != other.dtype:
        return f"{one.dtype} and {other.dtype}"
    if one.equal(other) or not one.numel():
        return ""
    wide, wider = one.double(), other.double()
    is_same = (wide == wider) | (wide.isnan() & wider.isnan())
    distance = torch.where(is_same, 0.0, (wide - wider).abs())
    is_off = ~is_same & ~(distance <= tolerance)  # the distance to a NaN is a NaN, which is not within any tolerance
    if not is_off.any():
        return ""
    nans = int((wide.isnan() != wider.isnan()).sum())
    largest = distance[is_off].nan_to_num(nan=-1.0).max().item()
    more = f", {nans} are NaN in one only" if nans else ""
    return (
        f"{int(is_off.sum())} of {one.numel()} elements" + (f", by {largest:g} at most" if largest >= 0 else "") + more
    )


def weights_of(path: Path, *, with_optimizer: bool = False) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint by name.

    Args:
        path: a file, or a folder.
        with_optimizer: the moments, too.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or it is something else.
    """
    state = read_state(path)
    tree: dict[str, Any] = {**state["model"].get("parameters", {}), **state["model"].get("others", {})}
    if with_optimizer:
        tree = {"model": tree, "optimizers": state["optimizers"]}
    return {named.name: named.tensor for named in flatten(tree).tensors}


def main(arguments: Sequence[str] | None = None) -> int:
    """Compares; returns the exit code."""
    parser = argparse.ArgumentParser(prog="compare_weights.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("first", type=Path, metavar="CHECKPOINT")
    parser.add_argument("second", type=Path, metavar="CHECKPOINT")
    parser.add_argument("--distributed", action="store_true", help="not needed: files and folders are recognized")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, metavar="X", help="absolute [%(default)s]")
    parser.add_argument("--optimizer", action="store_true", help="compare the optimizer's moments, too")
    parser.add_argument("--verbose", action="store_true", help="name every tensor that differs")
    given = parser.parse_args(arguments)
    if not given.tolerance >= 0:
        parser.error("--tolerance is 0 or more")
    try:
        first, second = (weights_of(path, with_optimizer=given.optimizer) for path in (given.first, given.second))
    except CheckpointError as error:
        print(f"compare_weights.py: error: {error}", file=sys.stderr)
        return NOT_COMPARABLE
    found = differences(first, second, given.tolerance)
    if not found:
        print(f"equal: {len(first)} tensors, within {given.tolerance:g}")
        return EQUAL
    print(f"different: {len(found)} of {len(first.keys() | second.keys())} tensors")
    for difference in found if given.verbose else found[:_SHOWN]:
        print(f"  {difference}")
    if len(found) > _SHOWN and not given.verbose:
        print(f"  and {len(found) - _SHOWN} more: --verbose names them")
    return DIFFERENT


if __name__ == "__main__":
    sys.exit(main())
