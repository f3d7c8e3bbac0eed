"""The transformer: shapes, causality, how it begins; the learning rate; the file of losses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from examples.nanogpt.losses import kept
from examples.nanogpt.model import GPT, Shape, adamw

SHAPE = Shape(vocab_size=11, block_size=8, n_layer=2, n_head=2, n_embd=12, bias=True)


def model(dropout: float = 0.0, shape: Shape = SHAPE) -> GPT:
    torch.manual_seed(0)
    return GPT(shape, dropout)


# The model


@pytest.mark.parametrize("place", range(8))
def test_a_later_token_changes_no_earlier_logit_and_its_own_ones(place: int) -> None:
    net = model().eval()
    tokens = torch.arange(8).unsqueeze(0)
    changed = tokens.clone()
    changed[0, place] = 10
    with torch.no_grad():
        before, after = net(tokens), net(changed)
    assert torch.equal(before[:, :place], after[:, :place])
    differs = (before != after).any(dim=2)[0]
    assert differs[place:].all(), "it is seen by itself and by all that follow"


def test_embedding_and_output_share_one_matrix() -> None:
    net = model()
    assert [name for name, _ in net.named_parameters() if "tokens" in name] == ["tokens.weight"]
    assert not list(net.buffers())
    net(torch.tensor([[1]])).sum().backward()
    assert net.tokens.weight.grad is not None
    assert (net.tokens.weight.grad[5] != 0).any(), "a token that is not in the text gets a gradient as an output"


def test_the_number_of_parameters_is_that_of_the_paper() -> None:
    """GPT-2's smallest model: 124 million, 124,439,808 with biases and a vocabulary of 50257."""
    shape = Shape(vocab_size=50257, block_size=1024, n_layer=12, n_head=12, n_embd=768, bias=True)
    with torch.device("meta"):
        net = GPT(shape)
    assert sum(parameter.numel() for parameter in net.parameters()) == 124_439_808
    with torch.device("meta"):
        lean = GPT(replace(shape, bias=False))
    assert not [name for name, _ in lean.named_parameters() if "bias" in name]


def test_the_optimizer_decays_matrices_only() -> None:
    net = model()
    optimizer = adamw(net, learning_rate=0.1, weight_decay=0.3, beta1=0.9, beta2=0.99)
    decayed, others = optimizer.param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.3, 0.0)
    assert {parameter.dim() for parameter in decayed["params"]} == {2}
    assert {parameter.dim() for parameter in others["params"]} == {1}
    assert len(decayed["params"]) + len(others["params"]) == len(list(net.parameters()))


# The learning rate


# The file of losses


@pytest.mark.parametrize(
    "tail", [b'{"iteration": 2, "lo', b'{"iteration": 2, "loss": 1}', b"\0\0\0\n", b"[]\n", b'{"loss": 1}\n']
)
def test_a_torn_end_is_cut_off(tail: bytes) -> None:
    whole = b'{"iteration": 0, "loss": 1.5}\n{"iteration": 1, "loss": 1.25}\n'
    assert kept(whole + tail, 9) == whole
    assert kept(tail, 9) == b""
