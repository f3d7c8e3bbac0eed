"""Accuracy on the validation images, each worker looking at its part of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from examples.imagenet.images import ImageDataset


@dataclass(frozen=True)
class Accuracy:
    """Fractions (0..1) of the validation images: the label is the first guess, or among the first five."""

    top1: float
    top5: float


def count_correct(logits: Tensor, labels: Tensor, *, guesses: int) -> int:
    """Counts rows of ``logits`` (N, classes) whose label (N,) is among their highest ``guesses`` entries."""
    best = logits.topk(min(guesses, logits.shape[1]), dim=1).indices
    return int((best == labels.unsqueeze(1)).any(dim=1).sum())


def evaluate(
    model: nn.Module, images: ImageDataset, *, rank: int, world_size: int, batch_size: int, device: torch.device
) -> Accuracy:
    """Measures the accuracy over all of ``images``; nothing of the model changes, buffers included.

    Worker ``rank`` takes every ``world_size``-th image; one all-reduce of three counts over the default process group
    adds up. With ``world_size`` 1 no process group is needed.

    Args:
        model: the plain module, not its DDP wrapper.
        images: the whole validation set, on every worker.
        rank: of this worker in the default process group.
        world_size: of the default process group; all its members call this at the same time.
        batch_size: images at a time.
        device: where the model is.

    Raises:
        RuntimeError: a peer died meanwhile.
    """
    counts = torch.zeros(3, dtype=torch.int64, device=device)
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            own = range(rank, len(images), world_size)
            for start in range(0, len(own), batch_size):
                items = [images[index] for index in own[start : start + batch_size]]
                logits = model(torch.stack([item.pixels for item in items]).to(device))
                labels = torch.tensor([item.label for item in items], device=device)
                correct = [count_correct(logits, labels, guesses=guesses) for guesses in (1, 5)]
                counts += torch.tensor([*correct, len(items)], device=device)
    finally:
        model.train(was_training)
    if world_size > 1:
        dist.all_reduce(counts)
    top1, top5, seen = counts.tolist()
    return Accuracy(top1 / seen, top5 / seen)
