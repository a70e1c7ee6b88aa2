"""Core's ops through vendor libraries. No call of these was verified on hardware.

Each class takes the library's module as an argument: tests pass stand-ins that know what the
library accepts.
"""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from deepinfer_core.checkpoint.tensors import PackedTensor
from deepinfer_sm100.further import FurtherOps

SCALES_IN_A_WORD = 4


def packed_scales(exponents: Tensor) -> Tensor:
    """E8M0 scales as DeepGEMM takes them on SM100.

    Args:
        exponents: [rows, blocks], uint8.

    Returns:
        [rows, ceil(blocks / 4)], int32, four exponents to a word, the first in the lowest byte;
        rows lie side by side, each column aligned to 16 bytes.
    """
    rows, count = exponents.shape
    words = -(-count // SCALES_IN_A_WORD)
    room = -(-rows // 4) * 4
    spread = torch.zeros(room, words * 4, dtype=torch.uint8, device=exponents.device)
    spread[:rows, :count] = exponents
    found = spread.view(torch.int32).t().contiguous()
    return found.t()[:rows]


def exponents_of(scales: Tensor) -> Tensor:
    """Exponents (E8M0) of scales that are exact powers of two.

    Raises:
        ValueError: they are not; the library would stop the device.
    """
    bits = scales.float().view(torch.int32)
    if bool((bits & 0x807FFFFF).any()):
        raise ValueError("scales are not all powers of two, which SM100's products need")
    return (bits >> 23).to(torch.uint8)


@frozen(kw_only=True, eq=False)
class GemmWeight:
    """Handle of ``DeepGemmLinear``: E4M3 numbers, scales as the library takes them, a bias."""

    data: Tensor
    scales: Tensor
    bias: Tensor | None


class DeepGemmLinear:
    """``Linear`` of weights in FP8 blocks of 128, activations rounded to FP8 as well.

    Args:
        library: module ``deep_gemm``.
        further: packs activations.
        quantise: ``tile_kernels.quant.per_token_cast`` where that is there; it packs them faster.
        device: where weights go.
    """

    packed_formats = ("fp8_128x128",)
    block = 128

    def __init__(
        self, library: Any, further: FurtherOps, device: torch.device, quantise: Any = None
    ) -> None:
        self._library, self._further = library, further
        self._device, self._quantise = device, quantise

    def prepare(self, weight: PackedTensor, bias: Tensor | None = None) -> GemmWeight:
        """Bring scales into the library's layout, once."""
        assert weight.scales is not None, weight.format
        exponents = exponents_of(weight.scales.to(self._device))
        rows = exponents.repeat_interleave(self.block, 0)[: weight.shape[0]]
        data = weight.data.to(self._device).contiguous()
        return GemmWeight(
            data=data.view(torch.float8_e4m3fn), scales=packed_scales(rows), bias=bias
        )

    def run(self, x: Tensor, handle: GemmWeight) -> Tensor:
        """[num_tokens, in_features] -> [num_tokens, out_features]."""
        out = torch.empty(x.shape[0], handle.data.shape[0], dtype=torch.bfloat16, device=x.device)
        self._library.fp8_fp4_gemm_nt(
            self._rounded(x), (handle.data, handle.scales), out, recipe=(1, 1, self.block)
        )
        if handle.bias is not None:
            out += handle.bias
        return out.to(x.dtype)

    def _rounded(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self._quantise is not None:
            found: tuple[Tensor, Tensor] = self._quantise(
                x, "e4m3", self.block, use_tma_aligned_col_major_sf=True, round_sf=True,
                use_packed_ue8m0=True,
            )  # fmt: skip
            return found
        count, width = x.shape
        codes = torch.empty(count, width, dtype=torch.uint8, device=x.device)
        blocks = -(-width // self.block)
        scales = torch.empty(count, blocks, dtype=torch.uint8, device=x.device)
        slots = torch.arange(count, dtype=torch.int32, device=x.device)
        self._further.pack_fp8(x, codes, scales, slots, block=self.block)
        return codes.view(torch.float8_e4m3fn), packed_scales(scales)


class DeepGemmDense:
    """``Linear`` of dense weights in bfloat16.

    Args:
        library: module ``deep_gemm``.
    """

    def __init__(self, library: Any) -> None:
        self._library = library

    def prepare(self, weight: Tensor, bias: Tensor | None = None) -> Any:
        """Keep the weight."""
        return weight.contiguous(), bias

    def run(self, x: Tensor, handle: Any) -> Tensor:
        """[num_tokens, in_features] -> [num_tokens, out_features]."""
        weight, bias = handle
        out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
        self._library.bf16_gemm_nt(x.contiguous(), weight, out)
        if bias is not None:
            out += bias
        return out


class FlashInferNorm:
    """``RmsNorm`` and ``AddRmsNorm``; numbers are rounded once, at the end.

    Args:
        library: module ``flashinfer``.
        adds: whether it is the latter.
    """

    def __init__(self, library: Any, *, adds: bool = False) -> None:
        self._norm, self._adds = library.norm, adds

    def run(self, x: Tensor, *rest: Any) -> Any:
        """See the references; ``AddRmsNorm`` writes the sum over ``x``."""
        if not self._adds:
            weight, eps = rest
            rows = x.reshape(-1, x.shape[-1]).contiguous()
            return self._norm.rmsnorm(rows, weight, eps).view(x.shape)
        delta, weight, eps = rest
        # The library writes the norm over its first argument, and the sum over its second.
        normed, total = delta.clone(), x.contiguous()
        self._norm.fused_add_rmsnorm(normed, total, weight, eps)
        return total, normed


class FlashInferSiluMul:
    """``SiluMul``.

    Args:
        library: module ``flashinfer``.
    """

    def __init__(self, library: Any) -> None:
        self._activation = library.activation

    def run(self, gate_up: Tensor) -> Tensor:
        """See the reference."""
        out: Tensor = self._activation.silu_and_mul(gate_up.contiguous())
        return out


class FlashMlaSparse:
    """Attention of DeepSeek's models over chosen entries; see ``further`` for own kernels.

    Args:
        library: module ``flash_mla``.
    """

    heads = (64, 128)
    dim = 512
    record_bytes = (528, 288)

    def __init__(self, library: Any) -> None:
        self._library = library

    def prefill(
        self, q: Tensor, entries: Tensor, chosen: Tensor, scale: float, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attend over entries in bfloat16.

        Args:
            q: [n, heads, 512].
            entries: [count, 512].
            chosen: [n, k] int32; -1 names no entry. The library reads any other index unchecked.
            scale: of the scores.
            sinks: [heads] or None.

        Returns:
            As ``reference.sparse_latent``.
        """
        self._check(q)
        out, _, lse = self._library.flash_mla_sparse_fwd(
            q, entries.unsqueeze(1), chosen.unsqueeze(1), scale, d_v=self.dim, attn_sink=sinks
        )
        return out, lse

    def decode(
        self,
        q: Tensor,
        records: Tensor,
        chosen: Tensor,
        schedule: Any,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attend over packed records.

        Args:
            q: [n, heads, 512].
            records: [pages, page_size, 528] uint8: codes, then scales, of each entry.
            chosen: [n, k] int32: page * page_size + offset, or -1.
            schedule: the library's metadata; made anew when shapes or lengths change.
            sinks: [heads] or None.

        Returns:
            As ``reference.sparse_latent``.
        """
        self._check(q)
        if records.shape[-1] not in self.record_bytes:
            raise ValueError(f"records have {records.shape[-1]} bytes, not {self.record_bytes}")
        out, lse = self._library.flash_mla_with_kvcache(
            q.unsqueeze(1), records.unsqueeze(2), None, None, self.dim, schedule,
            indices=chosen.unsqueeze(1), attn_sink=sinks,
        )  # fmt: skip
        return out.squeeze(1), lse.squeeze(-1)

    def _check(self, q: Tensor) -> None:
        if q.shape[1] not in self.heads or q.shape[2] != self.dim:
            raise ValueError(
                f"queries are {tuple(q.shape)}; the library takes {self.heads} heads of {self.dim}"
            )
