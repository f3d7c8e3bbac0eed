"""What does not go together with salvage and logical shards: refused where a `ModelState` is made."""

from __future__ import annotations

from typing import Any

import torch

from torchelastic.data.shares import MODES


def check_mode(mode: str, sampler: Any, logical_shards: int | None, find_unused_parameters: bool = False) -> None:
    """Raise ValueError for what does not go together."""
    if mode not in MODES:
        raise ValueError(f"salvage={mode!r} is not one of {', '.join(MODES)}")
    if (mode != "discard" or logical_shards is not None) and not hasattr(sampler, "deal_again"):
        what = f"salvage={mode!r}" if logical_shards is None else f"logical_shards={logical_shards}"
        raise ValueError(
            f"{what} needs ModelState(..., sampler=ElasticBatchSampler(...)), or an ElasticStream: it knows which "
            "samples a step has"
        )
    if mode != "discard" and logical_shards is None and find_unused_parameters:
        raise ValueError(
            f"salvage={mode!r} does not go with find_unused_parameters=True: the gradients kept of a parameter would "
            "be lost where the rest of the samples does not use it; give logical_shards too, or leave one out"
        )
    if mode == "drop" and logical_shards is not None:
        raise ValueError(
            "salvage='drop' changes what a step is trained on, so logical_shards could not give the same bits: use "
            "'discard' or 'recompute' with them"
        )


def check_parameters(module: torch.nn.Module, logical_shards: int | None) -> None:
    """Raise ValueError for a module of whose gradients no sums are kept."""
    for name, one in module.named_modules():
        if isinstance(one, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and one.sparse:
            raise ValueError(
                f"{name or 'the module'} is an {type(one).__name__}(sparse=True), and salvage and logical_shards keep "
                "dense gradients only: make it with sparse=False, or leave both options out"
            )
    complex_ones = [name for name, parameter in module.named_parameters() if parameter.is_complex()]
    if complex_ones and logical_shards is None:
        raise ValueError(f"{complex_ones[0]} is complex, and salvage keeps real gradients only: leave salvage out")
