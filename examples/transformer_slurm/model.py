"""A Llama-style transformer, written from the papers.

RMSNorm (arXiv:1910.07467), rotary positions (RoPE, arXiv:2104.09864), grouped-query attention (GQA, arXiv:2305.13245)
and SwiGLU (arXiv:2002.05202), put together as in Llama 3 (arXiv:2407.21783). Not a line has a random number but the
first weights, so what it computes depends on weights and tokens alone.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the name that everybody knows it by
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

INITIAL_STD = 0.02


@dataclass(frozen=True)
class ModelShape:
    """How large the model is.

    Attributes:
        vocabulary: how many tokens there are.
        dim: width of the residual stream.
        layers: how many blocks.
        heads: of the queries; `dim / heads` is even, since rotary positions turn pairs.
        kv_heads: of keys and values; divides `heads`.
        hidden: width between the two halves of a feed-forward layer.
        rope_theta: the base of the rotary frequencies.
        norm_eps: of RMSNorm.

    Raises:
        ValueError: the numbers do not go together.
    """

    vocabulary: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    rope_theta: float = 500_000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        if min(self.vocabulary, self.dim, self.layers, self.heads, self.kv_heads, self.hidden) < 1:
            raise ValueError(f"{self}: all sizes are 1 or more")
        if self.dim % self.heads or (self.dim // self.heads) % 2:
            raise ValueError(f"dim {self.dim} over {self.heads} heads: give each head an even, whole width")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.heads} heads cannot share {self.kv_heads} kv-heads evenly: give a divisor of heads"
            )

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.dim // self.heads


def usual_hidden(dim: int) -> int:
    """Two thirds of 4 x dim, as SwiGLU has three matrices instead of two, rounded up to a multiple of 64.

    >>> usual_hidden(128)
    384
    """
    return -(-8 * dim // 3 // 64) * 64


def widened(x: torch.Tensor) -> torch.Tensor:
    """The same values in float32, or in float64 if they were."""
    return x if x.dtype is torch.float64 else x.float()


class RMSNorm(nn.Module):
    """Scales by the root of the mean square; computed in float32 whatever the dtype."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Same shape and dtype as `x`."""
        wide = widened(x)
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


def rotations(length: int, head_dim: int, theta: float) -> torch.Tensor:
    """Cosines and sines by which positions turn pairs of channels: shape (2, length, head_dim / 2), float32."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies
    return torch.stack([angles.cos(), angles.sin()]).float()


def rotate(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Turns each pair of channels (i, i + half) by the angle of its position.

    Args:
        x: (batch, heads, length, head_dim).
        turns: of `rotations`, for as many positions or more.
    """
    cos, sin = turns[:, : x.shape[-2]]
    first, second = widened(x).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention; several query heads share one head of keys and values."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        kv_dim = shape.kv_heads * shape.head_dim
        self.wq = nn.Linear(shape.dim, shape.dim, bias=False)
        self.wk = nn.Linear(shape.dim, kv_dim, bias=False)
        self.wv = nn.Linear(shape.dim, kv_dim, bias=False)
        self.wo = nn.Linear(shape.dim, shape.dim, bias=False)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        """Same shape as `x`: (batch, length, dim)."""
        batch, length, _ = x.shape

        def heads(projected: torch.Tensor) -> torch.Tensor:
            return projected.view(batch, length, -1, self.shape.head_dim).transpose(1, 2)

        mixed = F.scaled_dot_product_attention(
            rotate(heads(self.wq(x)), turns),
            rotate(heads(self.wk(x)), turns),
            heads(self.wv(x)),
            is_causal=True,
            enable_gqa=self.shape.kv_heads != self.shape.heads,
        )
        return torch.as_tensor(self.wo(mixed.transpose(1, 2).reshape(batch, length, -1)))


class Block(nn.Module):
    """Attention, then a SwiGLU feed-forward layer, each behind a norm and added to the stream."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(shape.dim, shape.norm_eps)
        self.attention = Attention(shape)
        self.feed_forward_norm = RMSNorm(shape.dim, shape.norm_eps)
        self.gate = nn.Linear(shape.dim, shape.hidden, bias=False)
        self.up = nn.Linear(shape.dim, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.dim, bias=False)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        """Same shape as `x`."""
        x = x + self.attention(self.attention_norm(x), turns)
        y = self.feed_forward_norm(x)
        return torch.as_tensor(x + self.down(F.silu(self.gate(y)) * self.up(y)))


class Transformer(nn.Module):
    """Predicts the next token at each position.

    Args:
        shape: how large it is.
        sequence_length: the longest input.
        only_flash: let attention use the flash kernel or none (it needs fp16 or bf16 on a GPU).
    """

    def __init__(self, shape: ModelShape, sequence_length: int, *, only_flash: bool = False) -> None:
        super().__init__()
        self.shape = shape
        self._only_flash = only_flash
        self.embedding = nn.Embedding(shape.vocabulary, shape.dim)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.dim, shape.norm_eps)
        self.output = nn.Linear(shape.dim, shape.vocabulary, bias=False)
        # no buffer: it follows from the shape, so it is neither saved nor sent to other ranks
        self.turns = rotations(sequence_length, shape.head_dim, shape.rope_theta)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """New weights from torch's generator: normal, smaller where they write into the stream (GPT-2's rule)."""
        for name, parameter in self.named_parameters():
            if name.endswith("norm.weight"):
                nn.init.ones_(parameter)
            else:
                is_output = name.endswith(("wo.weight", "down.weight"))
                std = INITIAL_STD / (math.sqrt(2 * self.shape.layers) if is_output else 1.0)
                nn.init.normal_(parameter, std=std)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits (batch, length, vocabulary) for tokens (batch, length)."""
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if self._only_flash else nullcontext():
            x = self.embedding(tokens)
            for block in self.blocks:
                x = block(x, self.turns)
        return torch.as_tensor(self.output(self.norm(x)))


def next_token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy, in float32 or better."""
    return F.cross_entropy(widened(logits).flatten(0, 1), labels.flatten())


def built(
    shape: ModelShape, sequence_length: int, dtype: torch.dtype, device: torch.device, **more: bool
) -> Transformer:
    """A model with parameters of this dtype, made where it will be; the rotary angles stay float32."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            return Transformer(shape, sequence_length, **more)
    finally:
        torch.set_default_dtype(before)
