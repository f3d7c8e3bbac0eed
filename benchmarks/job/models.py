"""The models that all benchmarks of failures train: perceptrons of three layers, SGD with momentum, synthetic data.

Our workers and the peers' use the same ones. Imports torch alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Size:
    """Widths of a model, and samples for each of four workers."""

    width: int
    hidden: int
    samples_per_worker: int


SIZES = {
    "small": Size(16, 32, 12),
    "1M": Size(256, 768, 32),
    "25M": Size(1024, 4096, 8),
}


def make_model(size: str, seed: int) -> torch.nn.Module:
    """The same weights for the same seed."""
    width, hidden = SIZES[size].width, SIZES[size].hidden
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(width, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, hidden), torch.nn.ReLU(),
        torch.nn.Linear(hidden, width),
    )  # fmt: skip


def make_optimizer(model: torch.nn.Module, rate: float = 1e-3) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)


def make_data(size: str, samples: int, seed: int = 11) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs, and what a fixed function with some noise makes of them."""
    width = SIZES[size].width
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, width, generator=generator)
    noise = torch.randn(samples, width, generator=generator)
    return inputs, torch.sin(inputs.roll(1, dims=1)) * inputs + 0.1 * noise
