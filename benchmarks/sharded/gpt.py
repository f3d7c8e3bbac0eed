"""The model that ours and the peer train: the GPT of examples/nanogpt, sharded by FSDP2, with AdamW in float32."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812 - the name that everybody knows it by
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from examples.nanogpt.model import GPT, Shape

VOCABULARY = 512
#: Few, so that a step of the large model computes for seconds and not for minutes.
TOKENS = 16
SAMPLES_PER_WORKER = 3

_shape = partial(Shape, vocab_size=VOCABULARY, block_size=TOKENS, n_head=4, bias=True)
SIZES = {
    "1M": _shape(n_layer=5, n_embd=128),
    "25M": _shape(n_layer=8, n_embd=512),
    "200M": _shape(n_layer=10, n_embd=1280),
}


def build(size: str, mesh: DeviceMesh) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The model, without values, and its optimizer. Called on every rank of the mesh.

    Args:
        size: a name in `SIZES`.
        mesh: of all ranks.
    """
    with torch.device("meta"):
        model = GPT(SIZES[size])
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def initialize(model: torch.nn.Module, seed: int = 0) -> None:
    """Give a model of `build` memory and first values; on every rank of its mesh."""
    model.to_empty(device="cpu")
    torch.manual_seed(seed)
    for module in model.modules():
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()


def make_data(samples: int, seed: int = 11) -> torch.Tensor:
    """Random tokens and the one after them, (samples, `TOKENS` + 1)."""
    return torch.randint(0, VOCABULARY, (samples, TOKENS + 1), generator=torch.Generator().manual_seed(seed))


def loss_of(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """How badly each token is predicted from those before it; `tokens` as from `make_data`."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
