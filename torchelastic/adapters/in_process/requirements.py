"""What no adapter could go on with in the running process, whatever its framework: said before anything is trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from torchelastic.errors import UnfitError


def require_none_of(adapter: str, wrong: Mapping[str, bool], remedy: str) -> None:
    """Raise UnfitError for the first of these that is given.

    Args:
        adapter: the class that the user has made.
        wrong: what would not be kept, each with whether it is given.
        remedy: what to do about it.
    """
    for what, is_given in wrong.items():
        if is_given:
            raise UnfitError(f"{adapter} cannot go on in the running process with {what}: {remedy}")


def require_no_group(before: str, remedy: str) -> None:
    """Raise UnfitError if there is a process group: it is not of the run, so no newcomer would be in it.

    Args:
        before: when it must not be there yet, for people.
        remedy: what to do about it.
    """
    if dist.is_initialized():
        raise UnfitError(
            f"a process group was formed before {before}, and newcomers would have to take part in that: {remedy}"
        )


def require_known_order(
    plain: DataLoader[Any],
    remedy: str = "give the DataLoader batch_size and shuffle in its place",
    *,
    is_permuted: bool = False,
) -> None:
    """Raise UnfitError for data without a length, or of another order than torch's own: that order would be lost.

    Args:
        plain: the DataLoader that the framework would use.
        remedy: what to do about what draws another order.
        is_permuted: the dataset's own order is another one, too: each epoch has to be a permutation.
    """
    dataset: Any = plain.dataset
    if isinstance(dataset, IterableDataset):
        raise UnfitError(
            "the training data is an IterableDataset, of which no worker can give another one its place: give a "
            "dataset with a length, or write a loop with torchelastic.ElasticStream (docs/data.md)"
        )
    batches: Any = plain.batch_sampler
    batches = getattr(batches, "batch_sampler", batches)  # of Accelerate, where a group has been formed before
    drawn_by: Any = getattr(batches, "sampler", None) if type(batches) is BatchSampler else batches
    # Accelerate's own draws a permutation, with a seed that it keeps
    is_known = type(drawn_by) is RandomSampler or type(drawn_by).__name__ == "SeedableRandomSampler"
    is_known = is_known or (type(drawn_by) is SequentialSampler and not is_permuted)
    if not is_known or getattr(drawn_by, "replacement", False) or len(drawn_by) != len(dataset):
        what = f"the training data is drawn by a {type(drawn_by).__name__}{_how(drawn_by)}"
        raise UnfitError(f"{what}, whose order is not divided anew when the group changes: {remedy}")


def _how(drawn_by: Any) -> str:
    """What a sampler of torch's does that is no permutation, for people."""
    if getattr(drawn_by, "replacement", False):
        return " with replacement"
    return f" of {len(drawn_by)} samples" if type(drawn_by) is RandomSampler else ""
