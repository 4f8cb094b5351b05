"""A small transformer over bytes, in plain PyTorch."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name

from tools.training.config import Model

NUM_BYTES = 256


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout
        self.inputs = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Maps ``[b, n, width]`` to ``[b, n, width]``; position t sees positions up to t."""
        query, key, value = self.inputs(hidden).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        mixed = self.output(mixed.transpose(1, 2).flatten(2))
        return F.dropout(mixed, self.dropout, self.training)


class Layer(nn.Module):
    """Attention and a two-layer perceptron, each added to its input."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, num_heads, dropout)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """Maps ``[b, n, width]`` to ``[b, n, width]``."""
        hidden = hidden + self.attention(self.attention_norm(hidden))
        changed: Tensor = hidden + self.mlp(self.mlp_norm(hidden))
        return changed


class Transformer(nn.Module):
    """Predicts the next byte at each position; input and output share their embedding.

    Example:
        >>> import torch
        >>> model = Transformer(Model(width=8, num_layers=1, num_heads=2, context_length=16))
        >>> model(torch.zeros(2, 5, dtype=torch.int64)).shape
        torch.Size([2, 5, 256])
    """

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.tokens = nn.Embedding(NUM_BYTES, config.width)
        self.positions = nn.Embedding(config.context_length, config.width)
        layers = [Layer(config.width, config.num_heads, config.dropout) for _ in range(config.num_layers)]
        self.layers = nn.Sequential(*layers)
        self.norm = nn.LayerNorm(config.width)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Maps ``int64[b, n]`` to logits ``[b, n, 256]``."""
        hidden = self.tokens(input_ids) + self.positions.weight[: input_ids.shape[1]]
        return F.linear(self.norm(self.layers(hidden)), self.tokens.weight)
