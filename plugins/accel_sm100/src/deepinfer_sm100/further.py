"""Further ops over this package's kernels: what DeepSeek's models need beside core's ops.

``reference`` says what each computes. Every sum has one order whatever the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_sm100.kernels import gemm, hyper, latent, packing
from deepinfer_sm100.launching import Launcher, blocks, padded

STEP = 32
"""Entries that attention reads at once."""


class FurtherOps:
    """The ops.

    Args:
        launch: starts kernels.
    """

    def __init__(self, launch: Launcher) -> None:
        self._launch = launch

    def pack_fp8(
        self,
        x: Tensor,
        codes: Tensor,
        scales: Tensor,
        slots: Tensor,
        *,
        block: int,
        floor: float = 1e-4,
    ) -> None:
        """Put vectors into records of eight bits (``reference.quantize_fp8``).

        Args:
            x: [n, width].
            codes: [num_slots, width] uint8, a view of the records.
            scales: [num_slots, width / block] uint8, likewise.
            slots: [n]; -1 writes nothing.
            block: numbers that share a scale.
            floor: see the reference.
        """
        count, width = x.shape
        self._launch(
            packing.pack_fp8_kernel,
            (count, blocks(width, block)),
            x, codes, scales, slots, width, x.stride(0), codes.stride(0), scales.stride(0), floor,
            BLOCK=block,
        )  # fmt: skip

    def pack_fp4(
        self,
        x: Tensor,
        codes: Tensor,
        scales: Tensor,
        slots: Tensor,
        *,
        block: int,
        floor: float,
        e4m3_scales: bool,
    ) -> None:
        """Put vectors into records of four bits (``reference.quantize_fp4``).

        Args:
            x: [n, width].
            codes: [num_slots, width / 2] uint8, a view of the records.
            scales: [num_slots, width / block] uint8, likewise.
            slots: [n]; -1 writes nothing.
            block: numbers that share a scale.
            floor: see the reference.
            e4m3_scales: see the reference.
        """
        count, width = x.shape
        self._launch(
            packing.pack_fp4_kernel,
            (count, width // block),
            x, codes, scales, slots, x.stride(0), codes.stride(0), scales.stride(0), floor,
            E4M3_SCALES=e4m3_scales, BLOCK=block,
        )  # fmt: skip

    def sparse_latent(
        self,
        q: Tensor,
        codes: Tensor,
        scales: Tensor,
        chosen: Tensor,
        scale: float,
        sinks: Tensor | None = None,
        *,
        bits: int = 8,
    ) -> tuple[Tensor, Tensor]:
        """Attention over chosen records (``reference.sparse_latent``).

        Args:
            q: [n, heads, dim]; ``dim`` is a power of two.
            codes: [num_slots, dim * bits / 8] uint8, a view of the records.
            scales: [num_slots, blocks] uint8: E8M0 with 8 bits, E4M3 with 4.
            chosen: [n, k] int32; -1 names no entry. Others must lie within the records.
            scale: of the scores.
            sinks: [heads] or None.
            bits: of a code.
        """
        q = q.contiguous()
        count, heads, dim = q.shape
        out = torch.empty_like(q)
        lse = torch.empty(count, heads, dtype=torch.float32, device=q.device)
        tile = 16
        self._launch(
            latent.sparse_latent_kernel,
            (count, blocks(heads, tile)),
            q, codes, scales, chosen.contiguous(), lse if sinks is None else sinks, out, lse, heads,
            chosen.shape[1], float(scale), codes.stride(0), scales.stride(0),
            BITS=bits, BLOCK=dim // scales.shape[1], HAS_SINKS=sinks is not None, HEADS=tile,
            DIM=dim, STEP=STEP, num_warps=8,
        )  # fmt: skip
        return out, lse

    def pool(self, numbers: Tensor, gates: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """Means of tokens (``reference.pool``); all arguments contiguous."""
        (count, ratio), channels = slots.shape, numbers.shape[1]
        out = torch.empty(count, channels, dtype=dtype, device=numbers.device)
        wide = min(512, padded(channels))
        self._launch(
            latent.pool_kernel,
            (count, blocks(channels, wide)),
            numbers, gates, slots, out, channels, numbers.stride(0), RATIO=ratio, BLOCK=wide,
        )  # fmt: skip
        return out

    def index_scores(self, q: Tensor, weights: Tensor, keys: Tensor, visible: Tensor) -> Tensor:
        """Scores of entries (``reference.index_scores``), float32."""
        q, weights, keys = q.contiguous(), weights.contiguous(), keys.contiguous()
        (count, heads, dim), entries = q.shape, keys.shape[0]
        out = torch.empty(count, entries, dtype=torch.float32, device=q.device)
        tile = 64
        self._launch(
            latent.index_scores_kernel,
            (count, blocks(entries, tile)),
            q, weights, keys, visible, out, heads, entries, dim,
            HEADS=padded(heads, 16), DIM=padded(dim, 16), BLOCK=tile,
        )  # fmt: skip
        return out

    def top_entries(self, scores: Tensor, topk: int) -> Tensor:
        """Numbers of the best entries (``reference.top_entries``)."""
        count, entries = scores.shape
        out = torch.full((count, topk), -1, dtype=torch.int64, device=scores.device)
        self._launch(
            latent.top_entries_kernel,
            (count,),
            scores.contiguous(), out, entries, topk, BLOCK=min(2048, padded(entries)),
        )  # fmt: skip
        return out

    def mix(
        self,
        logits: Tensor,
        scale: Tensor,
        base: Tensor,
        *,
        copies: int,
        iterations: int,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Weights of hyper-connections (``reference.mix``), float32; copies a power of two."""
        count = logits.shape[0]
        shapes = ((count, copies), (count, copies), (count, copies, copies))
        out = [torch.empty(shape, dtype=torch.float32, device=logits.device) for shape in shapes]
        tile = 16
        self._launch(
            hyper.mix_kernel,
            (blocks(count, tile),),
            logits.contiguous(), scale, base, *out, count, eps,
            ITERATIONS=iterations, COPIES=copies, ROWS=tile,
        )  # fmt: skip
        return out[0], out[1], out[2]

    def collapse(self, stream: Tensor, weights: Tensor) -> Tensor:
        """Weighted copies (``reference.collapse``), dtype of the stream."""
        count, copies, width = stream.shape
        out = torch.empty(count, width, dtype=stream.dtype, device=stream.device)
        wide = min(1024, padded(width))
        self._launch(
            hyper.collapse_kernel,
            (count, blocks(width, wide)),
            stream.contiguous(), weights.contiguous(), out, width, COPIES=copies, BLOCK=wide,
        )  # fmt: skip
        return out

    def spread(self, stream: Tensor, output: Tensor, weights: Tensor, carry: Tensor) -> Tensor:
        """The next stream (``reference.spread``), in new memory, dtype of the stream."""
        count, copies, width = stream.shape
        out = torch.empty_like(stream, memory_format=torch.contiguous_format)
        wide = min(1024, padded(width))
        self._launch(
            hyper.spread_kernel,
            (count, blocks(width, wide)),
            stream.contiguous(), output.contiguous(), weights.contiguous(), carry.contiguous(), out,
            width, COPIES=copies, BLOCK=wide,
        )  # fmt: skip
        return out

    def block_fp8(
        self,
        x: Tensor,
        x_scales: Tensor,
        weight: Tensor,
        scales: Tensor,
        dtype: torch.dtype,
        *,
        block: int = 128,
    ) -> Tensor:
        """Products of eight bits by eight (``reference.block_fp8``); all arguments contiguous."""
        (count, inner), outer = x.shape, weight.shape[0]
        out = torch.empty(count, outer, dtype=dtype, device=x.device)
        tall, wide = 64, 64
        self._launch(
            gemm.block_fp8_kernel,
            (blocks(count, tall), blocks(outer, wide)),
            x, x_scales, weight, scales, out, count, inner, outer,
            BLOCK_ROWS=block, BLOCK=block, ROWS=tall, OUTER=wide,
        )  # fmt: skip
        return out
