"""The transformer: shapes, causality, how it begins; the learning rate; the file of losses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from examples.nanogpt.losses import LossFile, kept, read_losses
from examples.nanogpt.model import GPT, Shape, adamw
from examples.nanogpt.schedule import learning_rate

SHAPE = Shape(vocab_size=11, block_size=8, n_layer=2, n_head=2, n_embd=12, bias=True)


def model(dropout: float = 0.0, shape: Shape = SHAPE) -> GPT:
    torch.manual_seed(0)
    return GPT(shape, dropout)


# The model


def test_more_tokens_than_the_context_are_refused() -> None:
    with pytest.raises(ValueError, match="9 tokens do not fit into a context of block_size=8"):
        model()(torch.zeros(1, 9, dtype=torch.int64))


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


def test_the_same_token_elsewhere_is_another_thing() -> None:
    with torch.no_grad():
        logits = model().eval()(torch.full((1, 4), 3))
    assert not torch.allclose(logits[0, 0], logits[0, 1])


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


def test_dropout_acts_in_training_only() -> None:
    net, tokens = model(dropout=0.5), torch.zeros(1, 8, dtype=torch.int64)
    assert not torch.equal(net(tokens), net(tokens))
    net.eval()
    assert torch.equal(net(tokens), net(tokens))


def test_the_optimizer_decays_matrices_only() -> None:
    net = model()
    optimizer = adamw(net, learning_rate=0.1, weight_decay=0.3, beta1=0.9, beta2=0.99)
    decayed, others = optimizer.param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.3, 0.0)
    assert {parameter.dim() for parameter in decayed["params"]} == {2}
    assert {parameter.dim() for parameter in others["params"]} == {1}
    assert len(decayed["params"]) + len(others["params"]) == len(list(net.parameters()))


def test_what_is_generated_follows_the_beginning_and_repeats_with_the_seed() -> None:
    net = model().eval()
    begin = torch.tensor([[1, 2, 3]]).expand(2, -1)
    made = []
    for _ in range(2):
        torch.manual_seed(4)
        made.append(net.generate(begin, 10, temperature=0.7, top_k=5))  # longer than the context
    assert made[0].shape == (2, 13)
    assert torch.equal(made[0], made[1])
    assert torch.equal(made[0][:, :3], begin)


def test_with_top_k_1_the_likeliest_token_is_taken() -> None:
    net, begin = model().eval(), torch.tensor([[1, 2]])
    made = net.generate(begin, 3, top_k=1)
    for end in range(2, 5):
        assert made[0, end] == net(made[:, :end])[0, -1].argmax()


@pytest.mark.parametrize("wrong", [{"temperature": 0.0}, {"top_k": 0}])
def test_senseless_ways_to_draw_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="above 0"):
        model().generate(torch.tensor([[1]]), 1, **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [{"n_head": 5}, {"n_layer": 0}, {"vocab_size": 0}])
def test_a_shape_that_is_no_model_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="is no model"):
        replace(SHAPE, **wrong)  # type: ignore[arg-type]


# The learning rate


def test_the_rate_rises_falls_and_stays() -> None:
    rates = [
        learning_rate(iteration, peak=1.0, lowest=0.1, warmup_iters=9, decay_iters=109) for iteration in range(150)
    ]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == 1.0 == max(rates)
    assert rates[59] == pytest.approx(0.55)
    assert rates[109:] == [0.1] * 41
    assert rates[:10] == sorted(rates[:10])
    assert rates[9:] == sorted(rates[9:], reverse=True)


# The file of losses


def test_losses_come_back_to_the_bit_and_are_cut_where_a_life_resumes(tmp_path: Path) -> None:
    records = [{"iteration": number // 2, "loss": torch.rand(()).item() / 3} for number in range(10)]
    LossFile(tmp_path).append(records[:6])
    LossFile(tmp_path).append(records[6:])
    assert read_losses(tmp_path) == records
    LossFile(tmp_path).cut(3)
    assert read_losses(tmp_path) == records[:6]


@pytest.mark.parametrize(
    "tail", [b'{"iteration": 2, "lo', b'{"iteration": 2, "loss": 1}', b"\0\0\0\n", b"[]\n", b'{"loss": 1}\n']
)
def test_a_torn_end_is_cut_off(tail: bytes) -> None:
    whole = b'{"iteration": 0, "loss": 1.5}\n{"iteration": 1, "loss": 1.25}\n'
    assert kept(whole + tail, 9) == whole
    assert kept(tail, 9) == b""
