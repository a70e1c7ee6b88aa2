"""With parts switched off, the models are simple ones that fit on a page: float64, to 1e-10."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer_deepseek.testing.tiny import (
    TINY_V4,
    harness,
    harness_v4,
    random_weights,
    tiny_config,
    tokens_of,
    write_tiny,
    write_tiny_v4,
)

LENGTH = 53
PLAIN: dict[str, Any] = {
    "hc_mult": 1,
    "hc_eps": 1e-13,
    "n_routed_experts": 1,
    "num_experts_per_tok": 1,
    "swiglu_limit": 1e9,
    "rope_scaling": None,
    "index_topk": 64,
}
"""One copy, one expert, no choice."""


def plain(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """One copy that goes on as it is, sinks without mass, means without gates."""
    for name, value in tensors.items():
        if "hc_" in name and name.endswith("_fn"):
            value.zero_()
        elif "hc_" in name and name.endswith("_base"):
            # Collapse 1, spread 2 x sigmoid(0) = 1, carry 1.
            value.copy_(torch.tensor([40.0, 0.0, 0.0])[: len(value)])
        elif name.endswith((".wgate.weight", ".ape")):
            value.zero_()
        elif name.endswith("attn_sink"):
            value.fill_(-1e4)
    return tensors


def rms(x: Tensor, weight: Tensor | float, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def turned(x: Tensor, config: dict[str, Any], theta: float, positions: Tensor) -> Tensor:
    """The last numbers, pair by pair."""
    dim = config["qk_rope_head_dim"]
    angles = positions[:, None].double() * theta ** (-torch.arange(0, dim, 2).double() / dim)
    angles = angles.view(len(x), *[1] * (x.ndim - 2), dim // 2)
    still, pairs = x[..., :-dim], torch.view_as_complex(x[..., -dim:].unflatten(-1, (-1, 2)))
    both = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)
    return torch.cat([still, both], -1)


def simple(
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    tokens: list[int],
    *,
    owner: Callable[[int], int],
    groups: Callable[[int, int], range],
    eps: float,
    head_norm: bool,
) -> Tensor:
    """A transformer whose rows see a window, and means of groups of tokens.

    Args:
        config: of the model.
        tensors: its weights.
        tokens: the sequence.
        owner: whose means a layer sees.
        groups: (ratio, number) -> the tokens of a mean.
        eps: of norms.
        head_norm: queries are normed head by head.
    """
    w = {name: value.double() for name, value in tensors.items() if value.is_floating_point()}
    heads, dim, n = config["num_attention_heads"], config["head_dim"], len(tokens)
    at = torch.arange(n)
    x = w["embed.weight"][tokens]
    entries: dict[int, Tensor] = {}
    for layer, ratio in enumerate(config["compress_ratios"][: config["num_hidden_layers"]]):
        base = f"layers.{layer}.attn."
        theta = float(config["compress_rope_theta" if ratio else "rope_theta"])
        a = rms(x, w[f"layers.{layer}.attn_norm.weight"], eps)
        q = rms(a @ w[f"{base}wq_a.weight"].t(), w[f"{base}q_norm.weight"], eps)
        q = (q @ w[f"{base}wq_b.weight"].t()).unflatten(-1, (heads, dim))
        q = turned(rms(q, 1.0, eps) if head_norm else q, config, theta, at)
        keys = rms(a @ w[f"{base}wkv.weight"].t(), w[f"{base}kv_norm.weight"], eps)
        keys = turned(keys, config, theta, at)
        seen = (at[None] <= at[:, None]) & (at[None] > at[:, None] - config["sliding_window"])
        if f"{base}compressor.wkv.weight" in w:
            made = a @ w[f"{base}compressor.wkv.weight"].t()
            means = torch.stack(
                [pooled(made, groups(ratio, j), ratio, dim) for j in range(n // ratio)]
            )
            means = rms(means, w[f"{base}compressor.norm.weight"], eps)
            entries[layer] = turned(means, config, theta, torch.arange(n // ratio) * ratio)
        if ratio:
            keys = torch.cat([keys, entries[owner(layer)]])
            done = torch.arange(n // ratio)[None] < (at[:, None] + 1) // ratio
            seen = torch.cat([seen, done], 1)
        scores = torch.einsum("phd,kd->phk", q, keys) * dim**-0.5
        shares = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
        out = turned(torch.einsum("phk,kd->phd", shares, keys), config, theta, -at)
        parts = zip(
            out.flatten(1).chunk(config["o_groups"], -1),
            w[f"{base}wo_a.weight"].chunk(config["o_groups"]),
            strict=True,
        )
        x = x + torch.cat([part @ m.t() for part, m in parts], -1) @ w[f"{base}wo_b.weight"].t()
        b = rms(x, w[f"layers.{layer}.ffn_norm.weight"], eps)
        for place, share in (("experts.0", 1.5), ("shared_experts", 1.0)):
            gate, up, down = (
                w[f"layers.{layer}.ffn.{place}.{i}.weight"].t() for i in ("w1", "w3", "w2")
            )
            x = x + share * (torch.nn.functional.silu(b @ gate) * (b @ up)) @ down
    return rms(x, w["norm.weight"], eps) @ w["head.weight"].t()


def pooled(made: Tensor, tokens: range, ratio: int, dim: int) -> Tensor:
    """The mean of a group; where entries overlap, earlier tokens give their first half."""
    rows = made[tokens.start : tokens.stop]
    if rows.shape[1] == dim:
        return rows.mean(0)
    early = len(tokens) - ratio
    return torch.cat([rows[:early, :dim], rows[early:, dim:]]).mean(0)


def rewritten(folder: Path, tensors: dict[str, Tensor]) -> Path:
    from safetensors.torch import save_file

    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("window", [5, 8])
def test_v41_is_a_window_and_means_of_two(tmp_path: Path, window: int) -> None:
    changes = {
        **PLAIN,
        "sliding_window": window,
        "candidate_topk_blocks": 64,
        "engram_layer_ids": [],
    }
    config = tiny_config(**changes)
    tensors = plain(random_weights(config, 3))
    model = harness(rewritten(write_tiny(tmp_path, **changes), tensors))
    tokens = tokens_of(LENGTH)
    wanted = simple(
        config,
        tensors,
        tokens,
        owner=lambda layer: max(source for source in (2, 4, 6) if source <= layer),
        groups=lambda ratio, j: range(j * ratio, (j + 1) * ratio),
        eps=1e-20,
        head_norm=False,
    )
    assert float((model.logits(tokens) - wanted).abs().max()) < 1e-10


@pytest.mark.parametrize("ratios", [[0] * 6, [16, 0, 16, 16, 0, 0], [0, 4, 4, 16, 4, 4]], ids=str)
def test_v4_is_a_window_and_means_of_many(tmp_path: Path, ratios: list[int]) -> None:
    """Entries of four tokens are means of eight, of four at the beginning."""
    changes = {**PLAIN, "compress_ratios": ratios, "num_hash_layers": 0}
    config = {**TINY_V4, **changes}
    tensors = plain(random_weights(config, 3))
    model = harness_v4(rewritten(write_tiny_v4(tmp_path, **changes), tensors))

    def tokens_in(ratio: int, j: int) -> range:
        return range(max(0, j - (ratio == 4)) * ratio, (j + 1) * ratio)

    tokens = tokens_of(LENGTH)
    wanted = simple(
        config,
        tensors,
        tokens,
        owner=lambda layer: layer,
        groups=tokens_in,
        eps=1e-6,
        head_norm=True,
    )
    assert float((model.logits(tokens) - wanted).abs().max()) < 1e-10
