"""The transformer of examples/transformer_slurm does what the papers say."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name that everybody knows it by

from examples.transformer_slurm.model import (
    Attention,
    ModelShape,
    Transformer,
    built,
    next_token_loss,
    rotate,
    rotations,
)

SHAPE = ModelShape(vocabulary=31, dim=16, layers=2, heads=4, kv_heads=2, hidden=24)


def test_a_token_changes_no_prediction_before_it() -> None:
    torch.manual_seed(0)
    model = Transformer(SHAPE, 10)
    tokens = torch.randint(0, 31, (1, 10))
    others = tokens.clone()
    others[0, 6] = (tokens[0, 6] + 1) % 31
    before, after = model(tokens), model(others)
    assert torch.equal(before[:, :6], after[:, :6])
    assert all(not torch.allclose(before[0, place], after[0, place]) for place in range(6, 10))


def test_what_attention_sees_of_positions_is_their_distance() -> None:
    turns = rotations(20, 8, theta=500_000.0)
    query, key = torch.randn(2, 8, generator=torch.Generator().manual_seed(2)).double()

    def score(at: int, to: int) -> float:
        rows = torch.zeros(1, 1, 20, 8, dtype=torch.float64)
        rows[..., at, :] = query
        keys = torch.zeros(1, 1, 20, 8, dtype=torch.float64)
        keys[..., to, :] = key
        return float(rotate(rows, turns.double())[0, 0, at] @ rotate(keys, turns.double())[0, 0, to])

    assert score(7, 3) == pytest.approx(score(16, 12), rel=1e-6)
    assert score(7, 3) != pytest.approx(score(7, 4), rel=1e-6)


def test_shared_heads_are_as_repeated_ones() -> None:
    torch.manual_seed(3)
    shared = Attention(SHAPE)
    own = Attention(ModelShape(31, 16, 2, heads=4, kv_heads=4, hidden=24))
    with torch.no_grad():
        for name in ("wq", "wo"):
            getattr(own, name).weight.copy_(getattr(shared, name).weight)
        for name in ("wk", "wv"):
            heads = getattr(shared, name).weight.view(2, 4, 16)
            getattr(own, name).weight.copy_(heads.repeat_interleave(2, dim=0).reshape(16, 16))
    x, turns = torch.randn(2, 5, 16), rotations(5, 4, 100.0)
    torch.testing.assert_close(shared(x, turns), own(x, turns))


def test_the_loss_is_the_mean_over_all_tokens_in_float32() -> None:
    logits = torch.randn(2, 3, 5).bfloat16()
    labels = torch.tensor([[0, 1, 2], [3, 4, 0]])
    expected = -F.log_softmax(logits.float(), -1).gather(-1, labels[..., None]).mean()
    torch.testing.assert_close(next_token_loss(logits, labels), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_parameters_have_the_dtype_and_angles_stay_precise(dtype: torch.dtype) -> None:
    model = built(SHAPE, 10, dtype, torch.device("cpu"))
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert model.turns.dtype is torch.float32
    assert torch.get_default_dtype() is torch.float32
    assert model(torch.zeros(1, 10, dtype=torch.int64)).dtype is dtype
    assert "turns" not in model.state_dict()


@pytest.mark.parametrize(
    ("sizes", "told"),
    [({"heads": 3}, "even, whole width"), ({"kv_heads": 3}, "share 3 kv-heads"), ({"layers": 0}, "1 or more")],
)
def test_sizes_that_do_not_go_together_are_refused(sizes: dict[str, int], told: str) -> None:
    usual = {"vocabulary": 31, "dim": 16, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 24}
    with pytest.raises(ValueError, match=told):
        ModelShape(**{**usual, **sizes})
