"""What the storm's run would have come to if nothing had happened."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.job import models
from benchmarks.job.controller import Job
from torchelastic.data import ElasticBatchSampler

#: Samples that no run trains on, for the final loss.
HELD_OUT = 2000
RATE = 0.05


def plain_run(samples: int, epochs: int, batch: int, seed: int) -> float:
    """One process, no elasticity, the same global batches; returns the final loss on held-out samples."""
    torch.set_num_threads(1)
    model = models.make_model("small", seed)
    optimizer = models.make_optimizer(model, RATE)
    inputs, targets = models.make_data("small", samples)
    sampler = ElasticBatchSampler(samples, batch, epochs=epochs, seed=seed)
    for indices in sampler.upcoming():
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs[indices]), targets[indices]).backward()  # type: ignore[no-untyped-call]  # torch has no types here
        optimizer.step()
    return final_loss(model.state_dict())


def final_loss(weights: dict[str, Any]) -> float:
    """Of a model with these weights, on samples that nobody has trained on."""
    model = models.make_model("small", 0)
    model.load_state_dict(weights)
    inputs, targets = models.make_data("small", HELD_OUT, seed=12)
    with torch.no_grad():
        return float(torch.nn.functional.mse_loss(model(inputs), targets))


def undisturbed_weights(workers: int, **options: Any) -> dict[str, Any]:
    """The same job with one worker, whom nothing happens; `workers` says how large the global batch is."""
    with tempfile.TemporaryDirectory() as folder, Job(Path(folder), workers=workers, alone=True, **options) as job:
        job.start()
        job.wait_until(lambda: job.agent.poll() == 0, "the end of the undisturbed run")
        return final_weights(Path(folder))[0]


def final_weights(folder: Path) -> list[dict[str, Any]]:
    """Of every worker that was there at the end."""
    return [torch.load(path, weights_only=True) for path in sorted(folder.glob("weights-*.pt"))]


def are_equal(left: dict[str, Any], right: dict[str, Any]) -> bool:
    """Whether two models have the same bits."""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
