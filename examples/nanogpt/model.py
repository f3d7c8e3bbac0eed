"""A decoder-only transformer, written from the papers.

Vaswani et al., "Attention Is All You Need" (arXiv:1706.03762): scaled dot-product attention in several heads, a
feed-forward layer four times as wide, residual connections with dropout on each branch. Radford et al., "Language
Models are Unsupervised Multitask Learners" (GPT-2), section 2.3: layer norm before each branch and after the last
block, learned positions, residual projections that begin smaller by sqrt(number of branches). Press and Wolf
(arXiv:1608.05859): one matrix for the embedding and the output. Hendrycks and Gimpel (arXiv:1606.08415): GELU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the name that everybody knows it by
from torch import Tensor, nn

INITIAL_STD = 0.02
"""Of the weights: GPT, Radford et al. 2018, section 4.1."""


@dataclass(frozen=True)
class Shape:
    """What a model's weights depend on, and nothing else.

    Attributes:
        vocab_size: number of tokens.
        block_size: the longest context, in tokens.
        n_layer: blocks.
        n_head: attention heads of a block.
        n_embd: width; a multiple of `n_head`.
        bias: whether linear layers and layer norms have one.
    """

    vocab_size: int
    block_size: int
    n_layer: int
    n_head: int
    n_embd: int
    bias: bool

    def __post_init__(self) -> None:
        smallest = min(self.vocab_size, self.block_size, self.n_layer, self.n_head, self.n_embd)
        if smallest < 1 or self.n_embd % self.n_head:
            raise ValueError(f"{self} is no model: sizes start at 1, and n_embd must be a multiple of n_head")


class BranchEnd(nn.Linear):
    """The layer whose result is added to what goes past its branch.

    Args:
        inputs: features.
        outputs: features.
        shape: of the model; says how many branches there are.
    """

    def __init__(self, inputs: int, outputs: int, shape: Shape) -> None:
        super().__init__(inputs, outputs, bias=shape.bias)
        self.branches = 2 * shape.n_layer


@torch.no_grad()
def initialise(module: nn.Module) -> None:
    """Draw the first values of the parameters that a module of a GPT itself has, as for `Module.apply`.

    By the module alone, so that a model of which no process has the whole gets the same ones.
    """
    if isinstance(module, nn.LayerNorm):
        module.reset_parameters()
    elif isinstance(module, nn.Linear | nn.Embedding):
        branches = module.branches if isinstance(module, BranchEnd) else 1
        nn.init.normal_(module.weight, std=INITIAL_STD / math.sqrt(branches))
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


class Attention(nn.Module):
    """Each token looks at itself and at those before it.

    Args:
        shape: of the model.
        dropout: of the attention weights, 0..1.
    """

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = shape.n_head, dropout
        self.queries_keys_values = nn.Linear(shape.n_embd, 3 * shape.n_embd, bias=shape.bias)
        self.projection = BranchEnd(shape.n_embd, shape.n_embd, shape)

    def forward(self, hidden: Tensor) -> Tensor:
        """Maps (batch, tokens, width) to the same shape."""
        batch, tokens, width = hidden.shape
        packed: Tensor = self.queries_keys_values(hidden)
        query, key, value = packed.view(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        seen = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        mixed: Tensor = self.projection(seen.transpose(1, 2).reshape(batch, tokens, width))
        return mixed


class Block(nn.Module):
    """Attention and a feed-forward layer, each on a branch of its own.

    Args:
        shape: of the model.
        dropout: 0..1.
    """

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        width = shape.n_embd
        self.norm_attention = nn.LayerNorm(width, bias=shape.bias)
        self.attention = Attention(shape, dropout)
        self.norm_feed_forward = nn.LayerNorm(width, bias=shape.bias)
        self.widen = nn.Linear(width, 4 * width, bias=shape.bias)
        self.narrow = BranchEnd(4 * width, width, shape)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Maps (batch, tokens, width) to the same shape."""
        hidden = hidden + self.dropout(self.attention(self.norm_attention(hidden)))
        wide = F.gelu(self.widen(self.norm_feed_forward(hidden)))
        result: Tensor = hidden + self.dropout(self.narrow(wide))
        return result


class GPT(nn.Module):
    """Predicts each next token from those before it. Freshly initialised from torch's random numbers; has no buffers.

    Args:
        shape: of the model.
        dropout: 0..1; none in `eval()`.
    """

    def __init__(self, shape: Shape, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocab_size, shape.n_embd)
        self.positions = nn.Embedding(shape.block_size, shape.n_embd)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(shape, dropout) for _ in range(shape.n_layer))
        self.norm = nn.LayerNorm(shape.n_embd, bias=shape.bias)
        self.apply(initialise)

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps (batch, tokens) to logits (batch, tokens, vocabulary).

        Raises:
            ValueError: there are more tokens than `block_size`.
        """
        length = tokens.shape[1]
        if length > self.shape.block_size:
            raise ValueError(f"{length} tokens do not fit into a context of block_size={self.shape.block_size}")
        hidden = self.dropout(self.tokens(tokens) + self.positions.weight[:length])
        for block in self.blocks:
            hidden = block(hidden)
        return F.linear(self.norm(hidden), self.tokens.weight)

    @torch.no_grad()
    def generate(self, tokens: Tensor, count: int, *, temperature: float = 1.0, top_k: int | None = None) -> Tensor:
        """Appends `count` tokens, drawn from torch's random numbers one after the other.

        Args:
            tokens: (batch, tokens) with at least one token; what is longer than the context is not looked at.
            count: how many.
            temperature: above 0; below 1 the likely ones become likelier.
            top_k: draw from so many of the likeliest only; None: from all.

        Raises:
            ValueError: the temperature is not above 0, or `top_k` is below 1.
        """
        if not temperature > 0 or (top_k is not None and top_k < 1):
            raise ValueError(f"temperature={temperature} must be above 0, and top_k={top_k} at least 1")
        for _ in range(count):
            logits = self(tokens[:, -self.shape.block_size :])[:, -1] / temperature
            if top_k is not None:
                lowest = logits.topk(min(top_k, logits.shape[1])).values[:, -1:]
                logits = logits.masked_fill(logits < lowest, -math.inf)
            drawn = torch.multinomial(logits.softmax(dim=1), num_samples=1)
            tokens = torch.cat([tokens, drawn], dim=1)
        return tokens


def adamw(
    model: nn.Module, *, learning_rate: float, weight_decay: float, beta1: float, beta2: float
) -> torch.optim.AdamW:
    """AdamW (arXiv:1711.05101) that decays matrices only, and neither biases nor layer norms."""
    parameters = list(model.parameters())
    groups = [
        {"params": [parameter for parameter in parameters if parameter.dim() >= 2], "weight_decay": weight_decay},
        {"params": [parameter for parameter in parameters if parameter.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(beta1, beta2))
