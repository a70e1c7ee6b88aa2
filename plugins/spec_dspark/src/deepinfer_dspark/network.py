"""The draft model in torch: context features, draft layers, and the block pass.

One class serves training and drafting; they differ in how attention finds its keys, so that both
go through ``DraftLayer.project`` and ``DraftLayer.finish`` and bring the attention themselves.
Parameter names are those of the public checkpoint layout. The target's embedding and head are no
parameters: whoever owns the network passes them in.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from deepinfer_core.models.config import DecoderConfig
from deepinfer_core.models.rope import tables
from deepinfer_dspark.heads import ConfidenceHead, MarkovHead
from deepinfer_dspark.shape import DraftShape


class Norm(nn.Module):
    """Root-mean-square norm of the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> the same shape."""
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn heads by their positions.

    Args:
        x: [..., num_heads, head_dim].
        cos: [..., 1, rotary_dim / 2], broadcast over heads.
        sin: likewise.
    """
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


class DraftAttention(nn.Module):
    """Projections of a draft layer's attention; context and block share them."""

    def __init__(self, decoder: DecoderConfig) -> None:
        super().__init__()
        hidden, dim = decoder.hidden_size, decoder.head_dim
        self.heads, self.kv_heads, self.dim = decoder.num_heads, decoder.num_kv_heads, dim
        bias = decoder.qkv_bias
        self.q_proj = nn.Linear(hidden, self.heads * dim, bias=bias)
        self.k_proj = nn.Linear(hidden, self.kv_heads * dim, bias=bias)
        self.v_proj = nn.Linear(hidden, self.kv_heads * dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * dim, hidden, bias=decoder.output_bias)
        self.q_norm = Norm(dim, decoder.norm_eps) if decoder.qk_norm else nn.Identity()
        self.k_norm = Norm(dim, decoder.norm_eps) if decoder.qk_norm else nn.Identity()

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[..., hidden] -> [..., num_heads, head_dim]."""
        q = self.q_proj(x).unflatten(-1, (self.heads, self.dim))
        return rotate(self.q_norm(q), cos, sin)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """[..., hidden] -> keys and values, [..., num_kv_heads, head_dim] each."""
        k = self.k_proj(x).unflatten(-1, (self.kv_heads, self.dim))
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, self.dim))
        return rotate(self.k_norm(k), cos, sin), v


class DraftFeedForward(nn.Module):
    """Gated feed-forward."""

    def __init__(self, decoder: DecoderConfig) -> None:
        super().__init__()
        hidden, size, bias = decoder.hidden_size, decoder.intermediate_size, decoder.mlp_bias
        self.gate_proj = nn.Linear(hidden, size, bias=bias)
        self.up_proj = nn.Linear(hidden, size, bias=bias)
        self.down_proj = nn.Linear(size, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden]."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DraftLayer(nn.Module):
    """One decoder layer of the target's family; attention itself is the caller's."""

    def __init__(self, decoder: DecoderConfig) -> None:
        super().__init__()
        size, eps = decoder.hidden_size, decoder.norm_eps
        self.self_attn, self.mlp = DraftAttention(decoder), DraftFeedForward(decoder)
        self.input_layernorm, self.post_attention_layernorm = Norm(size, eps), Norm(size, eps)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Add the attention's output, [..., num_heads, head_dim], and the feed-forward."""
        x = x + self.self_attn.o_proj(attended.flatten(-2))
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class DraftNetwork(nn.Module):
    """A draft model without the target's tensors.

    Args:
        shape: sizes and kinds.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        decoder = shape.decoder
        self.shape = shape
        size, eps = decoder.hidden_size, decoder.norm_eps
        self.fc = nn.Linear(size * len(shape.target_layer_ids), size, bias=False)
        self.hidden_norm, self.norm = Norm(size, eps), Norm(size, eps)
        self.layers = nn.ModuleList(DraftLayer(decoder) for _ in range(decoder.num_layers))
        self.markov_head = MarkovHead(shape)
        self.confidence_head = ConfidenceHead(shape) if shape.confidence_head else None
        cos, sin = tables(decoder.rope, decoder.max_position)
        self.register_buffer("cos", cos.unsqueeze(1), persistent=False)
        self.register_buffer("sin", sin.unsqueeze(1), persistent=False)

    @property
    def stack(self) -> list[DraftLayer]:
        """The layers in order, by their type."""
        return [cast("DraftLayer", layer) for layer in self.layers]

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[...] int64 -> cosines and sines, [..., 1, rotary_dim / 2] each."""
        return self.cos[positions], self.sin[positions]

    def context(self, features: Tensor) -> Tensor:
        """Target layer outputs side by side, [n, m * hidden] -> context features [n, hidden]."""
        out: Tensor = self.hidden_norm(self.fc(features))
        return out

    def context_keys_values(
        self, features: Tensor, positions: Tensor
    ) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of context positions for every layer.

        Args:
            features: [n, m * hidden_size].
            positions: [n], int64.

        Returns:
            Per layer (keys, values), [n, num_kv_heads, head_dim] each.
        """
        context = self.context(features)
        cos, sin = self.angles(positions)
        return [layer.self_attn.keys_values(context, cos, sin) for layer in self.stack]
