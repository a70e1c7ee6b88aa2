"""A layer without what it attends to: backbone and draft layers are made of the same pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from deepinfer_core.interfaces.kernels import LatentAttention
from deepinfer_deepseek.attention import Seen, attend
from deepinfer_deepseek.experts import Experts
from deepinfer_deepseek.formats import CacheFormats
from deepinfer_deepseek.hyper import Mixer, collapse
from deepinfer_deepseek.numerics import Loader, Projection, Rotation
from deepinfer_deepseek.stack import ExpertConfig, StackConfig

Angles = tuple[Tensor, Tensor]


class Projections:
    """Into and out of attention: low-rank queries, one shared key, grouped low-rank output.

    Args:
        config: of the model.
        base: what names of its parameters begin with, as in ``layers.0.attn.``.
        load: for its parameters.
        rotation: of the layer.
        formats: how keys are rounded.
    """

    def __init__(
        self,
        config: StackConfig,
        base: str,
        load: Loader,
        rotation: Rotation,
        formats: CacheFormats,
    ) -> None:
        self._heads, self._dim = config.num_heads, config.head_dim
        self._rotation, self._formats = rotation, formats
        self._q_down = load.projection(f"{base}wq_a")
        self._q_norm = load.norm(f"{base}q_norm", config.norm_eps)
        self._q_up = load.projection(f"{base}wq_b")
        self._head_norm = None
        if config.head_norm:
            self._head_norm = load.plain_norm(config.head_dim, config.norm_eps)
        self._kv = load.projection(f"{base}wkv")
        self._kv_norm = load.norm(f"{base}kv_norm", config.norm_eps)
        groups = load.tensor(f"{base}wo_a.weight").chunk(config.o_groups)
        self._o_groups = [Projection(load.ops.linear, group.contiguous()) for group in groups]
        self._o_up = load.projection(f"{base}wo_b")
        self._sinks = load.wide(f"{base}attn_sink")
        self._scale = config.head_dim**-0.5
        self._latent: LatentAttention | None = load.ops.optional("latent_attention")
        if self._latent is not None and not self._latent.serves(self._heads, self._dim):
            self._latent = None

    def angles(self, positions: Tensor) -> Angles:
        """[n] int64 -> cosines and sines."""
        return self._rotation.angles(positions)

    def queries(self, x: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """[n, hidden] -> low-rank query [n, q_rank], and queries [n, heads, dim]."""
        low_rank = self._q_norm(self._q_down(x))
        q = self._q_up(low_rank).unflatten(-1, (self._heads, self._dim))
        if self._head_norm is not None:
            q = self._head_norm(q.flatten(0, 1)).view_as(q)
        return low_rank, self._rotation.turn(q, angles)

    def keys(self, x: Tensor, angles: Angles) -> Tensor:
        """[n, hidden] -> [n, dim], which are values as well."""
        return self._formats.window(self._rotation.turn(self._kv_norm(self._kv(x)), angles))

    def attended(self, q: Tensor, seen: Sequence[Seen], every: Seen | None = None) -> Tensor:
        """What queries [n, heads, dim] gather from the vectors they see; the same shape.

        By op "latent_attention" where one is bound that takes these heads; see ``attend``.
        """
        if self._latent is None:
            return attend(q, seen, scale=self._scale, sinks=self._sinks, every=every)
        parts = seen if every is None else [*seen, every]
        return self._latent.run(q, parts, scale=self._scale, sinks=self._sinks)

    def output(self, mixed: Tensor, angles: Angles) -> Tensor:
        """[n, heads, dim] -> [n, hidden].

        Values carry the rotation of their own position; turned back by that of the query, what
        remains is relative.
        """
        groups = self._rotation.turn_back(mixed, angles).flatten(1).chunk(len(self._o_groups), -1)
        lows = [project(group) for project, group in zip(self._o_groups, groups, strict=True)]
        return self._o_up(torch.cat(lows, -1))


class Block:
    """Norms, mixing and experts of a layer.

    Args:
        config: of the model.
        base: what names of its parameters begin with, as in ``layers.0.``.
        experts: of the layer.
        load: for its parameters.
        hashed: its experts are looked up by token.
    """

    def __init__(
        self,
        config: StackConfig,
        base: str,
        experts: ExpertConfig,
        load: Loader,
        *,
        hashed: bool = False,
    ) -> None:
        self._attention_norm = load.norm(f"{base}attn_norm", config.norm_eps)
        self._attention_mixer = Mixer(config, f"{base}hc_attn", load)
        self._experts_norm = load.norm(f"{base}ffn_norm", config.norm_eps)
        self._experts = Experts(experts, f"{base}ffn.", load, hashed=hashed)
        self._experts_mixer = Mixer(config, f"{base}hc_ffn", load)


class ShiftedBlock(Block):
    """V4.1's: weights made before a sub-layer collapse the copies for the next one."""

    def enter(self, stream: Tensor, weights: Tensor) -> Tensor:
        """Attention's input: stream [n, copies, hidden], its weights [n, copies] -> [n, hidden]."""
        return self._attention_norm(collapse(stream, weights))

    def run(
        self, stream: Tensor, x: Tensor, attention: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Both sub-layers.

        Args:
            stream: [n, copies, hidden].
            x: [n, hidden], from ``enter``.
            attention: [n, hidden] -> [n, hidden].

        Returns:
            The stream afterwards, and the weights that collapse it, [n, copies].
        """
        mix = self._attention_mixer(stream)
        stream = mix.apply(stream, attention(x))
        x = self._experts_norm(collapse(stream, mix.collapse))
        mix = self._experts_mixer(stream)
        return mix.apply(stream, self._experts(x)), mix.collapse


class PlainBlock(Block):
    """V4's: weights made before a sub-layer collapse the copies for it."""

    def run(
        self, stream: Tensor, token_ids: Tensor, attention: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Both sub-layers.

        Args:
            stream: [n, copies, hidden].
            token_ids: [n], int64, which may choose experts.
            attention: [n, hidden] -> [n, hidden].

        Returns:
            The stream afterwards.
        """
        mix = self._attention_mixer(stream)
        x = self._attention_norm(collapse(stream, mix.collapse))
        stream = mix.apply(stream, attention(x))
        mix = self._experts_mixer(stream)
        x = self._experts_norm(collapse(stream, mix.collapse))
        return mix.apply(stream, self._experts(x, token_ids))
