"""Core's ops over the kernels of this package, with the methods of core's references."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional

from deepinfer_core.checkpoint.tensors import PackedTensor
from deepinfer_core.interfaces.kernels import GatedActivation
from deepinfer_core.sampling.portable import exponentials
from deepinfer_sm100.kernels import experts, gemm, rows, sampling
from deepinfer_sm100.launching import Launcher, blocks, padded

TILE_ROWS = 64
"""Rows of a product's tile, for any number of rows: a row alone is added up as beside others."""

_ROW_TILE = 4096
"""Numbers that a program of an op by rows takes."""


def _dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _tile(width: int) -> dict[str, int]:
    wide = padded(width)
    return {"ROWS": min(16, max(1, _ROW_TILE // wide)), "WIDTH": wide}


class _Op:
    def __init__(self, launch: Launcher) -> None:
        self._launch = launch


@frozen(kw_only=True, eq=False)
class DenseWeight:
    """Handle of ``TiledLinear``: [out_features, in_features], and a bias."""

    weight: Tensor
    bias: Tensor | None


class TiledLinear(_Op):
    """``Linear`` in tiles of one shape."""

    def prepare(self, weight: Tensor, bias: Tensor | None = None) -> DenseWeight:
        """Keep the weight, its rows side by side."""
        return DenseWeight(
            weight=weight.detach().contiguous(), bias=None if bias is None else bias.contiguous()
        )

    def run(self, x: Tensor, handle: DenseWeight) -> Tensor:
        """[num_tokens, in_features] -> [num_tokens, out_features]."""
        x, weight = _dense_rows(x), handle.weight.to(x.dtype)
        outer, inner = weight.shape
        out = torch.empty(x.shape[0], outer, dtype=x.dtype, device=x.device)
        columns = 64
        self._launch(
            gemm.linear_kernel,
            (blocks(x.shape[0], TILE_ROWS), blocks(outer, columns)),
            x, weight, weight if handle.bias is None else handle.bias, out,
            x.shape[0], inner, outer, x.stride(0),
            HAS_BIAS=handle.bias is not None, ROWS=TILE_ROWS, OUTER=columns, INNER=64,
        )  # fmt: skip
        return out


_PACKED = re.compile(r"fp([48])_(\d+)x(\d+)")

PACKED_FORMATS = ("fp8_128x128", "fp8_32x32", "fp8_1x32", "fp4_1x32")
"""Weights that are kept as stored: bits, then rows and columns that share a scale."""


@frozen(kw_only=True, eq=False)
class PackedWeight:
    """Handle of ``PackedLinear`` for a weight that is kept as stored.

    Attributes:
        data: [out_features, bytes of a row], float8_e4m3fn or uint8.
        scales: [rows of blocks, columns of blocks], float32.
        bias: [out_features] or None.
        shape: of the dense weight.
        bits: of a number.
        block: rows and columns that share a scale.
    """

    data: Tensor
    scales: Tensor
    bias: Tensor | None
    shape: tuple[int, int]
    bits: int
    block: tuple[int, int]


class PackedLinear(_Op):
    """``Linear`` with weights of eight or four bits kept as stored, expanded tile by tile.

    Numbers and sums are those of the expanded weight, rounded to the dtype of the computation;
    activations are not rounded. Dense weights go through ``TiledLinear``.
    """

    packed_formats = PACKED_FORMATS

    def __init__(self, launch: Launcher, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(launch)
        self._dense, self._dtype, self._device = TiledLinear(launch), dtype, device

    def prepare(
        self, weight: Tensor | PackedTensor, bias: Tensor | None = None
    ) -> DenseWeight | PackedWeight:
        """Keep what is packed; others become dense in the dtype of the computation."""
        if not isinstance(weight, PackedTensor):
            return self._dense.prepare(weight.to(self._device, self._dtype), bias)
        found = _PACKED.fullmatch(weight.format)
        assert found is not None, weight.format
        assert weight.scales is not None, weight.format
        bits, rows, columns = (int(part) for part in found.groups())
        data = weight.data.to(self._device).contiguous()
        return PackedWeight(
            data=data.view(torch.float8_e4m3fn) if bits == 8 else data,
            scales=weight.scales.to(self._device).float().contiguous(),
            bias=None if bias is None else bias.contiguous(),
            shape=(weight.shape[0], weight.shape[1]),
            bits=bits,
            block=(rows, columns),
        )

    def run(self, x: Tensor, handle: DenseWeight | PackedWeight) -> Tensor:
        """[num_tokens, in_features] -> [num_tokens, out_features]."""
        if isinstance(handle, DenseWeight):
            return self._dense.run(x, handle)
        x = _dense_rows(x)
        outer, inner = handle.shape
        out = torch.empty(x.shape[0], outer, dtype=x.dtype, device=x.device)
        columns = 64
        self._launch(
            gemm.packed_linear_kernel,
            (blocks(x.shape[0], TILE_ROWS), blocks(outer, columns)),
            x, handle.data, handle.scales, handle.scales if handle.bias is None else handle.bias,
            out, x.shape[0], inner, outer, x.stride(0), handle.data.stride(0),
            handle.scales.stride(0), HAS_BIAS=handle.bias is not None, BITS=handle.bits,
            BLOCK_ROWS=handle.block[0], BLOCK_COLUMNS=handle.block[1],
            ROWS=TILE_ROWS, OUTER=columns, INNER=64, num_warps=8,
        )  # fmt: skip
        return out


class Embedding(_Op):
    """``Embedding``: rows are gathered by torch. The handle is the table."""

    def prepare(self, weight: Tensor) -> Tensor:
        """Keep the table."""
        return weight.contiguous()

    def run(self, token_ids: Tensor, handle: Tensor) -> Tensor:
        """[n] int64 -> [n, hidden_size]."""
        return functional.embedding(token_ids, handle)


class RmsNorm(_Op):
    """``RmsNorm``."""

    def run(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See the reference."""
        return _normed(self._launch, x, None, weight, eps)


class AddRmsNorm(_Op):
    """``AddRmsNorm``; the sum is written over ``x``."""

    def run(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See the reference."""
        if x.stride(-1) != 1:
            x = x.contiguous()
        return x, _normed(self._launch, x, _dense_rows(delta), weight, eps)


def _normed(
    launch: Launcher, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float
) -> Tensor:
    width = x.shape[-1]
    if x.dim() not in (2, 3) or x.stride(-1) != 1:
        x = x.contiguous().reshape(-1, width) if x.dim() not in (2, 3) else x.contiguous()
    heads = x.shape[1] if x.dim() == 3 else 1
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    count = x.shape[0] * heads
    tile = _tile(width)
    launch(
        rows.rms_norm_kernel,
        (blocks(count, tile["ROWS"]),),
        x, x if delta is None else delta, weight.contiguous(), out, count, heads, width, eps,
        x.stride(0), x.stride(1) if heads > 1 else 0, 0 if delta is None else delta.stride(0),
        HAS_DELTA=delta is not None, **tile,
    )  # fmt: skip
    return out


class Rope(_Op):
    """``Rope``."""

    def run(self, x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
        """See the reference."""
        x, cos, sin = _dense_rows(x), _dense_rows(cos.float()), _dense_rows(sin.float())
        if cos.stride(0) != sin.stride(0):
            cos, sin = cos.contiguous(), sin.contiguous()
        count, heads, width = x.shape
        half = cos.shape[-1]
        rest = width - 2 * half
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        self._launch(
            rows.rope_kernel,
            (count,),
            x, cos, sin, out, heads, width, half, x.stride(0), x.stride(1), cos.stride(0),
            INTERLEAVED=interleaved, HEADS=padded(heads), HALF=padded(half),
            REST=padded(rest) if rest else 0,
        )  # fmt: skip
        return out


class GateMul(_Op):
    """``SiluMul``, or ``GeluMul``."""

    def __init__(self, launch: Launcher, *, gelu: bool = False) -> None:
        super().__init__(launch)
        self._gelu = gelu

    def run(self, gate_up: Tensor) -> Tensor:
        """See the references."""
        gate_up = _dense_rows(gate_up)
        count, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(count, width, dtype=gate_up.dtype, device=gate_up.device)
        wide = min(1024, padded(width))
        tall = min(16, max(1, _ROW_TILE // wide))
        self._launch(
            rows.gate_mul_kernel,
            (blocks(count, tall), blocks(width, wide)),
            gate_up, out, count, width, gate_up.stride(0),
            GELU=self._gelu, ROWS=tall, WIDTH=wide,
        )  # fmt: skip
        return out


class MoeGate(_Op):
    """``MoeGate``."""

    def run(self, logits: Tensor, top_k: int, *, renormalise: bool) -> tuple[Tensor, Tensor]:
        """See the reference."""
        logits = _dense_rows(logits)
        count, number = logits.shape
        weights = torch.empty(count, top_k, dtype=torch.float32, device=logits.device)
        ids = torch.empty(count, top_k, dtype=torch.int64, device=logits.device)
        self._launch(
            experts.gate_kernel,
            (blocks(count, 4),),
            logits, weights, ids, count, number, logits.stride(0),
            TOP=top_k, RENORMALISE=renormalise, ROWS=4, EXPERTS=padded(number),
        )  # fmt: skip
        return weights, ids


@frozen(kw_only=True, eq=False)
class GroupedWeights:
    """Handle of ``GroupedExperts``.

    Attributes:
        gate_up: [experts, 2 * intermediate, hidden].
        down: [experts, hidden, intermediate].
        biases: of both, [experts, ...], or None.
        activation: between them.
    """

    gate_up: Tensor
    down: Tensor
    biases: tuple[Tensor, Tensor] | None
    activation: GatedActivation


class GroupedExperts(_Op):
    """``MoeExperts``: rows grouped by expert in a fixed order, one product a group."""

    tile_rows = 16

    def prepare(
        self,
        gate_up: Sequence[Tensor],
        down: Sequence[Tensor],
        biases: tuple[Sequence[Tensor], Sequence[Tensor]] | None = None,
        activation: GatedActivation = GatedActivation(),  # noqa: B008 - frozen
    ) -> GroupedWeights:
        """Stack the weights of all experts; see the reference."""
        stacked = None
        if biases is not None:
            stacked = torch.stack(list(biases[0])), torch.stack(list(biases[1]))
        return GroupedWeights(
            gate_up=torch.stack(list(gate_up)),
            down=torch.stack(list(down)),
            biases=stacked,
            activation=activation,
        )

    def run(self, x: Tensor, weights: Tensor, ids: Tensor, handle: GroupedWeights) -> Tensor:
        """See the reference."""
        x, ids, weights = _dense_rows(x), ids.contiguous(), _dense_rows(weights)
        count, top = ids.shape
        number, width, inner = handle.down.shape
        order, starts, tiles = self._group(ids, number)
        hidden = torch.empty(tiles * self.tile_rows, inner, dtype=x.dtype, device=x.device)
        parts = torch.empty(count * top, width, dtype=x.dtype, device=x.device)
        out = torch.empty(count, width, dtype=x.dtype, device=x.device)
        gate_bias, down_bias = handle.biases or (handle.gate_up, handle.down)
        act, shape = handle.activation, {"ROWS": self.tile_rows, "OUTER": 64, "INNER": 64}
        limited = math.isfinite(act.limit)
        common = {"HAS_BIAS": handle.biases is not None, "EXPERTS": padded(number), **shape}
        self._launch(
            experts.gate_up_kernel,
            (tiles, blocks(inner, 64)),
            x, handle.gate_up.to(x.dtype), gate_bias, order, starts, hidden, number, width, inner,
            x.stride(0), float(act.alpha), float(act.limit) if limited else 0.0, float(act.offset),
            CLAMPED=limited, TOP=top, **common,
        )  # fmt: skip
        self._launch(
            experts.down_kernel,
            (tiles, blocks(width, 64)),
            hidden, handle.down.to(x.dtype), down_bias, order, starts, parts, number, width, inner,
            **common,
        )  # fmt: skip
        wide = min(1024, padded(width))
        self._launch(
            experts.sum_experts_kernel,
            (count, blocks(width, wide)),
            parts, weights, ids, out, width, weights.stride(0), ids.stride(0), TOP=top, BLOCK=wide,
        )  # fmt: skip
        return out

    def _group(self, ids: Tensor, number: int) -> tuple[Tensor, Tensor, int]:
        """(places by expert, each expert's start, tiles): nothing is read back to the host."""
        total, rows_of_tile = ids.numel(), self.tile_rows
        tiles = blocks(total, rows_of_tile) + min(number, total)
        device = ids.device
        counts = torch.empty(number, dtype=torch.int32, device=device)
        block = min(1024, padded(total))
        self._launch(experts.count_kernel, (number,), ids, counts, total, BLOCK=block)
        room = (counts + (rows_of_tile - 1)) // rows_of_tile * rows_of_tile
        starts = (torch.cumsum(room, 0) - room).to(torch.int32)
        order = torch.full((tiles * rows_of_tile,), -1, dtype=torch.int32, device=device)
        self._launch(experts.place_kernel, (number,), ids, starts, order, total, BLOCK=block)
        return order, starts, tiles


class Draw(_Op):
    """``Draw``: the same tokens, without a sort."""

    def __init__(self, launch: Launcher) -> None:
        super().__init__(launch)
        self._tables: dict[torch.device, Tensor] = {}

    def run(
        self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor,
        keys: Tensor,
    ) -> Tensor:  # fmt: skip
        """See the reference."""
        logits, device = _dense_rows(logits.float()), logits.device
        if device not in self._tables:
            self._tables[device] = torch.tensor(exponentials(), dtype=torch.float64, device=device)
        count, vocab = logits.shape
        out = torch.empty(count, dtype=torch.int64, device=device)
        knobs = [
            knob.to(device, kind).contiguous()
            for knob, kind in (
                (temperature, torch.float64),
                (top_k, torch.int64),
                (top_p, torch.float64),
                (min_p, torch.float64),
                (keys, torch.int64),
            )
        ]
        self._launch(
            sampling.draw_kernel,
            (count,),
            logits, *knobs, self._tables[device], out, vocab, logits.stride(0),
            BLOCK=min(2048, padded(vocab)), num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
        return out
